"""The forms of a convolution with all that follows it at evaluation.

Owns them, what each takes, and the tiles of our own. Refuses to know which is fast. Invariant: every form gives the
plain one's values, up to the order of additions and the rounding between operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from reconv.kernels import dispatch as fused
from reconv.kernels.dispatch import CHANNEL_MULTIPLE, MAX_ELEMENTS
from reconv.kernels.jit.launch import launch
from reconv.kernels.pointwise.ops import EPILOGUE_IDS, EPILOGUES, Epilogue, bias_add_act, gate_add_act

_HALF_DTYPES = (torch.bfloat16, torch.float16)  # what tensor cores multiply
_LEAST = 16  # rows, channels and outputs of a product on tensor cores
_STAGES = 3  # steps of a product whose tiles are copied ahead
_FEW_ROWS = 1024  # of which tiles of the least height make enough programs
_STEP = 64  # channels
_HEIGHTS = (128, 64)  # rows of a tile
_NARROW, _WIDE, _WIDTHS = 64, 128, (128, 64, 32)  # outputs of a tile; with 256, 254 registers and serial products
_MOST_EMPTY = 1 / 8
_FILTERS = (3, 5, 7)  # sides of a depthwise filter
_FOURS = 1024  # of pixels beside each other, times channels, in a tile: one load of eight channels a thread
_SHORT_LINE = 32  # pixels, of which several lines are in a tile anyhow
_FILTERED = (64, 32, 16, 8)  # channels of a tile: whole lines of memory where little of it is empty
_DRIVER_BYTES = 1024  # of shared memory


class ConvConfig(NamedTuple):
    """What a convolution does beside its tensors; a tuple, so that a list of operations can hold it."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    act: Epilogue

    def is_pointwise(self, weight: Tensor) -> bool:
        """Whether every pixel is a row of a product."""
        sides = (*weight.shape[2:], *self.stride)
        return set(sides) == {1} and not any(self.padding) and self.groups == 1


class ConvInputs(NamedTuple):
    """The tensors of a convolution: images, weights [out, channels, k, k], what is added and what is multiplied."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    other: Tensor | None = None
    gate: Tensor | None = None  # of the images [n, channels, 1, 1]


class GemmTile(NamedTuple):
    """A program's share of a product."""

    rows: int
    channels: int  # of a step
    outputs: int
    warps: int

    def stages(self, channels: int) -> int:
        """Steps that are copied ahead, of a product over so many channels."""
        return min(_STAGES, -(-channels // self.channels))

    def shared_bytes(self, channels: int, item_bytes: int) -> int:
        """Shared memory for the steps that are copied ahead, or for the outputs on their way to whole lines."""
        inputs = self.stages(channels) * self.channels * (self.rows + self.outputs)
        return max(inputs, self.rows * self.outputs) * item_bytes


Candidate = Callable[[ConvInputs, ConvConfig], Tensor]


def find_candidates(given: ConvInputs, shape: ConvConfig) -> list[Candidate]:
    """All forms but the plain one that may take these tensors."""
    if given.gate is None:
        return list(_candidates_without_gate(given, shape))
    gated: list[Candidate] = [
        partial(gate_then_conv, form=form) for form in _candidates_without_gate(given._replace(gate=None), shape)
    ]
    return gated + _triton_gemms(given, shape)


def _candidates_without_gate(given: ConvInputs, shape: ConvConfig) -> Iterator[Candidate]:
    whole: tuple[Candidate, ...] = (conv_then_pointwise, cudnn_conv) if shape.act == "relu" else (conv_then_pointwise,)
    yield from whole
    if _is_stem(given, shape):
        yield from (partial(space_to_depth_conv, form=form) for form in whole)
    if _is_depthwise(given, shape):
        yield triton_depthwise
    if shape.is_pointwise(given.weight) and _is_channels_last(given.x):
        if given.other is None and shape.act in ("none", "relu"):
            yield cublas_gemm
        yield from _triton_gemms(given, shape)


def torch_conv(given: ConvInputs, shape: ConvConfig) -> Tensor:
    """By torch's own operations."""
    x, weight, bias, other, gate = given
    y = F.conv2d(x if gate is None else x * gate, weight, bias, *_conv_args(shape))
    return EPILOGUES[shape.act](y if other is None else y + other)


def conv_then_pointwise(given: ConvInputs, shape: ConvConfig) -> Tensor:
    """By a convolution and one pass over its output."""
    y = F.conv2d(given.x, given.weight, None, *_conv_args(shape))
    return bias_add_act(y, given.bias, given.other, shape.act)


def cudnn_conv(given: ConvInputs, shape: ConvConfig) -> Tensor:
    """By cuDNN alone, which knows one activation, ReLU."""
    x, weight, bias, other, _ = given
    if other is None:
        return torch.cudnn_convolution_relu(x, weight, bias, *_conv_args(shape))
    return torch.cudnn_convolution_add_relu(x, weight, other, 1.0, bias, *_conv_args(shape))


def space_to_depth_conv(given: ConvInputs, shape: ConvConfig, form: Candidate) -> Tensor:
    """A stem's convolution by a form of it over blocks of 2x2 pixels; its weights are few and rearranged every time."""
    from reconv.kernels.stem.ops import space_to_depth, space_to_depth_weight

    blocks = space_to_depth(given.x, given.weight.shape[-1], given.x.dtype)
    return form(
        given._replace(x=blocks, weight=space_to_depth_weight(given.weight)),
        ConvConfig((1, 1), (0, 0), (1, 1), 1, shape.act),
    )


def cublas_gemm(given: ConvInputs, shape: ConvConfig) -> Tensor:
    """A 1x1 as a product of rows by cuBLAS, which knows biases and ReLU."""
    x, weight, bias, _, _ = given
    rows = x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])
    multiplied = torch._addmm_activation if shape.act == "relu" else torch.addmm
    y = multiplied(bias, rows, weight.flatten(1).t())
    return y.view(x.shape[0], *x.shape[2:], len(weight)).permute(0, 3, 1, 2)


