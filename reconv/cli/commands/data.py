"""The commands `data get` and `data convert`: download public datasets and convert datasets to other formats."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from reconv.cli.options import Command, CommandGroup, print_line

if TYPE_CHECKING:
    from rich.console import Console

    from reconv.data.dataset import Split


_KINDS = ["packed", "folder", "tar", "tfrecord", "coco"]


def _pair(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[int, int] | None:
    """Two counts, as 1024,128."""
    if text is None:
        return None
    words = text.replace("_", "").split(",")
    if len(words) != 2 or not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise click.BadParameter("expected two numbers, for training and validation: 1024,128", ctx, param)
    return int(words[0]), int(words[1])


@click.group(cls=CommandGroup)
def data() -> None:
    """Download, convert and inspect datasets.

    \b
    Examples:
      reconv data get cifar10
      reconv data convert /imagenet /fast/imagenet --to packed
    """


@data.command("get", cls=Command)
@click.argument("name", type=click.Choice(["cifar10", "cifar100", "coco2017"]))
@click.argument("folder", type=click.Path(path_type=Path), envvar="DATA_DIR", default=Path("data"))
@click.option("--base-url", metavar="URL", help="URL of a mirror, instead of the dataset's home page.")
@click.option(
    "--to", "kind", type=click.Choice(_KINDS), help="Convert it, too, to FOLDER/NAME-KIND; see reconv data convert."
)
@click.option("--quiet", is_flag=True, help="No progress bar.")
def get(name: str, folder: Path, base_url: str | None, kind: str | None, quiet: bool) -> None:
    """Download NAME into FOLDER (default: $DATA_DIR, else data/), verify its checksum and unpack it.

    Run the same command again to continue after an interruption.

    \b
    Examples:
      reconv data get cifar10
      reconv data get coco2017 /data
      reconv data get coco2017 /data --to tfrecord
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from reconv.data.download_dataset import download_dataset

    columns = (TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=quiet or not sys.stderr.isatty(), console=_stderr()) as bar:
        task = bar.add_task(name, total=None)

        def advance(done: int, total: int | None) -> None:
            bar.update(task, completed=done, total=total)

        downloaded = download_dataset(name, folder, progress=advance, base_url=base_url)
    status = "was already there" if downloaded.already_there else "is complete"
    print_line(f"{name} {status}: {downloaded.path}")
    if kind is not None:
        _convert_downloaded(downloaded.path, folder / f"{name}-{kind}", kind, quiet)


def _convert_downloaded(source: Path, destination: Path, kind: str, quiet: bool) -> None:
    """Convert a dataset that was downloaded, with the defaults of `data convert`."""
    from reconv.core.machine import Machine, cores_per_process
    from reconv.data.boxes.annotations import DetectionDataset
    from reconv.data.convert.dataset import convert as write
    from reconv.data.convert.dataset import make_target
    from reconv.data.convert.open_splits import open_splits
    from reconv.data.convert.transcode import TranscodeOptions
    from reconv.distributed.shared_work import joined_ranks
    from reconv.recipe.parts.data import DataConfig

    datasets, root = open_splits(str(source), "auto", None, None, DataConfig())
    has_boxes = any(isinstance(dataset, DetectionDataset) for dataset in datasets.values())
    target = make_target(kind, TranscodeOptions(), None, None, has_boxes=has_boxes)
    num_shards = {split: min(number, len(datasets[split])) for split, number in target.num_shards.items()}
    target = replace(target, num_shards=num_shards)
    with joined_ranks() as ranks, _progress(quiet or not ranks.is_rank0) as advance:
        result = write(datasets, root, destination, target, cores_per_process(Machine(), 1), advance, ranks)
    counts = ", ".join(f"{count:,} {split}" for split, count in result.num_samples.items())
    status = "was already there" if result.already_there else "is complete"
    print_line(f"{kind} data {status}: {destination} ({counts})")


@data.command("index", cls=Command)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, exists=True, file_okay=False))
def index(folder: Path) -> None:
    """Write DIR/reconv-index.txt, with the name, size and checksum of each file, for data in an object store.

    A web server needs it (--data https://...), since it cannot list its files. In a bucket it saves the listing of
    millions of images. Upload it with the files, and write it again when they change.

    \b
    Examples:
      reconv data index /fast/imagenet
    """
    from reconv.storage.remote_index import INDEX_NAME, write_index

    num_files, num_bytes = write_index(folder)
    print_line(f"{folder / INDEX_NAME}: {num_files:,} files, {num_bytes / 1e6:,.1f} MB")


