"""`reconv train`: train a recipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from reconv.cli.dry_run_output import print_dry_run
from reconv.cli.options import (
    DEVICE_HELP,
    STDOUT,
    Command,
    Override,
    complete_recipes,
    emit_json,
    json_option,
    parse_settings,
    print_note,
    set_option,
    shortcut_options,
    stop_after_option,
    stop_at_option,
)
from reconv.cli.start_up import import_torch, pause_gc, start_cuda
from reconv.cluster.launch import Launch
from reconv.core.errors import UsageError
from reconv.distributed.environment import planned_world_size, read_launch_env
from reconv.recipe.presets import preset_names
from reconv.recipe.shortcuts import shortcut_overrides
from reconv.trainer.options import RunOptions

_DRY_RUN_STEPS = 10
_NO_RECIPE = """name a recipe, for example
  reconv train quickstart                                         built-in data, seconds on a CPU
  reconv train finetune --data photos/ --init mobilenet_v2.pth    your images, weights of ImageNet
  reconv train resnet50 --data /imagenet                          a reference recipe
`reconv recipes` lists them"""


@click.command(cls=Command)
@click.argument("recipe", required=False, shell_complete=complete_recipes)
@click.option(
    "--data", metavar="DIR|URL", type=click.Path(), help="The dataset, in any known format; default: $DATA_DIR."
)
@click.option(
    "--out",
    metavar="DIR|URL",
    type=click.Path(),
    help="The run directory, or the address to mirror it to; default: runs/RECIPE/N.",
)
@click.option("--resume", is_flag=True, help="Resume the newest unfinished run of this recipe, or the one in --out.")
@shortcut_options("epochs", "batch_size", "batch_per_device", "lr", "workers")
@click.option("--device", metavar="NAME", default="auto", show_default=True, help=DEVICE_HELP)
@click.option("--devices", metavar="N", type=click.IntRange(1, 256), help="Processes on this machine, one per device.")
@click.option(
    "--elastic", metavar="MIN:MAX", help="Go on when nodes leave or join: how many there may be; needs --out."
)
@click.option(
    "--rendezvous", metavar="HOST:PORT", help="Where `reconv rendezvous` listens, for --elastic on several machines."
)
@click.option("--nic", metavar="NAME|CIDR", help="Network interface between machines, e.g. eth1 or 10.0.0.0/16.")
@shortcut_options("seed", "model", "init", "resume_from", "freeze")
@set_option
@shortcut_options("profile")
@stop_after_option
@stop_at_option
@shortcut_options("on_divergence")
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
@click.option("--plan", is_flag=True, help="Print every line of the plan, not a screenful.")
@click.option("--quiet", is_flag=True, help="Print only the result.")
@json_option
def train(
    recipe: str | None,
    data: str | None,
    out: str | None,
    resume: bool,
    device: str,
    devices: int | None,
    elastic: str | None,
    rendezvous: str | None,
    nic: str | None,
    stop_after: str | None,
    stop_at: str | None,
    dry_run: int | None,
    compile_only: bool,
    trust_code: bool,
    plan: bool,
    quiet: bool,
    json_file: str | None,
    **options: Any,
) -> int:
    """Train RECIPE, a preset or your own YAML file; a folder of images in its place is trained by finetune.

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
    recipe, data = recipe_and_data(recipe, data)
    overrides = recipe_overrides(options, planned_world_size(devices))
    silence_torch()
    start_cuda(device, 1 if elastic else devices)
    launch = Launch(devices, elastic, rendezvous, nic)
    run = RunOptions(
        recipe,
        overrides,
        data,
        resume=resume,
        device=device,
        console=console_of(quiet, json_file, plan),
        stop_after=stop_after,
        stop_at=stop_at,
        trust_code=trust_code,
    )
    if dry_run is not None or compile_only:
        _check_dry_run_options(dry_run, compile_only, resume, options["profile"], stop_after, stop_at, elastic)
        return print_dry_run(run, launch, dry_run, json_file)
    return run_training(run, launch, out, json_file)


def recipe_and_data(recipe: str | None, data: str | None) -> tuple[str, str | None]:
    """RECIPE and --data; a folder in RECIPE's place is the data of `finetune`."""
    if recipe is None:
        raise click.UsageError(_NO_RECIPE, click.get_current_context())
    folder = Path(recipe)
    if recipe in preset_names() or not (folder.is_dir() or recipe.endswith("/")):
        return recipe, data
    if (folder / "recipe.yaml").is_file():
        raise UsageError(f"{recipe} is a run", hint=f"continue it: reconv resume {recipe}")
    if data is not None:
        raise UsageError(
            f"{recipe} is a folder, and so is the data",
            why=f"--data is {data}",
            hint=f"name a recipe: reconv train finetune --data {data}",
        )
    print_note(f"training finetune --data {recipe}: RECIPE is a folder")
    return "finetune", recipe


def recipe_overrides(options: Mapping[str, Any], num_devices: int) -> list[Override]:
    """The recipe fields that the options of `train` set, on so many devices."""
    return shortcut_overrides(options, num_devices) + parse_settings(options["settings"])


def silence_torch() -> None:
    """Keep torch from writing to stderr; it reads these variables when it is imported."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # its profiler
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # we print the error of a lost rank ourselves


def console_of(quiet: bool, json_file: str | None, plan: bool) -> str:
    """The console of a run, from --quiet, --json and --plan."""
    return "json" if json_file == STDOUT else "quiet" if quiet else "plan" if plan else "auto"


def run_training(
    options: RunOptions, launch: Launch, out: str | None, json_file: str | None, mirror: str | None = None
) -> int:
    """Train; the console of the run prints the result, except that of a run that was already finished."""
    with pause_gc():
        import_torch()
        from reconv.api.training import start  # reconv.api imports all of inference

    result = start(replace(options, command=["reconv", *sys.argv[1:]]), launch, out=out, mirror=mirror)
    if read_launch_env().rank == 0:
        if result.was_finished:
            _print_finished(result.summary, result.folder, options.console or "auto")
        if json_file is not None and json_file != STDOUT:
            emit_json(result.summary, json_file)
    return int(result.exit_code)


def _check_dry_run_options(
    dry_run: int | None,
    compile_only: bool,
    resume: bool,
    profile: str | None,
    stop_after: str | None,
    stop_at: str | None,
    elastic: str | None,
) -> None:
    """Refuse options that a dry run would ignore."""
    name = "--compile-only" if compile_only else "--dry-run"
    options = {
        "--dry-run": compile_only and dry_run is not None,
        "--resume": resume,
        "--profile": profile is not None,
        "--stop-after": stop_after is not None,
        "--stop-at": stop_at is not None,
        "--elastic": elastic is not None,
    }
    clash = next((other for other, is_given in options.items() if is_given), None)
    if clash is not None:
        raise UsageError(
            f"{name} and {clash} cannot be combined",
            why="it starts a new run in a temporary folder and keeps nothing",
            hint="use one of them",
        )


def _print_finished(summary: Mapping[str, Any], folder: Path, console: str) -> None:
    """Print the result of a run that was already finished."""
    from reconv.logging.console import make_console
    from reconv.logging.events import LogMessage

    screen = make_console(console, folder)
    if console in ("auto", "plan"):
        screen.on_event(LogMessage("info", f"{folder} is already finished: nothing to do"))
    screen.finish(summary)
    screen.close()
