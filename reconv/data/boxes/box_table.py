"""The boxes of a whole split in arrays, what can be wrong with them, and what a recipe does about that.

Owns the table, the rule for a usable box and the policies for bad boxes and empty images. Refuses to know files.
Invariant: rows of the table are in the order of its images; what is left out is counted and said.

A box is usable, by the rule of the published COCO converter, if it has an area and does not leave its image.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from reconv.data.boxes.annotations import F32, Annotation, AnnotationError, Flags
from reconv.data.dataset import I64, Split
from reconv.data.storage.file_list import FileList
from reconv.recipe.data_fields import DataConfig

UNKNOWN = -1  # the label of a box whose class is in no list
_ROUNDING_PX = 0.01  # files have two decimals: a sum of two such numbers may be that far beyond the edge
_ROUNDING_FRACTION = 1e-4

# What may be wrong with a box, the worst first, as in "a box that ...".
FAULTS = {
    "unknown-class": "is of no known class",
    "not-finite": "has a corner that is no number",
    "swapped": "has its corners swapped",
    "zero-area": "has no area",
    "outside": "leaves its image",
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
# What may be wrong with the files, in words.
PROBLEMS: dict[ProblemKind, str] = {
    "duplicate-id": "ids that are there more than once",
    "unknown-image": "annotations of images that are not in the list",
    "unknown-class": "classes that are in no list",
    "other-class": "numbers that mean one class in training and another here",
    "no-annotation": "annotations that cannot be read",
    "no-id": "images without an id",
    "no-file-name": "images without the name of their file",
    "no-size": "images without their size",
    "no-box": "annotations without a box",
    "no-class": "annotations without a class",
    "no-flag": "annotations with an iscrowd that is neither 0 nor 1",
    "no-area": "annotations with an area that is no number",
}
# Whatever the recipe says; a score against boxes without an inside would be nonsense.
_NEVER_BORNE: dict[Split, tuple[str, ...]] = {
    "train": ("unknown-class", "not-finite"),
    "val": ("unknown-class", "not-finite", "swapped"),
}


@dataclass(frozen=True, slots=True)
class BoxProblem:
    """Something wrong with the files of a data set, rather than with a box."""

    kind: ProblemKind
    text: str
    where: str
    then: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class BoxTable:
    """All images of a split with their boxes, as they are in the files."""

    class_names: tuple[str, ...]
    class_ids: tuple[int, ...]
    files: FileList
    image_ids: Sequence[int | str]
    sizes: npt.NDArray[np.int32]  # [n, 2]: height, width; zeros in a table of fractions
    offsets: I64  # [n + 1]: the boxes of image i are rows offsets[i] to offsets[i + 1]
    boxes_xyxy: F32  # [k, 4]
    labels: I64
    is_crowd: Flags
    difficult: Flags
    area: F32
    is_relative: bool = False  # boxes are fractions of the image
    places: FileList | None = None  # where each image's boxes are written, if in a file of its own
    problems: tuple[BoxProblem, ...] = ()

    def __len__(self) -> int:
        return len(self.files)

    def annotation(self, index: int, size: tuple[int, int] | None = None) -> Annotation:
        """The boxes of an image; a table of fractions needs its (height, width)."""
        rows = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        height, width = (int(side) for side in (self.sizes[index] if size is None else size))
        boxes, area = self.boxes_xyxy[rows], self.area[rows]
        if self.is_relative:
            boxes, area = boxes * np.array([width, height] * 2, np.float32), area * np.float32(width * height)
        of = (self.labels[rows], self.is_crowd[rows], self.difficult[rows], area)
        return Annotation(boxes, *of, self.image_ids[index], height, width)

    def owners(self) -> I64:
        """The image of each box."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    def place(self, index: int) -> str:
        """Where a person finds what is said about an image."""
        return (self.files if self.places is None else self.places)[index]

    def keep_boxes(self, kept: Flags) -> BoxTable:
        """The same images with some of their boxes."""
        counts = np.bincount(self.owners()[kept], minlength=len(self))
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
        for piece in self.files.content():
            digest.update(piece)
        for array in (self.sizes, self.offsets, self.boxes_xyxy, self.labels, self.is_crowd, self.difficult):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


@dataclass(slots=True)
class TableBuilder:
    """A table made image by image."""

    class_names: tuple[str, ...]
    class_ids: tuple[int, ...]
    is_relative: bool = False
    files: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    image_ids: list[int | str] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    boxes: list[tuple[float, float, float, float]] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    difficult: list[bool] = field(default_factory=list)
    problems: list[BoxProblem] = field(default_factory=list)

    def picture(self, file: str, place: str, image_id: int | str, height: int = 0, width: int = 0) -> None:
        """The next image; its boxes follow."""
        self.files.append(file)
        self.places.append(place)
        self.image_ids.append(image_id)
        self.sizes.append((height, width))
        self.counts.append(0)

    def box(self, corners: tuple[float, float, float, float], label: int, difficult: bool = False) -> None:
        """A box of the last image."""
        self.boxes.append(corners)
        self.labels.append(label)
        self.difficult.append(difficult)
        self.counts[-1] += 1

    def problem(self, kind: ProblemKind, text: str, where: str, then: str = "") -> None:
        """Something wrong with the files."""
        self.problems.append(BoxProblem(kind, text, where, then))

    def table(self) -> BoxTable:
        """All of it."""
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
            FileList(self.places),
            tuple(self.problems),
        )


