"""COCO's layout: `annotations/*.json` beside folders of images.

Owns finding the files of a split and reading their JSON. Refuses to know policies and pixels. Invariant: classes are
in the order of their ids in the training file, which may have gaps; images in the order of the file.
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

from reconv.data.boxes.annotations import AnnotationError
from reconv.data.boxes.box_table import UNKNOWN, BoxProblem, BoxTable, ProblemKind
from reconv.data.dataset import Split
from reconv.data.readers.detection.box_table_dataset import BoxTableDataset, open_box_table, relative_to
from reconv.data.storage.file_list import FileList
from reconv.data.storage.local import listing, read
from reconv.errors import DataError
from reconv.recipe.data_fields import DataConfig

_FOLDER = "annotations"
_INSIDE = "_annotations.coco.json"  # in the folder of the images themselves
_WORDS: dict[Split, tuple[str, ...]] = {"train": ("train",), "val": ("val", "valid", "validation")}
_CATEGORIES = b'"categories"'
_CATEGORIES_BYTES = 1 << 20
_MOST_PX = 2**31 - 1  # what a table holds of a side
_HEAVY = ("segmentation", "rle", "keypoints")  # most of the file, and nothing a detector needs


def why_coco(folder: Path) -> str | None:
    """The reason to take a folder for COCO's layout; None: it is not."""
    found = _candidates(folder, "train")
    return f"it has {found[0].relative_to(folder)}" if found else None


def open_coco(root: Path, split: Split, data: DataConfig, why: str = "") -> BoxTableDataset:
    """One split, by the recipe's policies."""
    return open_box_table("coco", partial(read_coco, root, split), split, data, f"COCO data at {root}", why)


def read_coco(root: Path, split: Split) -> BoxTable:
    """A split as its file says; classes are those of the training file."""
    file = find_json(root, split)
    told = _load(file)
    trained = find_json(root, "train")
    classes = _classes(told["categories"] if split == "train" else _categories(trained), trained)
    return _Reader(file, told, classes, image_folder(root, file, told["images"])).table()


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


def image_folder(root: Path, file: Path, images: Sequence[Any]) -> Path:
    """The folder that has the first image the file names."""
    own = file.stem.rpartition("_")[2]
    words = [own, *_WORDS[_split_of(file.name) or "train"], ""] if file.name != _INSIDE else []
    places = [root / inner / word for word in words for inner in ("", "images")]
    places = [file.parent, *places] if file.name == _INSIDE else places
    for image in images[:5]:  # the first may be missing
        name = str(image.get("file_name")) if isinstance(image, dict) else ""
        for place in places:
            if os.path.isfile(relative_to(str(place), name)):
                return place
    return next((place for place in places if place.is_dir()), places[0])


