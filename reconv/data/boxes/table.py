"""The boxes of a whole split in arrays, checks for unusable boxes, and the recipe's policies for them.

A box is usable, as in the published COCO converter, if it has an area and lies within its image.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from reconv.data.boxes.annotations import AnnotationError
from reconv.data.dataset import I64, Split
from reconv.data.file_list import FileList
from reconv.detection.annotation import F32, Annotation, Flags
from reconv.recipe.parts.data import DataConfig

UNKNOWN = -1  # the label of a box of an unknown class
_ROUNDING_PX = 0.01  # files have two decimals, so a corner may be this far outside of the image
_ROUNDING_FRACTION = 1e-4
_MAX_TEXT = 300  # characters of a problem

# What can be wrong with a box, worst first, as in "a box that ..."
BAD_BOX_KINDS = {
    "unknown-class": "has an unknown class",
    "not-finite": "has a corner that is not finite",
    "swapped": "has swapped corners",
    "zero-area": "has no area",
    "outside": "is partly outside of its image",
}
ProblemKind = Literal[
    "duplicate-id",
    "unknown-image",
    "unknown-class",
    "other-class",
    "no-annotation",
    "no-id",
    "no-file-name",
    "no-size",
    "no-box",
    "no-class",
    "no-flag",
    "no-area",
]
# What can be wrong with annotation files.
PROBLEMS: dict[ProblemKind, str] = {
    "duplicate-id": "duplicate ids",
    "unknown-image": "annotations of unknown images",
    "unknown-class": "unknown classes",
    "other-class": "class ids that stand for another class in training",
    "no-annotation": "annotations that cannot be read",
    "no-id": "images without an id",
    "no-file-name": "images without a file name",
    "no-size": "images without a size",
    "no-box": "annotations without a box",
    "no-class": "annotations without a class",
    "no-flag": "annotations whose iscrowd is neither 0 nor 1",
    "no-area": "annotations whose area is not a number",
}
# Refused whatever data.bad_boxes says; scores against boxes with swapped corners would be meaningless.
_NEVER_TOLERATED: dict[Split, tuple[str, ...]] = {
    "train": ("unknown-class", "not-finite"),
    "val": ("unknown-class", "not-finite", "swapped"),
    "test": ("unknown-class", "not-finite", "swapped"),
}


@dataclass(frozen=True, slots=True)
class AnnotationProblem:
    """Something wrong with an annotation file rather than with a box."""

    kind: ProblemKind
    text: str
    where: str
    hint: str = ""


def make_problem(kind: ProblemKind, text: str, where: str, hint: str = "") -> AnnotationProblem:
    """A problem whose text, with ids and names of the file in it, is kept readable."""
    short = text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"
    return AnnotationProblem(kind, short, where, hint)


@dataclass(frozen=True, slots=True, eq=False)
class BoxTable:
    """All images of a split with their boxes, as the files have them."""

    class_names: tuple[str, ...]
    class_ids: tuple[int, ...]
    files: FileList
    image_ids: Sequence[int | str]
    sizes: npt.NDArray[np.int32]  # [n, 2]: height, width; zeros if is_relative
    offsets: I64  # [n + 1]: the boxes of image i are rows offsets[i] to offsets[i + 1]
    boxes_xyxy: F32  # [k, 4]
    labels: I64
    is_crowd: Flags
    difficult: Flags
    area: F32
    is_relative: bool = False  # boxes are fractions of the image
    annotation_files: FileList | None = None  # of each image, if it has its own
    problems: tuple[AnnotationProblem, ...] = ()
    note: str = ""  # where the split comes from, for people

    def __len__(self) -> int:
        return len(self.files)

    def annotation(self, index: int, size: tuple[int, int] | None = None) -> Annotation:
        """The boxes of an image; relative boxes need its `size` (height, width)."""
        rows = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        height, width = (int(side) for side in (self.sizes[index] if size is None else size))
        boxes, area = self.boxes_xyxy[rows], self.area[rows]
        if self.is_relative:
            boxes, area = boxes * np.array([width, height] * 2, np.float32), area * np.float32(width * height)
        columns = (self.labels[rows], self.is_crowd[rows], self.difficult[rows], area)
        return Annotation(boxes, *columns, self.image_ids[index], height, width)

    def image_of_box(self) -> I64:
        """[k]: the image index of each box."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    def annotation_file(self, index: int) -> str:
        """File and line of an image's annotation, for people."""
        return (self.files if self.annotation_files is None else self.annotation_files)[index]

    def keep_images(self, kept: Flags) -> BoxTable:
        """Some of the images with their boxes."""
        rows = np.flatnonzero(kept).tolist()
        boxes = kept[self.image_of_box()]
        names = self.annotation_files
        return replace(
            self,
            files=FileList(self.files[row] for row in rows),
            image_ids=[self.image_ids[row] for row in rows],
            sizes=self.sizes[kept],
            offsets=np.concatenate([[0], np.cumsum(np.diff(self.offsets)[kept])]).astype(np.int64),
            boxes_xyxy=self.boxes_xyxy[boxes],
            labels=self.labels[boxes],
            is_crowd=self.is_crowd[boxes],
            difficult=self.difficult[boxes],
            area=self.area[boxes],
            annotation_files=None if names is None else FileList(names[row] for row in rows),
        )

    def keep_boxes(self, kept: Flags) -> BoxTable:
        """The same images with some of their boxes."""
        counts = np.bincount(self.image_of_box()[kept], minlength=len(self))
        return replace(
            self,
            offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            boxes_xyxy=self.boxes_xyxy[kept],
            labels=self.labels[kept],
            is_crowd=self.is_crowd[kept],
            difficult=self.difficult[kept],
            area=self.area[kept],
        )

    def digest(self) -> str:
        """A digest of images and boxes."""
        digest = hashlib.blake2b(repr((self.class_names, self.class_ids)).encode(), digest_size=16)
        for chunk in self.files.content():
            digest.update(chunk)
        for array in (self.sizes, self.offsets, self.boxes_xyxy, self.labels, self.is_crowd, self.difficult):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


