"""Random images in the layout of the kernels, and how far results are from exact ones."""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    values = torch.randn(*shape, device="cuda", dtype=torch.float32)
    return values.to(dtype).contiguous(memory_format=torch.channels_last)


def wide(tensor: Tensor) -> Tensor:
    return tensor.detach().double().requires_grad_()


def error(actual: Tensor | None, expected: Tensor | None) -> float:
    assert actual is not None and expected is not None
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))
