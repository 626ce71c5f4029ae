"""The order of training samples: an endless stream of positions, mapped to dataset indices.

A pure function of (seed, position): seeking to any step costs one shuffle at most, and no sample comes twice in an
epoch, unless the sampler is balanced.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from reconv.data.dataset import I64, Dataset, all_targets
from reconv.errors import DataError
from reconv.random import key, permutation
from reconv.recipe.schema import Recipe


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


class BalancedSampler(Sampler):
    """Every class equally often: k consecutive positions have one sample of each of the k classes, in random order.

    Round r takes the r-th sample of each class from an endless sequence of shuffles of the class, so that no sample of
    a class is repeated before all of them were used. An epoch has as many samples as the training set.
    """

    def __init__(self, targets: I64, global_batch: int, drop_last: bool, seed: int) -> None:
        super().__init__(len(targets), global_batch, drop_last, seed)
        by_class = np.argsort(targets, kind="stable")
        counts = np.bincount(targets)
        self._members = [members for members in np.split(by_class, np.cumsum(counts)[:-1]) if len(members)]
        self._counts = np.array([len(members) for members in self._members], np.int64)
        num_classes = len(self._members)
        self._order_in_round = lru_cache(maxsize=1024)(
            lambda number: permutation(key(seed, "balanced.round", number), num_classes)
        )
        self._shuffle_class = lru_cache(maxsize=2 * num_classes)(
            lambda number, cycle: self._members[number][
                permutation(key(seed, "balanced.class", number, cycle), len(self._members[number]))
            ]
        )

    def indices_of(self, positions: I64) -> I64:
        rounds, places = np.divmod(positions, len(self._members))
        orders = {number: self._order_in_round(number) for number in np.unique(rounds).tolist()}
        classes = [int(orders[number][place]) for number, place in zip(rounds.tolist(), places.tolist(), strict=True)]
        cycles, numbers = np.divmod(rounds, self._counts[classes])
        chosen = zip(classes, cycles.tolist(), numbers.tolist(), strict=True)
        return np.array([self._shuffle_class(c, cycle)[number] for c, cycle, number in chosen], np.int64)


def make_sampler(dataset: Dataset, recipe: Recipe, global_batch: int) -> Sampler:
    """The sampler of a recipe's `data.sampler`."""
    if recipe.data.sampler == "balanced":
        return BalancedSampler(all_targets(dataset), global_batch, recipe.data.drop_last, recipe.seed)
    return Sampler(len(dataset), global_batch, recipe.data.drop_last, recipe.seed)
