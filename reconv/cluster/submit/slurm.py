"""The batch script that trains a run under Slurm until it is finished: a process per device, requeued after a stop.

Exit code 75 alone requeues a job, and only while Slurm has it running; preemption, lost nodes and `scancel` are
Slurm's to decide (tests/external/test_slurm.py).
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reconv.core.errors import UsageError

if TYPE_CHECKING:
    from reconv.cluster.submit.target import Request, Submitted
    from reconv.recipe.load.resolved import Resolved

SCRIPT_NAME = "slurm.sh"  # in the run directory
JOB_FILE = "job.json"  # there, too
_MAX_EARLY_STOPS = 3  # starts in a row that reach no step before the time limit comes near
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_LIST = re.compile(r"[A-Za-z0-9._,:@+-]{1,200}")  # partitions, accounts
_MEMORY = re.compile(r"\d+[KMGT]?")
# Minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS, as sbatch takes them.
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")
_DEVICE_OPTION = re.compile(r"--(gpus|gres)\b|-G\b")
_NOT_ALLOCATED = ("cpu", "mps")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """Facts that decide the batch script of a run."""

    name: str
    run: Path  # the run directory, absolute
    folder: Path  # where the commands run, so that relative paths are those of the user
    nodes: int
    devices_per_node: int
    train: Sequence[str]  # the command that starts the run
    resume: Sequence[str]  # the command that continues it
    device: str = "auto"  # of --device
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    cpus_per_device: int | None = None
    memory_per_node: str | None = None
    stop_before_s: int = 300
    sbatch_options: Sequence[str] = ()
    setup: str = ""  # shell commands before the program starts: modules, a virtual environment

    def check(self) -> None:
        """Raise `UsageError` for values that Slurm would refuse, or read as something else."""
        _match("--name", self.name, _NAME, "letters, digits, '.', '_' and '-'")
        for option, value in (("--partition", self.partition), ("--account", self.account)):
            if value is not None:
                _match(option, value, _LIST, "a name as `sinfo` shows it")
        if self.memory_per_node is not None:
            _match("--memory-per-node", self.memory_per_node, _MEMORY, "a size as in 64G")
        for path in (self.run, self.folder):
            if re.search(r"[\\\x00-\x1f\x7f]", str(path)):
                raise UsageError(
                    "Slurm cannot use a path with a backslash or a control character",
                    where=str(path),
                    hint="choose another folder with --out DIR",
                )
        for option in self.sbatch_options:
            if not option.startswith("-") or re.search(r"[\x00-\x1f\x7f]", option):
                raise UsageError(
                    f"--sbatch takes an option of sbatch, not {option!r}", hint="for example --sbatch --qos=high"
                )
        if self.time is not None and seconds_of(self.time) < 2 * self.stop_before_s:
            raise UsageError(
                f"--time {self.time} leaves too little time to train",
                why=f"the run is asked to save {self.stop_before_s} s before the limit, and Slurm may do so a minute "
                "earlier",
                hint="give more --time, or a smaller --stop-before",
            )


def seconds_of(time: str) -> int:
    """A time limit as Slurm reads it, in seconds; raises `UsageError` if it is none."""
    match = _TIME.fullmatch(time)
    if match is None:
        raise UsageError(
            f"--time {time!r} is not a time limit",
            hint="use a form of sbatch, as in 90 (minutes), 8:00:00 or 2-00:00:00",
        )
    parts = [int(part) for part in match["parts"].split(":")]
    has_hours = match["days"] is not None or len(parts) == 3  # else MM or MM:SS
    units = (3600, 60, 1) if has_hours else (60, 1)
    seconds = sum(part * unit for part, unit in zip(parts, units, strict=False))
    return seconds + 86400 * int(match["days"] or 0)


def _match(option: str, value: str, pattern: re.Pattern[str], expected: str) -> None:
    if pattern.fullmatch(value) is None:
        raise UsageError(f"{option} {value!r} is not valid", hint=f"use {expected}")


def batch_script(job: SlurmJob) -> str:
    """The text of the batch script; raises `UsageError` for values that cannot be used."""
    job.check()
    setup, again = job.setup.strip("\n"), shlex.quote(str(job.run / SCRIPT_NAME))
    return _SCRIPT.format(
        script=again,
        again=shlex.quote(f"sbatch {again}"),
        options="\n".join(f"#SBATCH {option}" for option in _options(job)),
        stop_before_s=job.stop_before_s,
        log=_quoted(f"{_escaped(job.run)}/logs/slurm-%j.log"),
        folder=shlex.quote(str(job.folder)),
        run=shlex.quote(str(job.run)),
        setup=f"\n# From --setup.\n{setup}\n" if setup else "",
        srun="srun" + (f" --cpus-per-task={job.cpus_per_device}" if job.cpus_per_device is not None else ""),
        job_file=JOB_FILE,
        max_early_stops=_MAX_EARLY_STOPS,
        train=shlex.join(job.train),
        resume=shlex.join(job.resume),
    )


def _options(job: SlurmJob) -> Iterator[str]:
    yield f"--job-name={job.name}"
    yield f"--nodes={job.nodes}"
    yield f"--ntasks-per-node={job.devices_per_node}"
    kind = job.device.partition(":")[0]
    if kind not in _NOT_ALLOCATED and not any(_DEVICE_OPTION.match(option) for option in job.sbatch_options):
        yield f"--gres=hpu:{job.devices_per_node}" if kind == "hpu" else f"--gpus-per-node={job.devices_per_node}"
    if job.cpus_per_device is not None:
        yield f"--cpus-per-task={job.cpus_per_device}"
    if job.memory_per_node is not None:
        yield f"--mem={job.memory_per_node}"
    for name, value in (("partition", job.partition), ("account", job.account), ("time", job.time)):
        if value is not None:
            yield f"--{name}={value}"
    yield f"--chdir={_quoted(str(job.folder))}"
    yield from job.sbatch_options


def _escaped(path: Path) -> str:
    """A path in which Slurm replaces nothing."""
    return str(path).replace("%", "%%")


def _quoted(text: str) -> str:
    """A value of an #SBATCH line, quoted if need be."""
    is_plain = re.fullmatch(r"[\w./%+,:@=-]+", text) is not None
    return text if is_plain else '"' + text.replace('"', '\\"') + '"'


