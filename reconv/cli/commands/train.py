"""`reconv train`: train a recipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reconv.cli.dry_run_output import TrainArgs, print_dry_run
from reconv.cli.options import (
    DEVICE_HELP,
    STDOUT,
    Command,
    Override,
    batch_override,
    complete_models,
    complete_recipes,
    divergence_option,
    emit_json,
    json_option,
    parse_settings,
    set_option,
    stop_after_option,
)
from reconv.cli.start_up import import_torch, pause_gc, start_cuda
from reconv.core.errors import UsageError
from reconv.distributed.environment import planned_world_size, read_launch_env

_DRY_RUN_STEPS = 10
if TYPE_CHECKING:
    from reconv.core.custom_code import CodeConsent


@click.command(cls=Command)
@click.argument("recipe", shell_complete=complete_recipes)
@click.option(
    "--data", metavar="DIR|URL", type=click.Path(), help="The dataset, in any known format; default: $DATA_DIR."
)
@click.option(
    "--out",
    metavar="DIR|URL",
    type=click.Path(),
    help="The run directory, or where it is copied; default: runs/RECIPE/N.",
)
@click.option("--resume", is_flag=True, help="Resume the newest unfinished run of this recipe, or the one in --out.")
@click.option("--epochs", metavar="N", type=click.FloatRange(min=0, min_open=True), help="Number of epochs.")
@click.option("--batch-size", metavar="N", type=click.IntRange(min=1), help="Global batch size: all devices, one step.")
@click.option("--batch-per-device", metavar="N", type=click.IntRange(min=1), help="Batch size of one device.")
@click.option("--lr", metavar="X", help="Learning rate as in 0.1, 2^-11 or '0.1 per 256' (schedule.lr).")
@click.option("--workers", metavar="N", type=click.IntRange(min=0), help="Number of data loading workers.")
@click.option("--device", metavar="NAME", default="auto", show_default=True, help=DEVICE_HELP)
@click.option("--devices", metavar="N", type=click.IntRange(1, 256), help="Processes on this machine, one per device.")
@click.option(
    "--elastic", metavar="MIN:MAX", help="Go on when nodes leave or join: how many there may be; needs --out."
)
@click.option(
    "--rendezvous", metavar="HOST:PORT", help="Where `reconv rendezvous` listens, for --elastic on several machines."
)
@click.option("--nic", metavar="NAME|CIDR", help="Network interface between machines, e.g. eth1 or 10.0.0.0/16.")
@click.option("--seed", metavar="N", type=click.IntRange(min=0), help="Random seed.")
@click.option("--model", metavar="NAME", shell_complete=complete_models, help="Another network, by its name.")
@click.option("--init", metavar="WEIGHTS", help="Initial weights: a file, a run, torchvision:NAME, timm:NAME or a URL.")
@click.option(
    "--resume-from", metavar="FILE", help="Continue a checkpoint of torchvision's, NVIDIA's or timm's program."
)
@click.option("--freeze", is_flag=True, help="Train only the head; needs --init.")
@set_option
@click.option("--profile", metavar="A,B", help="Profile steps A to B, counted from 1, both included.")
@stop_after_option
@divergence_option
@click.option(
    "--dry-run",
    metavar="[N]",
    is_flag=False,
    flag_value=_DRY_RUN_STEPS,
    type=click.IntRange(min=1),
    help=f"Run N steps ({_DRY_RUN_STEPS}), report speed and memory, keep nothing.",
)
@click.option("--compile-only", is_flag=True, help="Build and compile the model; train and keep nothing.")
@click.option("--trust-code", is_flag=True, help="Import the code that a teacher's run or the weights of --init name.")
@click.option("--quiet", is_flag=True, help="Print only the result.")
@json_option
def train(
    recipe: str,
    data: str | None,
    out: str | None,
    resume: bool,
    device: str,
    devices: int | None,
    elastic: str | None,
    rendezvous: str | None,
    nic: str | None,
    stop_after: str | None,
    dry_run: int | None,
    compile_only: bool,
    trust_code: bool,
    quiet: bool,
    json_file: str | None,
    **options: Any,
) -> int:
    """Train RECIPE, a preset or your own YAML file.

    With --json, stdout has every event of the run as one JSON object per line, and the summary last; with
    --json FILE.json the summary is written to the file. Ctrl-C saves a checkpoint after the current step; --resume
    continues from there.

    \b
    Examples:
      reconv train quickstart
      reconv train resnet50 --data /imagenet --batch-size 512
      reconv train my.yaml --epochs 10 --set optimizer.momentum=0.875
      reconv train resnet50 --data flowers/ --init torchvision:resnet50 --freeze --epochs 5
      reconv train resnet50 --data /imagenet --dry-run 50
      reconv train resnet50 --data /imagenet --stop-after 100step --profile 90,95
      reconv train resnet50 --data /imagenet --resume
      reconv train resnet50 --data s3://bucket/imagenet --out s3://bucket/runs/1 --resume
      reconv train resnet50 --data /imagenet --out /shared/run --elastic 1:4 --rendezvous node1:29400
    """
    overrides = recipe_overrides(options, planned_world_size(devices))
    silence_torch()
    start_cuda(device, 1 if elastic else devices)
    args = TrainArgs(recipe, data, overrides, device, devices, nic, quiet, json_file, trust_code)
    if dry_run is not None or compile_only:
        _check_dry_run_options(dry_run, compile_only, resume, options["profile"], stop_after, elastic)
        return print_dry_run(args, dry_run)
    return run_training(args, out, resume, stop_after, elastic, rendezvous)


def recipe_overrides(options: Mapping[str, Any], num_devices: int) -> list[Override]:
    """The recipe fields that the options of `train` set, on so many devices."""
    epochs, profile = options["epochs"], options["profile"]
    given: list[Override] = [
        ("length", None if epochs is None else epochs_text(epochs), "--epochs"),
        batch_override(options["batch_size"], options["batch_per_device"], num_devices),
        ("schedule.lr", options["lr"], "--lr"),
        ("data.num_workers", options["workers"], "--workers"),
        ("seed", options["seed"], "--seed"),
        ("model.name", options["model"], "--model"),
        ("model.init", options["init"], "--init"),
        ("model.resume_from", options["resume_from"], "--resume-from"),
        ("model.freeze_backbone", options["freeze"] or None, "--freeze"),
        ("profile", None if profile is None else step_range(profile), "--profile"),
        ("engine.divergence.policy", options["on_divergence"], "--on-divergence"),
    ]
    return [override for override in given if override[1] is not None] + parse_settings(options["settings"])


def silence_torch() -> None:
    """Keep torch from writing to stderr; it reads these variables when it is imported."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # its profiler
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # we print the error of a lost rank ourselves


