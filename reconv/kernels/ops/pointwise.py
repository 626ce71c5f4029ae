"""Inference operations between convolutions, each one kernel; unsupported tensors use torch's operations.

Not differentiable. Values, NaN included, are those of the plain operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from reconv.kernels import dispatch as fused
from reconv.kernels import reference
from reconv.kernels.jit.launch import MAX_GRID_YZ, launch
from reconv.kernels.window import PoolWindow

Epilogue = Literal["none", "relu", "relu6", "silu", "sigmoid"]  # an activation at the end of an operation
EPILOGUES: dict[str, Callable[[Tensor], Tensor]] = {**reference.ACTIVATION_FUNCTIONS, "sigmoid": torch.sigmoid}
EPILOGUE_IDS = {"none": 0, "relu": 1, "relu6": 2, "silu": 3, "sigmoid": 4}  # as in triton.py
_VALUES = 2048  # per program: two vector loads per thread
_BLOCKS = (64, 32, 16, 8)  # channels of a tile that is reduced over rows
_MAX_INPUTS = 4  # of a concatenation
_SUMMED = 8192  # values of such a tile: few programs with many bytes in flight
_SUM_WARPS = 8


def max_pool(x: Tensor, side: int, stride: int, pad: int, ceil: bool) -> Tensor:
    """The max-pool of x."""
    if fused.supports(x):
        from reconv.kernels.ops.max_pool import max_pool_inference, supports

        window = PoolWindow(side, stride, pad, ceil)
        if supports(x, window):
            return max_pool_inference(x, window)
    return F.max_pool2d(x, side, stride, pad, ceil_mode=ceil)


def global_avg_pool(x: Tensor) -> Tensor:
    """The mean over the pixels of each image [n, channels, 1, 1]."""
    if not fused.supports(x) or len(x) > MAX_GRID_YZ:
        return x.mean((2, 3), keepdim=True)
    from reconv.kernels.triton import squeeze_excite as device

    images, channels, height, width = x.shape
    block, pixels = min(_BLOCKS, key=lambda block: (-channels % block, -block)), height * width
    y = torch.empty(images, channels, 1, 1, dtype=x.dtype, device=x.device)
    sizes = {"LANES": min(_SUMMED // block, 1 << (pixels - 1).bit_length()), "BLOCK": block, "num_warps": _SUM_WARPS}
    launch(device.means, (-(-channels // block), images), x, y, channels // 8, pixels, **sizes)
    return y


def gate_add_act(x: Tensor, gate: Tensor, other: Tensor | None, act: Epilogue) -> Tensor:
    """act(x * gate + other), with gate [n, channels, 1, 1] and an optional other."""
    added = x if other is None else other
    if not (fused.supports(x) and fused.supports(added)):
        return EPILOGUES[act](x * gate if other is None else x * gate + other)
    from reconv.kernels.triton.pointwise import gate_add_act

    images, channels, height, width = x.shape
    y = torch.empty_like(x)
    counts = (images, height * width, channels // 8)
    launch(gate_add_act, _programs(x), x, gate.flatten(1).contiguous(), added, y, *counts, **_constants(other, act))
    return y


def bias_add_act(y: Tensor, bias: Tensor, other: Tensor | None, act: Epilogue) -> Tensor:
    """act(y + bias + other) with an optional other, in place where kernels support it."""
    added = y if other is None else other
    if not (fused.supports(y) and fused.supports(added)):
        y = y + bias.view(1, -1, 1, 1)
        return EPILOGUES[act](y if other is None else y + other)
    from reconv.kernels.triton.pointwise import bias_add_act

    channels = y.shape[1]
    launch(bias_add_act, _programs(y), y, bias, added, y.numel() // channels, channels // 8, **_constants(other, act))
    return y


def concat(parts: Sequence[Tensor]) -> Tensor:
    """The concatenation of images along the channels."""
    first, num_channels = parts[0], sum(part.shape[1] for part in parts)
    num_rows = first.numel() // first.shape[1]
    is_supported = all(fused.supports(part) and part.dtype == first.dtype for part in parts)
    if not is_supported or len(parts) > _MAX_INPUTS or num_rows * num_channels > fused.MAX_ELEMENTS:
        return torch.cat(list(parts), 1)
    from reconv.kernels.triton.pointwise import concat

    y = torch.empty(len(first), *first.shape[2:], num_channels, dtype=first.dtype, device=first.device)
    num_unused = _MAX_INPUTS - len(parts)
    eighths = [part.shape[1] // 8 for part in parts] + [0] * num_unused
    launch(concat, _programs(y), *parts, *[first] * num_unused, y, num_rows, *eighths, VALUES=_VALUES)
    return y.permute(0, 3, 1, 2)


def _programs(y: Tensor) -> tuple[int]:
    return (-(-y.numel() // _VALUES),)


def _constants(other: Tensor | None, act: Epilogue) -> dict[str, int]:
    return {"ADDS": int(other is not None), "ACT": EPILOGUE_IDS[act], "VALUES": _VALUES}
