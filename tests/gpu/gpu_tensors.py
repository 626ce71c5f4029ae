"""Random tensors in the layout of the kernels, and how far results are from exact ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from reconv.kernels.ops.batch_norm import NormParams

TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
HALF_DTYPES = (torch.float16, torch.bfloat16)  # cuDNN may multiply float32 in TF32
all_dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
half_dtypes = pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)


def random_tensor(*shape: int, dtype: torch.dtype) -> Tensor:
    """Normal values on the GPU, channels_last."""
    values = torch.randn(*shape, device="cuda", dtype=torch.float32)
    return values.to(dtype).contiguous(memory_format=torch.channels_last)


def random_norm(channels: int) -> NormParams:
    weight, bias = torch.randn(2, channels, device="cuda").unbind()
    return NormParams(weight.requires_grad_(), bias.requires_grad_(), torch.ones(channels, device="cuda"), 1e-5)


def in_float64(tensor: Tensor) -> Tensor:
    """A leaf of its own with the same values."""
    return tensor.detach().double().requires_grad_()


def relative_error(actual: Tensor | None, expected: Tensor | None) -> float:
    """The norm of the difference over that of the expected values."""
    assert actual is not None and expected is not None
    actual, expected = actual.detach().double(), expected.detach().double()
    error = float((actual - expected).norm() / expected.norm().clamp(min=1e-30))
    return error if error == error else float("inf")


def worst_error(tensors: list[Tensor], fused: Callable[..., Tensor], plain: Callable[..., Tensor]) -> float:
    """The worst error of a function's output and gradients against those of a plain one in float64."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    leaves64 = [in_float64(tensor) for tensor in tensors]
    y, y64 = fused(*leaves), plain(*leaves64)
    dy = torch.randn_like(y)
    y.backward(dy)
    y64.backward(dy.double())
    return max(relative_error(y, y64), *(relative_error(a.grad, b.grad) for a, b in zip(leaves, leaves64, strict=True)))
