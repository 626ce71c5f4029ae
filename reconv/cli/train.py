"""The verb `train`: options become overrides of the recipe, the result becomes a line and an exit code.

Owns which short option stands for which recipe field. Refuses to know what the fields do. Invariant: an option that
is not given overrides nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import click

from reconv.cli.dry_run_output import Asked, rehearse
from reconv.cli.options import (
    DEVICE_HELP,
    STDOUT,
    Command,
    Override,
    batch_override,
    complete_recipes,
    emit_json,
    json_option,
    parse_settings,
    start_kernel_compiler,
)
from reconv.distributed.environment import read_launch_env
from reconv.errors import UsageError


@click.command(cls=Command)
@click.argument("recipe", shell_complete=complete_recipes)
@click.option("--data", metavar="DIR", type=click.Path(), help="The data set; else $DATA_DIR. Its kind is found out.")
@click.option("--out", metavar="DIR", type=click.Path(), help="The run folder itself; else runs/RECIPE/N.")
@click.option("--resume", is_flag=True, help="Go on with the newest unfinished run of this recipe, or with --out.")
@click.option("--epochs", metavar="N", type=click.FloatRange(min=0, min_open=True), help="Length of the training.")
@click.option("--batch-size", metavar="N", type=click.IntRange(min=1), help="Global batch: all devices, one step.")
@click.option("--batch-per-device", metavar="N", type=click.IntRange(min=1), help="The same, counted on one device.")
@click.option("--lr", metavar="X", type=click.FloatRange(min=0, min_open=True), help="schedule.lr of the recipe.")
@click.option("--workers", metavar="N", type=click.IntRange(min=0), help="Decoding workers.")
@click.option("--device", metavar="NAME", default="auto", show_default=True, help=DEVICE_HELP)
@click.option("--devices", metavar="N", type=click.IntRange(min=1), help="Processes on this machine, one a device.")
@click.option("--nic", metavar="NAME|CIDR", help="The network between machines, as in eth1 or 10.0.0.0/16.")
@click.option("--seed", metavar="N", type=click.IntRange(min=0), help="Another seed is another run.")
@click.option("--model", metavar="NAME", help="Another network, as torchvision spells it.")
@click.option("--init", metavar="WEIGHTS", help="Start from a file, a run, torchvision:NAME, timm:NAME or an address.")
@click.option("--freeze", is_flag=True, help="Train the head alone; needs --init.")
@click.option("--set", "settings", metavar="A.B=V", multiple=True, help="Set any recipe field; may be repeated.")
@click.option("--profile", metavar="A,B", help="Trace steps A to B, counted from 1, both included.")
@click.option(
    "--dry-run", metavar="N", type=click.IntRange(min=1), help="N steps, told and forgotten: speed, size, time."
)
@click.option("--compile-only", is_flag=True, help="Build and compile, train nothing, keep nothing.")
@click.option("--quiet", is_flag=True, help="Print the result only.")
@json_option
def train(
    recipe: str,
    data: str | None,
    out: str | None,
    resume: bool,
    epochs: float | None,
    batch_size: int | None,
    batch_per_device: int | None,
    lr: float | None,
    workers: int | None,
    device: str,
    devices: int | None,
    nic: str | None,
    seed: int | None,
    model: str | None,
    init: str | None,
    freeze: bool,
    settings: tuple[str, ...],
    profile: str | None,
    dry_run: int | None,
    compile_only: bool,
    quiet: bool,
    json_file: str | None,
) -> int:
    """Train RECIPE, a preset or your own YAML file.

    With --json, stdout carries every event of the run as one JSON object a line, and the summary last; with
    --json FILE.json the summary goes into the file. Ctrl-C saves at the next step; --resume goes on from there.

    \b
    Examples:
      reconv train quickstart
      reconv train resnet50 --data /imagenet --batch-size 512
      reconv train my.yaml --epochs 10 --set optimizer.momentum=0.875
      reconv train resnet50 --data flowers/ --init torchvision:resnet50 --freeze --epochs 5
      reconv train resnet50 --data /imagenet --dry-run 50
      reconv train resnet50 --data /imagenet --resume
    """
    given: list[Override] = [
        ("length", None if epochs is None else _epochs(epochs), "--epochs"),
        batch_override(batch_size, batch_per_device, devices or read_launch_env().world_size),
        ("schedule.lr", lr, "--lr"),
        ("data.num_workers", workers, "--workers"),
        ("seed", seed, "--seed"),
        ("model.name", model, "--model"),
        ("model.init", init, "--init"),
        ("model.freeze_backbone", freeze or None, "--freeze"),
        ("profile", None if profile is None else _step_range(profile), "--profile"),
    ]
    overrides = [override for override in given if override[1] is not None] + parse_settings(settings)
    _hush_torch()
    start_kernel_compiler(device, devices)
    asked = Asked(recipe, data, overrides, device, devices, nic, quiet, json_file)
    if dry_run is not None or compile_only:
        _refuse_with_rehearsal(dry_run, compile_only, resume, profile)
        return rehearse(asked, dry_run)
    return _run(asked, out, resume)


def _hush_torch() -> None:
    """Keep torch from writing to stderr; it reads these when it is imported."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # its profiler
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost peer is told once, in our words


def _run(asked: Asked, out: str | None, resume: bool) -> int:
    """Train, and say what nobody has said before: what was finished already, and the summary in a file."""
    from reconv.api import train as run_train

    console = "json" if asked.json_file == STDOUT else "quiet" if asked.quiet else "auto"
    result = run_train(
        asked.recipe,
        data=asked.data,
        out=out,
        resume=resume,
        overrides=asked.overrides,
        device=asked.device,
        devices=asked.devices,
        nic=asked.nic,
        console=console,
        command=["reconv", *sys.argv[1:]],
    )
    if read_launch_env().rank == 0:
        if result.was_finished:
            _say_finished(result.summary, result.folder, console)
        if asked.json_file is not None and asked.json_file != STDOUT:
            emit_json(result.summary, asked.json_file)
    return int(result.exit_code)


def _epochs(number: float) -> str:
    """A number of epochs as a duration: recipes do not write exponents."""
    return f"{Decimal(repr(number)).normalize():f}ep"


def _step_range(text: str) -> list[int]:
    """`50,53` as the first and the last step; a lone number is both."""
    words = text.split(",")
    if len(words) > 2 or not all(word.strip().isdecimal() for word in words):
        raise UsageError(f"--profile takes two steps, not {text!r}", then="for example --profile 50,53")
    return [int(words[0]), int(words[-1])]


def _refuse_with_rehearsal(dry_run: int | None, compile_only: bool, resume: bool, profile: str | None) -> None:
    """Refuse options that a rehearsal could only ignore."""
    name = "--compile-only" if compile_only else "--dry-run"
    others = {"--dry-run": compile_only and dry_run is not None, "--resume": resume, "--profile": profile is not None}
    clash = next((other for other, is_given in others.items() if is_given), None)
    if clash is not None:
        raise UsageError(
            f"{name} and {clash} do not go together",
            why="a rehearsal starts afresh in a temporary folder and keeps nothing",
            then="give one of them",
        )


def _say_finished(summary: Mapping[str, Any], folder: Path, console: str) -> None:
    """Repeat the result of a run that had nothing left to do; a run that did something has said it itself."""
    from reconv.logging.console import make_console
    from reconv.logging.events import LogMessage

    screen = make_console(console, folder)
    if console == "auto":
        screen.on_event(LogMessage("info", f"{folder} is finished: nothing to do"))
    screen.finish(summary)
    screen.close()
