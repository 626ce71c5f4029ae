"""Annotations of images with boxes.

Boxes are absolute pixels (x1, y1, x2, y2) of the stored image. Labels index the dataset's class names.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Annotation:
    """The boxes of one image, in the order of the files."""

    boxes_xyxy: F32  # [k, 4]
    labels: I64  # [k], from 0
    is_crowd: Flags  # [k]: a group of objects; evaluation ignores detections there, training ignores the box
    difficult: Flags  # [k]: an object that evaluation does not require (Pascal VOC)
    area: F32  # [k]: of the object, which may be smaller than its box
    image_id: int | str
    height: int
    width: int

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, some: Flags | I64) -> Annotation:
        """The boxes at a mask or indices."""
        return Annotation(
            self.boxes_xyxy[some],
            self.labels[some],
            self.is_crowd[some],
            self.difficult[some],
            self.area[some],
            self.image_id,
            self.height,
            self.width,
        )


def make_annotation(
    boxes_xyxy: npt.ArrayLike,
    labels: npt.ArrayLike,
    image_id: int | str,
    height: int,
    width: int,
    *,
    is_crowd: npt.ArrayLike | None = None,
    difficult: npt.ArrayLike | None = None,
    area: npt.ArrayLike | None = None,
) -> Annotation:
    """An annotation from plain lists; the default areas are those of the boxes."""
    boxes = np.asarray(boxes_xyxy, np.float32).reshape(-1, 4)
    num_boxes = len(boxes)
    flags = [np.zeros(num_boxes, bool) if given is None else np.asarray(given, bool) for given in (is_crowd, difficult)]
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) if area is None else np.asarray(area, np.float32)
    numbers = np.asarray(labels, np.int64).reshape(num_boxes)
    return Annotation(boxes, numbers, flags[0], flags[1], areas.reshape(num_boxes), image_id, height, width)
