"""The embedded handwritten digits scattered over a canvas: a small detection task without a download.

Owns where digits lie and how a canvas is painted. Refuses to know seeds of runs: the data set is fixed. Invariant:
image i is a function of split and i; the digits of validation are never seen in training; a box is exactly the
rectangle its digit is painted into, and no two boxes overlap by more than a quarter of the smaller.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from reconv.data.boxes.annotations import NO_TARGET, Annotation, DetectionDataset, annotation
from reconv.data.dataset import I64, Sample, Split
from reconv.data.readers.digits import open_digits
from reconv.random import hash_array, key, uniforms

NUM_SAMPLES = 2000  # for training; validation has a fifth as many
_SEED = 0
_MOST_DIGITS = 6
_SIDES = (0.14, 0.36)  # of a digit's box, as shares of the canvas
_MOST_SHARED = 0.25  # of the smaller of two boxes
_TRIES = 4
_BACKGROUND = 96  # the brightest the background gets
_DRAWS = 3  # side and corner of a box


class ScatteredDigits(DetectionDataset):
    """One split; the canvas has the side of the network's input."""

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
            f"1 to {_MOST_DIGITS} of {len(self._digits):,} handwritten digits on each, made up"
        )

    def __len__(self) -> int:
        return self._num_samples

    def annotation(self, index: int) -> Annotation:
        """The boxes of the digits."""
        boxes, chosen = self._placed(index)
        return annotation(boxes, self._digits.targets[chosen], index, self._size, self._size)

    def __getitem__(self, index: int) -> Sample:
        """The canvas: noise, and the digits painted where it is darker than they are."""
        said = self.annotation(index)
        _, chosen = self._placed(index)
        side = self._size
        words = hash_array(key(self._key, "noise", index), np.arange((side * side + 7) // 8)).astype("<u8")
        noise = words.view(np.uint8)[: side * side].reshape(side, side)
        canvas = (noise.astype(np.uint16) * _BACKGROUND // 255).astype(np.uint8)
        for (left, top, right, bottom), digit in zip(said.boxes_xyxy.astype(int), chosen.tolist(), strict=True):
            ink = Image.fromarray(self._digits.images[digit, 0])
            painted = np.asarray(ink.resize((int(right - left), int(bottom - top)), Image.Resampling.BILINEAR))
            canvas[top:bottom, left:right] = np.maximum(canvas[top:bottom, left:right], painted)
        pixels = np.repeat(canvas[:, :, None], self._channels, axis=2)
        return Sample(pixels, NO_TARGET, f"{self.kind}[{index}]", said)

    def _placed(self, index: int) -> tuple[I64, I64]:
        """Boxes in whole pixels, and the digit in each; a digit that finds no room in a few tries stays out."""
        draws = uniforms(self._key, np.array([index]), 1 + _MOST_DIGITS * (1 + _DRAWS * _TRIES))[0]
        wanted = 1 + int(draws[0] * _MOST_DIGITS)
        boxes: list[tuple[int, int, int, int]] = []
        chosen: list[int] = []
        for own in draws[1:].reshape(_MOST_DIGITS, -1)[:wanted]:
            for part, x, y in own[1:].reshape(_TRIES, _DRAWS).tolist():
                side = max(1, round(self._size * (_SIDES[0] + part * (_SIDES[1] - _SIDES[0]))))
                left, top = int(x * (self._size - side + 1)), int(y * (self._size - side + 1))
                box = (left, top, left + side, top + side)
                if all(_shared(box, other) <= _MOST_SHARED for other in boxes):
                    boxes.append(box)
                    chosen.append(int(own[0] * len(self._digits)))
                    break
        return np.array(boxes, np.int64), np.array(chosen, np.int64)

    def box_counts(self) -> I64:
        """How many digits each image has."""
        return np.array([len(self._placed(index)[1]) for index in range(len(self))], np.int64)

    def fingerprint(self) -> str:
        """The numbers the images are made from."""
        return f"{self.origin}/{self._channels}/{self._key:016x}"


def _shared(first: tuple[int, int, int, int], second: tuple[int, int, int, int]) -> float:
    """What two squares share, as a part of the smaller."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    smaller = min(first[2] - first[0], second[2] - second[0])
    return max(width, 0) * max(height, 0) / smaller**2
