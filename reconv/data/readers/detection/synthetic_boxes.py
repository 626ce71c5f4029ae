"""Generated images with boxes: no files, the same on every machine, and learnable.

A sample depends only on its split and index. An image is half noise and half the patterns of its boxes' classes.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from reconv.core.random import key, uniforms
from reconv.data.boxes.annotations import NO_TARGET, DetectionDataset
from reconv.data.dataset import I64, Sample, Split
from reconv.data.readers.synthetic import SyntheticDataset, class_pattern
from reconv.detection.annotation import Annotation, make_annotation

MAX_BOXES = 13
_MIN_SIDE = 0.08  # of a box, relative to the image
_MAX_SIDE = 0.6


class SyntheticBoxDataset(DetectionDataset):
    """Synthetic images with boxes, generated on the host per sample."""

    def __init__(self, kind: str, split: Split, num_samples: int, num_classes: int, size: int, channels: int) -> None:
        self.kind = kind  # synthetic-device: the training loader makes one batch and repeats it
        self._plain = SyntheticDataset(split, num_samples, num_classes, size, channels)
        self._size = size
        self._channels = channels
        self._key = key(0, f"synthetic.boxes.{split}")
        self.class_names = self._plain.class_names
        self.class_ids = tuple(range(1, num_classes + 1))
        self.origin = (
            f"{kind}: {num_samples} {split} images of {size} px with boxes in {num_classes} classes, generated"
        )

    def __len__(self) -> int:
        return len(self._plain)

    def __getitem__(self, index: int) -> Sample:
        """Noise, with the pattern of its class in each box; later boxes cover earlier ones."""
        annotation = self.annotation(index)
        noise = self._plain.noise(index)
        patterns = np.zeros_like(noise)
        for (left, top, right, bottom), label in zip(
            annotation.boxes_xyxy.astype(int), annotation.labels.tolist(), strict=True
        ):
            patterns[top:bottom, left:right] = class_pattern(label, bottom - top, right - left, self._channels)
        return Sample((noise >> 1) + (patterns >> 1), NO_TARGET, f"{self.kind}[{index}]", annotation)

    def annotation(self, index: int) -> Annotation:
        """1 to 13 boxes with integer corners."""
        numbers = np.arange(int(self._counts[index]), dtype=np.int64)
        draws = uniforms(key(self._key, "boxes", index), numbers, 5)
        sides = np.maximum(2, self._size * (_MIN_SIDE + (_MAX_SIDE - _MIN_SIDE) * draws[:, :2] ** 2)).round()
        low = np.floor(draws[:, 2:4] * (self._size - sides + 1))
        labels = (draws[:, 4] * len(self.class_names)).astype(np.int64)
        return make_annotation(np.concatenate([low, low + sides], axis=1), labels, index, self._size, self._size)

    def box_counts(self) -> I64:
        """The number of boxes of each image."""
        return self._counts

    @cached_property
    def _counts(self) -> I64:
        draws = uniforms(key(self._key, "counts"), np.arange(len(self), dtype=np.int64), 1)[:, 0]
        return 1 + (draws * MAX_BOXES).astype(np.int64)

    def fingerprint(self) -> str:
        """A description of the images; they are generated."""
        return f"{self.origin}/{self._channels}/{self._key:016x}"
