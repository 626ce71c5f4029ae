"""Detect what kind of dataset a folder holds, and why; two possible formats are an error."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os.path import isfile
from pathlib import Path

from reconv.core.errors import DataError
from reconv.data.dataset import Dataset, Split
from reconv.data.decode.pillow import INSTALL_HEIF, NEEDS_HEIF
from reconv.data.file_list import is_image_name, is_unread_heic
from reconv.data.readers.cifar import LAYOUTS, CifarLayout
from reconv.data.readers.csv_table import describe_table, find_tables
from reconv.data.readers.detection.box_tfrecord import BOX_TFRECORD
from reconv.data.readers.detection.coco import detect_coco, detect_coco_without_splits
from reconv.data.readers.detection.voc import detect_voc
from reconv.data.readers.detection.yolo import detect_yolo, detect_yolo_without_training
from reconv.data.readers.folder import has_class_folders, split_folder
from reconv.data.readers.hf import SPLITS_FILE
from reconv.data.readers.imagenet.archives import has_imagenet_archives
from reconv.data.readers.imagenet.raw_validation import find_label_source
from reconv.data.readers.shards.dataset import detect_shards
from reconv.data.readers.shards.packed import PackedDataset, packed_reason
from reconv.data.readers.shards.tfrecord import TFRECORD
from reconv.data.readers.tar import TAR
from reconv.recipe.presets import nearest
from reconv.storage.data_errors import unreadable
from reconv.storage.local import is_folder, listing
from reconv.storage.remote_tree import local_data_path

_GET = "reconv data get cifar10"
_LEVELS_DOWN = 2
_HAS_TRAIN = "it has train/"


@dataclass(frozen=True, slots=True)
class Format:
    """A format of images with one class each, which the names of the files in a folder show."""

    kind: str  # of data.source
    reason: Callable[[Path], str | None]  # why a folder holds it; None: it does not
    open: Callable[[Path, Split, str], Dataset]  # folder, split, and the reason, for errors


FORMATS: Sequence[Format] = [
    Format("packed", packed_reason, PackedDataset),
]


@dataclass(frozen=True, slots=True)
class DetectedDataset:
    """The kind of data in a folder, the reason for it, and the CIFAR layout if it is CIFAR."""

    kind: str
    path: Path
    why: str
    layout: CifarLayout | None = None


def detect(path: Path, wanted: str = "auto") -> DetectedDataset:
    """The data at `path` or up to two levels below it; `wanted` restricts the kind."""
    path = local_data_path(path)
    _check_folder(path)
    if wanted == "folder" and _is_folder_with_train(path):
        return DetectedDataset("folder", path, _HAS_TRAIN)
    candidates = [found for found in _candidates(path) if wanted in ("auto", found.kind)]
    if not candidates:
        raise _not_detected(path, wanted)
    kinds = sorted({found.kind for found in candidates})
    if len(kinds) > 1:
        raise DataError(
            f"more than one kind of data under {path}: {', '.join(kinds)}",
            where=str(path),
            why="; ".join(f"{found.kind}: {found.why}" for found in candidates),
            hint=f"choose one: --data {candidates[0].path} or --set data.source={candidates[0].kind}",
        )
    others = [found for found in candidates if found.layout is None]
    if len(others) > 1:
        raise DataError(
            f"more than one {'image folder' if kinds == ['folder'] else f'{kinds[0]} dataset'} under {path}",
            where=str(path),
            why=", ".join(str(found.path) for found in others),
            hint=f"choose one: --data {others[0].path}",
        )
    return candidates[0]


def _is_folder_with_train(path: Path) -> bool:
    """True if train/ holds folders of images, which are classes in every format but YOLO's."""
    train = split_folder(path, "train")
    return train is not None and has_class_folders(train) and detect_yolo(path) is None


