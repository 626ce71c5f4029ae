"""The handwritten digits of the package scattered over a canvas: a small detection task without a download.

An image depends only on its split and index. Validation uses other digits than training. Boxes are exact, and two boxes
overlap by at most a quarter of the smaller one.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from reconv.core.random import hash_array, key, uniforms
from reconv.data.boxes.annotations import NO_TARGET, DetectionDataset
from reconv.data.dataset import I64, Sample, Split
from reconv.data.readers.digits import open_digits
from reconv.detection.annotation import Annotation, make_annotation

NUM_SAMPLES = 2000  # for training; validation has a fifth as many
_SEED = 0
_MAX_DIGITS = 6
_SIDES = (0.14, 0.36)  # of a digit's box, relative to the canvas
_MAX_OVERLAP = 0.25  # of the smaller of two boxes
_TRIES = 4
_BACKGROUND = 96  # maximum brightness of the background
_RANDOM_PER_TRY = 3  # side and corner of a box


class ScatteredDigitsDataset(DetectionDataset):
    """One split; the canvas has the model's input size."""

    kind = "scattered-digits"

    def __init__(self, split: Split, num_train: int, size: int, channels: int) -> None:
        self._num_samples = num_train if split == "train" else max(1, num_train // 5)
        self._digits = open_digits(split)
        self._key = key(_SEED, f"scattered.{split}")
        self._size = size
        self._channels = channels
        self.class_names = self._digits.class_names
        self.class_ids = tuple(range(1, len(self.class_names) + 1))
        self.origin = (
            f"{self.kind}: {self._num_samples:,} {split} images of {size} px, "
            f"1 to {_MAX_DIGITS} of {len(self._digits):,} handwritten digits on each, generated"
        )

    def __len__(self) -> int:
        return self._num_samples

    def annotation(self, index: int) -> Annotation:
        """The boxes of the digits."""
        boxes, chosen = self._place_digits(index)
        return make_annotation(boxes, self._digits.targets[chosen], index, self._size, self._size)

    def __getitem__(self, index: int) -> Sample:
        """The canvas: noise, with the digits painted where they are brighter."""
        annotation = self.annotation(index)
        _, chosen = self._place_digits(index)
        side = self._size
        words = hash_array(key(self._key, "noise", index), np.arange((side * side + 7) // 8)).astype("<u8")
        noise = words.view(np.uint8)[: side * side].reshape(side, side)
        canvas = (noise.astype(np.uint16) * _BACKGROUND // 255).astype(np.uint8)
        for (left, top, right, bottom), digit in zip(annotation.boxes_xyxy.astype(int), chosen.tolist(), strict=True):
            ink = Image.fromarray(self._digits.images[digit, 0])
            painted = np.asarray(ink.resize((int(right - left), int(bottom - top)), Image.Resampling.BILINEAR))
            canvas[top:bottom, left:right] = np.maximum(canvas[top:bottom, left:right], painted)
        pixels = np.repeat(canvas[:, :, None], self._channels, axis=2)
        return Sample(pixels, NO_TARGET, f"{self.kind}[{index}]", annotation)

    def _place_digits(self, index: int) -> tuple[I64, I64]:
        """Boxes with integer corners, and the digit in each; a digit that does not fit is left out."""
        random = uniforms(self._key, np.array([index]), 1 + _MAX_DIGITS * (1 + _RANDOM_PER_TRY * _TRIES))[0]
        wanted = 1 + int(random[0] * _MAX_DIGITS)
        boxes: list[tuple[int, int, int, int]] = []
        chosen: list[int] = []
        for own in random[1:].reshape(_MAX_DIGITS, -1)[:wanted]:
            for scale, x, y in own[1:].reshape(_TRIES, _RANDOM_PER_TRY).tolist():
                side = max(1, round(self._size * (_SIDES[0] + scale * (_SIDES[1] - _SIDES[0]))))
                left, top = int(x * (self._size - side + 1)), int(y * (self._size - side + 1))
                box = (left, top, left + side, top + side)
                if all(_overlap(box, other) <= _MAX_OVERLAP for other in boxes):
                    boxes.append(box)
                    chosen.append(int(own[0] * len(self._digits)))
                    break
        return np.array(boxes, np.int64), np.array(chosen, np.int64)

    def box_counts(self) -> I64:
        """The number of digits in each image."""
        return np.array([len(self._place_digits(index)[1]) for index in range(len(self))], np.int64)

    def fingerprint(self) -> str:
        """A description of the images; they are generated."""
        return f"{self.origin}/{self._channels}/{self._key:016x}"


def _overlap(first: tuple[int, int, int, int], second: tuple[int, int, int, int]) -> float:
    """The intersection of two squares, relative to the smaller one."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    smaller = min(first[2] - first[0], second[2] - second[0])
    return max(width, 0) * max(height, 0) / smaller**2
