"""Finding out what kind of data a folder holds, and saying why.

Owns recognition and its errors. Refuses to open what it finds. Invariant: it never guesses between two answers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from reconv.data.readers.cifar import LAYOUTS, CifarLayout
from reconv.data.readers.csv_table import find_tables
from reconv.data.readers.detection.box_tfrecord import BOX_TFRECORD
from reconv.data.readers.detection.coco import why_coco
from reconv.data.readers.detection.voc import why_voc
from reconv.data.readers.detection.yolo import why_yolo
from reconv.data.readers.folder import is_image_name, split_folder
from reconv.data.readers.hf import MARK
from reconv.data.readers.imagenet.imagenet_archives import is_archives
from reconv.data.readers.packed import is_packed
from reconv.data.readers.shards.shard_dataset import why_shards
from reconv.data.readers.tar import TAR
from reconv.data.readers.tfrecord import TFRECORD
from reconv.data.storage.local import listing, unreadable
from reconv.errors import DataError

_GET = "reconv data get cifar10"
_LEVELS_DOWN = 2


@dataclass(frozen=True, slots=True)
class Found:
    """What a path holds: its kind, the folder itself, the CIFAR layout if it is one, and a reason for people."""

    kind: str
    path: Path
    why: str
    layout: CifarLayout | None = None


def detect(path: Path, wanted: str = "auto") -> Found:
    """The data at `path` or up to two levels below it; `wanted` narrows the choice to one kind."""
    _refuse_what_is_no_folder(path)
    candidates = [found for found in _candidates(path) if wanted in ("auto", found.kind)]
    if not candidates:
        raise _nothing(path, wanted)
    kinds = sorted({found.kind for found in candidates})
    if len(kinds) > 1:
        raise DataError(
            f"more than one kind of data under {path}: {', '.join(kinds)}",
            where=str(path),
            why="; ".join(f"{found.kind}: {found.why}" for found in candidates),
            then=f"name one of them: --data {candidates[0].path} or --set data.source={candidates[0].kind}",
        )
    trees = [found for found in candidates if found.layout is None]
    if len(trees) > 1:
        raise DataError(
            f"more than one {'image tree' if kinds == ['folder'] else f'{kinds[0]} data set'} under {path}",
            where=str(path),
            why=", ".join(str(found.path) for found in trees),
            then=f"name one of them: --data {trees[0].path}",
        )
    return candidates[0]


def _candidates(path: Path) -> list[Found]:
    """Everything recognised, the shallowest level first and only that level."""
    for level in range(_LEVELS_DOWN + 1):
        found = [hit for folder in _folders_at(path, level) for hit in _recognise(folder)]
        if found:
            # Both forms of CIFAR hold the same samples; binary loads faster, and LAYOUTS lists it first.
            order = {layout.folder: rank for rank, layout in enumerate(LAYOUTS)}
            return sorted(found, key=lambda hit: order[hit.layout.folder] if hit.layout else len(order))
    return []


def _recognise(folder: Path) -> Iterator[Found]:
    for layout in LAYOUTS:
        first = layout.train[0]
        # CIFAR-100 files are called just `train` and `test`: the file with the class names tells them apart.
        if (folder / first).is_file() and ((folder / layout.names).is_file() or folder.name == layout.folder):
            why = f"it has {first} and {layout.names}" if folder.name != layout.folder else f"found {layout.folder}/"
            yield Found(layout.kind, folder, why, layout)
    if is_packed(folder):
        yield Found("packed", folder, "it has train-*.packed")
    with_boxes = list(_recognise_boxes(folder))
    yield from with_boxes or _recognise_pictures(folder)


def _recognise_boxes(folder: Path) -> Iterator[Found]:
    """Layouts of images with boxes, which have folders that would pass for other things."""
    try:
        for kind, reason in (("coco", why_coco), ("voc", why_voc), ("yolo", why_yolo)):
            if (why := reason(folder)) is not None:
                yield Found(kind, folder, why)
    except DataError as error:
        if not isinstance(error.__cause__, PermissionError):
            raise


def _recognise_pictures(folder: Path) -> Iterator[Found]:
    """Everything that may lie in train/ or flat; a train/ that holds nothing else is a tree of class folders."""
    train = split_folder(folder, "train")
    try:
        inner = listing(train)[1] if train is not None else []
        namings = (TFRECORD, TAR, BOX_TFRECORD)
        reasons = [(naming.kind, why) for naming in namings if (why := why_shards(naming, folder)) is not None]
        shards = list(dict(reversed(reasons)).items())
        tables = find_tables(folder)
    except DataError as error:
        if isinstance(error.__cause__, PermissionError):
            return  # someone else's folder beside the data is no reason to stop
        raise
    if (folder / MARK).is_file():
        yield Found("hf", folder, f"it has {MARK}")
        return
    for kind, why in shards:
        # Archives left beside the class folders they were unpacked to are no shards.
        if kind != TAR.kind or not inner:
            yield Found(kind, folder, why)
    if tables:
        yield Found("csv", folder, f"{tables[0]} has the columns file and label")
    if train is not None and (inner or not (shards or tables)):
        yield Found("folder", folder, "it has train/")


def _folders_at(path: Path, level: int) -> list[Path]:
    """Folders `level` levels below `path`, sorted."""
    folders = [path]
    for _ in range(level):
        folders = [inner for folder in folders for inner in _subfolders(folder)]
    return folders


def _subfolders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    except PermissionError:
        return []  # someone else's folder beside the data is no reason to stop
    except OSError as error:
        raise unreadable(folder, error) from error
    return [folder / name for name in sorted(names)]


def _refuse_what_is_no_folder(path: Path) -> None:
    if not path.exists():
        raise DataError(f"no data at {path}", where=str(path), why="there is no such folder", then=f"{_GET} {path}")
    if not path.is_dir():
        is_archive = path.name.endswith((".gz", ".tgz", ".tar", ".zip"))
        raise DataError(
            f"{path} is a file, not a folder",
            where=str(path),
            why="it looks like an archive that was not unpacked" if is_archive else "data is given as its folder",
            then=f"unpack it: tar -xf {path}, then --data FOLDER" if is_archive else f"--data {path.parent}",
        )
    try:
        with os.scandir(path) as entries:
            is_empty = next(entries, None) is None
    except OSError as error:
        raise unreadable(path, error) from error
    if is_empty:
        raise DataError(f"{path} is empty", where=str(path), why="nothing was put there yet", then=f"{_GET} {path}")


def _some_picture(path: Path) -> str | None:
    """An image not far below the folder, by its path from there."""
    for level in range(_LEVELS_DOWN + 1):
        for folder in (folder for folder in _folders_at(path, level) if os.access(folder, os.R_OK | os.X_OK)):
            found = next((name for name in listing(folder)[0] if is_image_name(name)), None)
            if found is not None:
                return str((folder / found).relative_to(path))
    return None


def _nothing(path: Path, wanted: str) -> DataError:
    names = ", ".join(f"{layout.folder}/" for layout in LAYOUTS)
    others = sorted({found.kind for found in _candidates(path)})
    held = (
        f"it holds {', '.join(others)}" if others else f"looked two levels down for train/, shards, a CSV file, {names}"
    )
    what = f"no data recognised in {path}" if wanted == "auto" else f"no {wanted} in {path}"
    then = (
        f"reconv data get {wanted} {path}"
        if wanted.startswith("cifar")
        else "--data DIR with train/ and val/ in it; docs/data.md has all forms"
    )
    if wanted in ("auto", "folder") and not others and (picture := _some_picture(path)) is not None:
        held = f"it has images ({picture}), but not in train/CLASS/ and val/CLASS/, nor a list of classes or boxes"
        then = "sort them so, or list them in a CSV file with the columns file and label; docs/data.md has all forms"
    if is_archives(path):
        held, then = "it holds the original archives", f"reconv data convert {path} DIR --to packed, then --data DIR"
    return DataError(what, where=str(path), why=held, then=then)
