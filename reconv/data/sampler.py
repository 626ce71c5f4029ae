"""The order of training samples: an endless stream of positions, mapped to dataset indices.

A pure function of (seed, position): seeking to any step costs one shuffle at most, and no sample comes twice in an
epoch.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from reconv.data.dataset import I64
from reconv.errors import DataError
from reconv.random import key, permutation


class Sampler:
    """The shuffled order of a training run; position = step * global_batch + row."""

    def __init__(self, num_samples: int, global_batch: int, drop_last: bool, seed: int) -> None:
        if num_samples < 1 or (drop_last and num_samples < global_batch):
            raise DataError(
                f"{num_samples} training samples do not fill a batch of {global_batch}",
                why="data.drop_last: true leaves out a last batch that is not full",
                then=f"--batch-size {max(1, num_samples)} or less, or --set data.drop_last=false",
            )
        self._num_samples = num_samples
        self._global_batch = global_batch
        self._epoch_samples = num_samples // global_batch * global_batch if drop_last else num_samples
        # A step that wraps around touches two epochs; the third entry serves a second loader at another step.
        self._shuffle = lru_cache(maxsize=3)(lambda epoch: permutation(key(seed, "order", epoch), num_samples))

    def positions(self, step: int) -> I64:
        """The positions of a step's global batch."""
        return step * self._global_batch + np.arange(self._global_batch, dtype=np.int64)

    def epoch_of(self, positions: I64) -> I64:
        """The epoch of each position, from 0; with `drop_last: false` an epoch may end in the middle of a batch."""
        return positions // self._epoch_samples

    def indices(self, step: int) -> I64:
        """The dataset indices of a step's global batch."""
        return self.indices_of(self.positions(step))

    def indices_of(self, positions: I64) -> I64:
        """The dataset index of each position."""
        epochs = self.epoch_of(positions)
        offsets = positions - epochs * self._epoch_samples
        indices = np.empty_like(positions)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            indices[rows] = self._shuffle(int(epoch))[offsets[rows]]
        return indices