def _candidates(path: Path) -> list[DetectedDataset]:
    """Everything recognized on the first level that has any."""
    for level in range(_LEVELS_DOWN + 1):
        found = [hit for folder in _folders_at(path, level) for hit in _detect_in(folder)]
        if found:
            # Both formats of CIFAR hold the same samples; binary loads faster, and LAYOUTS lists it first.
            order = {layout.folder: rank for rank, layout in enumerate(LAYOUTS)}
            return sorted(found, key=lambda hit: order[hit.layout.folder] if hit.layout else len(order))
        if level == 0 and _has_only_class_folders(path):
            break  # nothing else can be below, and a million files need not be listed again
    for level in range(_LEVELS_DOWN + 1):
        found = [hit for folder in _folders_at(path, level) for hit in _detect_unsplit(folder)]
        if found:
            return found
    return []


def _has_only_class_folders(path: Path) -> bool:
    """True if the folders in `path` hold images and nothing else."""
    folders = _subfolders(path)
    contents = [listing(folder) for folder in folders if os.access(folder, os.R_OK | os.X_OK)]
    return bool(folders) and all(files and not inner and all(map(is_image_name, files)) for files, inner in contents)


def _detect_in(folder: Path) -> Iterator[DetectedDataset]:
    for layout in LAYOUTS:
        first = layout.train[0]
        # CIFAR-100's files are just called `train` and `test`, so the file with the class names must be there too.
        # Not Path.is_file, which raises in a folder that may not be entered.
        if isfile(folder / first) and (isfile(folder / layout.names) or folder.name == layout.folder):
            why = f"it has {first} and {layout.names}" if folder.name != layout.folder else f"found {layout.folder}/"
            yield DetectedDataset(layout.kind, folder, why, layout)
    reasons = ((format.kind, format.reason(folder)) for format in FORMATS)
    yield from (DetectedDataset(kind, folder, why) for kind, why in reasons if why is not None)
    yield from list(_detect_boxes(folder)) or _detect_images(folder)


def _detect_boxes(folder: Path) -> Iterator[DetectedDataset]:
    """Detection layouts; checked first because their folders look like those of other layouts."""
    try:
        for kind, reason in (("coco", detect_coco), ("voc", detect_voc), ("yolo", detect_yolo)):
            if (why := reason(folder)) is not None:
                yield DetectedDataset(kind, folder, why)
    except DataError as error:
        if not isinstance(error.__cause__, PermissionError):
            raise


def _detect_images(folder: Path) -> Iterator[DetectedDataset]:
    """Classification layouts; a train/ folder that holds nothing else is an image folder."""
    train = split_folder(folder, "train")
    try:
        inner = listing(train)[1] if train is not None else []
        namings = (TFRECORD, TAR, BOX_TFRECORD)
        reasons = [(naming.kind, why) for naming in namings if (why := detect_shards(naming, folder)) is not None]
        shards = list(dict(reversed(reasons)).items())
        tables = find_tables(folder)
    except DataError as error:
        if isinstance(error.__cause__, PermissionError):
            return  # a folder of another user beside the data
        raise
    if isfile(folder / SPLITS_FILE):
        yield DetectedDataset("hf", folder, f"it has {SPLITS_FILE}")
        return
    for kind, why in shards:
        # Archives left beside the class folders they were unpacked to are not shards.
        if kind != TAR.kind or not inner:
            yield DetectedDataset(kind, folder, why)
    if tables:
        yield DetectedDataset("csv", folder, describe_table(folder / tables[0]))
    if train is not None and (inner or not (shards or tables)):
        yield DetectedDataset("folder", folder, _HAS_TRAIN)


def _detect_unsplit(folder: Path) -> Iterator[DetectedDataset]:
    """Data without train/: all images in one place, or a validation set alone. Checked last."""
    try:
        for kind, reason in (("coco", detect_coco_without_splits), ("yolo", detect_yolo_without_training)):
            if (why := reason(folder)) is not None:
                yield DetectedDataset(kind, folder, why)
                return
        if has_class_folders(folder):
            yield DetectedDataset("folder", folder, "its folders hold images, and none is called train/ or val/")
        elif (own := split_folder(folder, "val") or split_folder(folder, "test")) is not None and (
            listing(own)[1] or find_label_source(folder, own) is not None
        ):
            yield DetectedDataset("folder", folder, f"it has {own.name}/ and no train/")
    except DataError as error:
        if not isinstance(error.__cause__, PermissionError):
            raise


