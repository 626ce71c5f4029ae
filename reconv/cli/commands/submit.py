"""`reconv submit`: train a recipe on a cluster, by its scheduler or on Ray; and `reconv rendezvous`, for nodes."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from dataclasses import replace
from typing import Any

import click

from reconv.cli.commands.train import recipe_overrides, silence_torch, train
from reconv.cli.options import Command, complete_recipes, emit_json, json_option, print_line, print_note
from reconv.cluster.launch import parse_endpoint
from reconv.cluster.submit.target import TARGETS, Request, Target, find_target
from reconv.core.errors import UsageError
from reconv.core.stop_signals import handled_stop_signals
from reconv.recipe.shortcuts import SHORTCUTS
from reconv.trainer.options import RunOptions

# Options of `train` that `submit` passes on.
_TRAIN_OPTIONS = ("data", "device", "nic", "settings", "stop_at", "trust_code", *SHORTCUTS)
# Options that every target has; the others are those of single targets.
_COMMON = (
    *("target", "nodes", "devices_per_node", "out", "name", "cpus_per_device", "memory_per_node", "stop_before"),
    *("program", "dry_run"),
)


def _with_train_options(command: click.Command) -> click.Command:
    command.params += [param for param in train.params if param.name in _TRAIN_OPTIONS]
    return command


@_with_train_options
@click.command(cls=Command)
@click.argument("recipe", shell_complete=complete_recipes)
@click.option("--to", "target", type=click.Choice(TARGETS), required=True, help="The scheduler or engine.")
@click.option("--nodes", metavar="N|MIN:MAX", default="1", show_default=True, help="Machines; a range with --to ray.")
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
    help="The run directory [default: runs/RECIPE/N], or, except with Slurm, an address such as s3://bucket/runs/1.",
)
@click.option("--resume", is_flag=True, help="Slurm: continue the run in --out.")
@click.option("--name", metavar="NAME", help="Name of the job [default: the recipe's].")
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
    help="Slurm, SkyPilot: shell commands to run first: modules, a virtual environment.",
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
@click.option("--data-claim", metavar="NAME", help="Kubernetes: claim of the dataset, mounted at /data.")
@click.option("--shm-size", metavar="SIZE", help="Kubernetes: size of /dev/shm [default: 8G].")
@click.option(
    "--secret",
    "secrets",
    metavar="NAME",
    multiple=True,
    help="Kubernetes: a Secret whose keys become environment variables, as the credentials of an object store, or "
    "NAME/KEY for one; SkyPilot: the name of an environment variable; repeatable.",
)
@click.option("--service-account", metavar="NAME", help="Kubernetes: the ServiceAccount of the pods.")
@click.option(
    "--cache-size", metavar="SIZE", help="Kubernetes: size of the cache of data in an object store [default: 50G]."
)
@click.option("--manifest", metavar="FILE", type=click.Path(), help="The file to write [default: of the job's name].")
@click.option("--runtime", metavar="NAME", help="TrainJob: the ClusterTrainingRuntime [default: torch-distributed].")
@click.option("--accelerators", metavar="NAME:N", help="SkyPilot: the devices of a machine, as in H100:8.")
@click.option("--spot", is_flag=True, help="SkyPilot: machines that the cloud may take back.")
@click.option("--address", metavar="HOST:PORT", help="Ray: the cluster [default: $RAY_ADDRESS, or the one here].")
@click.option("--dry-run", is_flag=True, help="Print what would be written or run; submit nothing.")
@json_option
@click.pass_context
def submit(ctx: click.Context, /, recipe: str, target: str, json_file: str | None, **options: Any) -> int:
    """Train RECIPE on a cluster until it is finished: one process per device, saved and continued after a stop.

    For Slurm, a batch script is written to the run directory and submitted. For Kubernetes (a Job, or a TrainJob of
    Kubeflow Trainer) and SkyPilot, a file is written for their own commands. On Ray the run is trained by this
    command, on the nodes that there are. Options of `reconv train` are passed on.

    \b
    Examples:
      reconv submit resnet50 --to slurm --nodes 2 --devices-per-node 8 --data /imagenet --time 8:00:00
      reconv submit my.yaml --to slurm --devices-per-node 4 --partition gpu --sbatch --qos=high --setup env.sh
      reconv submit resnet50 --to slurm --out runs/mine --resume --data /imagenet
      reconv submit resnet50 --to slurm --data /imagenet --dry-run
      reconv submit resnet50 --to kubernetes --nodes 2 --devices-per-node 8 --image reconv:1.0 --runs-claim runs
      reconv submit resnet50 --to kubernetes --image reconv:1.0 --data s3://b/imagenet --out s3://b/runs/1 --secret keys
      reconv submit resnet50 --to trainjob --nodes 2 --devices-per-node 8 --image reconv:1.0 --runs-claim runs
      reconv submit resnet50 --to skypilot --spot --accelerators H100:8 --devices-per-node 8 --out s3://b/runs/1
      reconv submit resnet50 --to ray --nodes 1:4 --devices-per-node 8 --data /imagenet --out /shared/run
    """
    request_target = find_target(target)
    _refuse_other_options(ctx, target, request_target)
    _check_nodes(options["nodes"], target)
    values = {**options, "target": target}
    request = Request(recipe=recipe, overrides=(), train_words=train_words(ctx), options=values, train=_train)
    request = replace(request, overrides=recipe_overrides(options, request.num_devices))
    if options["dry_run"]:
        click.echo(request_target.text(request), nl=False)
        return 0
    submitted = request_target.submit(request)
    for note in submitted.notes:
        print_note(f"note: {note}")
    if json_file is not None:
        emit_json(dict(submitted.result), json_file)
    else:
        for line in submitted.lines:
            print_line(line)
    return submitted.exit_code


def _train(options: RunOptions, launch: Any, out: str) -> Any:
    from reconv.api.training import start  # imports torch

    return start(replace(options, command=["reconv", *sys.argv[1:]]), launch, out=out)


def _refuse_other_options(ctx: click.Context, name: str, target: Target) -> None:
    """Refuse options of other targets, which would be ignored."""
    passed_on = {param.name for param in train.params}
    for param in ctx.command.params:
        is_passed_on = param.name in passed_on and param.name != "resume"  # RECIPE and --json, too
        is_refused = not is_passed_on and param.name not in _COMMON and param.name not in target.options
        if is_refused and _is_given(ctx, param):
            raise UsageError(f"{param.opts[0]} cannot be combined with --to {name}", hint="leave it out")


def _check_nodes(text: str, target: str) -> None:
    match = re.fullmatch(r"([1-9]\d{0,4})(?::([1-9]\d{0,4}))?", text, re.ASCII)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise UsageError(f"--nodes {text!r} is not a number of machines", hint="for example --nodes 2")
    if match[2] is not None and target != "ray":
        raise UsageError(
            f"--nodes {text} cannot be combined with --to {target}",
            why="it starts a fixed number of machines",
            hint=f"--nodes {match[2]}, or --to ray",
        )


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


@click.command(cls=Command)
@click.argument("address", metavar="HOST:PORT")
def rendezvous(address: str) -> int:
    """Listen on HOST:PORT for the nodes of an elastic run, until Ctrl-C or SIGTERM.

    HOST is an address of this machine that all nodes can reach; nothing listens on any other. It trains nothing and
    writes nothing. Nodes may come and go; this process should stay, so start it where no job ends it.

    \b
    Examples:
      reconv rendezvous 10.0.0.1:29400
    """
    silence_torch()

    from reconv.distributed.environment import SECRET_VARIABLE
    from reconv.distributed.rank_store import new_secret, serve_rendezvous

    host, port = parse_endpoint(address)
    ended = threading.Event()
    for number in handled_stop_signals():
        signal.signal(number, lambda *_: ended.set())
    store = serve_rendezvous(host, port)
    print_note(f"listening on {host}:{store.port}; on every node:")
    if not os.environ.get(SECRET_VARIABLE):
        print_note(f"  export {SECRET_VARIABLE}={new_secret()}")
    print_note(f"  reconv train RECIPE --out /shared/run --elastic 1:4 --rendezvous {host}:{store.port}")
    while not ended.wait(1.0):
        pass
    return 0
