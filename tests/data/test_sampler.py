"""The order of training samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconv.core.errors import DataError
from reconv.data.sampler import SHUFFLE_RUN, BalancedSampler, Sampler, windowed_permutation


@given(
    num_samples=st.integers(1, 60), global_batch=st.integers(1, 60), seed=st.integers(0, 2**31), epoch=st.integers(0, 9)
)
def test_with_drop_last_an_epoch_has_each_sample_at_most_once(
    num_samples: int, global_batch: int, seed: int, epoch: int
) -> None:
    global_batch = min(num_samples, global_batch)
    order = Sampler(num_samples, global_batch, True, seed)
    num_steps = num_samples // global_batch
    steps = range(epoch * num_steps, (epoch + 1) * num_steps)
    seen = np.concatenate([order.indices(step) for step in steps])
    assert len(np.unique(seen)) == len(seen) == num_steps * global_batch
    assert {int(e) for step in steps for e in order.epoch_of(order.positions(step))} == {epoch}


@given(num_samples=st.integers(1, 40), global_batch=st.integers(1, 90), seed=st.integers(0, 2**31))
def test_without_drop_last_epochs_follow_each_other_without_a_gap(
    num_samples: int, global_batch: int, seed: int
) -> None:
    order = Sampler(num_samples, global_batch, False, seed)
    stream = np.concatenate([order.indices(step) for step in range(3 * num_samples // global_batch + 1)])
    epochs = order.epoch_of(np.arange(len(stream), dtype=np.int64))
    for epoch in range(len(stream) // num_samples):
        assert sorted(stream[epochs == epoch]) == list(range(num_samples))


def test_any_step_is_reached_without_the_ones_before_it() -> None:
    walked = Sampler(1000, 64, False, 3)
    stream = [walked.indices(step) for step in range(100)]
    for step in (99, 0, 15, 16, 50):
        assert np.array_equal(Sampler(1000, 64, False, 3).indices(step), stream[step])


def test_epochs_and_seeds_shuffle_differently() -> None:
    first = Sampler(100, 100, True, 0)
    assert not np.array_equal(first.indices(0), first.indices(1))
    assert not np.array_equal(first.indices(0), Sampler(100, 100, True, 1).indices(0))
    assert not np.array_equal(first.indices(0), np.arange(100))


def test_too_few_samples_for_a_batch_are_an_error() -> None:
    with pytest.raises(DataError, match="9 training samples do not fill a batch of 10"):
        Sampler(9, 10, True, 0)
    assert len(Sampler(9, 10, False, 0).indices(0)) == 10


@given(
    counts=st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(any),
    global_batch=st.integers(1, 20),
    seed=st.integers(0, 2**31),
)
def test_a_balanced_sampler_has_one_sample_of_each_class_in_every_round(
    counts: list[int], global_batch: int, seed: int
) -> None:
    targets = np.repeat(np.arange(len(counts)), counts)
    order = BalancedSampler(targets, global_batch, False, seed)
    classes = [number for number, count in enumerate(counts) if count]
    num_rounds = 3 * max(counts)
    steps = -(-num_rounds * len(classes) // global_batch)
    stream = np.concatenate([order.indices(step) for step in range(steps)])
    rounds = stream[: num_rounds * len(classes)].reshape(num_rounds, len(classes))
    assert all(sorted(targets[row]) == classes for row in rounds)
    for number in classes:
        members = np.flatnonzero(targets == number)
        drawn = np.array([row[targets[row] == number][0] for row in rounds])
        for start in range(0, len(drawn) - len(members) + 1, len(members)):
            assert sorted(drawn[start : start + len(members)]) == members.tolist()


def test_a_balanced_sampler_reaches_any_step_and_shuffles_by_seed() -> None:
    targets = np.repeat([0, 1, 2], [500, 40, 3])
    walked = BalancedSampler(targets, 64, True, 3)
    stream = [walked.indices(step) for step in range(40)]
    for step in (39, 0, 8, 9):
        assert np.array_equal(BalancedSampler(targets, 64, True, 3).indices(step), stream[step])
    assert not np.array_equal(stream[0], BalancedSampler(targets, 64, True, 4).indices(0))
    drawn = np.concatenate(stream)
    of_second_class = drawn[targets[drawn] == 1].reshape(-1)[: 3 * 40].reshape(3, 40)
    assert len({tuple(cycle) for cycle in of_second_class.tolist()}) == 3, "each cycle has its own shuffle"
    counts = np.bincount(targets[drawn])
    assert counts.max() - counts.min() <= 1
    assert walked.epoch_of(walked.positions(8)).tolist() == [1] * 64  # an epoch has 543 // 64 steps


@given(
    num_samples=st.integers(4, 60),
    global_batch=st.integers(4, 30),
    repeats=st.integers(2, 4),
    epoch=st.integers(0, 4),
    balanced=st.booleans(),
)
def test_repeats_are_the_images_of_a_repeated_augmentation_sampler(
    num_samples: int, global_batch: int, repeats: int, epoch: int, balanced: bool
) -> None:
    global_batch = min(num_samples, global_batch)
    targets = np.arange(num_samples) % 3
    settings = (global_batch, True, 7)
    once = BalancedSampler(targets, *settings) if balanced else Sampler(num_samples, *settings)
    order = BalancedSampler(targets, *settings, repeats) if balanced else Sampler(num_samples, *settings, repeats)
    steps = range(epoch * (num_samples // global_batch), (epoch + 1) * (num_samples // global_batch))
    drawn = [order.indices(step) for step in steps]
    if not balanced or epoch == 0:  # RASampler: repeat each image of the shuffled epoch, keep the length of the epoch
        shuffled = np.concatenate([once.indices(step) for step in steps])
        expected = np.repeat(shuffled, repeats)[: len(shuffled)].reshape(-1, global_batch)
        assert [sorted(step) for step in drawn] == [sorted(step) for step in expected]
    assert [order.epoch_of(order.positions(step)).tolist() for step in steps] == [[epoch] * global_batch] * len(steps)
    seeking = Sampler(num_samples, *settings, repeats)
    rows = order.positions(steps[-1])[1::2]
    assert balanced or np.array_equal(seeking.indices_of(rows), drawn[-1][1::2])


def test_copies_of_an_image_lie_far_apart_in_a_batch() -> None:
    step = Sampler(1000, 48, True, 0, repeats=3).indices(2)
    assert np.array_equal(step[:16], step[16:32]) and np.array_equal(step[:16], step[32:])
    assert len(np.unique(step)) == 16


@given(num_samples=st.integers(1, 3000), window=st.integers(1, 4000), seed=st.integers(0, 2**31))
def test_a_windowed_shuffle_has_each_sample_once(num_samples: int, window: int, seed: int) -> None:
    assert sorted(windowed_permutation(seed, 0, num_samples, window)) == list(range(num_samples))


def test_a_windowed_shuffle_uses_few_runs_at_a_time_and_mixes_them() -> None:
    num_runs, window = 100, 20 * SHUFFLE_RUN
    order = windowed_permutation(0, 0, num_runs * SHUFFLE_RUN, window) // SHUFFLE_RUN
    for run in range(num_runs):
        positions = np.flatnonzero(order == run)
        assert positions[-1] - positions[0] <= window + SHUFFLE_RUN
    middle = order[len(order) // 2 : len(order) // 2 + 256]
    assert len(np.unique(middle)) > 15
    assert not np.array_equal(order, windowed_permutation(0, 1, num_runs * SHUFFLE_RUN, window) // SHUFFLE_RUN)
