"""`reconv submit`: train a recipe as a job of Slurm, or write the manifests of one for Kubernetes."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reconv.cli.commands.train import recipe_overrides, train
from reconv.cli.options import Command, complete_recipes, emit_json, json_option, print_line, print_note, write_text
from reconv.core.errors import UsageError

if TYPE_CHECKING:
    from reconv.recipe.load.resolved import Resolved

# Options of `train` that `submit` passes on.
_TRAIN_OPTIONS = (
    *("data", "epochs", "batch_size", "batch_per_device", "lr", "workers", "device", "nic", "seed", "model", "init"),
    *("resume_from", "freeze", "settings", "profile", "trust_code"),
)
_SLURM_ONLY = ("partition", "account", "time", "sbatch_options", "setup", "resume")
_KUBERNETES_ONLY = (
    *("image", "namespace", "runs_claim", "data_claim", "shm_size", "cache_size", "secrets", "service_account"),
    "manifest",
)


def _with_train_options(command: click.Command) -> click.Command:
    command.params += [param for param in train.params if param.name in _TRAIN_OPTIONS]
    return command


@_with_train_options
@click.command(cls=Command)
@click.argument("recipe", shell_complete=complete_recipes)
@click.option("--to", "target", type=click.Choice(["slurm", "kubernetes"]), required=True, help="The scheduler.")
@click.option("--nodes", metavar="N", type=click.IntRange(min=1), default=1, show_default=True, help="Machines.")
@click.option(
    "--devices-per-node",
    metavar="N",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="Processes on each machine, one per device.",
)
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(),
    help="The run directory; default: runs/RECIPE/N. Kubernetes: or an address such as s3://bucket/runs/1.",
)
@click.option("--resume", is_flag=True, help="Slurm: continue the run in --out.")
@click.option("--name", metavar="NAME", help="Name of the job [default: that of the recipe].")
@click.option("--partition", metavar="NAME", help="Slurm: the partition.")
@click.option("--account", metavar="NAME", help="Slurm: the account to charge.")
@click.option("--time", metavar="LIMIT", help="Slurm: time limit of one start, as in 8:00:00 or 2-00:00:00.")
@click.option("--cpus-per-device", metavar="N", type=click.IntRange(min=1), help="CPU cores of each process.")
@click.option("--memory-per-node", metavar="SIZE", help="Memory on each machine, as in 64G.")
@click.option(
    "--stop-before",
    metavar="S",
    type=click.IntRange(30, 86400),
    default=300,
    show_default=True,
    help="Seconds that the run has to finish a step and save, before the time limit or after a pod is asked to end.",
)
@click.option(
    "--sbatch", "sbatch_options", metavar="OPTION", multiple=True, help="Slurm: any option of sbatch; repeatable."
)
@click.option(
    "--setup",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    help="Slurm: shell commands to run first: modules, a virtual environment.",
)
@click.option(
    "--command",
    "program",
    metavar="COMMAND",
    help="How reconv is started there, as in 'apptainer exec --nv reconv.sif reconv' [default: as here].",
)
@click.option("--image", metavar="NAME", help="Kubernetes: the container image.")
@click.option("--namespace", metavar="NAME", help="Kubernetes: the namespace.")
@click.option("--runs-claim", metavar="NAME", help="Kubernetes: the PersistentVolumeClaim for runs, mounted at /runs.")
@click.option("--data-claim", metavar="NAME", help="Kubernetes: that of the dataset, mounted at /data.")
@click.option("--shm-size", metavar="SIZE", help="Kubernetes: size of /dev/shm [default: 8G].")
@click.option(
    "--secret",
    "secrets",
    metavar="NAME",
    multiple=True,
    help="Kubernetes: a Secret whose keys become environment variables: the credentials of an object store; "
    "repeatable.",
)
@click.option("--service-account", metavar="NAME", help="Kubernetes: the ServiceAccount of the pods.")
@click.option(
    "--cache-size", metavar="SIZE", help="Kubernetes: size of the cache of data in an object store [default: 50G]."
)
@click.option("--manifest", metavar="FILE", type=click.Path(), help="Kubernetes: the file [default: NAME-job.yaml].")
@click.option("--dry-run", is_flag=True, help="Print the script or the manifests; write and submit nothing.")
@json_option
@click.pass_context
def submit(ctx: click.Context, /, recipe: str, target: str, json_file: str | None, **options: Any) -> int:
    """Train RECIPE on a cluster until it is finished: one process per device, saved and requeued at the time limit.

    For Slurm, a batch script is written to the run directory and submitted. For Kubernetes, manifests are written
    for `kubectl apply`. Options of `reconv train` are passed on.

    \b
    Examples:
      reconv submit resnet50 --to slurm --nodes 2 --devices-per-node 8 --data /imagenet --time 8:00:00
      reconv submit my.yaml --to slurm --devices-per-node 4 --partition gpu --sbatch --qos=high --setup env.sh
      reconv submit resnet50 --to slurm --out runs/mine --resume --data /imagenet
      reconv submit resnet50 --to slurm --data /imagenet --dry-run
      reconv submit resnet50 --to kubernetes --nodes 2 --devices-per-node 8 --image reconv:1.0 --runs-claim runs
      reconv submit resnet50 --to kubernetes --image reconv:1.0 --data s3://b/imagenet --out s3://b/runs/1 --secret keys
    """
    _refuse_other_options(ctx, target)
    words = train_words(ctx)
    overrides = recipe_overrides(options, options["nodes"] * options["devices_per_node"])
    if target == "kubernetes":
        return _write_manifests(recipe, overrides, words, options, json_file)
    return _submit_to_slurm(recipe, overrides, words, options, json_file)


def _refuse_other_options(ctx: click.Context, target: str) -> None:
    """Refuse options of the other scheduler, which would be ignored."""
    other = _KUBERNETES_ONLY if target == "slurm" else _SLURM_ONLY
    for param in ctx.command.params:
        if param.name in other and _is_given(ctx, param):
            raise UsageError(f"{param.opts[0]} cannot be combined with --to {target}", then="leave it out")


def _is_given(ctx: click.Context, param: click.Parameter) -> bool:
    return ctx.get_parameter_source(param.name or "") is click.core.ParameterSource.COMMANDLINE


def train_words(ctx: click.Context) -> list[str]:
    """The options of `reconv train` among those of this command, as typed."""
    words: list[str] = []
    for param in ctx.command.params:
        if param.name not in _TRAIN_OPTIONS or not _is_given(ctx, param):
            continue
        value, name = ctx.params[param.name], param.opts[0]
        for item in value if isinstance(value, tuple) else (value,):
            text = str(item)
            words += [name] if item is True else [f"{name}={text}"] if text.startswith("-") else [name, text]
    return words


def _program(text: str | None) -> list[str]:
    """The words that start reconv on the nodes."""
    if text is None:
        return [sys.executable, "-m", "reconv"]
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--command {text!r} is not a command", why=str(error)) from error
    if not words:
        raise UsageError("--command is empty", then="for example --command reconv")
    return words


def _submit_to_slurm(
    recipe: str, overrides: list[Any], words: list[str], options: Mapping[str, Any], json_file: str | None
) -> int:
    from reconv.cluster.submit import preflight, slurm, slurm_queue
    from reconv.logging.run_dir import RunDir
    from reconv.recipe.plan_text import count
    from reconv.storage.object_stores.store import is_url

    is_dry = options["dry_run"]
    if not is_dry and not slurm_queue.has_slurm():
        raise UsageError(
            "this machine has no Slurm: sbatch is not on the PATH",
            then="submit from a login node of the cluster, or print the script with --dry-run",
        )
    num_devices = options["nodes"] * options["devices_per_node"]
    resolved = preflight.check_recipe(recipe, overrides, options["data"], num_devices)
    data = preflight.check_data(resolved)
    if options["data"] is None and resolved.recipe.data.path is None and data is not None:
        words = [*words, "--data", str(data)]  # of $DATA_DIR, which the nodes may not have
    name = resolved.recipe.name
    if options["out"] is not None and is_url(options["out"]):
        raise UsageError(
            "--out must be a folder with --to slurm",
            where=options["out"],
            why="the log and the state of the job are kept there",
            then="give a folder that all nodes have",
        )
    folder = Path(options["out"]).expanduser().absolute() if options["out"] is not None else None
    if folder is None and options["resume"]:
        raise UsageError("--resume needs the run directory", then="add --out DIR")
    run = folder or RunDir.next(Path("runs").absolute(), name)
    plan = preflight.check_run(RunDir(run), options["resume"])
    note = preflight.check_writable(run)
    job = _slurm_job(recipe, resolved, run, words, options)
    script = slurm.batch_script(job)
    if note:
        print_note(f"note: {note}")
    if is_dry:
        click.echo(script, nl=False)
        return 0
    run_dir = RunDir.at(run) if folder is not None else RunDir.create(Path("runs").absolute(), name)
    if run_dir.path != run:  # another process was faster
        run = run_dir.path
        script = slurm.batch_script(_slurm_job(recipe, resolved, run, words, options))
    submitted = slurm_queue.submit_script(run_dir, script)
    file = run / slurm.SCRIPT_NAME
    log = run_dir.logs / f"slurm-{submitted.job_id}.log"
    if json_file is not None:
        result = {"job_id": submitted.job_id, "run": str(run), "script": str(file), "log": str(log)}
        emit_json(result, json_file)
        return 0
    shown = os.path.relpath(run) if run.is_relative_to(Path.cwd()) else str(run)
    size = f"{count(num_devices, 'device')} of {count(options['nodes'], 'node')}"
    print_line(f"submitted job {submitted.job_id}: {plan} on {size}, in {shown}")
    print_line(f"  follow: {shlex.join(['reconv', 'status', shown])}")
    print_line(f"  log:    {shlex.join(['tail', '-F', str(log)])}")
    print_line(f"  stop:   scancel {submitted.job_id} (it saves); to continue: {shlex.join(['sbatch', str(file)])}")
    return 0


def _slurm_job(recipe: str, resolved: Resolved, run: Path, words: list[str], options: Mapping[str, Any]) -> Any:
    from reconv.cluster.submit.slurm import SlurmJob
    from reconv.recipe.parts.code import code_references
    from reconv.recipe.presets import preset_names

    program = _program(options["program"])
    file = recipe if recipe in preset_names() else str(Path(recipe).expanduser().absolute())
    # The recipe of the run is then the user's own: its code is what they have submitted.
    trusts = options["trust_code"] or bool(code_references(resolved.recipe))
    settings = {"--device": options["device"] if options["device"] != "auto" else None, "--nic": options["nic"]}
    again = [word for name, value in settings.items() if value is not None for word in (name, value)]
    return SlurmJob(
        name=options["name"] or resolved.recipe.name.replace(" ", "-"),
        run=run,
        folder=Path.cwd(),
        nodes=options["nodes"],
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


def _write_manifests(
    recipe: str, overrides: list[Any], words: list[str], options: Mapping[str, Any], json_file: str | None
) -> int:
    from reconv.cluster.submit import kubernetes, preflight
    from reconv.recipe.load.extends import own_files
    from reconv.recipe.parts.data import NEED_NO_PATH
    from reconv.recipe.plan_text import count

    num_devices = options["nodes"] * options["devices_per_node"]
    resolved = preflight.check_recipe(recipe, overrides, options["data"], num_devices)
    needs_data = resolved.recipe.data.source not in NEED_NO_PATH and options["data"] is None
    if options["image"] is None:
        raise UsageError("--to kubernetes needs --image", then="see `reconv submit --help`")
    if needs_data and options["data_claim"] is not None:
        words = [*words, "--data", kubernetes.DATA]
    elif needs_data:
        raise UsageError(
            f"{resolved.recipe.name} needs a dataset in the pods",
            then="add --data-claim NAME, or --data with a path or URL that the pods can read",
        )
    files = own_files(recipe)
    if len({file.name for file in files}) < len(files) or len({file.parent for file in files}) > 1:
        raise UsageError(
            "the recipe extends files in other folders, which the pods do not have",
            where=", ".join(map(str, files)),
            then="put them into one folder, or extend a preset",
        )
    name = options["name"] or kubernetes.job_name(resolved.recipe.name)
    run = options["out"] or f"{kubernetes.RUNS}/{name}"
    program = ["reconv"] if options["program"] is None else _program(options["program"])
    source = f"{kubernetes.RECIPES}/{files[0].name}" if files else recipe
    given = ("cpus_per_device", "memory_per_node", "shm_size", "cache_size", "service_account")
    job = kubernetes.KubernetesJob(
        name=name,
        image=options["image"],
        nodes=options["nodes"],
        devices_per_node=options["devices_per_node"],
        command=[*program, "train", source, "--out", run, "--resume", *words],
        run=run,
        device=options["device"],
        namespace=options["namespace"],
        runs_claim=options["runs_claim"],
        data_claim=options["data_claim"],
        data=resolved.recipe.data.path,
        secrets=options["secrets"],
        stop_before_s=options["stop_before"],
        recipe_files={file.name: file.read_text(encoding="utf-8") for file in files},
        **{field: options[field] for field in given if options[field] is not None},
    )
    text = kubernetes.manifests(job)
    if options["dry_run"]:
        click.echo(text, nl=False)
        return 0
    file = Path(options["manifest"] or f"{name}-job.yaml")
    write_text(file, text)
    if json_file is not None:
        emit_json({"manifest": str(file), "name": name, "run": run}, json_file)
        return 0
    print_line(f"wrote {file}: {count(num_devices, 'device')} of {count(options['nodes'], 'pod')}, run directory {run}")
    print_line(f"  start: {shlex.join(['kubectl', 'apply', '-f', str(file)])}")
    return 0
