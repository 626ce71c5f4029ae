"""Fused batch norm with activation and residual sum equals the reference, forward and backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import (
    DTYPES,
    TOLERANCE,
    alternate,
    as_float64,
    assert_near,
    draw,
    norm_as_float64,
    pairwise,
    parameters,
    plain,
)
from torch import Tensor

from reconv.kernels import reference
from reconv.kernels.channels_last import ROWS_PER_THREAD, channel_rows, counters
from reconv.kernels.ops import batch_norm as norm

# samples, channels, height, width, groups: odd row counts, channels that fill no block, several groups, a longer and
# a shorter last group, groups of one value.
SHAPES = [
    ((3, 24, 5, 7), (3,)),
    ((5, 64, 6, 6), (2, 3)),
    ((7, 72, 3, 3), (3, 3, 1)),
    ((2, 8, 1, 1), (2,)),
    ((3, 16, 1, 1), (1, 1, 1)),
    ((40, 16, 8, 8), (40,)),
]


@pytest.mark.parametrize(
    "shape, groups, act, dtype",
    alternate(
        [(*case, "relu") for case in SHAPES] + [(*SHAPES[0], act) for act in ("none", "relu6", "silu", "hardswish")],
        DTYPES,
    ),
    ids=str,
)
def test_batch_norm_act_equals_the_reference(shape, groups, act, dtype) -> None:
    x, of = draw(shape, dtype, 1, offset=0.5), parameters(shape[1], 2)
    x64, of64 = as_float64(x), norm_as_float64(of)
    y, stats = norm.batch_norm_act(x, of, groups, act)
    z64, recorded = plain(x64, of64, groups)
    y64 = reference.ACTIVATION_FUNCTIONS[act](z64)
    assert y.dtype == dtype and y.is_contiguous(memory_format=torch.channels_last)
    assert_near(y, y64, TOLERANCE[dtype])
    assert_near(stats[:, :2], recorded, 2e-5)
    # A ReLU may fall to either side of a kink where float32 and float64 differ: no gradient is asked for there.
    dy = torch.randn_like(x) * near_kink(z64, act).logical_not()
    y.backward(dy)
    y64.backward(dy.double())
    assert_near(x.grad, x64.grad, TOLERANCE[dtype])
    assert_near(of.weight.grad, of64.weight.grad, 1e-4)
    assert_near(of.bias.grad, of64.bias.grad, 1e-4)


def near_kink(z: Tensor, act: str) -> Tensor:
    kinks = {"relu": (0.0,), "relu6": (0.0, 6.0), "hardswish": (-3.0, 3.0)}.get(act, ())
    near = torch.zeros_like(z, dtype=torch.bool)
    for kink in kinks:
        near |= (z - kink).abs() < 1e-4
    return near


SUMS = [
    (*SHAPES[0], "relu", "both"),
    (*SHAPES[1], "relu", "first"),
    (*SHAPES[2], "none", "both"),
    (*SHAPES[4], "none", "second"),
]


@pytest.mark.parametrize("case, has_norm, dtype", pairwise(SUMS, [False, True], DTYPES), ids=str)
def test_batch_norm_add_act_equals_the_reference(case, has_norm, dtype) -> None:
    shape, groups, act, uses = case
    x, of, other, other_of = (
        draw(shape, dtype, 1),
        parameters(shape[1], 2),
        draw(shape, dtype, 3),
        parameters(shape[1], 4),
    )
    x64, of64, other64, other_of64 = as_float64(x), norm_as_float64(of), as_float64(other), norm_as_float64(other_of)
    if has_norm:
        first, second, *stats = norm.batch_norm_add_norm_act(x, of, other, other_of, groups, act)
        added, recorded = plain(other64, other_of64, groups)
        assert_near(stats[1][:, :2], recorded, 2e-5)
    else:
        first, second, *stats = norm.batch_norm_add_act(x, of, other, groups, act)
        added = other64
    z64, recorded = plain(x64, of64, groups)
    z64 = z64 + added
    y64 = reference.ACTIVATION_FUNCTIONS[act](z64)
    assert first.data_ptr() == second.data_ptr()
    assert_near(first, y64, TOLERANCE[dtype])
    assert_near(stats[0][:, :2], recorded, 2e-5)
    chosen = {"both": [first, second], "first": [first], "second": [second]}[uses]
    keep = near_kink(z64, act).logical_not()
    gradients = [torch.randn_like(x) * keep for _ in chosen]
    torch.autograd.backward(chosen, gradients)
    y64.backward(torch.stack([g.double() for g in gradients]).sum(0))
    assert_near(x.grad, x64.grad, TOLERANCE[dtype])
    assert_near(other.grad, other64.grad, TOLERANCE[dtype])
    pairs = [(of, of64), (other_of, other_of64)] if has_norm else [(of, of64)]
    for narrow, exact in pairs:
        assert_near(narrow.weight.grad, exact.weight.grad, 1e-4 if dtype == torch.float32 else 4e-3)
        assert_near(narrow.bias.grad, exact.bias.grad, 1e-4 if dtype == torch.float32 else 4e-3)


def test_nan_is_propagated_within_its_group() -> None:
    x = draw((4, 16, 3, 3), torch.float32, 1).detach()
    x[3, 5, 0, 0] = float("nan")
    for act in ("none", "relu", "relu6", "silu", "hardswish"):
        y, _ = norm.batch_norm_act(x, parameters(16, 2), (2, 2), act)
        assert y[2:, 5].isnan().all() and not y[:2].isnan().any()


def test_variance_is_exact_with_a_large_mean() -> None:
    x = draw((8, 16, 6, 6), torch.float32, 1, offset=1000.0).detach()
    _, stats = norm.batch_norm_act(x, parameters(16, 2), (8,), "none")
    _, recorded = plain(x.double(), norm_as_float64(parameters(16, 2)), (8,))
    assert_near(stats[:, 1], recorded[:, 1], 1e-5)


def test_statistics_do_not_depend_on_the_number_of_programs() -> None:
    x, of = draw((9, 24, 16, 16), torch.float32, 1), parameters(24, 2)
    one, many = channel_rows(x, (4, 5)), replace(channel_rows(x, (4, 5)), num_sms=8)
    config = norm.CONFIGS["statistics"]
    assert one.splits(config) < many.splits(config)
    torch.testing.assert_close(norm.statistics(x, of, one), norm.statistics(x, of, many), rtol=1e-5, atol=1e-5)
    assert not counters(many.num_counts, x.device).any()


@pytest.mark.parametrize("shared_bytes", [40 * 1024, 99 * 1024, 163 * 1024, 227 * 1024])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_pipeline_stages_fit_into_shared_memory(dtype, shared_bytes) -> None:
    x = draw((4, 64, 16, 16), dtype, 1)
    rows = replace(channel_rows(x, (4,)), shared_bytes=shared_bytes)
    for config in norm.CONFIGS.values():
        for tiles in ((x,), (x, x), (x, x, x)):
            stages = rows.stages(config, *tiles)
            stage_bytes = sum(t.element_size() for t in tiles) * ROWS_PER_THREAD * rows.lanes(config) * rows.block
            assert 1 <= stages <= config.stages and (stages - 1) * stage_bytes <= shared_bytes
            assert stages == config.stages or stages * stage_bytes > shared_bytes  # as many as fit