@dataclass(slots=True)
class BoxTableBuilder:
    """Builds a table image by image."""

    class_names: tuple[str, ...]
    class_ids: tuple[int, ...]
    is_relative: bool = False
    files: list[str] = field(default_factory=list)
    annotation_files: list[str] = field(default_factory=list)
    image_ids: list[int | str] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    boxes: list[tuple[float, float, float, float]] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    difficult: list[bool] = field(default_factory=list)
    problems: list[AnnotationProblem] = field(default_factory=list)

    def add_image(self, file: str, annotation_file: str, image_id: int | str, height: int = 0, width: int = 0) -> None:
        """Add an image; boxes added next belong to it."""
        self.files.append(file)
        self.annotation_files.append(annotation_file)
        self.image_ids.append(image_id)
        self.sizes.append((height, width))
        self.counts.append(0)

    def add_box(self, corners: tuple[float, float, float, float], label: int, difficult: bool = False) -> None:
        """Add a box (x1, y1, x2, y2) to the last image."""
        self.boxes.append(corners)
        self.labels.append(label)
        self.difficult.append(difficult)
        self.counts[-1] += 1

    def add_problem(self, kind: ProblemKind, text: str, where: str, hint: str = "") -> None:
        """Note something wrong with the files."""
        self.problems.append(make_problem(kind, text, where, hint))

    def build(self) -> BoxTable:
        """The table of everything that was added."""
        boxes = np.array(self.boxes, np.float32).reshape(-1, 4)
        return BoxTable(
            self.class_names,
            self.class_ids,
            FileList(self.files),
            self.image_ids,
            np.array(self.sizes, np.int32).reshape(-1, 2),
            np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64),
            boxes,
            np.array(self.labels, np.int64),
            np.zeros(len(boxes), bool),
            np.array(self.difficult, bool),
            (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]),
            self.is_relative,
            FileList(self.annotation_files),
            tuple(self.problems),
        )


def concat_tables(tables: Sequence[BoxTable]) -> BoxTable:
    """Tables with the same classes as one table; duplicate image ids are noted as problems."""
    ids = [number for table in tables for number in table.image_ids]
    sources = [table.annotation_file(index) for table in tables for index in range(len(table))]
    first = {number: row for row, number in reversed(list(enumerate(ids)))}
    duplicates = [
        make_problem("duplicate-id", f"image id {number} occurs {count} times", sources[first[number]])
        for number, count in Counter(ids).items()
        if count > 1
    ]
    counts = np.concatenate([np.diff(table.offsets) for table in tables])
    return BoxTable(
        tables[0].class_names,
        tables[0].class_ids,
        FileList(table.files[index] for table in tables for index in range(len(table))),
        ids,
        np.concatenate([table.sizes for table in tables]),
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        np.concatenate([table.boxes_xyxy for table in tables]),
        np.concatenate([table.labels for table in tables]),
        np.concatenate([table.is_crowd for table in tables]),
        np.concatenate([table.difficult for table in tables]),
        np.concatenate([table.area for table in tables]),
        tables[0].is_relative,
        FileList(sources),
        tuple(duplicates),
    )


def find_bad_boxes(table: BoxTable) -> dict[str, I64]:
    """The unusable boxes of a table by kind; a box with several defects is listed under the worst."""
    boxes = table.boxes_xyxy
    if table.is_relative:
        limit, slack = np.ones((len(boxes), 2)), _ROUNDING_FRACTION
    else:
        limit, slack = table.sizes[table.image_of_box()][:, ::-1].astype(np.float64), _ROUNDING_PX
    with np.errstate(invalid="ignore"):
        wrong = {
            "unknown-class": table.labels == UNKNOWN,
            "not-finite": ~np.isfinite(boxes).all(1),
            "swapped": (boxes[:, 2:] < boxes[:, :2]).any(1),
            "zero-area": (boxes[:, 2:] == boxes[:, :2]).any(1),
            "outside": (boxes[:, :2] < -slack).any(1) | (boxes[:, 2:] > limit + slack).any(1),
        }
    counted = np.zeros(len(boxes), bool)
    found: dict[str, I64] = {}
    for kind in BAD_BOX_KINDS:
        found[kind] = np.flatnonzero(wrong[kind] & ~counted)
        counted |= wrong[kind]
    return found


