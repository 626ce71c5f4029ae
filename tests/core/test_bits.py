"""Digests of the training state: any flipped bit is found, with the name of its tensor."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from reconv.core.bits import StateBlock, StateDigests, bits_sum, in_storage_order, row_digests, whole_rows


def state() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "weight": torch.randn(8, 4, 3, 3, generator=draw).to(memory_format=torch.channels_last),
        "large": torch.randn(40_001, generator=draw),  # whole rows where they are, and a rest that is copied
        "rows": torch.randn(40_960, generator=draw),
        "unaligned": torch.randn(40_001, generator=draw)[1:],
        "bias": torch.randn(7, generator=draw),
        "half": torch.randn(130, generator=draw).to(torch.bfloat16),
        "count": torch.tensor(3),
        "ok": torch.tensor([True, False, True]),
    }


def flip(tensor: Tensor, bit: int) -> None:
    content = in_storage_order(tensor).view(torch.uint8)
    content[bit // 8] ^= 1 << bit % 8


def test_every_flipped_bit_is_found_and_named() -> None:
    tensors = state()
    digests = StateDigests(StateBlock(tensors))
    digests.record()
    draw, tried = random.Random(0), 0
    for name, tensor in tensors.items():
        num_bits = 8 * tensor.nbytes
        for bit in {0, num_bits - 1, *draw.sample(range(num_bits), min(num_bits, 40))}:
            if name == "ok" and bit % 8:
                continue  # not a bool
            digests.check(5)
            assert digests.describe(digests.found) is None
            flip(tensor, bit)
            digests.check(6)
            assert digests.describe(digests.found) == (name, 6)
            flip(tensor, bit)
            digests.check(7)
            assert digests.describe(digests.found) == (name, 6)  # the first one is kept
            digests.reset()
            tried += 1
    assert tried > 100


def test_digests_are_those_of_a_copy_of_the_state() -> None:
    digests = StateDigests(StateBlock(state()))
    digests.record()
    assert torch.equal(digests.rows, row_digests(digests.state()))
    assert len(whole_rows(state()["rows"])) == 320
    assert [len(whole_rows(state()[name])) for name in ("unaligned", "bias")] == [0, 0]


def test_a_block_restores_the_state() -> None:
    tensors = state()
    block = StateBlock(tensors)
    copied = block.new()
    block.copy_from_state(block.views(copied))
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    rows = row_digests(copied)
    for tensor in tensors.values():
        tensor.zero_()
    block.copy_to_state(block.views(copied))
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)
    other = rows.clone()
    other[-1] += 1
    assert block.first_difference(rows, rows) == ""
    assert block.first_difference(rows, other) == "ok"


def test_the_sum_of_bits_does_not_depend_on_the_layout() -> None:
    tensor = torch.randn(4, 6, 5, 5)
    assert bits_sum(tensor) == bits_sum(tensor.to(memory_format=torch.channels_last))
    changed = tensor.clone()
    flip(changed, 12345)
    assert bits_sum(tensor) != bits_sum(changed)


def test_tensors_with_gaps_are_refused() -> None:
    with pytest.raises(ValueError, match="gaps"):
        bits_sum(torch.zeros(4, 4)[:, :2])
