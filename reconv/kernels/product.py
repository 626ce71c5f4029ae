"""A convolution with all that follows it at evaluation: bias, a sum and an activation.

Owns the forms of that, and which is the fastest for a shape on this device, found by trying them once. Refuses to know
networks and gradients: nothing here is differentiated. Limits: `fused.available` of the output; other tensors are
computed plainly. Invariant: a form whose values differ from the plain ones is never chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from reconv.kernels import fused, reference
from reconv.kernels.launch import launch
from reconv.kernels.reference import Activation

_ROWS = 32  # of a tile
_BLOCKS = (64, 32, 16, 8)  # channels of a tile
_TRIALS = 5
_SLEEP_CYCLES = (
    1_000_000  # the device waits about half a millisecond while the host gives it the trials: launches are not timed
)
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of the largest value
_TF32_TOLERANCE, _FP32_TOLERANCE = 1e-2, 1e-4  # the second tells TF32 from float32


class Shape(NamedTuple):
    """What a convolution does beside its tensors; a tuple, so that a list of operations can hold it."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    act: Activation


Form = Callable[[Tensor, Tensor, Tensor, Tensor | None, Shape], Tensor]
_chosen: dict[tuple[object, ...], Form] = {}


def product(x: Tensor, weight: Tensor, bias: Tensor, other: Tensor | None, shape: Shape) -> Tensor:
    """The activation of the convolution of x plus bias (plus the other)."""
    if not x.is_cuda:
        return plain(x, weight, bias, other, shape)
    key = (x.shape, x.stride(), x.dtype, x.device, weight.shape, other is None, shape, _tolerance(x.dtype))
    if key not in _chosen:
        if torch.cuda.is_current_stream_capturing():
            return plain(x, weight, bias, other, shape)
        _chosen[key] = _fastest(x, weight, bias, other, shape)
    return _chosen[key](x, weight, bias, other, shape)


def plain(x: Tensor, weight: Tensor, bias: Tensor, other: Tensor | None, shape: Shape) -> Tensor:
    """By torch's own operations."""
    y = F.conv2d(x, weight, bias, shape.stride, shape.padding, shape.dilation, shape.groups)
    return reference.FUNCTIONS[shape.act](y if other is None else y + other)


def finished(x: Tensor, weight: Tensor, bias: Tensor, other: Tensor | None, shape: Shape) -> Tensor:
    """By a convolution and one pass over its output."""
    from reconv.kernels.norm import ACTIVATIONS

    y = F.conv2d(x, weight, None, shape.stride, shape.padding, shape.dilation, shape.groups)
    if not all(fused.available(t) for t in ((y,) if other is None else (y, other))):
        return reference.FUNCTIONS[shape.act](_sum(y, bias, other))
    from reconv.kernels.product_triton import finish

    channels, num_rows = y.shape[1], y.numel() // y.shape[1]
    block = min(_BLOCKS, key=lambda block: (-channels % block, -block))
    constants = {"ADDS": int(other is not None), "ACT": ACTIVATIONS[shape.act], "ROWS": _ROWS, "BLOCK": block}
    added = y if other is None else other
    grid = (-(-num_rows // _ROWS), -(-channels // block))
    launch(finish, grid, y, bias, added, num_rows, channels // 8, **constants)
    return y


def by_cudnn(x: Tensor, weight: Tensor, bias: Tensor, other: Tensor | None, shape: Shape) -> Tensor:
    """By cuDNN alone, which knows one activation, ReLU."""
    where = (shape.stride, shape.padding, shape.dilation, shape.groups)
    if other is None:
        return torch.cudnn_convolution_relu(x, weight, bias, *where)
    return torch.cudnn_convolution_add_relu(x, weight, other, 1.0, bias, *where)


def _sum(y: Tensor, bias: Tensor, other: Tensor | None) -> Tensor:
    y = y + bias.view(1, -1, 1, 1)
    return y if other is None else y + other


def _fastest(x: Tensor, weight: Tensor, bias: Tensor, other: Tensor | None, shape: Shape) -> Form:
    """The form that takes least time of those that run and give the plain values."""
    forms: Sequence[Form] = (finished, by_cudnn) if shape.act == "relu" else (finished,)
    expected = plain(x, weight, bias, other, shape).float()
    times_ms: dict[Form, float] = {}
    for form in (*forms, plain):
        try:
            y = form(x, weight, bias, other, shape).float()
        except RuntimeError:  # cuDNN has no plan for this shape and type, and says so in many ways
            continue
        error = (y - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
        if float(error) <= _tolerance(x.dtype):
            times_ms[form] = _time_ms(lambda form=form: form(x, weight, bias, other, shape))  # type: ignore[misc]
    return min(times_ms, key=times_ms.__getitem__, default=plain)


def _tolerance(dtype: torch.dtype) -> float:
    has_tf32: bool = torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
    return _TOLERANCE.get(dtype, _TF32_TOLERANCE if has_tf32 else _FP32_TOLERANCE)


def _time_ms(call: Callable[[], Tensor]) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    torch.cuda._sleep(_SLEEP_CYCLES)
    began.record()
    for _ in range(_TRIALS):
        call()
    ended.record()
    ended.synchronize()
    spent_ms: float = began.elapsed_time(ended)
    return spent_ms / _TRIALS