def run_training(
    args: TrainArgs,
    out: str | None,
    resume: bool,
    stop_after: str | None,
    elastic: str | None = None,
    rendezvous: str | None = None,
    mirror: str | None = None,
    consent: CodeConsent | None = None,
) -> int:
    """Train; the console of the run prints the result, except that of a run that was already finished."""
    with pause_gc():
        import_torch()
        from reconv.api.training import train as run_train  # reconv.api imports all of inference

    console = "json" if args.json_file == STDOUT else "quiet" if args.quiet else "auto"
    result = run_train(
        args.recipe,
        data=args.data,
        out=out,
        resume=resume,
        overrides=args.overrides,
        device=args.device,
        devices=args.devices,
        elastic=elastic,
        rendezvous=rendezvous,
        nic=args.nic,
        console=console,
        command=["reconv", *sys.argv[1:]],
        stop_after=stop_after,
        trust_code=args.trust_code,
        mirror=mirror,
        consent=consent,
    )
    if read_launch_env().rank == 0:
        if result.was_finished:
            _print_finished(result.summary, result.folder, console)
        if args.json_file is not None and args.json_file != STDOUT:
            emit_json(result.summary, args.json_file)
    return int(result.exit_code)


def epochs_text(number: float) -> str:
    """A number of epochs as a duration, which has no exponent."""
    return f"{Decimal(repr(number)).normalize():f}ep"


def step_range(text: str) -> list[int]:
    """`50,53` as the first and last step; a single number is both."""
    words = text.split(",")
    if len(words) > 2 or not all(word.strip().isdecimal() for word in words):
        raise UsageError(f"--profile takes a range of steps, not {text!r}", then="for example --profile 50,53")
    return [int(words[0]), int(words[-1])]


def _check_dry_run_options(
    dry_run: int | None,
    compile_only: bool,
    resume: bool,
    profile: str | None,
    stop_after: str | None,
    elastic: str | None,
) -> None:
    """Refuse options that a dry run would ignore."""
    name = "--compile-only" if compile_only else "--dry-run"
    options = {
        "--dry-run": compile_only and dry_run is not None,
        "--resume": resume,
        "--profile": profile is not None,
        "--stop-after": stop_after is not None,
        "--elastic": elastic is not None,
    }
    clash = next((other for other, is_given in options.items() if is_given), None)
    if clash is not None:
        raise UsageError(
            f"{name} and {clash} cannot be combined",
            why="it starts a new run in a temporary folder and keeps nothing",
            then="use one of them",
        )


def _print_finished(summary: Mapping[str, Any], folder: Path, console: str) -> None:
    """Print the result of a run that was already finished."""
    from reconv.logging.console import make_console
    from reconv.logging.events import LogMessage

    screen = make_console(console, folder)
    if console == "auto":
        screen.on_event(LogMessage("info", f"{folder} is already finished: nothing to do"))
    screen.finish(summary)
    screen.close()
