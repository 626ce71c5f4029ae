"""The verbs `data check` and `data show`: look at data before paying for it.

Owns the progress bar, the table and where results are written. Refuses to know what a fault is. Invariant: nothing is
written into the data that is looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from reconv.cli.options import Command, complete_recipes, emit_json, json_option, parse_settings, print_table
from reconv.errors import ExitCode, ResourceError, UsageError

if TYPE_CHECKING:
    from reconv.data.inspect.check import Checked
    from reconv.data.inspect.issue import DataIssue

_CLASSES_SHOWN = 30
_PATHS_SHOWN = 5


@click.command("check", cls=Command)
@click.argument("path")
@click.option("--out", metavar="DIR", type=click.Path(path_type=Path), default=Path("data-check"), show_default=True)
@click.option("--workers", metavar="N", type=click.IntRange(min=1), help="Decoding threads; else one a core.")
@click.option("--quiet", is_flag=True, help="No progress bar.")
@json_option
def check(path: str, out: Path, workers: int | None, quiet: bool, json_file: str | None) -> None:
    """Read and decode all of PATH and tell what is wrong with it; code 3 if anything is.

    PATH is whatever --data takes, or the name of a data set in the package (digits). Found are files that do not
    decode, the same image in training and validation or under two labels, empty classes, classes that validation
    alone has, and labels that look like mistakes; of images with boxes, boxes that leave their image, have no
    area, swapped corners or an unknown class, missing images, images of another size, and ids that come twice.
    DIR gets check.json with every path and contact.png with images of each class. No file of PATH is changed.

    \b
    Examples:
      reconv data check /imagenet
      reconv data check flowers/ --out /tmp/flowers-check
      reconv data check digits --json
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from reconv.data.inspect.check import check as look
    from reconv.environment_checks import Machine, usable_cores
    from reconv.recipe.data_fields import DataConfig

    _refuse_inside(out, Path(path))
    hidden = quiet or not sys.stderr.isatty()
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=hidden, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        checked = look(path, DataConfig(), workers or usable_cores(Machine()), advance)
    emit_json(checked.as_json(), str(out / "check.json"))
    write_picture(out / "contact.png", _contact_sheet(checked))
    if json_file is not None:
        emit_json(checked.as_json(), json_file)
    else:
        _print(checked, out)
    if checked.faults:
        click.get_current_context().exit(ExitCode.DATA)


@click.command("show", cls=Command)
@click.argument("path")
@click.option("--recipe", metavar="RECIPE", shell_complete=complete_recipes, help="Else the usual one for the data.")
@click.option("--out", metavar="FILE.png", type=click.Path(path_type=Path), default=Path("show.png"), show_default=True)
@click.option("--images", metavar="N", type=click.IntRange(1, 128), default=32, show_default=True)
@click.option("--step", metavar="N", type=click.IntRange(min=0), default=0, show_default=True, help="Of training.")
@click.option("--set", "settings", metavar="FIELD=VALUE", multiple=True, help="Any recipe field; may be repeated.")
def show(path: str, recipe: str | None, out: Path, images: int, step: int, settings: tuple[str, ...]) -> None:
    """Image what a network trained on PATH will see: augmented training images, and evaluation's.

    \b
    Examples:
      reconv data show /imagenet
      reconv data show flowers/ --recipe my.yaml --out flowers.png
      reconv data show digits --set augment.mixup.alpha=0.4
    """
    from reconv.inference.show_batch import show as picture

    _refuse_inside(out, Path(path))
    shown = picture(path, recipe, overrides=parse_settings(settings), images=images, step=step)
    write_picture(out, shown.png)
    click.echo(f"{shown.origin}, by the recipe {shown.recipe}: {out}")


def write_picture(path: Path, png: bytes) -> None:
    """Write an image the user named, or say why it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png)
    except OSError as error:
        raise ResourceError(
            f"Cannot write {path}", where=str(path.parent), why=str(error.strerror), then="name another --out"
        ) from error


def _refuse_inside(out: Path, data: Path) -> None:
    """Results do not go where the data lies: the next check would find them there."""
    if data.is_dir() and out.resolve().is_relative_to(data.resolve()):
        raise UsageError(f"{out} lies inside the data", where=str(data), then="name another place with --out")


def _contact_sheet(checked: Checked) -> bytes:
    from reconv.data.inspect.check import pictures_of
    from reconv.data.inspect.contact_sheet import Sheet, titled

    sheets = [Sheet(f"{name} ({count:,})", tiles) for name, count, tiles in pictures_of(checked)]
    return titled(sheets or [Sheet("no image decodes", [])])


def _print(checked: Checked, out: Path) -> None:
    """The tables, then what was found, the worst first."""
    click.echo(checked.origin)
    rows = []
    for split, seen in checked.splits.items():
        told = seen.as_json()
        sides = [_spread(told["width_px"]), _spread(told["height_px"])]
        counts = [
            f"{seen.num_samples:,}",
            f"{len(seen.bad):,}",
            f"{len(seen.classes):,}",
            f"{seen.num_bytes / 1e6:,.1f}",
        ]
        kinds = ", ".join(
            f"{name} {count:,}" for name, count in (*seen.formats.most_common(), *seen.modes.most_common())
        )
        turned = sum(count for number, count in seen.orientations.items() if number != 1)
        boxes = [] if seen.num_boxes is None else [f"{seen.num_boxes:,}"]
        rows.append([split, *counts, *boxes, *sides, kinds + (f", turned by EXIF {turned:,}" if turned else "")])
    boxes = ["boxes"] if any(seen.num_boxes is not None for seen in checked.splits.values()) else []
    print_table(["split", "images", "bad", "classes", "MB", *boxes, "width", "height", "formats and colours"], rows)
    click.echo()
    _print_classes(checked)
    whys = {path: f"{path}: {why}" for seen in checked.splits.values() for path, why in seen.bad}
    for finding in checked.findings:
        _print_finding(finding, whys)
    num_faults = len(checked.faults)
    said = f"{num_faults} kind{'s' * (num_faults > 1)} of fault" if num_faults else "no faults"
    click.secho(f"{said} · {out / 'check.json'} · {out / 'contact.png'}", bold=True)


def _print_classes(checked: Checked) -> None:
    names = list(checked.class_names)
    first = next(iter(checked.splits.values()))
    if len(names) > _CLASSES_SHOWN:
        ranked = sorted(names, key=lambda name: first.classes[name])
        names = [*ranked[: _CLASSES_SHOWN // 2], *ranked[-_CLASSES_SHOWN // 2 :]]
        click.echo(f"the {_CLASSES_SHOWN // 2} smallest and largest of {len(ranked):,} classes; all are in check.json")
    rows = [[name, *(f"{seen.classes[name]:,}" for seen in checked.splits.values())] for name in names]
    print_table(["class", *checked.splits], rows)
    click.echo()


def _print_finding(finding: DataIssue, whys: Mapping[str, str]) -> None:
    colour = "red" if finding.level == "fault" else "yellow"
    click.secho(f"{finding.level}: {finding.text} ({finding.total:,})", fg=colour)
    for path in finding.paths[:_PATHS_SHOWN]:
        click.echo(f"    {whys.get(path, path)}")
    if finding.paths[_PATHS_SHOWN:]:
        click.echo(f"    and {finding.total - _PATHS_SHOWN:,} more")


def _spread(values: dict[str, float] | None) -> str:
    """Smallest, median and largest."""
    if values is None:
        return "-"
    low, middle, high = values["min"], values["median"], values["max"]
    return f"{low:g}" if low == high else f"{low:g} to {high:g} ({middle:g})"
