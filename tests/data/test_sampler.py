"""The order of training samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconv.data.sampler import Sampler
from reconv.errors import DataError


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
