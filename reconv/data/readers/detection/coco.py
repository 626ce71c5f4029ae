"""COCO's layout: `annotations/*.json` beside folders of images.

Classes are in the order of their ids in the training file, which may have gaps; images in the order of their file.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from reconv.core.errors import DataError
from reconv.data.boxes.annotations import AnnotationError
from reconv.data.boxes.table import UNKNOWN, AnnotationProblem, BoxTable, ProblemKind, make_problem
from reconv.data.dataset import Split
from reconv.data.file_list import FileList
from reconv.data.readers.detection.box_table_dataset import BoxTableDataset, hold_out, open_box_table, resolve_path
from reconv.recipe.parts.data import DataConfig
from reconv.storage import read_limits
from reconv.storage.bounded import parse_json
from reconv.storage.local import is_possible_path, listing, read_bounded_text

_FOLDER = "annotations"
_ROBOFLOW_FILE = "_annotations.coco.json"  # in the folder of the images
_SPLIT_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "val": ("val", "valid", "validation"),
    "test": ("test",),
}
_CATEGORIES = b'"categories"'
_CATEGORIES_BYTES = 1 << 20
_MAX_SIDE_PX = 2**31 - 1  # that a table can hold
_UNUSED_KEYS = ("segmentation", "rle", "keypoints")  # most of the file


def detect_coco(folder: Path) -> str | None:
    """Evidence that the folder is in COCO's layout, or None."""
    found = _candidates(folder, "train")
    return f"it has {found[0].relative_to(folder)}" if found else None


def detect_coco_without_splits(folder: Path) -> str | None:
    """Evidence of one annotation file for all images, or of one for validation alone, or None."""
    found = _unnamed_files(folder)
    if len(found) == 1:
        return f"{found[0].relative_to(folder)} has the lists images, annotations and categories"
    found = _candidates(folder, "val") or _candidates(folder, "test")
    return f"it has {found[0].relative_to(folder)} and none for training" if found else None


def open_coco(root: Path, split: Split, data: DataConfig, why: str = "") -> BoxTableDataset:
    """One split after the recipe's policies."""
    return open_box_table("coco", read_coco(root, split, data), split, data, f"COCO data at {root}", why)


def read_coco(root: Path, split: Split, data: DataConfig) -> BoxTable:
    """A split as its file has it; classes are those of the training file."""
    source = locate_annotations(root, split)
    content = _load(source.file)
    train = find_json(root, "train")
    is_own = source.is_shared or train is None or train == source.file
    class_file = source.file if train is None else train
    classes = _classes(content["categories"] if is_own else _categories(class_file), class_file)
    table = _CocoParser(source.file, content, classes, image_folder(root, source.file, content["images"])).table()
    return hold_out(table, root, split, data) if source.is_shared else replace(table, note=source.note)


@dataclass(frozen=True, slots=True)
class AnnotationSource:
    """The annotation file of a split."""

    file: Path
    is_shared: bool = False  # with the other split: a share of the images is held out for validation
    note: str = ""


def locate_annotations(root: Path, split: Split) -> AnnotationSource:
    """The file of a split; without one for validation it is that for testing, else shared with training."""
    train, own, test = (find_json(root, name) for name in ("train", split, "test"))
    if own is not None:
        is_shared = split == "train" and test is None and find_json(root, "val") is None
        return AnnotationSource(own, is_shared)
    if split == "val" and test is not None:
        return AnnotationSource(test, note=f"no file for validation: {test.name} is used")
    whole = train or next(iter(_unnamed_files(root)), None)
    if whole is None or split == "test":
        raise DataError(
            f"no annotation file for {split} in {root}",
            where=str(root / _FOLDER),
            why=f"looked for {_FOLDER}/*{split}*.json",
            hint=f"call it {_FOLDER}/instances_{split}.json",
        )
    return AnnotationSource(whole, is_shared=True)


def find_json(root: Path, split: Split) -> Path | None:
    """The annotation file of a split, if there are several the one called `instances_*`; None if there is none."""
    found = _candidates(root, split)
    instances = [file for file in found if file.name.startswith("instances")]
    chosen = instances or found
    if len(chosen) > 1:
        raise DataError(
            f"more than one annotation file for {split} in {root}",
            where=str(root / _FOLDER),
            why=f"candidates are {', '.join(file.name for file in chosen)}",
            hint=f"keep one called {_FOLDER}/instances_{split}.json",
        )
    return chosen[0] if chosen else None


def _candidates(root: Path, split: Split) -> list[Path]:
    _, folders = listing(root)
    inside = [root / name / _ROBOFLOW_FILE for name in _SPLIT_NAMES[split] if name in folders]
    found = [file for file in inside if file.is_file()]
    if _FOLDER in folders:
        names = [name for name in listing(root / _FOLDER)[0] if name.endswith(".json")]
        found += [root / _FOLDER / name for name in names if _split_of(name) == split]
    return found


