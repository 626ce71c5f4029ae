"""The verb `data`: get a data set onto this machine, and convert it.

Owns the progress bars. Refuses to know addresses, checksums and formats. Invariant: nothing is downloaded that was not
named, and no file of the user is changed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from reconv.cli.options import Command, CommandGroup

if TYPE_CHECKING:
    from rich.console import Console

    from reconv.data.dataset import Split


def _pair(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[int, int] | None:
    """Two counts, as 1024,128."""
    if text is None:
        return None
    words = text.replace("_", "").split(",")
    if len(words) != 2 or not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise click.BadParameter("two numbers, for training and validation: 1024,128", ctx, param)
    return int(words[0]), int(words[1])


@click.group(cls=CommandGroup)
def data() -> None:
    """Get data sets and convert them.

    \b
    Examples:
      reconv data get cifar10
      reconv data convert /imagenet /fast/imagenet --to packed
    """


@data.command("get", cls=Command)
@click.argument("name", type=click.Choice(["cifar10", "cifar100", "coco2017"]))
@click.argument("folder", type=click.Path(path_type=Path), envvar="DATA_DIR", default=Path("data"))
@click.option("--base-url", metavar="URL", help="A mirror's folder, instead of the data set's home page.")
@click.option("--quiet", is_flag=True, help="No progress bar.")
def get(name: str, folder: Path, base_url: str | None, quiet: bool) -> None:
    """Download NAME into FOLDER (else $DATA_DIR, else data/), check it and unpack it.

    A broken download goes on where it stopped; a wrong checksum is refused.

    \b
    Examples:
      reconv data get cifar10
      reconv data get coco2017 /data
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from reconv.data.download_dataset import get as fetch

    columns = (TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=quiet or not sys.stderr.isatty(), console=_stderr()) as bar:
        task = bar.add_task(name, total=None)

        def advance(there: int, total: int | None) -> None:
            bar.update(task, completed=there, total=total)

        got = fetch(name, folder, progress=advance, base_url=base_url)
    said = "was there already" if got.already_there else "is complete"
    click.echo(f"{name} {said}: {got.path}")


@data.command("convert", cls=Command)
@click.argument("source", metavar="SOURCE")
@click.argument("destination", metavar="DEST", type=click.Path(path_type=Path))
@click.option("--to", "kind", type=click.Choice(["packed", "folder", "tar", "tfrecord", "coco"]), required=True)
@click.option(
    "--from", "source_kind", metavar="KIND", default="auto", help="What SOURCE is, where it could be two things."
)
@click.option("--raw", is_flag=True, help="Keep pixels instead of encoded files (packed).")
@click.option("--longest", metavar="PX", type=click.IntRange(1), help="Make images with a longer side smaller.")
@click.option("--shortest", metavar="PX", type=click.IntRange(1), help="The same, by the shorter side.")
@click.option(
    "--quality", metavar="1-100", type=click.IntRange(1, 100), help="Encode every image as JPEG of this quality."
)
@click.option("--per-shard", metavar="N", type=click.IntRange(1), help="Samples in a shard (packed, tar); else 4096.")
@click.option("--shards", metavar="TRAIN,VAL", callback=_pair, help="Numbers of shards (tfrecord); else 1024,128.")
@click.option("--labels", type=click.Path(path_type=Path, exists=True), help="ImageNet archives: label list or devkit.")
@click.option(
    "--expect", metavar="TRAIN,VAL", callback=_pair, help="Samples there must be; archives: else as published."
)
@click.option(
    "--bad-boxes", type=click.Choice(["skip", "clip", "stop"]), default="skip", help="Boxes beyond an image's edge."
)
@click.option(
    "--empty-images", type=click.Choice(["drop", "keep"]), default="drop", help="Training images without a box."
)
@click.option("--workers", metavar="N", type=click.IntRange(1), help="Threads; else one a core.")
@click.option("--quiet", is_flag=True, help="No progress bar.")
def convert(
    source: str,
    destination: Path,
    kind: str,
    source_kind: str,
    raw: bool,
    longest: int | None,
    shortest: int | None,
    quality: int | None,
    per_shard: int | None,
    shards: tuple[int, int] | None,
    labels: Path | None,
    expect: tuple[int, int] | None,
    bad_boxes: str,
    empty_images: str,
    workers: int | None,
    quiet: bool,
) -> None:
    """Write the data at SOURCE in another form to DEST, which must not exist yet.

    SOURCE is what --data takes, `digits`, or the folder with ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar (and
    a label list or the devkit). DEST appears when it is whole; the same command goes on after a kill. Images with
    boxes become TFRecords or COCO's layout; training images without a usable box are left out, and counted.

    \b
    Examples:
      reconv data convert /imagenet /fast/imagenet --to packed --shortest 320 --quality 90
      reconv data convert /downloads /imagenet --to folder --labels ILSVRC2012_devkit_t12.tar.gz
      reconv data convert digits digits-tar --to tar
      reconv data convert /coco2017 /fast/coco --to tfrecord
    """
    from reconv.data.boxes.annotations import DetectionDataset
    from reconv.data.convert.convert import convert as write
    from reconv.data.convert.convert import make_target
    from reconv.data.convert.inputs import open_splits
    from reconv.data.convert.transcode import OutputFormat
    from reconv.recipe.data_fields import DataConfig

    form = OutputFormat(raw, longest, shortest, quality)
    policy = DataConfig.model_validate({"bad_boxes": bad_boxes, "empty_images": empty_images})
    splits, root = open_splits(source, source_kind, labels, None if expect is None else _splits(expect), policy)
    boxed = {split: opened for split, opened in splits.items() if isinstance(opened, DetectionDataset)}
    target = make_target(kind, form, per_shard, None if shards is None else _splits(shards), has_boxes=bool(boxed))
    with _progress(quiet) as advance:
        done = write(splits, root, destination, target, workers or _num_cores(), advance)
    counts = ", ".join(f"{count:,} {split}" for split, count in done.num_samples.items())
    for split, opened in boxed.items():
        for note in opened.notes:
            click.echo(f"{split}: {note}")
    repaired = ", ".join(f"{count:,} {why}" for why, count in done.repaired.items())
    said = "was there already" if done.already_there else "is complete"
    click.echo(
        f"{kind} data {said}: {destination} ({counts})" + (f"; encoded as RGB JPEG: {repaired}" if repaired else "")
    )


def _splits(pair: tuple[int, int]) -> dict[Split, int]:
    return {"train": pair[0], "val": pair[1]}


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar that counts samples."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("samples"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=quiet or not sys.stderr.isatty(), console=_stderr()) as bar:
        task = bar.add_task("samples", total=None)

        def advance(there: int, total: int) -> None:
            bar.update(task, completed=there, total=total)

        yield advance


def _stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True)