def apply_box_policies(table: BoxTable, data: DataConfig, split: Split) -> tuple[BoxTable, I64, tuple[str, ...]]:
    """The table after the recipe's policies, the indices of the images used, and notes on what was left out.

    Validation keeps every image and every box: metrics are computed against the unchanged annotations.
    """
    if table.problems:
        raise problem_error(table.problems[0])
    bad_boxes = find_bad_boxes(table)
    for kind, rows in bad_boxes.items():
        can_be_tolerated = kind not in _NEVER_TOLERATED[split]
        if len(rows) and (data.bad_boxes == "stop" or not can_be_tolerated):
            raise _bad_box_error(table, kind, bad_boxes, can_be_tolerated)
    all_images = np.arange(len(table))
    if split != "train":
        return table, all_images, ()
    notes: list[str] = []
    kept = table
    num_bad = sum(len(rows) for rows in bad_boxes.values())
    if num_bad:
        kept = _without_bad_boxes(table, bad_boxes, clip=data.bad_boxes == "clip")
        num_dropped = len(table.labels) - len(kept.labels)
        text = f"{num_dropped:,} of {len(table.labels):,} boxes are unusable and left out"
        notes.append(text + (f", {num_bad - num_dropped:,} are clipped to the image" if num_bad > num_dropped else ""))
    if data.empty_images == "keep":
        return kept, all_images, tuple(notes)
    used = np.flatnonzero(np.diff(kept.offsets) > 0)
    if not len(used):
        raise AnnotationError(
            "no training image has a usable box",
            where=table.annotation_file(0) if len(table) else "",
            why=f"none of {len(table.labels):,} boxes in {len(table):,} images is usable",
            hint="run `reconv data check PATH` to see what is wrong with them",
        )
    if len(used) < len(table):
        notes.append(f"{len(used):,} of {len(table):,} images have a usable box; the others are left out")
    return kept, used, tuple(notes)


def _without_bad_boxes(table: BoxTable, bad_boxes: dict[str, I64], clip: bool) -> BoxTable:
    kept = np.ones(len(table.labels), bool)
    for kind, rows in bad_boxes.items():
        kept[rows] = clip and kind == "outside"
    if clip:
        limit = np.ones(2) if table.is_relative else table.sizes[table.image_of_box()][:, ::-1]
        corners = np.clip(table.boxes_xyxy.reshape(-1, 2, 2), 0, np.expand_dims(limit, -2)).astype(np.float32)
        table = replace(table, boxes_xyxy=corners.reshape(-1, 4))
        kept &= (table.boxes_xyxy[:, 2:] > table.boxes_xyxy[:, :2]).all(1)
    return table.keep_boxes(kept)


def _bad_box_error(table: BoxTable, kind: str, bad_boxes: dict[str, I64], can_be_tolerated: bool) -> AnnotationError:
    row = int(bad_boxes[kind][0])
    owner = int(table.image_of_box()[row])
    number = row - int(table.offsets[owner]) + 1
    corners = ", ".join(f"{value:g}" for value in table.boxes_xyxy[row].tolist())
    of = "" if table.is_relative else f" of {table.sizes[owner, 1]} x {table.sizes[owner, 0]}"
    counts = ", ".join(f"{len(rows):,} {BAD_BOX_KINDS[name]}" for name, rows in bad_boxes.items() if len(rows))
    hint = "correct the annotation (`reconv data check PATH` lists all such boxes)"
    if can_be_tolerated:
        hint += ", or leave such boxes out with --set data.bad_boxes=skip, or clip them with =clip"
    return AnnotationError(
        f"a box that {BAD_BOX_KINDS[kind]}: box {number} of {table.files[owner]}{of}, corners {corners}",
        where=table.annotation_file(owner),
        why=f"of {len(table.labels):,} boxes, {counts}",
        hint=hint,
    )


def problem_error(problem: AnnotationProblem) -> AnnotationError:
    """The error for a problem with the files."""
    hint = problem.hint or "correct the annotation (`reconv data check PATH` lists all problems)"
    return AnnotationError(problem.text, where=problem.where, hint=hint)


def describe_boxes(table: BoxTable, rows: Sequence[int]) -> Iterator[str]:
    """Each box with its file and number, for people."""
    owners = table.image_of_box()
    for row in rows:
        owner = int(owners[row])
        corners = ", ".join(f"{value:g}" for value in table.boxes_xyxy[row].tolist())
        yield f"{table.annotation_file(owner)}: box {row - int(table.offsets[owner]) + 1} ({corners})"