_SCRIPT = """\
#!/bin/bash
# Written by `reconv submit`. To submit the run again after it was stopped: sbatch {script}
{options}
# Ask every rank to save and to exit with 75 before the time limit; Slurm may do so up to a minute early.
#SBATCH --signal=USR1@{stop_before_s}
# Slurm starts the job again after a preemption or the loss of a node, and the log is continued.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={log}

run={run}
again={again}
cd {folder} || exit 6
{setup}
say() {{ echo "slurm.sh: $(date -u +%FT%TZ) $*"; }}
job_state() {{ squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T; }}
requeue() {{
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        scontrol requeue "$SLURM_JOB_ID" && exit "$code"
        sleep 15  # the controller may be restarting
    done
    say "the job could not be requeued; to continue: $again"
}}

# For `reconv status`; the job may have been submitted by hand.
printf '{{"scheduler": "slurm", "job_id": "%s", "submitted_s": %s}}\n' "$SLURM_JOB_ID" "$(date +%s)" > "$run/{job_file}"
if [ -e "$run/recipe.yaml" ] && [ -e "$run/events.jsonl" ]; then
    command=({resume})
else
    command=({train})
fi
say "start $((${{SLURM_RESTART_COUNT:-0}} + 1)) of job $SLURM_JOB_ID on $SLURM_JOB_NODELIST"

# SIGTERM (scancel, preemption) is for the ranks: they save and exit, then srun returns. Ranks that fail end each other,
# so srun need not.
trap : TERM
{srun} --kill-on-bad-exit=0 --wait=0 "${{command[@]}}"
code=$?
trap - TERM

state=$(job_state)
if [ "$code" = 0 ]; then
    say "the run is finished"
elif [ -n "$state" ] && [ "$state" != RUNNING ]; then
    # Cancelled, preempted or out of time: whether the job starts again is for Slurm to decide.
    say "exit code $code; Slurm is ending the job ($state)"
elif [ "$code" = 75 ]; then
    say "a checkpoint was saved: requeueing"
    rm -f "$run/early-stops"
    requeue
elif [ "$code" = 138 ] || [ "$code" = 143 ]; then
    # SIGUSR1 or SIGTERM before the first step: a slow start, or --time is too short for any.
    stops=$(($(cat "$run/early-stops" 2> /dev/null || echo 0) + 1))
    echo "$stops" > "$run/early-stops"
    say "asked to stop before the first step, $stops times in a row"
    if [ "$stops" -lt {max_early_stops} ]; then requeue; fi
elif [ "$code" = 7 ]; then
    # A rank is lost. If its node is lost too, Slurm requeues the job; if this script ended before that, it would fail.
    say "a rank is lost; Slurm requeues the job if a node is"
    for _ in 1 2 3 4 5 6 7 8 9 10 11 12; do
        sleep 5
        state=$(job_state)
        [ -z "$state" ] || [ "$state" = RUNNING ] || break
    done
    say "exit code 7, and the job is ${{state:-unknown}}; unless Slurm requeues it: $again"
else
    say "exit code $code: not requeued; see the error above and $run/logs"
fi
exit "$code"
"""