def _unnamed_files(root: Path) -> list[Path]:
    """Files with boxes for all images: their names have no split."""
    places = [root, root / _FOLDER] if (root / _FOLDER).is_dir() else [root]
    files = [place / name for place in places for name in listing(place)[0] if name.endswith(".json")]
    return [
        file
        for file in files
        if _split_of(file.name) is None and _has_boxes(read_bounded_text(file, read_limits.COCO_BYTES))
    ]


def _has_boxes(text: bytes) -> bool:
    return all(key in text for key in (b'"images"', b'"annotations"', _CATEGORIES, b'"bbox"'))


def _split_of(name: str) -> Split | None:
    """The split in a file's name; None for `trainval`, and for the lists of images without annotations."""
    has_train, has_val = "train" in name, "val" in name.removeprefix("eval")
    if has_train != has_val:
        return "train" if has_train else "val"
    return "test" if "test" in name and not has_train and not name.startswith("image_info") else None


def image_folder(root: Path, file: Path, images: Sequence[Any]) -> Path:
    """The folder that holds the images of an annotation file."""
    own = file.stem.rpartition("_")[2]
    names = [own, *_SPLIT_NAMES[_split_of(file.name) or "train"], ""]
    folders = [root / inner / name for name in names for inner in ("", "images")]
    folders += [root / name for name in listing(root)[1] if name != _FOLDER]
    if file.name == _ROBOFLOW_FILE:
        folders = [file.parent]
    for image in images[:5]:  # the first may be missing on disk
        name = str(image.get("file_name")) if isinstance(image, dict) else ""
        for folder in folders:
            if os.path.isfile(resolve_path(str(folder), name)):
                return folder
    return next((folder for folder in folders if folder.is_dir()), folders[0])


def _load(file: Path) -> dict[str, Any]:
    try:
        content = parse_json(read_bounded_text(file, read_limits.COCO_BYTES), object_hook=_drop_unused)
    except ValueError as error:
        raise AnnotationError(
            f"{file.name} is not valid JSON", where=str(file), why=str(error), hint="copy or download it again"
        ) from error
    lists = content if isinstance(content, dict) else {}
    missing = [key for key in ("images", "annotations", "categories") if not isinstance(lists.get(key), list)]
    if missing:
        raise AnnotationError(
            f"{file.name} has no list of {', '.join(missing)}",
            where=str(file),
            why="COCO's annotation files have the lists images, annotations and categories",
            hint="use the instances_*.json file",
        )
    return lists


def _categories(file: Path) -> Sequence[dict[str, Any]]:
    """Only the categories of a file: parsing all of COCO's training file takes 20 s and 1 GB."""
    quick = _quick_categories(read_bounded_text(file, read_limits.COCO_BYTES))
    categories: Sequence[dict[str, Any]] = _load(file)["categories"] if quick is None else quick
    return categories


def _quick_categories(text: bytes) -> list[dict[str, Any]] | None:
    """The categories, found by searching for their key; None if that is not reliable."""
    at = text.find(b"[", text.rfind(_CATEGORIES))
    if text.count(_CATEGORIES) != 1 or at < 0:
        return None
    try:
        found, _ = json.JSONDecoder().raw_decode(text[at : at + _CATEGORIES_BYTES].decode("utf-8", "replace"))
    except (ValueError, RecursionError):  # longer than the searched range, or not a list
        return None
    return found if all(isinstance(entry, dict) and {"id", "name"} <= set(entry) for entry in found) else None


def _drop_unused(entry: dict[str, Any]) -> dict[str, Any]:
    for key in _UNUSED_KEYS:
        entry.pop(key, None)
    return entry


def _classes(categories: Sequence[Any], file: Path) -> dict[int, str]:
    """Class names by id, in the order of the ids."""
    classes: dict[int, str] = {}
    for category in categories:
        number, name = (category.get("id"), category.get("name")) if isinstance(category, dict) else (None, None)
        if not isinstance(number, int) or not isinstance(name, str):
            raise AnnotationError(
                f"a category of {file.name} has no id or no name",
                where=str(file),
                why=f"it is {json.dumps(category, ensure_ascii=False)[:200]}",
                hint='write it as {"id": 1, "name": "cat"}',
            )
        if number in classes:
            raise AnnotationError(
                f"category id {number} of {file.name} is used twice",
                where=str(file),
                why=f"for {classes[number]!r} and for {name!r}",
                hint="give each category its own id",
            )
        classes[number] = name
    return dict(sorted(classes.items()))