def joined(tables: Sequence[BoxTable]) -> BoxTable:
    """Tables with the same classes, one after the other; an id that comes twice is a problem."""
    ids = [number for table in tables for number in table.image_ids]
    places = [table.place(index) for table in tables for index in range(len(table))]
    twice = [
        BoxProblem("duplicate-id", f"image id {number} is there {count} times", places[ids.index(number)])
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
        FileList(places),
        tuple(twice),
    )


def find_faults(table: BoxTable) -> dict[str, I64]:
    """Rows of boxes that are not usable, each under the worst that is wrong with it."""
    boxes = table.boxes_xyxy
    if table.is_relative:
        most, slack = np.ones((len(boxes), 2)), _ROUNDING_FRACTION
    else:
        most, slack = table.sizes[table.owners()][:, ::-1].astype(np.float64), _ROUNDING_PX
    with np.errstate(invalid="ignore"):
        wrong = {
            "unknown-class": table.labels == UNKNOWN,
            "not-finite": ~np.isfinite(boxes).all(1),
            "swapped": (boxes[:, 2:] < boxes[:, :2]).any(1),
            "zero-area": (boxes[:, 2:] == boxes[:, :2]).any(1),
            "outside": (boxes[:, :2] < -slack).any(1) | (boxes[:, 2:] > most + slack).any(1),
        }
    told = np.zeros(len(boxes), bool)
    found: dict[str, I64] = {}
    for kind in FAULTS:
        found[kind] = np.flatnonzero(wrong[kind] & ~told)
        told |= wrong[kind]
    return found


def settled(table: BoxTable, data: DataConfig, split: Split) -> tuple[BoxTable, I64, tuple[str, ...]]:
    """The table as a run uses it, which of its images are used, and what was left out, in words.

    Validation keeps every image and every box: scores are computed against what the files say.
    """
    if table.problems:
        raise refusal(table.problems[0])
    faults = find_faults(table)
    for kind, rows in faults.items():
        is_borne = data.bad_boxes != "stop" and kind not in _NEVER_BORNE[split]
        if len(rows) and not is_borne:
            raise _refused_box(table, kind, faults, can_be_borne=kind not in _NEVER_BORNE[split])
    everything = np.arange(len(table))
    if split == "val":
        return table, everything, ()
    notes: list[str] = []
    kept = table
    num_bad = sum(len(rows) for rows in faults.values())
    if num_bad:
        kept = _repaired(table, faults, clip=data.bad_boxes == "clip")
        num_dropped = len(table.labels) - len(kept.labels)
        text = f"{num_dropped:,} of {len(table.labels):,} boxes are not usable and are left out"
        notes.append(text + (f", {num_bad - num_dropped:,} are cut to the image" if num_bad > num_dropped else ""))
    if data.empty_images == "keep":
        return kept, everything, tuple(notes)
    used = np.flatnonzero(np.diff(kept.offsets) > 0)
    if not len(used):
        raise AnnotationError(
            "no training image has a usable box",
            where=table.place(0) if len(table) else "",
            why=f"there are {len(table):,} images with {len(table.labels):,} boxes, and none is left",
            then="reconv data check PATH says what is wrong with them",
        )
    if len(used) < len(table):
        notes.append(f"{len(used):,} of {len(table):,} images have a usable box, the others are left out")
    return kept, used, tuple(notes)


def _repaired(table: BoxTable, faults: dict[str, I64], clip: bool) -> BoxTable:
    kept = np.ones(len(table.labels), bool)
    for kind, rows in faults.items():
        kept[rows] = clip and kind == "outside"
    if clip:
        most = np.ones(2) if table.is_relative else table.sizes[table.owners()][:, ::-1]
        corners = np.clip(table.boxes_xyxy.reshape(-1, 2, 2), 0, np.expand_dims(most, -2)).astype(np.float32)
        table = replace(table, boxes_xyxy=corners.reshape(-1, 4))
        kept &= (table.boxes_xyxy[:, 2:] > table.boxes_xyxy[:, :2]).all(1)
    return table.keep_boxes(kept)


def _refused_box(table: BoxTable, kind: str, faults: dict[str, I64], can_be_borne: bool) -> AnnotationError:
    row = int(faults[kind][0])
    owner = int(table.owners()[row])
    number = row - int(table.offsets[owner]) + 1
    corners = ", ".join(f"{value:g}" for value in table.boxes_xyxy[row].tolist())
    of = "" if table.is_relative else f" of {table.sizes[owner, 1]} x {table.sizes[owner, 0]}"
    counts = ", ".join(f"{len(rows):,} {FAULTS[name]}" for name, rows in faults.items() if len(rows))
    then = "correct the annotation; reconv data check PATH lists all such boxes"
    if can_be_borne:
        then += "; or --set data.bad_boxes=skip to leave them out, clip to cut them to the image"
    return AnnotationError(
        f"a box that {FAULTS[kind]}: box {number} of {table.files[owner]}{of}, corners {corners}",
        where=table.place(owner),
        why=f"of {len(table.labels):,} boxes {counts}",
        then=then,
    )


def refusal(problem: BoxProblem) -> AnnotationError:
    """The error for what is wrong with the files."""
    then = problem.then or "correct the annotation; reconv data check PATH lists all that is wrong"
    return AnnotationError(problem.text, where=problem.where, then=then)


def described(table: BoxTable, rows: Sequence[int]) -> Iterator[str]:
    """Each box as a person would look for it."""
    owners = table.owners()
    for row in rows:
        owner = int(owners[row])
        corners = ", ".join(f"{value:g}" for value in table.boxes_xyxy[row].tolist())
        yield f"{table.place(owner)}: box {row - int(table.offsets[owner]) + 1} ({corners})"
