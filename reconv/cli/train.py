"""The verb `train`: options become overrides of the recipe, the result becomes a line and an exit code.

Owns which short option stands for which recipe field. Refuses to know what the fields do. Invariant: an option that
is not given overrides nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reconv.cli.options import DEVICE_HELP, STDOUT, Verb, complete_recipes, emit_json, json_option, parse_settings
from reconv.errors import UsageError

if TYPE_CHECKING:
    from reconv.report.events import Event

Override = tuple[str, object, str]


@click.command(cls=Verb)
@click.argument("recipe", shell_complete=complete_recipes)
@click.option("--data", metavar="DIR", type=click.Path(), help="The data set; else $DATA_DIR. Its kind is found out.")
@click.option("--out", metavar="DIR", type=click.Path(), help="The run folder itself; else runs/RECIPE/N.")
@click.option("--resume", is_flag=True, help="Go on with the newest unfinished run of this recipe, or with --out.")
@click.option("--epochs", metavar="N", type=click.FloatRange(min=0, min_open=True), help="Length of the training.")
@click.option("--batch-size", metavar="N", type=click.IntRange(min=1), help="Global batch: all devices, one step.")
@click.option("--batch-per-device", metavar="N", type=click.IntRange(min=1), help="The same, counted on one device.")
@click.option("--lr", metavar="X", type=click.FloatRange(min=0, min_open=True), help="schedule.lr of the recipe.")
@click.option("--workers", metavar="N", type=click.IntRange(min=0), help="Decoding threads.")
@click.option("--device", metavar="NAME", default="auto", show_default=True, help=DEVICE_HELP)
@click.option("--devices", metavar="N", type=click.IntRange(1, 1), default=1, help="How many devices; only 1 so far.")
@click.option("--seed", metavar="N", type=click.IntRange(min=0), help="Another seed is another run.")
@click.option("--model", metavar="NAME", help="Another network, as torchvision spells it.")
@click.option("--init", metavar="WEIGHTS", help="Start from a file, a run, torchvision:NAME, timm:NAME or an address.")
@click.option("--freeze", is_flag=True, help="Train the head alone; needs --init.")
@click.option("--set", "settings", metavar="A.B=V", multiple=True, help="Set any recipe field; may be repeated.")
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
    devices: int,
    seed: int | None,
    model: str | None,
    init: str | None,
    freeze: bool,
    settings: tuple[str, ...],
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
      reconv train resnet50 --data /imagenet --resume
    """
    if batch_size is not None and batch_per_device is not None:
        raise UsageError(
            "--batch-size and --batch-per-device both say how large the batch is",
            why=f"{batch_per_device} per device x {devices} = {batch_per_device * devices}, against {batch_size}",
            then="give one of them",
        )
    given: list[Override] = [
        ("length", None if epochs is None else f"{epochs:g}ep", "--epochs"),
        ("batch.size", batch_size, "--batch-size"),
        ("batch.size", None if batch_per_device is None else batch_per_device * devices, "--batch-per-device"),
        ("schedule.lr", lr, "--lr"),
        ("data.workers", workers, "--workers"),
        ("seed", seed, "--seed"),
        ("model.name", model, "--model"),
        ("model.init", init, "--init"),
        ("model.freeze", freeze or None, "--freeze"),
    ]
    overrides = [override for override in given if override[1] is not None] + parse_settings(settings)

    from reconv.run import train as run_train

    num_events = 0

    def count(event: Event) -> None:
        nonlocal num_events
        num_events += 1

    result = run_train(
        recipe,
        data=data,
        out=out,
        resume=resume,
        overrides=overrides,
        device=device,
        devices=devices,
        console="json" if json_file == STDOUT else "quiet" if quiet else "auto",
        on_event=count,
        command=["reconv", *sys.argv[1:]],
    )
    if num_events == 0:
        _say_finished(result.summary, result.folder, json_file)
    if json_file not in (None, STDOUT):
        emit_json(result.summary, json_file)
    return int(result.exit_code)


def _say_finished(summary: Mapping[str, Any], folder: Path, json_file: str | None) -> None:
    """Repeat the result of a run that had nothing left to do; a run that did something has said it itself."""
    from reconv.report.console import final_lines

    if json_file == STDOUT:
        click.echo(json.dumps({"kind": "summary", **summary}, ensure_ascii=False))
        return
    click.echo(f"{folder} is finished: nothing to do")
    for line in final_lines(summary, folder):
        click.echo(line)