class SlurmTarget:
    """Submits a batch script, which is written to the run directory."""

    options = frozenset(("partition", "account", "time", "sbatch_options", "setup", "resume"))

    def text(self, request: Request) -> str:
        """The batch script."""
        run, resolved, words, _, _ = _prepare(request)
        return batch_script(_slurm_job(request, resolved, run, words))

    def submit(self, request: Request) -> Submitted:
        """Write the script and hand it to sbatch."""
        from reconv.cluster.submit import slurm_queue
        from reconv.cluster.submit.target import Submitted
        from reconv.core.text import count
        from reconv.logging.run_dir import RunDir

        if not slurm_queue.has_slurm():
            raise UsageError(
                "this machine has no Slurm: sbatch is not on the PATH",
                hint="submit from a login node of the cluster, or print the script with --dry-run",
            )
        run, resolved, words, plan, note = _prepare(request)
        batch_script(_slurm_job(request, resolved, run, words))  # raises before a folder is made
        is_named = request.options["out"] is not None
        run_dir = RunDir.at(run) if is_named else RunDir.create(Path("runs").absolute(), resolved.recipe.name)
        run = run_dir.path  # another process may have been faster
        submitted = slurm_queue.submit_script(run_dir, batch_script(_slurm_job(request, resolved, run, words)))
        file = run / SCRIPT_NAME
        log = run_dir.logs / f"slurm-{submitted.job_id}.log"
        shown = os.path.relpath(run) if run.is_relative_to(Path.cwd()) else str(run)
        size = f"{count(request.num_devices, 'device')} of {count(request.num_nodes, 'node')}"
        again = shlex.join(["sbatch", str(file)])
        return Submitted(
            {"job_id": submitted.job_id, "run": str(run), "script": str(file), "log": str(log)},
            [
                f"submitted job {submitted.job_id}: {plan} on {size}, in {shown}",
                f"  follow: {shlex.join(['reconv', 'status', shown])}",
                f"  log:    {shlex.join(['tail', '-F', str(log)])}",
                f"  stop:   scancel {submitted.job_id} (it saves); to continue: {again}",
            ],
            notes=[note] if note else [],
        )


def _prepare(request: Request) -> tuple[Path, Resolved, list[str], str, str]:
    """The run directory, the recipe, the options of train, what submitting will do, and a note; all are checked."""
    from reconv.cluster.submit import preflight
    from reconv.logging.run_dir import RunDir
    from reconv.storage.object_stores.store import is_url

    options = request.options
    resolved = request.check()
    data = preflight.check_data(resolved)
    words = list(request.train_words)
    if options["data"] is None and resolved.recipe.data.path is None and data is not None:
        words += ["--data", str(data)]  # of $DATA_DIR, which the nodes may not have
    if options["out"] is not None and is_url(options["out"]):
        raise UsageError(
            "--out must be a folder with --to slurm",
            where=options["out"],
            why="the log and the state of the job are kept there",
            hint="give a folder that all nodes have",
        )
    folder = Path(options["out"]).expanduser().absolute() if options["out"] is not None else None
    if folder is None and options["resume"]:
        raise UsageError("--resume needs the run directory", hint="add --out DIR")
    run = folder or RunDir.next(Path("runs").absolute(), resolved.recipe.name)
    plan = preflight.check_run(RunDir(run), options["resume"])
    return run, resolved, words, plan, preflight.check_writable(run)


def _slurm_job(request: Request, resolved: Resolved, run: Path, words: Sequence[str]) -> SlurmJob:
    from reconv.cluster.submit.target import HERE
    from reconv.recipe.parts.code import code_references
    from reconv.recipe.presets import preset_names

    options, program = request.options, request.program(HERE)
    recipe = request.recipe
    file = recipe if recipe in preset_names() else str(Path(recipe).expanduser().absolute())
    # The recipe of the run is then the user's own: its code is what they have submitted.
    trusts = options["trust_code"] or bool(code_references(resolved.recipe))
    settings = {"--device": options["device"] if options["device"] != "auto" else None, "--nic": options["nic"]}
    settings["--stop-at"] = options.get("stop_at")
    again = [word for name, value in settings.items() if value is not None for word in (name, value)]
    return SlurmJob(
        name=options["name"] or resolved.recipe.name.replace(" ", "-"),
        run=run,
        folder=Path.cwd(),
        nodes=request.num_nodes,
        devices_per_node=options["devices_per_node"],
        train=[*program, "train", file, "--out", str(run), "--resume", *words],
        resume=[*program, "resume", str(run), *again, *(["--trust-code"] if trusts else [])],
        device=options["device"],
        partition=options["partition"],
        account=options["account"],
        time=options["time"],
        cpus_per_device=options["cpus_per_device"],
        memory_per_node=options["memory_per_node"],
        stop_before_s=options["stop_before"],
        sbatch_options=options["sbatch_options"],
        setup=Path(options["setup"]).read_text(encoding="utf-8") if options["setup"] is not None else "",
    )
