"""Kept batches: copies in one block of memory that is pinned once, when they are first sent again."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from reconv.core.batch import Batch
from reconv.data.pipeline.kept_batches import KeptBatches

SIZES = {3: 4, 5: 4, 9: 3}  # rows of batches by number; the last is short


class NoCopy:
    """A finished copy to a device."""

    def query(self) -> bool:
        return True

    def wait(self) -> None: ...
    def synchronize(self) -> None: ...


class PinningDevice:
    """A device that notes which memory is pinned and copies from pinned images only."""

    def __init__(self, is_asynchronous: bool = True) -> None:
        self.pinned: list[tuple[int, int]] = []
        self.num_pins = 0
        self._is_asynchronous = is_asynchronous

    def move(self, tensor: Tensor) -> Tensor:
        return tensor

    def pin(self, memory: Tensor) -> Callable[[], None]:
        block = (memory.data_ptr(), memory.data_ptr() + memory.nbytes)
        assert not any(block[0] < end and start < block[1] for start, end in self.pinned)
        self.pinned.append(block)
        self.num_pins += 1
        return lambda: self.pinned.remove(block)

    def send(self, batch: Batch) -> tuple[Batch, NoCopy | None]:
        images = batch["images"]
        assert any(
            start <= images.data_ptr() and images.data_ptr() + images.nbytes <= end for start, end in self.pinned
        )
        return (batch.map(torch.clone), NoCopy()) if self._is_asynchronous else (batch, None)


def make_batch(number: int) -> Batch:
    rows = SIZES[number]
    indices = torch.arange(10 * number, 10 * number + rows)
    images = torch.arange(rows * 75, dtype=torch.uint8).reshape(rows, 3, 5, 5) + number
    return Batch({"images": images, "targets": indices % 2, "indices": indices}, indices.clone(), (rows,))


def is_equal(batch: Batch, other: Batch) -> bool:
    tensors = zip((batch.positions, *batch.tensors.values()), (other.positions, *other.tensors.values()), strict=True)
    return batch.groups == other.groups and all(torch.equal(a, b) for a, b in tensors)


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_batches_are_sent_as_they_were_from_memory_that_is_pinned_once(is_asynchronous: bool) -> None:
    device = PinningDevice(is_asynchronous)
    kept = KeptBatches(list(SIZES), 4, device)
    for number in SIZES:
        assert not kept.is_complete
        batch = make_batch(number)
        kept.add(number, batch)
        batch["images"].zero_()  # a buffer that is filled again
    assert kept.is_complete and device.num_pins == 0
    for _ in range(3):
        sent = dict(kept.send())
        assert list(sent) == list(SIZES)
        for number, batch in sent.items():
            assert is_equal(batch, make_batch(number))
            for tensor in (batch.positions, *batch.tensors.values()):
                tensor.zero_()  # as a metric of the user may do
    assert device.num_pins == len(device.pinned) == 1


def test_the_memory_is_unpinned_when_the_batches_are_dropped() -> None:
    device = PinningDevice()
    kept = KeptBatches([3], 4, device)
    kept.add(3, make_batch(3))
    list(kept.send())
    assert len(device.pinned) == 1
    del kept
    gc.collect()
    assert not device.pinned


def test_a_rank_without_batches_keeps_none() -> None:
    assert not KeptBatches([], 4, PinningDevice()).is_complete


class UnpinnableDevice(PinningDevice):
    """A device on a system that allows no pinned memory."""

    def pin(self, memory: Tensor) -> Callable[[], None]:
        raise RuntimeError("out of memory")

    def send(self, batch: Batch) -> tuple[Batch, NoCopy | None]:
        return batch.map(torch.clone), NoCopy()


def test_batches_are_sent_even_if_memory_cannot_be_pinned() -> None:
    kept = KeptBatches(list(SIZES), 4, UnpinnableDevice())
    for number in SIZES:
        kept.add(number, make_batch(number))
    for _ in range(2):
        sent = dict(kept.send())
        assert list(sent) == list(SIZES)
        assert all(is_equal(batch, make_batch(number)) for number, batch in sent.items())
