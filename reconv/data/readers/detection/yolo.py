"""YOLO's layout: a text file of boxes for each image, with `labels/` instead of `images/` in its path.

A line is `class x y width height`, relative to the image and with the box's centre, or `class x1 y1 x2 y2 ...`, a
polygon. Images are sorted by path or in the order of the list in data.yaml; one without a text file has no boxes.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reconv.core.errors import DataError
from reconv.data.boxes.table import UNKNOWN, BoxTable, BoxTableBuilder
from reconv.data.dataset import Split
from reconv.data.file_list import is_image_name, walk_images
from reconv.data.readers.detection.box_table_dataset import (
    BoxTableDataset,
    hold_out,
    open_box_table,
    read_class_names,
    read_file_names,
    resolve_path,
)
from reconv.data.readers.folder import SPLIT_TITLES
from reconv.recipe.load import document as yaml_document
from reconv.recipe.parts.data import DataConfig
from reconv.storage import read_limits
from reconv.storage.local import is_possible_path, listing, read_bounded_text

_NAME_LISTS = ("classes.txt", "obj.names")
_SPLIT_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "val": ("val", "valid", "validation"),
    "test": ("test",),
}
_IMAGES, _LABELS = "images", "labels"


def detect_yolo(folder: Path) -> str | None:
    """Evidence that the folder is in YOLO's layout, or None."""
    _, folders = listing(folder)
    if _IMAGES in folders and _LABELS in folders:
        return f"it has {_IMAGES}/ and {_LABELS}/"
    if "train" in folders and {_IMAGES, _LABELS} <= set(listing(folder / "train")[1]):
        return f"it has train/{_IMAGES}/ and train/{_LABELS}/"
    return None


def detect_yolo_without_training(folder: Path) -> str | None:
    """Evidence of a validation set in YOLO's layout, or None."""
    _, folders = listing(folder)
    for name in (*_SPLIT_NAMES["val"], *_SPLIT_NAMES["test"]):
        if name in folders and {_IMAGES, _LABELS} <= set(listing(folder / name)[1]):
            return f"it has {name}/{_IMAGES}/ and {name}/{_LABELS}/ and no train/"
    return None


def open_yolo(root: Path, split: Split, data: DataConfig, why: str = "") -> BoxTableDataset:
    """One split after the recipe's policies."""
    return open_box_table("yolo", read_yolo(root, split, data), split, data, f"YOLO data at {root}", why)


def read_yolo(root: Path, split: Split, data: DataConfig) -> BoxTable:
    """A split as the files have it."""
    config = _read_config(root)
    names = _class_names(root, config)
    builder = BoxTableBuilder(names, tuple(range(len(names))), is_relative=True)
    source = locate_images(root, split, config)
    images = [path for place in source.places for path in _list_images(root, place)]
    for path, count in Counter(images).items():
        if count > 1:
            builder.add_problem("duplicate-id", f"{path} is listed {count} times", path, "list it once")
    for path in images:
        text_file = label_file(path)
        builder.add_image(path, text_file, os.path.relpath(path, root))
        if os.path.lexists(text_file):  # a broken link is an error, not an image without boxes
            _add_boxes(builder, text_file, len(names))
    table = builder.build()
    return hold_out(table, root, split, data) if source.is_shared else replace(table, note=source.note)


def label_file(image: str) -> str:
    """The label file of an image: the last `images` in its path becomes `labels`, its extension .txt."""
    parts = image.split(os.sep)
    levels = [level for level, part in enumerate(parts[:-1]) if part == _IMAGES]
    if levels:
        parts[levels[-1]] = _LABELS
    return os.path.splitext(os.sep.join(parts))[0] + ".txt"


def _add_boxes(builder: BoxTableBuilder, file: str, num_classes: int) -> None:
    """Add the boxes in a label file to the last image."""
    try:
        text = read_bounded_text(file, read_limits.LABEL_FILE_BYTES).decode("utf-8-sig", "replace")
    except DataError as error:
        builder.add_problem("no-annotation", f"{error.what}: {error.why}", file, error.hint)
        return
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words:
            continue
        try:
            label, values = int(words[0].removesuffix(".0")), [float(word) for word in words[1:]]
        except ValueError:
            label, values = UNKNOWN, []
        if len(values) == 4:
            x, y, width, height = values
            corners = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
        elif len(values) >= 6 and len(values) % 2 == 0:
            corners = (min(values[::2]), min(values[1::2]), max(values[::2]), max(values[1::2]))
        else:
            text = f"line {number} is neither a box nor a polygon"
            builder.add_problem("no-box", text, f"{file}:{number}", "write class, x, y, width and height")
            continue
        is_known = 0 <= label < num_classes
        builder.add_box(corners, label if is_known else UNKNOWN)
        if not is_known:
            text = f"class {words[0]:.40} is not one of 0 to {num_classes - 1}"
            builder.add_problem(
                "unknown-class", text, f"{file}:{number}", "correct the number, or add the class's name"
            )


