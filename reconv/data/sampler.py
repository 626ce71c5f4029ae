"""The order of training samples: an endless stream of positions, mapped to dataset indices.

A pure function of (seed, position): seeking to any step costs one shuffle at most, and no sample comes twice in an
epoch, unless the sampler is balanced or repeats images.

A sample's position is step x global batch + row. With `data.drop_last: true` an epoch has `len // batch` steps;
otherwise samples continue into the next epoch. A balanced sampler deals the classes in rounds of one sample each, and
repeated augmentation takes each image of an epoch several times; neither changes the number of samples in an epoch
(tests/data/test_sampler.py).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from reconv.core.errors import DataError
from reconv.core.random import key, permutation, uniforms
from reconv.data.dataset import I64, Dataset, all_targets
from reconv.recipe.schema import Recipe

SHUFFLE_RUN = 256  # consecutive samples that `data.shuffle_window` keeps close together: several MB of images


class Sampler:
    """The shuffled order of a training run; position = step * global_batch + row.

    With `repeats` each image comes that many times one after the other (repeated augmentation, Hoffer et al., 2020), so
    that an epoch, which keeps its length, has 1 / repeats of the images: those of DeiT's RASampler. In each batch the
    first copies of all images come first, then the second ones, so that the copies of an image lie far apart.
    """

    def __init__(
        self,
        num_samples: int,
        global_batch: int,
        drop_last: bool,
        seed: int,
        repeats: int = 1,
        shuffle_window: int | None = None,
    ) -> None:
        if num_samples < 1 or (drop_last and num_samples < global_batch):
            raise DataError(
                f"{num_samples} training samples do not fill a batch of {global_batch}",
                why="data.drop_last: true leaves out a last batch that is not full",
                hint=f"--batch-size {max(1, num_samples)} or less, or --set data.drop_last=false",
            )
        self._num_samples = num_samples
        self._global_batch = global_batch
        self._epoch_samples = num_samples // global_batch * global_batch if drop_last else num_samples
        self._repeats = repeats
        # A step that wraps around touches two epochs; the third entry serves a second loader at another step.
        self._shuffle = lru_cache(maxsize=3)(
            lambda epoch: (
                permutation(key(seed, "order", epoch), num_samples)
                if shuffle_window is None
                else windowed_permutation(seed, epoch, num_samples, shuffle_window)
            )
        )

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
        if self._repeats > 1:
            positions = self._spread_copies(positions)
        epochs = self.epoch_of(positions)
        return self._draw(epochs, (positions - epochs * self._epoch_samples) // self._repeats)

    def _spread_copies(self, positions: I64) -> I64:
        """The places in the order of each position: a batch is sorted by the number of the copy."""
        places = np.empty_like(positions)
        batches = positions // self._global_batch
        for batch in np.unique(batches).tolist():
            rows = batches == batch
            own = self.positions(batch)
            copies = (own - self.epoch_of(own) * self._epoch_samples) % self._repeats
            by_copy = own[np.lexsort((own, copies))]
            places[rows] = by_copy[positions[rows] - batch * self._global_batch]
        return places

    def _draw(self, epochs: I64, numbers: I64) -> I64:
        """The dataset index of each epoch's image with a number."""
        indices = np.empty_like(numbers)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            indices[rows] = self._shuffle(int(epoch))[numbers[rows]]
        return indices


def windowed_permutation(seed: int, epoch: int, num_samples: int, window: int) -> I64:
    """An order of all samples in which the samples of a run of `SHUFFLE_RUN` neighbors come within `window` positions.

    The runs are shuffled, and each sample moves back by up to `window` positions from the start of its run. So only
    window / SHUFFLE_RUN runs are in use at a time, and an epoch reads each part of a file once.
    """
    num_runs = -(-num_samples // SHUFFLE_RUN)
    place_of_run = np.empty(num_runs, np.float64)
    place_of_run[permutation(key(seed, "order.runs", epoch), num_runs)] = np.arange(num_runs) * float(SHUFFLE_RUN)
    samples = np.arange(num_samples, dtype=np.int64)
    moved = uniforms(key(seed, "order.window", epoch), samples, 1)[:, 0] * window
    return np.argsort(place_of_run[samples // SHUFFLE_RUN] + moved, kind="stable")


class BalancedSampler(Sampler):
    """Every class equally often: k consecutive positions have one sample of each of the k classes, in random order.

    Round r takes the r-th sample of each class from an endless sequence of shuffles of the class, so that no sample of
    a class is repeated before all of them were used. An epoch has as many samples as the training set.
    """

    def __init__(self, targets: I64, global_batch: int, drop_last: bool, seed: int, repeats: int = 1) -> None:
        super().__init__(len(targets), global_batch, drop_last, seed, repeats)
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

    def _draw(self, epochs: I64, numbers: I64) -> I64:
        images_per_epoch = -(-self._epoch_samples // self._repeats)
        rounds, places = np.divmod(epochs * images_per_epoch + numbers, len(self._members))
        orders = {number: self._order_in_round(number) for number in np.unique(rounds).tolist()}
        classes = [int(orders[number][place]) for number, place in zip(rounds.tolist(), places.tolist(), strict=True)]
        cycles, members = np.divmod(rounds, self._counts[classes])
        chosen = zip(classes, cycles.tolist(), members.tolist(), strict=True)
        return np.array([self._shuffle_class(c, cycle)[member] for c, cycle, member in chosen], np.int64)


def make_sampler(dataset: Dataset, recipe: Recipe, global_batch: int) -> Sampler:
    """The sampler of a recipe's `data.sampler` and `augment.repeats`."""
    data, repeats = recipe.data, recipe.augment.repeats
    if data.sampler == "balanced":
        return BalancedSampler(all_targets(dataset), global_batch, data.drop_last, recipe.seed, repeats)
    return Sampler(len(dataset), global_batch, data.drop_last, recipe.seed, repeats, data.shuffle_window)
