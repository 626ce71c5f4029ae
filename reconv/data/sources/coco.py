"""COCO's layout: `annotations/*.json` beside folders of pictures.

Owns finding the files of a split and reading their JSON. Refuses to know policies and pixels. Invariant: classes are
in the order of their ids in the training file, which may have gaps; pictures in the order of the file.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from reconv.data.annotation import AnnotationError
from reconv.data.box_table import UNKNOWN, BoxTable, Problem
from reconv.data.names import PackedNames
from reconv.data.reader import listing, read
from reconv.data.source import Split
from reconv.data.sources.boxed import BoxedSource, open_boxed, relative_to
from reconv.errors import DataError
from reconv.recipe.images import Data

_FOLDER = "annotations"
_INSIDE = "_annotations.coco.json"  # in the folder of the pictures themselves
_WORDS: dict[Split, tuple[str, ...]] = {"train": ("train",), "val": ("val", "valid", "validation")}
_CATEGORIES = b'"categories"'
_CATEGORIES_BYTES = 1 << 20
_HEAVY = ("segmentation", "rle", "keypoints")  # most of the file, and nothing a detector needs


def why_coco(folder: Path) -> str | None:
    """The reason to take a folder for COCO's layout; None: it is not."""
    found = _candidates(folder, "train")
    return f"it has {found[0].relative_to(folder)}" if found else None


def open_coco(root: Path, split: Split, data: Data, why: str = "") -> BoxedSource:
    """One split, by the recipe's policies."""
    return open_boxed("coco", partial(read_coco, root, split), split, data, f"COCO data at {root}", why)


def read_coco(root: Path, split: Split) -> BoxTable:
    """A split as its file says; classes are those of the training file."""
    file = find_json(root, split)
    told = _load(file)
    categories = told["categories"] if split == "train" else _categories(find_json(root, "train"))
    return _Reader(file, told, categories, image_folder(root, file, told["images"])).table()


def find_json(root: Path, split: Split) -> Path:
    """The annotations of a split: `instances_*` where there are several."""
    found = _candidates(root, split)
    instances = [file for file in found if file.name.startswith("instances")]
    chosen = instances or found
    if len(chosen) != 1:
        names = ", ".join(file.name for file in chosen)
        raise DataError(
            f"{'no' if not chosen else 'more than one'} file of {split} annotations in {root}",
            where=str(root / _FOLDER),
            why=f"either of {names} could be meant" if chosen else f"looked for {_FOLDER}/*{split}*.json",
            then=f"keep one called {_FOLDER}/instances_{split}.json",
        )
    return chosen[0]


def _candidates(root: Path, split: Split) -> list[Path]:
    _, folders = listing(root)
    inside = [root / name / _INSIDE for name in _WORDS[split] if name in folders]
    found = [file for file in inside if file.is_file()]
    if _FOLDER in folders:
        names = [name for name in listing(root / _FOLDER)[0] if name.endswith(".json")]
        found += [root / _FOLDER / name for name in names if _split_of(name) == split]
    return found


def _split_of(name: str) -> Split | None:
    """The split a file's name speaks of; `trainval` speaks of none."""
    has_train, has_val = "train" in name, "val" in name.removeprefix("eval")
    return None if has_train == has_val else "train" if has_train else "val"


def image_folder(root: Path, file: Path, images: Sequence[dict[str, Any]]) -> Path:
    """The folder that has the first picture the file names."""
    own = file.stem.rpartition("_")[2]
    words = [own, *_WORDS[_split_of(file.name) or "train"], ""] if file.name != _INSIDE else []
    places = [root / inner / word for word in words for inner in ("", "images")]
    places = [file.parent, *places] if file.name == _INSIDE else places
    if not images or "file_name" not in images[0]:
        return places[0]
    for image in images[:5]:  # the first may be missing
        for place in places:
            if os.path.isfile(relative_to(str(place), image["file_name"])):
                return place
    return next((place for place in places if place.is_dir()), places[0])


def _load(file: Path) -> dict[str, Any]:
    try:
        told = json.loads(read(file), object_hook=_without_outlines)
    except ValueError as error:
        raise AnnotationError(
            f"{file.name} is no JSON", where=str(file), why=str(error), then="copy or download it again"
        ) from error
    missing = [key for key in ("images", "annotations", "categories") if not isinstance(told, dict) or key not in told]
    if missing:
        raise AnnotationError(
            f"{file.name} has no {', '.join(missing)}",
            where=str(file),
            why="COCO's files have the lists images, annotations and categories",
            then="use the file of instances",
        )
    loaded: dict[str, Any] = told
    return loaded


