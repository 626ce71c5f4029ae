"""Generated images: no files, the same on every machine, and learnable.

A sample depends only on its split and index. An image is half noise and half a coarse pattern of its class, so that a
smoke test has something to learn.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from reconv.core.random import hash_array, key
from reconv.data.dataset import I64, U8, Sample, Split

_SEED = 0
_PATTERN_SIDE = 4

NUM_SAMPLES = 1280
NUM_CLASSES = 10


class SyntheticDataset:
    """Synthetic images, generated on the host per sample."""

    kind = "synthetic"

    def __init__(self, split: Split, num_samples: int, num_classes: int, size: int, channels: int) -> None:
        self._num_samples = num_samples
        self._noise_key = key(_SEED, f"synthetic.{split}")
        self._size = size
        self._channels = channels
        self.class_names = tuple(f"class{number}" for number in range(num_classes))
        self.origin = f"{self.kind}: {num_samples} {split} images of {size} px in {num_classes} classes, generated"

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        """Half noise, half the pattern of the class."""
        target = index % len(self.class_names)
        pattern, pixels = class_pattern(target, self._size, self._size, self._channels), self.noise(index)
        pixels >>= 1
        pattern >>= 1
        pixels += pattern
        return Sample(pixels, target, f"{self.kind}[{index}]")

    @property
    def targets(self) -> I64:
        """The class index of each sample."""
        return np.arange(self._num_samples, dtype=np.int64) % len(self.class_names)

    def noise(self, index: int) -> U8:
        """Random pixels [size, size, channels]."""
        count = self._size * self._size * self._channels
        return _bytes(key(self._noise_key, "pixels", index), count).reshape(self._size, self._size, self._channels)

    def fingerprint(self) -> str:
        """A description of the images; they are generated."""
        return f"{self.origin}/{self._channels}/{self._noise_key:016x}"


class SyntheticDeviceDataset(SyntheticDataset):
    """The same images, but the training loader repeats one batch that stays on the device."""

    kind = "synthetic-device"


class MultilabelSyntheticDataset:
    """The same images with two labels each: the class of the pattern, and the one half of the classes further."""

    is_multilabel = True

    def __init__(self, dataset: SyntheticDataset) -> None:
        self._dataset = dataset
        self.kind = dataset.kind
        self.class_names = dataset.class_names
        self.origin = f"{dataset.origin}, two labels each"

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Sample:
        sample = self._dataset[index]
        num_classes = len(self.class_names)
        return replace(sample, target=-1, labels=(sample.target, (sample.target + num_classes // 2) % num_classes))

    def fingerprint(self) -> str:
        return f"{self._dataset.fingerprint()}/multilabel"


def class_pattern(target: int, height: int, width: int, channels: int) -> U8:
    """The coarse pattern of a class as [height, width, channels]."""
    cells = _bytes(key(_SEED, "synthetic.pattern", target), _PATTERN_SIDE * _PATTERN_SIDE * channels)
    rows, columns = (np.arange(side) * _PATTERN_SIDE // side for side in (height, width))
    # `take` copies whole rows and is 50 times as fast as indexing with two arrays.
    return cells.reshape(_PATTERN_SIDE, _PATTERN_SIDE, channels).take(columns, axis=1).take(rows, axis=0)


def _bytes(base: int, count: int) -> U8:
    words = hash_array(base, np.arange((count + 7) // 8, dtype=np.int64)).astype("<u8")
    return words.view(np.uint8)[:count]
