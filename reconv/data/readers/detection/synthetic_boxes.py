"""Images with boxes made from their index: no files, the same on every machine, and learnable.

Owns the pixels and the boxes. Refuses to know seeds of runs: the data set is fixed. Invariant: sample i is a function
of split and i. An image is half noise, and half the coarse patterns of the classes of its boxes, later boxes over
earlier ones.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from reconv.data.boxes.annotations import NO_TARGET, Annotation, DetectionDataset, annotation
from reconv.data.dataset import I64, Sample, Split
from reconv.data.readers.synthetic import Synthetic, pattern_of
from reconv.random import key, uniforms

MOST_BOXES = 13
_SMALLEST = 0.08  # of the image's side
_LARGEST = 0.6


class SyntheticBoxes(DetectionDataset):
    """Synthetic images with boxes, made on the host, sample by sample."""

    def __init__(self, kind: str, split: Split, num_samples: int, num_classes: int, size: int, channels: int) -> None:
        self.kind = kind  # synthetic-device: the training loader makes one batch and repeats it
        self._plain = Synthetic(split, num_samples, num_classes, size, channels)
        self._size = size
        self._channels = channels
        self._key = key(0, f"synthetic.boxes.{split}")
        self.class_names = self._plain.class_names
        self.class_ids = tuple(range(1, num_classes + 1))
        self.origin = f"{kind}: {num_samples} {split} images of {size} px with boxes in {num_classes} classes, made up"

    def __len__(self) -> int:
        return len(self._plain)

    def __getitem__(self, index: int) -> Sample:
        """Noise, with the pattern of its class in each box."""
        said = self.annotation(index)
        noise = self._plain.noise(index)
        patterns = np.zeros_like(noise)
        for (left, top, right, bottom), label in zip(said.boxes_xyxy.astype(int), said.labels.tolist(), strict=True):
            patterns[top:bottom, left:right] = pattern_of(label, bottom - top, right - left, self._channels)
        return Sample((noise >> 1) + (patterns >> 1), NO_TARGET, f"{self.kind}[{index}]", said)

    def annotation(self, index: int) -> Annotation:
        """One to thirteen boxes of whole pixels."""
        places = np.arange(int(self._counts[index]), dtype=np.int64)
        draws = uniforms(key(self._key, "boxes", index), places, 5)
        sides = np.maximum(2, self._size * (_SMALLEST + (_LARGEST - _SMALLEST) * draws[:, :2] ** 2)).round()
        low = np.floor(draws[:, 2:4] * (self._size - sides + 1))
        labels = (draws[:, 4] * len(self.class_names)).astype(np.int64)
        return annotation(np.concatenate([low, low + sides], axis=1), labels, index, self._size, self._size)

    def box_counts(self) -> I64:
        """How many boxes each image has."""
        return self._counts

    @cached_property
    def _counts(self) -> I64:
        draws = uniforms(key(self._key, "counts"), np.arange(len(self), dtype=np.int64), 1)[:, 0]
        return 1 + (draws * MOST_BOXES).astype(np.int64)

    def fingerprint(self) -> str:
        """The numbers the images are made from."""
        return f"{self.origin}/{self._channels}/{self._key:016x}"
