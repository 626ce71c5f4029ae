"""Counter-based dropout in one kernel, forward and backward, with the bits of `models/layers/dropout`.

But for a float16 gradient of a dropped element that overflows when it is scaled: there it becomes NaN, here zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from reconv.kernels.dispatch import DTYPES, MAX_ELEMENTS, supports_device
from reconv.kernels.jit.launch import MAX_GRID_YZ, launch
from reconv.kernels.triton import dropout as device

_BLOCK = 512


def supports(x: Tensor, keys: Tensor) -> bool:
    """True if the kernel supports x, with one key for each of its rows."""
    return (
        supports_device(x)
        and x.dtype in DTYPES
        and len(x) == len(keys) <= MAX_GRID_YZ
        and 0 < x.numel() <= MAX_ELEMENTS
        and x.is_contiguous()
    )


def keyed_dropout(x: Tensor, keys: Tensor, rate: float) -> Tensor:
    """x with elements dropped by random numbers of (key of the row, element), and the rest scaled."""
    y: Tensor = _KeyedDropout.apply(x, keys, rate)  # type: ignore[no-untyped-call]
    return y


class _KeyedDropout(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, rate: float) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.rate = rate
        return _drop(x, keys, rate)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (keys,) = ctx.saved_tensors
        return _drop(dy.contiguous(), keys, ctx.rate), None, None


def _drop(x: Tensor, keys: Tensor, rate: float) -> Tensor:
    y, elements = torch.empty_like(x), x.numel() // len(x)
    grid = (-(-elements // _BLOCK), len(x))
    launch(device.drop, grid, x, keys, y, elements, rate, 1 / (1 - rate), BLOCK=_BLOCK)
    return y
