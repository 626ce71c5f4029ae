"""Squeeze-and-excitation: the means of channels_last images, and their product with a gate computed from the means.

The gradient of the images is written once, when the gradients of both uses are known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from reconv.kernels.jit.launch import launch
from reconv.kernels.triton import squeeze_excite as device

_LANES = 64
_BLOCKS = (64, 32, 16)


@dataclass(slots=True)
class _Gate:
    """The gate, set by the forward pass."""

    value: Tensor | None = None


def squeeze_excite(x: Tensor, gate_fn: Callable[[Tensor], Tensor]) -> Tensor:
    """x times the gate that `gate_fn` computes from its means, both [n, channels, 1, 1]."""
    # The gradient of `x_alias` is that of the product, not yet multiplied by the gate: nothing else may use it.
    gate = _Gate()
    x_alias, means = _Squeeze.apply(x, gate)  # type: ignore[no-untyped-call]
    output: Tensor = _Excite.apply(x_alias, gate_fn(means).to(x.dtype), gate)  # type: ignore[no-untyped-call]
    return output


class _Squeeze(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: _Gate) -> tuple[Tensor, Tensor]:
        means = torch.empty((*x.shape[:2], 1, 1), dtype=x.dtype, device=x.device)
        grid, counts, constants = _programs(x)
        launch(device.means, grid, x, means, *counts, **constants)
        ctx.gate = gate
        return x.detach(), means

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dmeans: Tensor) -> tuple[Tensor, None]:
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx = torch.empty_like(dy)
        grid, counts, constants = _programs(dy)
        launch(device.images_gradient, grid, dy, ctx.gate.value, dmeans.contiguous(), dx, *counts, **constants)
        return dx, None


class _Excite(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor, gate: _Gate) -> Tensor:
        y, factor = torch.empty_like(x), factor.contiguous()
        grid, counts, constants = _programs(x)
        launch(device.scale, grid, x, factor, y, *counts, **constants)
        ctx.save_for_backward(x, factor)
        gate.value = factor.detach()
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, factor = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        dfactor = torch.empty_like(factor)
        grid, counts, constants = _programs(x)
        launch(device.gate_gradient, grid, dy, x, dfactor, *counts, **constants)
        return dy, dfactor, None


def _programs(x: Tensor) -> tuple[tuple[int, int], tuple[int, int], dict[str, int]]:
    """The launch grid, the sizes and the constants."""
    images, channels, height, width = x.shape
    block = min(_BLOCKS, key=lambda block: (-channels % block, -block))
    constants = {"LANES": _LANES, "BLOCK": block}
    return (-(-channels // block), images), (channels // 8, height * width), constants