class _CocoParser:
    """Turns the content of one file into a table; what is wrong is noted as a problem, not raised."""

    def __init__(self, file: Path, content: dict[str, Any], classes: dict[int, str], folder: Path) -> None:
        self._file = file
        self._content = content
        self._folder = folder
        self._classes = classes
        self._problems: list[AnnotationProblem] = []

    def table(self) -> BoxTable:
        """The valid images and boxes."""
        self._check_classes()
        images, rows = self._images()
        valid = list(self._valid_annotations(rows))
        self._note_duplicates("annotation", [a["id"] for _, a in valid if isinstance(a.get("id"), int | str)])
        image_rows = np.array([row for row, _ in valid], np.int64)
        annotations = [valid[place][1] for place in np.argsort(image_rows, kind="stable").tolist()]
        counts = np.bincount(image_rows, minlength=len(images))
        boxes_xywh = np.array([a["bbox"] for a in annotations], np.float64).reshape(-1, 4)
        corners = np.concatenate([boxes_xywh[:, :2], boxes_xywh[:, :2] + boxes_xywh[:, 2:]], axis=1)
        labels = {number: label for label, number in enumerate(self._classes)}
        box_areas = boxes_xywh[:, 2] * boxes_xywh[:, 3]
        areas = [own if a.get("area") is None else a["area"] for a, own in zip(annotations, box_areas, strict=True)]
        with np.errstate(over="ignore"):  # reported later as a corner that is not finite
            corners_32, areas_32 = corners.astype(np.float32), np.array(areas, np.float64).astype(np.float32)
        return BoxTable(
            tuple(self._classes.values()),
            tuple(self._classes),
            FileList(resolve_path(str(self._folder), image["file_name"]) for image in images),
            [image["id"] for image in images],
            np.array([[image["height"], image["width"]] for image in images], np.int32).reshape(-1, 2),
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            corners_32,
            np.array([labels.get(a["category_id"], UNKNOWN) for a in annotations], np.int64),
            np.array([bool(a.get("iscrowd", 0)) for a in annotations], bool),
            np.zeros(len(annotations), bool),
            areas_32,
            problems=tuple(self._problems),
        )

    def _check_classes(self) -> None:
        """An id must stand for the same class as in training."""
        for entry in self._content["categories"]:
            number, name = (entry.get("id"), entry.get("name")) if isinstance(entry, dict) else (None, None)
            train_name = self._classes.get(number) if isinstance(number, int) else None
            if train_name is not None and train_name != name:
                text = f"category {number} is {name!r:.80} here and {train_name!r:.80} in training"
                self._note("other-class", text, "give the classes of both files the same ids")

    def _images(self) -> tuple[list[dict[str, Any]], dict[int | str, int | None]]:
        """The valid images, and the row of each image id; None for an invalid image."""
        images: list[dict[str, Any]] = []
        rows: dict[int | str, int | None] = {}
        ids: list[int | str] = []
        for number, entry in enumerate(self._content["images"]):
            image = entry if isinstance(entry, dict) else {}
            image_id = image.get("id")
            if not isinstance(image_id, int | str):
                self._note("no-id", f"image number {number} has no id", "add it")
                continue
            ids.append(image_id)
            rows[image_id] = None
            name = image.get("file_name")
            if not isinstance(name, str):
                self._note("no-file-name", f"image {image_id} has no file_name", "add it")
            elif not is_possible_path(name):
                self._note("no-file-name", f"image {image_id} has a file_name that cannot be a path", "correct it")
            elif not all(_is_side(image.get(side)) for side in ("height", "width")):
                self._note("no-size", f"image {image_id} has no width and height in pixels", "write them as integers")
            else:
                rows[image_id] = len(images)
                images.append(image)
        self._note_duplicates("image", ids)
        return images, rows

    def _valid_annotations(self, rows: dict[int | str, int | None]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Each valid annotation with the row of its image."""
        for number, entry in enumerate(self._content["annotations"]):
            annotation = entry if isinstance(entry, dict) else {}
            name = f"annotation {annotation.get('id', f'number {number}')}"
            image_id, box = annotation.get("image_id"), annotation.get("bbox")
            if not isinstance(image_id, int | str) or image_id not in rows:
                self._note("unknown-image", f"{name} has an unknown image_id", "remove it")
            elif not isinstance(box, list) or len(box) != 4 or not all(map(_is_number, box)):
                self._note("no-box", f"{name} has no bbox of four numbers", "remove it")
            elif not isinstance(annotation.get("category_id"), int):
                self._note("no-class", f"{name} has no category_id", "remove it")
            elif annotation.get("iscrowd") not in (0, 1, None):
                self._note("no-flag", f"{name} has an iscrowd that is neither 0 nor 1", "correct it")
            elif annotation.get("area") is not None and not _is_number(annotation["area"]):
                self._note("no-area", f"{name} has an area that is not a number", "correct or remove it")
            elif (row := rows[image_id]) is not None:
                yield row, annotation

    def _note(self, kind: ProblemKind, text: str, hint: str) -> None:
        self._problems.append(make_problem(kind, text, str(self._file), f"{hint} in {self._file.name}"))

    def _note_duplicates(self, what: str, ids: Sequence[int | str]) -> None:
        for number, count in Counter(ids).items():
            if count > 1:
                text = f"{what} id {number} occurs {count} times"
                self._note("duplicate-id", text, f"give each {what} its own id")


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= _MAX_SIDE_PX)


def _is_side(value: Any) -> bool:
    """True if a value is a valid side of an image in pixels."""
    return isinstance(value, int | float) and 0 < value <= _MAX_SIDE_PX and int(value) == value
