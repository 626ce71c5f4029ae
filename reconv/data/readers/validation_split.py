"""Choice of the images held out for validation if a dataset has no validation split.

An image is held out if a hash of (`data.split_seed`, its path) is below `data.validation_split`. So it stays in its
split when other files are added or removed, on every machine, and in runs with another `seed`: scores of several seeds
are only comparable on the same images. In small classes chance is limited: from half to one and a half times that
fraction is held out.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reconv.core.errors import DataError
from reconv.core.random import key, uniforms
from reconv.data.dataset import Split
from reconv.recipe.parts.data import DataConfig

_LIMITS = (0.5, 1.5)  # of the fraction, per class

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ValidationSplit:
    """A share of the images, by the hash of their paths."""

    fraction: float  # 1: all images are for validation
    seed: int

    @classmethod
    def of(cls, data: DataConfig) -> ValidationSplit:
        return cls(data.validation_split, data.split_seed)

    def held_out(self, paths: Iterable[str], targets: npt.NDArray[np.integer] | None = None) -> Flags:
        """Mask of the images held out; `paths` are relative to the dataset, `targets` are their classes, if any.

        A class (or the whole set) of two or more images has at least one in each split; a single image is trained on.
        Images change their split when others are added only in a class that is at its limit.
        """
        hashes = np.array([_path_hash(path) for path in paths], np.uint64)
        if self.fraction >= 1:
            return np.ones(len(hashes), bool)
        draws = uniforms(key(self.seed, "validation-split"), hashes, 1)[:, 0]
        held_out: Flags = draws < self.fraction
        classes = np.zeros(len(hashes), np.int64) if targets is None else targets.astype(np.int64)
        order = np.lexsort((draws, classes))
        starts = np.flatnonzero(np.diff(classes[order], prepend=-1))
        for members in np.split(order, starts[1:]):  # of one class, in the order of their draws
            low, high = (max(1, round(ratio * self.fraction * len(members))) for ratio in _LIMITS)
            num_held_out = min(max(int(held_out[members].sum()), low), high, len(members) - 1)
            held_out[members] = np.arange(len(members)) < num_held_out
        return held_out

    def select(
        self, split: Split, paths: Iterable[str], targets: npt.NDArray[np.integer] | None, where: str
    ) -> tuple[Flags, str]:
        """Mask of the images in `split`, which must not be empty, and a sentence on the split for people."""
        held_out = self.held_out(paths, targets)
        num_val = int(held_out.sum())
        if split == "test":
            raise DataError(
                "there is no test split", where=where, why="the data has one set of images", hint="--split val"
            )
        if num_val in (0, len(held_out)) and self.fraction < 1:
            raise DataError(
                "no image can be held out for validation",
                where=where,
                why="there is no validation split, and no class has two images",
                hint="add images, or make train/CLASS/ and val/CLASS/",
            )
        return held_out == (split == "val"), self._describe(len(held_out) - num_val, num_val, targets is not None)

    def _describe(self, num_train: int, num_val: int, by_class: bool) -> str:
        if self.fraction >= 1:
            return f"no validation split: all {num_val:,} images are evaluated"
        share = f"{100 * self.fraction:g}%" + (" of each class" if by_class else "")
        return (
            f"about {share} is held out for validation (data.validation_split, split_seed {self.seed}): "
            f"{num_train:,} images for training, {num_val:,} for validation"
        )


def _path_hash(path: str) -> int:
    """64 bits of a path's bytes, the same on every machine."""
    name = os.fsencode(path.replace(os.sep, "/"))
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
