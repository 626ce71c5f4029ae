"""Pointwise inference operations equal plain operations."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DTYPES, TOLERANCE, assert_near, draw, pairwise

from reconv.kernels.ops.pointwise import EPILOGUES, Epilogue, concat, gate_add_act, global_avg_pool

SHAPES = [(2, 24, 9, 9), (3, 8, 1, 1), (1, 72, 5, 13), (2, 5, 4, 4)]  # the last is not supported


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_global_avg_pool_equals_the_mean(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = draw(shape, dtype, 1, offset=1.0).detach()
    y = global_avg_pool(x)
    assert y.dtype == dtype
    assert_near(y, x.double().mean((2, 3), keepdim=True), TOLERANCE[dtype])


@pytest.mark.parametrize(
    "shape, adds, act, dtype", pairwise(SHAPES, [False, True], ["none", "relu", "silu"], DTYPES), ids=str
)
def test_gate_add_act_equals_plain_operations(
    shape: tuple[int, ...], adds: bool, act: Epilogue, dtype: torch.dtype
) -> None:
    x, gate = draw(shape, dtype, 1).detach(), draw((*shape[:2], 1, 1), dtype, 2).detach()
    other = draw(shape, dtype, 3).detach() if adds else None
    y = gate_add_act(x, gate, other, act)
    total = x.double() * gate.double() + (0 if other is None else other.double())
    assert_near(y, EPILOGUES[act](total), TOLERANCE[dtype])
    assert y.dtype == dtype and y.stride() == x.stride()


def test_nan_is_propagated() -> None:
    x, gate = draw((2, 8, 3, 3), torch.float32, 1).detach(), torch.ones(2, 8, 1, 1)
    x[1, 2, 0, 0] = torch.nan
    assert torch.equal(gate_add_act(x, gate, x, "relu").isnan(), x.isnan())
    assert int(global_avg_pool(x).isnan().sum()) == 1


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("widths", [(8, 24, 16, 8), (40, 8), (64, 8, 72), (8,), (8, 5), (8, 8, 8, 8, 8)], ids=str)
def test_concat_equals_torchs(widths: tuple[int, ...], dtype: torch.dtype) -> None:
    parts = [draw((2, width, 5, 7), dtype, seed).detach() for seed, width in enumerate(widths)]
    parts[0][0, 0, 0, 0] = torch.nan
    y = concat(parts)
    torch.testing.assert_close(y, torch.cat(parts, 1), rtol=0, atol=0, equal_nan=True)
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_concat_of_several_dtypes_promotes() -> None:
    parts = [draw((2, 8, 3, 3), dtype, 1).detach() for dtype in (torch.float16, torch.float32)]
    y = concat(parts)
    assert y.dtype == torch.float32 and torch.equal(y, torch.cat(parts, 1))


def test_a_gate_may_have_any_layout() -> None:
    x, gate = draw((3, 8, 2, 2), torch.float32, 1).detach(), draw((8, 3, 1, 1), torch.float32, 2).detach()
    gate = gate.transpose(0, 1)
    assert not gate.is_contiguous()
    assert_near(gate_add_act(x, gate, None, "none"), x.double() * gate, 2e-5)
    one = torch.full((1, 1, 1, 1), 0.5).expand(3, 8, 1, 1)
    assert torch.equal(gate_add_act(x, one, None, "none"), x / 2)


def test_global_avg_pool_falls_back_to_torch_beyond_the_launch_grid() -> None:
    x = draw((65536, 8, 1, 1), torch.float32, 1).detach()
    assert torch.equal(global_avg_pool(x), x)