def _load(file: Path) -> dict[str, Any]:
    try:
        told = json.loads(read(file), object_hook=_without_outlines)
    except ValueError as error:
        raise AnnotationError(
            f"{file.name} is no JSON", where=str(file), why=str(error), then="copy or download it again"
        ) from error
    lists = told if isinstance(told, dict) else {}
    missing = [key for key in ("images", "annotations", "categories") if not isinstance(lists.get(key), list)]
    if missing:
        raise AnnotationError(
            f"{file.name} has no list of {', '.join(missing)}",
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


def _classes(categories: Sequence[Any], file: Path) -> dict[int, str]:
    """Names by number, in the order of the numbers; without them nothing of a file can be told."""
    classes: dict[int, str] = {}
    for category in categories:
        number, name = (category.get("id"), category.get("name")) if isinstance(category, dict) else (None, None)
        if not isinstance(number, int) or not isinstance(name, str):
            raise AnnotationError(
                f"a category of {file.name} has no id or no name",
                where=str(file),
                why=f"it is {json.dumps(category, ensure_ascii=False)[:200]}",
                then='write it as {"id": 1, "name": "cat"}',
            )
        if number in classes:
            raise AnnotationError(
                f"category id {number} of {file.name} is there twice",
                where=str(file),
                why=f"as {classes[number]!r} and as {name!r}",
                then="give each category an id of its own",
            )
        classes[number] = name
    return dict(sorted(classes.items()))


class _Reader:
    """One file becoming a table; what is wrong is noted, not raised."""

    def __init__(self, file: Path, told: dict[str, Any], classes: dict[int, str], folder: Path) -> None:
        self._file = file
        self._told = told
        self._folder = folder
        self._classes = classes
        self._problems: list[BoxProblem] = []

    def table(self) -> BoxTable:
        """The images and boxes that can be read; the others are problems."""
        self._compare_classes()
        images, rows = self._images()
        said = list(self._said(rows))
        self._note_twice("annotation", [a["id"] for _, a in said if isinstance(a.get("id"), int | str)])
        order = np.argsort(np.array([row for row, _ in said], np.int64), kind="stable")
        told = [said[place][1] for place in order.tolist()]
        counts = np.bincount(np.array([row for row, _ in said], np.int64), minlength=len(images))
        lefts_and_sizes = np.array([a["bbox"] for a in told], np.float64).reshape(-1, 4)
        corners = np.concatenate([lefts_and_sizes[:, :2], lefts_and_sizes[:, :2] + lefts_and_sizes[:, 2:]], axis=1)
        numbers = {number: label for label, number in enumerate(self._classes)}
        own_areas = lefts_and_sizes[:, 2] * lefts_and_sizes[:, 3]
        areas = [own if a.get("area") is None else a["area"] for a, own in zip(told, own_areas, strict=True)]
        with np.errstate(over="ignore"):  # told as a box whose corner is no number
            corners_32, areas_32 = corners.astype(np.float32), np.array(areas, np.float64).astype(np.float32)
        return BoxTable(
            tuple(self._classes.values()),
            tuple(self._classes),
            FileList(relative_to(str(self._folder), image["file_name"]) for image in images),
            [image["id"] for image in images],
            np.array([[image["height"], image["width"]] for image in images], np.int32).reshape(-1, 2),
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            corners_32,
            np.array([numbers.get(a["category_id"], UNKNOWN) for a in told], np.int64),
            np.array([bool(a.get("iscrowd", 0)) for a in told], bool),
            np.zeros(len(told), bool),
            areas_32,
            problems=tuple(self._problems),
        )

    def _compare_classes(self) -> None:
        """A number must mean the same class here as in training."""
        for entry in self._told["categories"]:
            number, name = (entry.get("id"), entry.get("name")) if isinstance(entry, dict) else (None, None)
            trained = self._classes.get(number) if isinstance(number, int) else None
            if trained is not None and trained != name:
                text = f"category {number} is {name!r} here and {trained!r} in training"
                self._note("other-class", text, "give the classes of both files the same ids")

    def _images(self) -> tuple[list[dict[str, Any]], dict[int | str, int | None]]:
        """The images that can be read, and the row of each id; None: of an image that cannot."""
        images: list[dict[str, Any]] = []
        rows: dict[int | str, int | None] = {}
        ids: list[int | str] = []
        for number, entry in enumerate(self._told["images"]):
            told = entry if isinstance(entry, dict) else {}
            own = told.get("id")
            if not isinstance(own, int | str):
                self._note("no-id", f"image number {number} has no id", "give it one")
                continue
            ids.append(own)
            rows[own] = None
            if not isinstance(told.get("file_name"), str):
                self._note("no-file-name", f"image {own} has no file_name", "name its file")
            elif not all(_is_side(told.get(side)) for side in ("height", "width")):
                self._note("no-size", f"image {own} has no width and height in pixels", "write them as whole numbers")
            else:
                rows[own] = len(images)
                images.append(told)
        self._note_twice("image", ids)
        return images, rows

    def _said(self, rows: dict[int | str, int | None]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Each annotation that can be read, with its image."""
        for number, entry in enumerate(self._told["annotations"]):
            told = entry if isinstance(entry, dict) else {}
            name = f"annotation {told.get('id', f'number {number}')}"
            image_id, box = told.get("image_id"), told.get("bbox")
            if not isinstance(image_id, int | str) or image_id not in rows:
                self._note("unknown-image", f"{name} is of an image that is not in the list", "remove it")
            elif not isinstance(box, list) or len(box) != 4 or not all(map(_is_number, box)):
                self._note("no-box", f"{name} has no bbox of four numbers", "remove it")
            elif not isinstance(told.get("category_id"), int):
                self._note("no-class", f"{name} has no category_id", "remove it")
            elif told.get("iscrowd") not in (0, 1, None):
                self._note("no-flag", f"{name} has an iscrowd that is neither 0 nor 1", "correct it")
            elif told.get("area") is not None and not _is_number(told["area"]):
                self._note("no-area", f"{name} has an area that is no number", "correct or remove it")
            elif (row := rows[image_id]) is not None:
                yield row, told

    def _note(self, kind: ProblemKind, text: str, then: str) -> None:
        self._problems.append(BoxProblem(kind, text, str(self._file), f"{then} in {self._file.name}"))

    def _note_twice(self, what: str, ids: Sequence[int | str]) -> None:
        for number, count in Counter(ids).items():
            if count > 1:
                text = f"{what} id {number} is there {count} times"
                self._note("duplicate-id", text, f"give each {what} an id of its own")


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= _MOST_PX)


def _is_side(value: Any) -> bool:
    """Whether a value is an image's side in pixels."""
    return isinstance(value, int | float) and 0 < value <= _MOST_PX and int(value) == value
