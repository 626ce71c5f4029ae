"""Norm and ReLU of a split and of a concatenation equal the plain ones, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import (
    TOLERANCE,
    alternate,
    as_float64,
    assert_near,
    draw,
    norm_as_float64,
    parameters,
    plain,
)
from torch import Tensor

from reconv.kernels.ops.norm_concat import Columns, batch_norm_relu_concat, batch_norm_relu_split, part_rows

TOLERANCES = {**TOLERANCE, torch.bfloat16: 2e-2}
# samples, height, width; groups; widths of the split's parts and of the concatenated ones: parts narrower than a block,
# blocks that end inside a part, rows that fill no tile, a longer and a shorter last group, groups of one value.
CASES = [
    ((3, 5, 7), (3,), (24, 8, 16), (40, 8, 24)),
    ((5, 6, 6), (2, 3), (64, 96, 16), (128, 32, 32)),
    ((7, 3, 3), (3, 3, 1), (8, 72, 24), (16, 16, 8)),
    ((3, 1, 1), (1, 1, 1), (16, 8, 8), (8, 24, 8)),
    ((20, 8, 8), (20,), (8, 8, 8), (8, 16, 8)),
]


def far_from_kink(z: Tensor) -> Tensor:
    """Where float32 and float64 agree on the side of the ReLU's kink."""
    return (z.abs() > 1e-4).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape, groups, widths, added, dtype", alternate(CASES, list(TOLERANCES)), ids=str)
def test_split_and_concatenation_equal_the_reference(shape, groups, widths, added, dtype) -> None:
    samples, *sides = shape
    inputs = [
        draw((samples, channels, *sides), dtype, seed, offset=0.5)
        for seed, channels in enumerate((sum(widths), *added))
    ]
    norms = [parameters(channels, 10 + seed) for seed, channels in enumerate((*widths, *added))]
    inputs64, norms64 = [as_float64(x) for x in inputs], [norm_as_float64(of) for of in norms]

    split = batch_norm_relu_split(inputs[0], norms[:3], groups, widths[0] + sum(added))
    before, stats = split[0], [split[3]]
    y, added_stats = batch_norm_relu_concat(before, inputs[1:], norms[3:], groups)
    stats.append(added_stats)
    assert y is before and y.is_contiguous(memory_format=torch.channels_last)
    outputs = (y, *split[1:3])

    parts = [*inputs64[0].split(widths, 1), *inputs64[1:]]
    z64, recorded = zip(*(plain(x, of, groups) for x, of in zip(parts, norms64, strict=True)), strict=True)
    joined = torch.cat([z64[0], *z64[3:]], 1)
    for found, expected in zip(stats, (recorded[:3], recorded[3:]), strict=True):
        assert_near(found[:, :2], torch.cat(expected, 2), 2e-5)
    dys = []
    for output, z in zip(outputs, (joined, *z64[1:3]), strict=True):
        assert output.dtype == dtype
        assert_near(output, F.relu(z), TOLERANCES[dtype])
        dys.append(torch.randn_like(output) * far_from_kink(z))
    torch.autograd.backward(outputs, dys)
    torch.autograd.backward([F.relu(z) for z in (joined, *z64[1:3])], [dy.double() for dy in dys])
    for x, x64 in zip(inputs, inputs64, strict=True):
        assert_near(x.grad, x64.grad, TOLERANCES[dtype])
    for of, of64 in zip(norms, norms64, strict=True):
        assert_near(of.weight.grad, of64.weight.grad, 1e-4)
        assert_near(of.bias.grad, of64.bias.grad, 1e-4)


def test_gradients_may_have_any_layout() -> None:
    x = draw((2, 24, 4, 4), torch.float32, 1)
    inputs, norms = (
        [draw((2, 8, 4, 4), torch.float32, seed) for seed in (2, 3, 4)],
        [parameters(8, s) for s in range(6)],
    )
    leaves = [x, *inputs, *(of.weight for of in norms), *(of.bias for of in norms)]

    def gradients(layout: torch.memory_format) -> tuple[Tensor, ...]:
        y, *narrow, _ = batch_norm_relu_split(x, norms[:3], (2,), 32)
        y, _ = batch_norm_relu_concat(y, inputs, norms[3:], (2,))
        dys = [torch.linspace(-1, 1, t.numel()).view(t.shape).contiguous(memory_format=layout) for t in (y, *narrow)]
        return torch.autograd.grad((y, *narrow), leaves, dys)

    pairs = zip(gradients(torch.channels_last), gradients(torch.contiguous_format), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs)


def test_given_statistics_are_used() -> None:
    x, norms = draw((2, 24, 4, 4), torch.float32, 1).detach(), [parameters(8, seed) for seed in range(3)]
    first = batch_norm_relu_split(x, norms, (2,), 16)
    again = batch_norm_relu_split(x, norms, (2,), 16, first[3])
    assert again[3].data_ptr() == first[3].data_ptr() and torch.equal(again[1], first[1])
    doubled = first[3] * torch.tensor([1.0, 1.0, 2.0]).view(3, 1)
    assert not torch.equal(batch_norm_relu_split(x, norms, (2,), 16, doubled)[1], first[1])


def test_nan_is_propagated_within_its_channel_and_group() -> None:
    x, norms = draw((4, 24, 3, 3), torch.float32, 1).detach(), [parameters(8, seed) for seed in range(3)]
    x[3, 9, 0, 0] = float("nan")
    _, second, third, _ = batch_norm_relu_split(x, norms, (2, 2), 8)
    assert second[2:, 1].isnan().all() and second.isnan().sum() == second[2:, 1].numel() and not third.isnan().any()


def test_blocks_do_not_cross_parts() -> None:
    x = draw((2, 176, 4, 4), torch.float32, 1)
    rows = part_rows(x, (2,), (64, 96, 16))
    assert rows.block == 32 and rows.num_blocks == 2 + 3 + 1
    assert Columns.of_range(x, (64, 96, 16)).parts[2].data_ptr() == x.data_ptr() + 160 * x.element_size()
