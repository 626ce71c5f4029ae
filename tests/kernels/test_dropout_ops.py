"""Dropout by the kernel has the bits of the plain layer, forward and backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from reconv.core.batch import Batch
from reconv.kernels.fuse import fuse
from reconv.kernels.fused.layers import FusedDropout
from reconv.kernels.jit.launch import trace_launches
from reconv.models.layers.batch_norm import BatchNorm2d, LayerState
from reconv.models.layers.dropout import Dropout

DTYPES = (torch.float32, torch.float16)


def network(rate: float) -> nn.Module:
    return nn.Sequential(BatchNorm2d(8), nn.Flatten(), Dropout(rate))


def keyed(model: nn.Module, positions: Tensor, step: int = 3) -> LayerState:
    state = LayerState(model, seed=5)
    state.set_micro_batch(Batch({}, positions, (len(positions),)), step)
    return state


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rate", [0.2, 0.5, 1 / 3])
@pytest.mark.parametrize("elements", [8, 700])  # less and more than a program's
def test_the_kernel_has_the_bits_of_the_layer(elements: int, rate: float, dtype: torch.dtype) -> None:
    x = torch.randn(5, elements, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0, 0] = torch.inf
    plain = Dropout(rate)
    keyed(plain, torch.tensor([7, 2**40, 0, 3, 1]))
    fused = copy.deepcopy(plain)
    fused.__class__ = FusedDropout
    given = [x.clone().requires_grad_() for _ in range(2)]
    expected, found = plain(given[0]), fused(given[1])
    assert 0 < (expected == 0).sum() < expected.numel()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    dy = torch.randn(5, elements, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected.backward(dy)
    found.backward(dy)
    assert given[0].grad is not None and given[1].grad is not None
    assert torch.equal(given[0].grad, given[1].grad)


def launched(model: nn.Module, x: Tensor) -> list[str]:
    with trace_launches() as noted:
        model(x).sum().backward()
    return [variant.kernel.__name__ for variant in noted]


def meta(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta", requires_grad=True)


def test_dropout_of_a_fused_network_is_one_kernel_in_training_alone() -> None:
    model = network(0.5)
    fuse(model)
    model.to("meta")
    x = meta(3, 8, 2, 2).contiguous(memory_format=torch.channels_last)
    assert launched(model, x).count("drop") == 1  # forward and backward launch the same variant
    assert "drop" not in launched(model.eval(), x)


@pytest.mark.parametrize("why", ["rows", "rate", "keys"])
def test_what_the_kernel_does_not_support_is_computed_by_the_layer(why: str) -> None:
    layer = Dropout(0.0 if why == "rate" else 0.5)
    if why != "keys":
        keyed(layer, torch.arange(3))
    layer.__class__ = FusedDropout
    x = torch.ones(6 if why == "rows" else 3, 16)  # two rows per sample, such as windows
    with trace_launches() as noted:
        y = layer(x)
    assert not noted and y.shape == x.shape


def test_a_network_without_other_kernels_keeps_its_dropout() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Dropout(0.5))
    assert fuse(model) == 0 and type(model[1]) is Dropout