def _categories(file: Path) -> Sequence[dict[str, Any]]:
    """The classes of a file of which nothing else is wanted: all of COCO's takes 20 s and a GB to read."""
    quick = _quick_categories(read(file))
    categories: Sequence[dict[str, Any]] = _load(file)["categories"] if quick is None else quick
    return categories


def _quick_categories(text: bytes) -> list[dict[str, Any]] | None:
    """The list of classes found by its name; None where that is not certain."""
    at = text.find(b"[", text.rfind(_CATEGORIES))
    if text.count(_CATEGORIES) != 1 or at < 0:
        return None
    try:
        found, _ = json.JSONDecoder().raw_decode(text[at : at + _CATEGORIES_BYTES].decode("utf-8", "replace"))
    except ValueError:  # longer than was looked at, or no list
        return None
    return found if all(isinstance(entry, dict) and {"id", "name"} <= set(entry) for entry in found) else None


def _without_outlines(entry: dict[str, Any]) -> dict[str, Any]:
    for key in _HEAVY:
        entry.pop(key, None)
    return entry


class _Reader:
    """One file becoming a table; what is wrong is noted, not raised."""

    def __init__(self, file: Path, told: dict[str, Any], categories: Sequence[dict[str, Any]], folder: Path) -> None:
        self._file = file
        self._told = told
        self._folder = folder
        self._problems: list[Problem] = []
        kept = sorted({category["id"]: str(category["name"]) for category in categories}.items())
        self._class_ids = tuple(number for number, _ in kept)
        self._class_names = tuple(name for _, name in kept)

    def table(self) -> BoxTable:
        images = self._told["images"]
        self._problems += self._twice("image", [image["id"] for image in images])
        self._problems += self._twice("annotation", [a["id"] for a in self._told["annotations"] if "id" in a])
        rows = {image["id"]: row for row, image in enumerate(images)}
        said = list(self._said(rows))
        order = np.argsort(np.array([row for row, _ in said], np.int64), kind="stable")
        told = [said[place][1] for place in order.tolist()]
        counts = np.bincount(np.array([row for row, _ in said], np.int64), minlength=len(images))
        lefts_and_sizes = np.array([a["bbox"] for a in told], np.float64).reshape(-1, 4)
        corners = np.concatenate([lefts_and_sizes[:, :2], lefts_and_sizes[:, :2] + lefts_and_sizes[:, 2:]], axis=1)
        numbers = {number: label for label, number in enumerate(self._class_ids)}
        own_areas = lefts_and_sizes[:, 2] * lefts_and_sizes[:, 3]
        return BoxTable(
            self._class_names,
            self._class_ids,
            PackedNames(relative_to(str(self._folder), image["file_name"]) for image in images),
            [image["id"] for image in images],
            np.array([[image["height"], image["width"]] for image in images], np.int32).reshape(-1, 2),
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            corners.astype(np.float32),
            np.array([numbers.get(a["category_id"], UNKNOWN) for a in told], np.int64),
            np.array([bool(a.get("iscrowd", 0)) for a in told], bool),
            np.zeros(len(told), bool),
            np.array([a.get("area", area) for a, area in zip(told, own_areas, strict=True)], np.float32),
            problems=tuple(self._problems),
        )

    def _said(self, rows: dict[int, int]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Each annotation that can be read, with its picture."""
        for number, entry in enumerate(self._told["annotations"]):
            name = f"annotation {entry.get('id', f'number {number}')}"
            box, row = entry.get("bbox"), rows.get(entry.get("image_id"))
            if row is None:
                self._note("unknown-image", f"{name} is of an image that is not in the list", "remove it")
            elif not isinstance(box, list) or len(box) != 4 or not all(isinstance(v, int | float) for v in box):
                self._note("no-box", f"{name} has no bbox of four numbers", "remove it")
            elif "category_id" not in entry:
                self._note("no-class", f"{name} has no category_id", "remove it")
            else:
                yield row, entry

    def _note(self, kind: str, text: str, then: str = "") -> None:
        self._problems.append(Problem(kind, text, str(self._file), f"{then} in {self._file.name}"))

    def _twice(self, what: str, ids: Sequence[Any]) -> Iterator[Problem]:
        for number, count in Counter(ids).items():
            if count > 1:
                text = f"{what} id {number} is there {count} times"
                yield Problem("duplicate-id", text, str(self._file), f"give each {what} an id of its own")