def _folders_at(path: Path, level: int) -> list[Path]:
    """The sorted folders `level` levels below `path`."""
    folders = [path]
    for _ in range(level):
        folders = [inner for folder in folders for inner in _subfolders(folder)]
    return folders


def _subfolders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if not entry.name.startswith(".") and is_folder(entry)]
    except PermissionError:
        return []  # a folder of another user beside the data
    except OSError as error:
        raise unreadable(folder, error) from error
    return [folder / name for name in sorted(names)]


def _check_folder(path: Path) -> None:
    if not path.exists():
        close = _nearest_folder(path)
        hint = f"did you mean {close}?" if close is not None else f"{_GET} {path}"
        raise DataError(f"no data at {path}", where=str(path), why="there is no such folder", hint=hint)
    if not path.is_dir():
        is_archive = path.name.endswith((".gz", ".tgz", ".tar", ".zip"))
        raise DataError(
            f"{path} is a file, not a folder",
            where=str(path),
            why="it looks like an archive that was not unpacked" if is_archive else "--data takes a folder",
            hint=f"unpack it: tar -xf {path}, then --data FOLDER" if is_archive else f"--data {path.parent}",
        )
    try:
        with os.scandir(path) as entries:
            is_empty = next(entries, None) is None
    except OSError as error:
        raise unreadable(path, error) from error
    if is_empty:
        raise DataError(f"{path} is empty", where=str(path), why="the folder has no files", hint=f"{_GET} {path}")


def _nearest_folder(path: Path) -> str | None:
    """The folder beside a misspelt one that was most likely meant, with a slash; None if none is close."""
    parent = path.parent
    if not parent.is_dir():
        return None
    close = nearest(path.name, [folder.name for folder in _subfolders(parent)])
    return None if close is None else os.path.join(parent if str(parent) != "." else "", close, "")


def _find_image(path: Path, is_image: Callable[[str], bool] = is_image_name) -> str | None:
    """The relative path of an image up to two levels below the folder; None if there is none."""
    for level in range(_LEVELS_DOWN + 1):
        for folder in (folder for folder in _folders_at(path, level) if os.access(folder, os.R_OK | os.X_OK)):
            found = next((name for name in listing(folder)[0] if is_image(name)), None)
            if found is not None:
                return str((folder / found).relative_to(path))
    return None


def _not_detected(path: Path, wanted: str) -> DataError:
    names = ", ".join(f"{layout.folder}/" for layout in LAYOUTS)
    others = sorted({found.kind for found in _candidates(path)})
    why = (
        f"it holds {', '.join(others)}" if others else f"looked two levels down for train/, shards, CSV files, {names}"
    )
    what = f"no data recognized in {path}" if wanted == "auto" else f"no {wanted} in {path}"
    hint = (
        f"reconv data get {wanted} {path}"
        if wanted.startswith("cifar")
        else "--data DIR with train/ and val/ in it; docs/how-to/data.md lists all formats"
    )
    if wanted in ("auto", "folder") and not others and (image := _find_image(path)) is not None:
        why = f"it has images ({image}), but neither folders for the classes nor a file with classes or boxes"
        hint = (
            "sort them into a folder per class, or list them in a CSV file with the columns file and label; "
            "docs/how-to/data.md lists all formats"
        )
    elif wanted in ("auto", "folder") and not others and (image := _find_image(path, is_unread_heic)) is not None:
        why, hint = f"its images are HEIC ({image}): {NEEDS_HEIF}", INSTALL_HEIF
    if has_imagenet_archives(path):
        why, hint = (
            "it holds the original ImageNet archives",
            f"reconv data convert {path} DIR --to packed, then --data DIR",
        )
    return DataError(what, where=str(path), why=why, hint=hint)
