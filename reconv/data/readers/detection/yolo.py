"""YOLO's layout: a text file of boxes for each image, `labels/` instead of `images/` in its path.

Owns `data.yaml`, finding a split's images and reading their lines. Refuses to know policies and pixels. Invariant:
images are sorted by path, or in the order of the list that names them; an image without a text file has no boxes.

A line is `class x y width height`, fractions with the centre first, or `class x1 y1 x2 y2 ...`, an outline.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from reconv.data.boxes.box_table import UNKNOWN, BoxTable, TableBuilder
from reconv.data.dataset import Split
from reconv.data.readers.detection.box_table_dataset import (
    BoxTableDataset,
    class_lines,
    file_lines,
    open_box_table,
    relative_to,
)
from reconv.data.readers.folder import is_image_name
from reconv.data.storage.local import listing, read
from reconv.errors import DataError
from reconv.recipe.data_fields import DataConfig

_NAME_LISTS = ("classes.txt", "obj.names")
_WORDS: dict[Split, tuple[str, ...]] = {"train": ("train",), "val": ("val", "valid", "validation", "test")}
_IMAGES, _LABELS = "images", "labels"


def why_yolo(folder: Path) -> str | None:
    """The reason to take a folder for YOLO's layout; None: it is not."""
    _, folders = listing(folder)
    if _IMAGES in folders and _LABELS in folders:
        return f"it has {_IMAGES}/ and {_LABELS}/"
    if "train" in folders and {_IMAGES, _LABELS} <= set(listing(folder / "train")[1]):
        return f"it has train/{_IMAGES}/ and train/{_LABELS}/"
    return None


def open_yolo(root: Path, split: Split, data: DataConfig, why: str = "") -> BoxTableDataset:
    """One split, by the recipe's policies."""
    return open_box_table("yolo", partial(read_yolo, root, split), split, data, f"YOLO data at {root}", why)


def read_yolo(root: Path, split: Split) -> BoxTable:
    """A split as its files say."""
    settings = _settings(root)
    names = _class_names(root, settings)
    builder = TableBuilder(names, tuple(range(len(names))), is_relative=True)
    pictures = _pictures(root, split, settings)
    for path, count in Counter(pictures).items():
        if count > 1:
            builder.problem("duplicate-id", f"{path} is named {count} times", path, "name it once")
    for path in pictures:
        text_file = label_file(path)
        builder.picture(path, text_file, os.path.relpath(path, root))
        if os.path.lexists(text_file):  # a link that leads nowhere is no image without boxes
            _add(builder, text_file, len(names))
    return builder.table()


def label_file(picture: str) -> str:
    """The text file of an image: the last `images` in its path becomes `labels`, its ending .txt."""
    parts = picture.split(os.sep)
    places = [number for number, part in enumerate(parts[:-1]) if part == _IMAGES]
    if places:
        parts[places[-1]] = _LABELS
    return os.path.splitext(os.sep.join(parts))[0] + ".txt"


def _add(builder: TableBuilder, file: str, num_classes: int) -> None:
    """The boxes of the last image."""
    for number, line in enumerate(read(file).decode("utf-8-sig", "replace").splitlines(), 1):
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
            text = f"line {number} is no class with four numbers or an outline"
            builder.problem("no-box", text, f"{file}:{number}", "write class, x, y, width and height")
            continue
        is_known = 0 <= label < num_classes
        builder.box(corners, label if is_known else UNKNOWN)
        if not is_known:
            text = f"class {words[0]} where there are {num_classes}, from 0"
            builder.problem("unknown-class", text, f"{file}:{number}", "correct the number, or name the class")


def _settings(root: Path) -> dict[str, Any]:
    """What a YAML file with `names` in the folder says."""
    for name in listing(root)[0]:
        if not name.endswith((".yaml", ".yml")):
            continue
        try:
            said = yaml.safe_load(read(root / name))
        except yaml.YAMLError as error:
            raise DataError(f"{name} is no YAML", where=str(root / name), why=str(error), then="correct it") from error
        if isinstance(said, dict) and "names" in said:
            return said
    return {}


def _class_names(root: Path, settings: dict[str, Any]) -> tuple[str, ...]:
    names = settings.get("names")
    if isinstance(names, dict):
        names = _numbered(names, root)
    for name in _NAME_LISTS if names is None else ():
        for place in (root, root / _LABELS):
            if (place / name).is_file():
                names = class_lines(place / name)
    if not isinstance(names, list) or not names:
        raise DataError(
            f"no names of classes in {root}",
            where=str(root),
            why=f"looked for a YAML file with names, and for {' and '.join(_NAME_LISTS)}",
            then="write classes.txt there, one name a line",
        )
    return tuple(str(name) for name in names)


def _numbered(names: dict[Any, Any], root: Path) -> list[str]:
    """Names that a mapping gives by their number; numbers that it leaves out get one."""
    try:
        by_number = {int(number): str(name) for number, name in names.items()}
    except (TypeError, ValueError) as error:
        why = f"the names of classes are under {', '.join(map(repr, names))}"
        raise DataError("names of classes without numbers", where=str(root), why=why, then="0: cat, 1: dog") from error
    return [by_number.get(number, f"class{number}") for number in range(max(by_number, default=-1) + 1)]


def _pictures(root: Path, split: Split, settings: dict[str, Any]) -> list[str]:
    """Paths of a split's images."""
    told = settings.get("val" if split == "val" else "train")
    entries = told if isinstance(told, list) else [] if told is None else [told]
    top = relative_to(str(root), str(settings.get("path", ".")))
    places = [found for entry in entries if (found := _existing(root, top, str(entry))) is not None]
    if not places:
        tried = [root / pair for word in _WORDS[split] for pair in (f"{_IMAGES}/{word}", f"{word}/{_IMAGES}")]
        places = [str(place) for place in tried if place.is_dir()][:1]
    if not places:
        raise DataError(
            f"no images for {'training' if split == 'train' else 'validation'} in {root}",
            where=str(root),
            why=f"looked for {_IMAGES}/{split} and {split}/{_IMAGES}, and for what data.yaml names",
            then="name the folder that holds images/ and labels/: --data DIR",
        )
    return [path for place in places for path in _listed(root, place)]


def _existing(root: Path, top: str, entry: str) -> str | None:
    """A place that `data.yaml` names; written elsewhere, its path is often another one here."""
    for base in (top, str(root), str(root / entry.lstrip("./").partition("/")[0])):
        if os.path.exists(place := relative_to(base, entry)):
            return place
    return None


def _listed(root: Path, place: str) -> list[str]:
    if os.path.isfile(place):
        return [relative_to(str(root), line) for line in file_lines(place)]
    found = [os.path.join(folder, name) for folder, _, names in os.walk(place) for name in names if is_image_name(name)]
    return sorted(found)
