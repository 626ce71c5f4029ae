"""Runs of trials: processes on this machine, jobs of Slurm, or runs on Ray; each an ordinary `reconv train --resume`.

A run that is started again continues its newest checkpoint, so a job may be lost, killed or repeated at any time. Where
a job ends is in its own command (`--stop-at`), so a scheduler may requeue it, too. Imports no torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from reconv.cluster.submit.slurm_queue import queued_jobs, read_job
from reconv.cluster.submit.target import Request, find_target
from reconv.core.errors import ExitCode, UsageError
from reconv.core.text import printable
from reconv.logging.run_dir import RunDir, read_summary
from reconv.recipe.loader import Override
from reconv.recipe.units import BatchPerDevice

LOG = "tune.log"  # in the logs of each run
_POLL_S = 0.05
_SLURM_POLL_S = 5.0
_GRACE_S = 300.0  # for runs that were asked to save and end
_LOCKED_S = 120.0  # for the run of a killed study, which is about to save and end
_STARTS = 4  # of a run that is asked to stop by others, such as a scheduler
_STOPPED = (ExitCode.PREEMPTED, ExitCode.INTERRUPTED, ExitCode.TERMINATED)


@dataclass(frozen=True, slots=True)
class TrialJob:
    """A run to start or to continue, and where it ends."""

    run: Path
    values: Mapping[str, object]  # recipe fields, beside those of all jobs
    stop_at: str | None  # None: its end


@dataclass(frozen=True, slots=True)
class JobEnd:
    """End of a job: exit code 0, or the reason."""

    code: int
    reason: str = ""


class TrialLauncher(Protocol):
    """Starts jobs and says which have ended."""

    def start(self, job: TrialJob) -> None:
        """Start a job, or find that it is already running."""
        ...

    def poll(self) -> dict[Path, JobEnd]:
        """The jobs that have ended since the last call, by their runs; waits a moment."""
        ...

    def stop(self) -> str:
        """Let the jobs save and end; returns what goes on nevertheless, for people."""
        ...


def setting_words(overrides: Sequence[Override]) -> list[str]:
    """Overrides of a recipe as words of a command."""
    return [word for name, value, _ in overrides for word in ("--set", f"{name}={_text(value)}")]


def _text(value: object) -> str:
    if isinstance(value, BatchPerDevice):
        value = value.size * value.num_devices
    return value if isinstance(value, str) else json.dumps(value, default=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialCommand:
    """The part of the command that all jobs of a study have."""

    recipe: str
    overrides: Sequence[Override]
    data: str | None = None
    device: str = "auto"
    trust_code: bool = False

    def words(self, job: TrialJob) -> list[str]:
        """The words after the recipe and the run directory."""
        words = setting_words([*self.overrides, *((name, value, "") for name, value in job.values.items())])
        words += ["--data", self.data] if self.data is not None else []
        words += ["--device", self.device] if self.device != "auto" else []
        words += ["--trust-code"] if self.trust_code else []
        return words + (["--stop-at", job.stop_at] if job.stop_at is not None else [])


@dataclass(slots=True)
class _Process:
    job: TrialJob
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int  # bytes of earlier starts
    num_stops: int = 0
    locked_s: float | None = None


@dataclass(slots=True)
class LocalLauncher:
    """Processes of this machine; `verb` is the command of each, `more` its further words."""

    command: TrialCommand
    verb: Sequence[str] = ("train",)
    more: Sequence[str] = ("--quiet",)
    _running: list[_Process] = field(default_factory=list)

    def start(self, job: TrialJob) -> None:
        """Start the process of a job."""
        self._start(job)

    def _start(self, job: TrialJob, num_stops: int = 0, locked_s: float | None = None) -> None:
        log = job.run / "logs" / LOG
        log.parent.mkdir(parents=True, exist_ok=True)
        words = [*self.verb, self.command.recipe, "--out", str(job.run), "--resume", *self.command.words(job)]
        with log.open("ab") as file:
            log_start = file.tell()  # not after the start: the process writes at the same position
            process = subprocess.Popen(
                [sys.executable, "-m", "reconv", *words, *self.more],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,  # Ctrl-C is for this process, which asks the others to save
                preexec_fn=_end_with_parent(),
            )
            self._running.append(_Process(job, process, log, log_start, num_stops, locked_s))

    def poll(self) -> dict[Path, JobEnd]:
        """The processes that have ended."""
        time.sleep(_POLL_S)
        ended: dict[Path, JobEnd] = {}
        for running in [running for running in self._running if running.process.poll() is not None]:
            self._running.remove(running)
            if not self._is_started_again(running):
                code = running.process.returncode
                reason = _reason(running.job.run, code, _tail(running.log, running.log_start))
                ended[running.job.run] = JobEnd(code, reason)
        return ended

    def _is_started_again(self, ended: _Process) -> bool:
        """True for a run that others have stopped, or whose directory a killed study's process still holds."""
        code = ended.process.returncode
        if code == ExitCode.RUN_LOCKED:
            locked_s = ended.locked_s or time.monotonic()
            if time.monotonic() - locked_s < _LOCKED_S:
                time.sleep(1.0)
                self._start(ended.job, ended.num_stops, locked_s)
                return True
        if code in _STOPPED and ended.num_stops + 1 < _STARTS:
            self._start(ended.job, ended.num_stops + 1)
            return True
        return False

    def stop(self) -> str:
        """Ask all processes to save and to end, and wait for them."""
        for running in self._running:
            with suppress(ProcessLookupError):
                running.process.terminate()
        try:
            end_s = time.monotonic() + _GRACE_S
            for running in self._running:
                running.process.wait(max(0.1, end_s - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            for running in self._running:
                running.process.kill()
        self._running.clear()
        return ""


def _end_with_parent() -> Any:
    """A function that makes a new process save and end when this one is gone, on Linux."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(1, signal.SIGTERM)


@dataclass(slots=True)
class SlurmLauncher:
    """Jobs of Slurm, each with the batch script that `reconv submit --to slurm` writes."""

    command: TrialCommand
    options: Mapping[str, Any]  # of `reconv submit`, by their names
    poll_s: float = _SLURM_POLL_S
    _running: dict[Path, TrialJob] = field(default_factory=dict)

    def start(self, job: TrialJob) -> None:
        """Submit a job, unless the queue still has it from before this study was started again."""
        self._running[job.run] = job
        submitted = read_job(job.run)
        if submitted is not None and submitted.job_id in (queued_jobs() or {}):
            return
        values = [(name, value, "") for name, value in job.values.items()]
        options = {
            **self.options,
            "data": self.command.data,
            "device": self.command.device,
            "trust_code": self.command.trust_code,
            "out": str(job.run),
            "resume": RunDir(job.run).is_run(),
            "stop_at": job.stop_at,
        }
        request = Request(
            recipe=self.command.recipe,
            overrides=[*self.command.overrides, *values],
            train_words=[*self.command.words(job), "--quiet"],
            options=options,
            train=_never,
        )
        find_target("slurm").submit(request)

    def poll(self) -> dict[Path, JobEnd]:
        """The jobs that the queue does not have any more."""
        time.sleep(self.poll_s)
        queue = queued_jobs()
        if queue is None:  # the controller may be restarting
            return {}
        ended: dict[Path, JobEnd] = {}
        for run in list(self._running):
            submitted = read_job(run)
            if submitted is not None and submitted.job_id in queue:
                continue
            del self._running[run]
            log = run / "logs" / f"slurm-{submitted.job_id if submitted is not None else ''}.log"
            code = _exit_code(run)
            ended[run] = JobEnd(code, _reason(run, code, _tail(log, 0)))
        return ended

    def stop(self) -> str:
        """Leave the jobs in the queue: the same command finds them there."""
        jobs = [job.job_id for run in self._running if (job := read_job(run)) is not None]
        self._running.clear()
        return f"jobs {', '.join(jobs)} go on in Slurm; to end them, too: scancel {' '.join(jobs)}" if jobs else ""


def _never(*arguments: Any) -> None:
    raise UsageError("Slurm trains on its nodes, not here")


def make_launcher(command: TrialCommand, target: str | None, options: Mapping[str, Any]) -> TrialLauncher:
    """The launcher of --to; `options` are those of `reconv submit`."""
    if target is None:
        return LocalLauncher(command)
    if target == "slurm":
        return SlurmLauncher(command, options)
    if target == "ray":
        words = ["--to", "ray", "--nodes", str(options["nodes"])]
        words += ["--devices-per-node", str(options["devices_per_node"])]
        if options.get("cpus_per_device") is not None:
            words += ["--cpus-per-device", str(options["cpus_per_device"])]
        words += ["--address", options["address"]] if options.get("address") is not None else []
        return LocalLauncher(command, verb=("submit",), more=words)
    raise UsageError(
        f"--to {target} cannot be combined with tune",
        why="trials are decided on while they run, and it only writes a file",
        hint="use --to slurm or --to ray, or train on this machine",
    )


@contextmanager
def stopping(launcher: TrialLauncher) -> Iterator[None]:
    """Let no job go on unnoticed when the block ends by an exception."""
    try:
        yield
    except BaseException:
        note = launcher.stop()
        if note:
            print(note, file=sys.stderr, flush=True)
        raise


def _exit_code(run: Path) -> int:
    """The exit code that a run has recorded; 1 if it has not."""
    with suppress(Exception):  # no summary, or a damaged one
        code = read_summary(run).get("exit_code")
        return ExitCode.UNEXPECTED if code is None else int(code)
    return ExitCode.UNEXPECTED


def _reason(run: Path, code: int, log: str) -> str:
    """Reason of a failure, in one line: the run's own, else the last error in its log."""
    if code == 0:
        return ""
    if code < 0:
        with suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    errors = [line.removeprefix("error: ") for line in log.splitlines() if line.startswith("error: ")]
    if errors:
        return printable(f"exit code {code}: {errors[-1]}")
    with suppress(Exception):
        summary = read_summary(run)
        if summary.get("exit_code") == code and summary.get("reason"):
            return printable(f"exit code {code}: {summary['reason']}")
    lines = [line for line in log.splitlines() if line.strip()]
    return printable(f"exit code {code}: {lines[-1]:.200}" if lines else f"exit code {code}")


def _tail(log: Path, start: int) -> str:
    """The text of a log from a byte on, at most its last 64 kB."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(start, os.path.getsize(log) - (64 << 10)))
        return file.read().decode(errors="replace")
    return ""