def _read_config(root: Path) -> dict[str, Any]:
    """The content of the YAML file with `names` in the folder; empty if there is none."""
    for name in listing(root)[0]:
        if not name.endswith((".yaml", ".yml")):
            continue
        text = read_bounded_text(root / name, read_limits.DATA_YAML_BYTES).decode("utf-8-sig", "replace")
        content = yaml_document.read(text)
        if content.broken or (content.problems and "names" in content.tree):
            problem = content.problems[0]
            raise DataError(
                f"{name} is not valid", where=f"{root / name}:{problem.line}", why=problem.text, hint="correct it"
            )
        if "names" in content.tree:
            return content.tree
    return {}


def _class_names(root: Path, config: dict[str, Any]) -> tuple[str, ...]:
    names = config.get("names")
    if isinstance(names, dict):
        names = _names_by_number(names, root)
    for name in _NAME_LISTS if names is None else ():
        for place in (root, root / _LABELS):
            if (place / name).is_file():
                names = read_class_names(place / name)
    if not isinstance(names, list) or not names:
        raise DataError(
            f"no class names in {root}",
            where=str(root),
            why=f"looked for a YAML file with names, and for {' and '.join(_NAME_LISTS)}",
            hint="write classes.txt there, with one name per line",
        )
    return tuple(str(name) for name in names)


def _names_by_number(names: dict[Any, Any], root: Path) -> list[str]:
    """The names of a mapping by number; missing numbers get a made-up name."""
    try:
        by_number = {int(number): str(name) for number, name in names.items()}
    except (TypeError, ValueError) as error:
        why = f"the keys of names are {', '.join(map(repr, names)):.200}"
        raise DataError(
            "the keys of names must be numbers", where=str(root), why=why, hint="write them as 0: cat, 1: dog"
        ) from error
    if outside := [number for number in by_number if not 0 <= number < read_limits.CLASSES]:
        why = f"one of the keys of names is {outside[0]}; classes are 0 to {read_limits.CLASSES - 1:,}"
        raise DataError("a class number is out of range", where=str(root), why=why, hint="number the classes from 0")
    return [by_number.get(number, f"class{number}") for number in range(max(by_number, default=-1) + 1)]


@dataclass(frozen=True, slots=True)
class ImagePlaces:
    """Locations of a split's images: folders and lists of files."""

    places: list[str]
    is_shared: bool = False  # with the other split: a share of the images is held out for validation
    note: str = ""


def locate_images(root: Path, split: Split, config: dict[str, Any]) -> ImagePlaces:
    """The images of a split; without any for validation they are those for testing, else shared with training."""
    train, own, test = (_places(root, name, config) for name in ("train", split, "test"))
    if own:
        return ImagePlaces(own, is_shared=split == "train" and not test and not _places(root, "val", config))
    if split == "val" and test:
        return ImagePlaces(test, note="no validation images: the test images are used")
    whole = train or [str(root / _IMAGES)] * any(map(is_image_name, _files_in(root / _IMAGES)))
    if not whole or split == "test":
        raise DataError(
            f"no images for {SPLIT_TITLES[split]} in {root}",
            where=str(root),
            why=f"looked for {_IMAGES}/{split}, {split}/{_IMAGES} and the paths in data.yaml",
            hint="give the folder that holds images/ and labels/: --data DIR",
        )
    return ImagePlaces(whole, is_shared=True)


def _files_in(folder: Path) -> list[str]:
    return listing(folder)[0] if folder.is_dir() else []


def _places(root: Path, split: Split, config: dict[str, Any]) -> list[str]:
    """The folders and lists of files of a split."""
    value = config.get(split)
    entries = value if isinstance(value, list) else [] if value is None else [value]
    base = resolve_path(str(root), str(config.get("path", ".")))
    places = [path for entry in entries if (path := _existing_path(root, base, str(entry))) is not None]
    if not places:
        tried = [root / pair for name in _SPLIT_NAMES[split] for pair in (f"{_IMAGES}/{name}", f"{name}/{_IMAGES}")]
        places = [str(folder) for folder in tried if folder.is_dir()][:1]
    return places


def _existing_path(root: Path, base: str, entry: str) -> str | None:
    """A path in `data.yaml`, which may be relative to its `path`, to the folder or to a sub-folder."""
    if not is_possible_path(entry):
        return None
    for top in (base, str(root), str(root / entry.lstrip("./").partition("/")[0])):
        if os.path.exists(path := resolve_path(top, entry)):
            return path
    return None


def _list_images(root: Path, place: str) -> list[str]:
    if not os.path.isdir(place):
        return [resolve_path(str(root), line) for line in read_file_names(place) if is_possible_path(line)]
    return walk_images(place)