@data.command("convert", cls=Command)
@click.argument("source", metavar="SOURCE")
@click.argument("destination", metavar="DEST", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "kind",
    type=click.Choice(_KINDS),
    required=True,
    help="Format to write: packed is the fastest to read, coco and tfrecord keep boxes.",
)
@click.option(
    "--from", "source_kind", metavar="KIND", default="auto", help="Format of SOURCE, if it could be more than one."
)
@click.option("--raw", is_flag=True, help="Store decoded pixels instead of encoded images (packed only).")
@click.option("--longest", metavar="PX", type=click.IntRange(1), help="Downscale images whose longer side is larger.")
@click.option("--shortest", metavar="PX", type=click.IntRange(1), help="Downscale images whose shorter side is larger.")
@click.option(
    "--quality", metavar="1-100", type=click.IntRange(1, 100), help="Re-encode every image as JPEG of this quality."
)
@click.option(
    "--per-shard", metavar="N", type=click.IntRange(1), help="Samples per shard (packed, tar); default: 4096."
)
@click.option(
    "--shards",
    metavar="TRAIN,VAL",
    callback=_pair,
    help="Numbers of shards (tfrecord); default: 1024,128, with boxes 256,32.",
)
@click.option(
    "--labels",
    type=click.Path(path_type=Path, exists=True),
    help="Validation labels of the ImageNet archives: a list or the devkit.",
)
@click.option(
    "--expect", metavar="TRAIN,VAL", callback=_pair, help="Required numbers of samples; archives: default as published."
)
@click.option(
    "--bad-boxes",
    type=click.Choice(["skip", "clip", "stop"]),
    default="skip",
    show_default=True,
    help="What to do with boxes outside of their image.",
)
@click.option(
    "--empty-images",
    type=click.Choice(["drop", "keep"]),
    default="drop",
    show_default=True,
    help="What to do with training images without a box.",
)
@click.option("--workers", metavar="N", type=click.IntRange(1), help="Threads; default: one per core.")
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
    """Convert the data at SOURCE to another format in DEST, which must not exist yet.

    SOURCE is anything --data takes, `digits`, or the folder with ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar
    (and a list of labels or the devkit). DEST appears when it is complete; run the same command again to continue
    after an interruption. Images with boxes are written as TFRecords or in COCO's layout; training images without a
    usable box are left out and counted. Started by srun, mpirun or torchrun, the processes share the shards of DEST,
    which all of them must see.

    \b
    Examples:
      reconv data convert /imagenet /fast/imagenet --to packed --shortest 320 --quality 90
      reconv data convert /downloads /imagenet --to folder --labels ILSVRC2012_devkit_t12.tar.gz
      reconv data convert digits digits-tar --to tar
      srun -N 10 reconv data convert /imagenet /shared/imagenet --to packed
      reconv data convert /coco2017 /fast/coco --to tfrecord
    """
    from reconv.core.machine import Machine, cores_per_process
    from reconv.data.boxes.annotations import DetectionDataset
    from reconv.data.convert.dataset import convert as write
    from reconv.data.convert.dataset import make_target
    from reconv.data.convert.open_splits import open_splits
    from reconv.data.convert.transcode import TranscodeOptions
    from reconv.distributed.shared_work import joined_ranks
    from reconv.recipe.parts.data import DataConfig

    options = TranscodeOptions(raw, longest, shortest, quality)
    policy = DataConfig.model_validate({"bad_boxes": bad_boxes, "empty_images": empty_images})
    with joined_ranks() as ranks:
        datasets, root = open_splits(source, source_kind, labels, None if expect is None else _splits(expect), policy)
        boxed = {split: dataset for split, dataset in datasets.items() if isinstance(dataset, DetectionDataset)}
        pairs = None if shards is None else _splits(shards)
        target = make_target(kind, options, per_shard, pairs, has_boxes=bool(boxed))
        num_threads = workers or cores_per_process(Machine(), ranks.launch_env.local_world_size)
        with _progress(quiet or not ranks.is_rank0) as advance:
            result = write(datasets, root, destination, target, num_threads, advance, ranks)
    if not ranks.is_rank0:
        return
    counts = ", ".join(f"{count:,} {split}" for split, count in result.num_samples.items())
    for split, dataset in boxed.items():
        for note in dataset.notes:
            print_line(f"{split}: {note}")
    repaired = ", ".join(f"{count:,} {why}" for why, count in result.repaired.items())
    status = "was already there" if result.already_there else "is complete"
    print_line(
        f"{kind} data {status}: {destination} ({counts})"
        + (f"; re-encoded as RGB JPEG: {repaired}" if repaired else "")
    )


def _splits(pair: tuple[int, int]) -> dict[Split, int]:
    return {"train": pair[0], "val": pair[1]}


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar that counts samples."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("samples"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=quiet or not sys.stderr.isatty(), console=_stderr()) as bar:
        task = bar.add_task("samples", total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield advance


def _stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True)