def triton_depthwise(given: ConvInputs, shape: ConvConfig) -> Tensor:
    """A depthwise convolution by our own kernel, with everything in it; its few weights are turned every time."""
    from reconv.kernels.depthwise_inference.triton import depthwise_conv

    x, weight, bias, _, _ = given
    images, channels, height, width = x.shape
    kernel, stride, pad = weight.shape[-1], shape.stride[0], shape.padding[0]
    out_height, out_width = ((side + 2 * pad - kernel) // stride + 1 for side in (height, width))
    y = torch.empty(images, out_height, out_width, channels, dtype=x.dtype, device=x.device)
    block, fours = next(b for b in _FILTERED if -channels % b <= channels * _MOST_EMPTY), -(-out_width // 4)
    tall, wide = (_FOURS // (4 * block), 4) if out_width > _SHORT_LINE else (0, _FOURS // block)
    num_tiles = images * -(-out_height // tall) * -(-fours // wide) if tall else -(-images * out_height * fours // wide)
    launch(
        depthwise_conv, (num_tiles * -(-channels // block),),
        x, weight.flatten(1).t().contiguous(), bias, y, images, channels // 8, height, width, out_height, out_width,
        KERNEL=kernel, STRIDE=stride, PAD=pad, ACT=EPILOGUE_IDS[shape.act], TALL=tall, WIDE=wide, BLOCK=block,
    )  # fmt: skip
    return y.permute(0, 3, 1, 2)


def gate_then_conv(given: ConvInputs, shape: ConvConfig, form: Candidate) -> Tensor:
    """By a pass that multiplies images and gate, and a form without one."""
    assert given.gate is not None
    return form(given._replace(x=gate_add_act(given.x, given.gate, None, "none"), gate=None), shape)


def triton_gemm(given: ConvInputs, shape: ConvConfig, tile: GemmTile) -> Tensor:
    """A 1x1 by our own product, with everything in it."""
    from reconv.kernels.conv_bias_act.triton import gemm_epilogue

    x, weight, bias, other, gate = given
    samples, channels, height, width = x.shape
    y = torch.empty(samples, height, width, len(weight), dtype=x.dtype, device=x.device)
    images = 1 if gate is None else samples
    pixels = samples * height * width // images
    in_part, out_part = _channel_divisor(channels), _channel_divisor(len(weight))
    launch(
        gemm_epilogue, (images * -(-pixels // tile.rows) * -(-len(weight) // tile.outputs),),
        x, weight.flatten(1).contiguous(), bias, x if gate is None else gate.flatten(1).contiguous(),
        y if other is None else other, y, pixels, channels // in_part, len(weight) // out_part,
        IN_PART=in_part, OUT_PART=out_part, GATES=int(gate is not None), ADDS=int(other is not None),
        ACT=EPILOGUE_IDS[shape.act], ROWS=tile.rows, BLOCK=tile.channels, OUT=tile.outputs,
        STAGES=tile.stages(channels), num_warps=tile.warps,
    )  # fmt: skip
    return y.permute(0, 3, 1, 2)


def _triton_gemms(given: ConvInputs, shape: ConvConfig) -> list[Candidate]:
    """Our product in each way it is worth trying."""
    x, other = given.x, given.other
    num_outputs = len(given.weight) * (x.numel() // x.shape[1])
    are_rows = shape.is_pointwise(given.weight) and _is_channels_last(x) and (other is None or _is_channels_last(other))
    are_taken = x.dtype in _HALF_DTYPES and are_rows
    if not are_taken or not fused.supports_device(x) or max(x.numel(), num_outputs) > MAX_ELEMENTS:
        return []
    images = 1 if given.gate is None else len(x)
    pixels = x.numel() // (x.shape[1] * images)
    found = gemm_tiles(images, pixels, x.shape[1], len(given.weight))
    room_bytes = _shared_bytes(x)
    fitting = [tile for tile in found if tile.shared_bytes(x.shape[1], x.element_size()) <= room_bytes]
    return [partial(triton_gemm, tile=tile) for tile in fitting]


def _shared_bytes(x: Tensor) -> int:
    """Shared memory that a program may have where this tensor is: all of a processor's but what the driver keeps."""
    if not x.is_cuda:
        return MAX_ELEMENTS
    return torch.cuda.get_device_properties(x.device).shared_memory_per_multiprocessor - _DRIVER_BYTES


def gemm_tiles(images: int, pixels: int, channels: int, outputs: int) -> list[GemmTile]:
    """Tiles for a product of so many rows in each of so many images, two at most: of two widths, else heights."""
    step, whole = _next_power_of_2(channels), _next_power_of_2(outputs)
    if images * pixels <= _FEW_ROWS:
        return [GemmTile(_LEAST, min(step, 4 * _STEP), min(whole, _NARROW), 4)]
    # Activations are computed for the empty part of a tile too: either few blocks of outputs, or little empty.
    snug = next((width for width in _WIDTHS if -outputs % width <= outputs * _MOST_EMPTY), whole)
    widths = {min(whole, _WIDE), min(snug, whole)}
    fits = min(_HEIGHTS, key=lambda height: (-pixels % height if images > 1 else 0, -height))
    heights = _HEIGHTS if len(widths) == 1 else (fits,)
    found = sorted((height, width) for height in heights for width in widths)
    return [GemmTile(h, min(step, _STEP), w, 8 if h * w >= _WIDE * _WIDE else 4) for h, w in found]


def _next_power_of_2(number: int) -> int:
    """The least power of two that holds so many, of those that tensor cores multiply."""
    return max(_LEAST, 1 << (number - 1).bit_length())


def _is_depthwise(given: ConvInputs, shape: ConvConfig) -> bool:
    """Whether a convolution filters each channel by a small square, and nothing is added to it."""
    x, weight = given.x, given.weight
    kernel = weight.shape[-1]
    is_square = all(len(set(sides)) == 1 for sides in (weight.shape[2:], shape.stride, shape.padding))
    is_each = shape.groups == x.shape[1] == len(weight) and kernel in _FILTERS and set(shape.dilation) == {1}
    return is_each and is_square and shape.padding[0] <= kernel // 2 and given.other is None and fused.supports(x)


def _is_stem(given: ConvInputs, shape: ConvConfig) -> bool:
    """Whether a convolution can be one over blocks of pixels."""
    half = given.weight.shape[-1] // 2
    if shape[:4] != ((2, 2), (half, half), (1, 1), 1) or not fused.supports_device(given.x):
        return False
    from reconv.kernels.stem.ops import supports

    return supports(given.x, given.weight)


def _is_channels_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last)


def _channel_divisor(channels: int) -> int:
    """What device code knows of a number of channels: loads of eight at once, or of one."""
    return CHANNEL_MULTIPLE if channels % CHANNEL_MULTIPLE == 0 else 1


def _conv_args(shape: ConvConfig) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
    return shape.stride, shape.padding, shape.dilation, shape.groups
