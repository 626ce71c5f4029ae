"""Implementations of a convolution with bias, residual sum and activation, from which autotuning chooses.

All of them compute the same values, up to the order of sums and the rounding between operations.
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
from reconv.kernels.ops.pointwise import EPILOGUE_IDS, EPILOGUES, Epilogue, bias_add_act, gate_add_act

_HALF_DTYPES = (torch.bfloat16, torch.float16)  # dtypes of tensor cores
_MIN_TILE = 16  # rows, channels and outputs, on tensor cores
_STAGES = 3  # pipeline stages of a product
_FEW_ROWS = 1024  # below it, tiles of 16 rows give enough programs
_STEP = 64  # channels
_HEIGHTS = (128, 64)  # rows of a tile
# Outputs of a tile; 256 would need 254 registers and serialize the products.
_NARROW, _WIDE, _WIDTHS = 64, 128, (128, 64, 32)
_MOST_EMPTY = 1 / 8
_DEPTHWISE_KERNELS = (3, 5, 7)
_DEPTHWISE_TILE = 1024  # groups of four pixels times channels: one load of eight channels per thread
_SHORT_LINE = 32  # pixels; below it, a tile spans several lines anyway
_DEPTHWISE_BLOCKS = (64, 32, 16, 8)  # channels of a tile: the largest with little of it empty
_DRIVER_BYTES = 1024  # of shared memory, reserved


class ConvConfig(NamedTuple):
    """The hyperparameters of a convolution and its activation; a tuple, so that an fx graph can contain it."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    act: Epilogue

    def is_pointwise(self, weight: Tensor) -> bool:
        """True if the convolution is a matrix product over pixels."""
        sides = (*weight.shape[2:], *self.stride)
        return set(sides) == {1} and not any(self.padding) and self.groups == 1


class ConvInputs(NamedTuple):
    """The tensors of a convolution; `other` is added to its output, and `gate` multiplied with x."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    other: Tensor | None = None
    gate: Tensor | None = None  # of the images [n, channels, 1, 1]


class GemmTile(NamedTuple):
    """The tile of a matrix product that one program computes."""

    rows: int
    channels: int  # of a step
    outputs: int
    warps: int

    def stages(self, channels: int) -> int:
        """Pipeline stages of a product over this many channels."""
        return min(_STAGES, -(-channels // self.channels))

    def shared_bytes(self, channels: int, item_bytes: int) -> int:
        """Shared memory for the pipeline stages, or for the output tile."""
        staged = self.stages(channels) * self.channels * (self.rows + self.outputs)
        return max(staged, self.rows * self.outputs) * item_bytes


Candidate = Callable[[ConvInputs, ConvConfig], Tensor]


def find_candidates(inputs: ConvInputs, config: ConvConfig) -> list[Candidate]:
    """All implementations but torch's that support these tensors."""
    if inputs.gate is None:
        return list(_candidates_without_gate(inputs, config))
    gated: list[Candidate] = [
        partial(gate_then_conv, candidate=candidate)
        for candidate in _candidates_without_gate(inputs._replace(gate=None), config)
    ]
    return gated + _triton_gemms(inputs, config)


def _candidates_without_gate(inputs: ConvInputs, config: ConvConfig) -> Iterator[Candidate]:
    full: tuple[Candidate, ...] = (conv_then_pointwise, cudnn_conv) if config.act == "relu" else (conv_then_pointwise,)
    yield from full
    if _is_stem(inputs, config):
        yield from (partial(space_to_depth_conv, candidate=candidate) for candidate in full)
    if _is_depthwise(inputs, config):
        yield triton_depthwise
    if config.is_pointwise(inputs.weight) and _is_channels_last(inputs.x):
        if inputs.other is None and config.act in ("none", "relu"):
            yield cublas_gemm
        yield from _triton_gemms(inputs, config)


def torch_conv(inputs: ConvInputs, config: ConvConfig) -> Tensor:
    """Torch's own operations."""
    x, weight, bias, other, gate = inputs
    y = F.conv2d(x if gate is None else x * gate, weight, bias, *_conv_args(config))
    return EPILOGUES[config.act](y if other is None else y + other)


def conv_then_pointwise(inputs: ConvInputs, config: ConvConfig) -> Tensor:
    """A convolution, and one pointwise kernel over its output."""
    y = F.conv2d(inputs.x, inputs.weight, None, *_conv_args(config))
    return bias_add_act(y, inputs.bias, inputs.other, config.act)


def cudnn_conv(inputs: ConvInputs, config: ConvConfig) -> Tensor:
    """cuDNN's fused convolution, which has ReLU only."""
    x, weight, bias, other, _ = inputs
    if other is None:
        return torch.cudnn_convolution_relu(x, weight, bias, *_conv_args(config))
    return torch.cudnn_convolution_add_relu(x, weight, other, 1.0, bias, *_conv_args(config))


def space_to_depth_conv(inputs: ConvInputs, config: ConvConfig, candidate: Candidate) -> Tensor:
    """A stem's convolution over 2x2 blocks of pixels, by another candidate; rearranges the small weight each time."""
    from reconv.kernels.ops.stem import space_to_depth, space_to_depth_weight

    blocks = space_to_depth(inputs.x, inputs.weight.shape[-1], inputs.x.dtype)
    return candidate(
        inputs._replace(x=blocks, weight=space_to_depth_weight(inputs.weight)),
        ConvConfig((1, 1), (0, 0), (1, 1), 1, config.act),
    )


def cublas_gemm(inputs: ConvInputs, config: ConvConfig) -> Tensor:
    """A 1x1 convolution as a matrix product by cuBLAS, which fuses bias and ReLU."""
    x, weight, bias, _, _ = inputs
    rows = x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])
    multiplied = torch._addmm_activation if config.act == "relu" else torch.addmm
    y = multiplied(bias, rows, weight.flatten(1).t())
    return y.view(x.shape[0], *x.shape[2:], len(weight)).permute(0, 3, 1, 2)


def triton_depthwise(inputs: ConvInputs, config: ConvConfig) -> Tensor:
    """A depthwise convolution by our kernel with everything fused; its small weight is transposed each time."""
    from reconv.kernels.triton.depthwise_inference import depthwise_conv

    x, weight, bias, _, _ = inputs
    images, channels, height, width = x.shape
    kernel, stride, pad = weight.shape[-1], config.stride[0], config.padding[0]
    out_height, out_width = ((side + 2 * pad - kernel) // stride + 1 for side in (height, width))
    y = torch.empty(images, out_height, out_width, channels, dtype=x.dtype, device=x.device)
    block, fours = next(b for b in _DEPTHWISE_BLOCKS if -channels % b <= channels * _MOST_EMPTY), -(-out_width // 4)
    tall, wide = (_DEPTHWISE_TILE // (4 * block), 4) if out_width > _SHORT_LINE else (0, _DEPTHWISE_TILE // block)
    num_tiles = images * -(-out_height // tall) * -(-fours // wide) if tall else -(-images * out_height * fours // wide)
    launch(
        depthwise_conv, (num_tiles * -(-channels // block),),
        x, weight.flatten(1).t().contiguous(), bias, y, images, channels // 8, height, width, out_height, out_width,
        KERNEL=kernel, STRIDE=stride, PAD=pad, ACT=EPILOGUE_IDS[config.act], TALL=tall, WIDE=wide, BLOCK=block,
    )  # fmt: skip
    return y.permute(0, 3, 1, 2)


def gate_then_conv(inputs: ConvInputs, config: ConvConfig, candidate: Candidate) -> Tensor:
    """A pointwise kernel that applies the gate, and a candidate without gate."""
    assert inputs.gate is not None
    return candidate(inputs._replace(x=gate_add_act(inputs.x, inputs.gate, None, "none"), gate=None), config)


def triton_gemm(inputs: ConvInputs, config: ConvConfig, tile: GemmTile) -> Tensor:
    """A 1x1 convolution by our matrix product with everything fused."""
    from reconv.kernels.triton.conv_bias_act import gemm_epilogue

    x, weight, bias, other, gate = inputs
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
        ACT=EPILOGUE_IDS[config.act], ROWS=tile.rows, BLOCK=tile.channels, OUT=tile.outputs,
        STAGES=tile.stages(channels), num_warps=tile.warps,
    )  # fmt: skip
    return y.permute(0, 3, 1, 2)


def _triton_gemms(inputs: ConvInputs, config: ConvConfig) -> list[Candidate]:
    """Our matrix product with each tile that is worth trying."""
    x, other = inputs.x, inputs.other
    num_outputs = len(inputs.weight) * (x.numel() // x.shape[1])
    are_rows = (
        config.is_pointwise(inputs.weight) and _is_channels_last(x) and (other is None or _is_channels_last(other))
    )
    is_supported = x.dtype in _HALF_DTYPES and are_rows
    if not is_supported or not fused.supports_device(x) or max(x.numel(), num_outputs) > MAX_ELEMENTS:
        return []
    images = 1 if inputs.gate is None else len(x)
    pixels = x.numel() // (x.shape[1] * images)
    tiles = gemm_tiles(images, pixels, x.shape[1], len(inputs.weight))
    available_bytes = _shared_bytes(x)
    fitting = [tile for tile in tiles if tile.shared_bytes(x.shape[1], x.element_size()) <= available_bytes]
    return [partial(triton_gemm, tile=tile) for tile in fitting]


def _shared_bytes(x: Tensor) -> int:
    """Shared memory available to a program: all of an SM's but what the driver reserves."""
    if not x.is_cuda:
        return MAX_ELEMENTS
    return torch.cuda.get_device_properties(x.device).shared_memory_per_multiprocessor - _DRIVER_BYTES


def gemm_tiles(images: int, pixels: int, channels: int, outputs: int) -> list[GemmTile]:
    """Tiles to try for a product of `pixels` rows in each of `images` images: two widths, else two heights."""
    step, whole = _next_power_of_2(channels), _next_power_of_2(outputs)
    if images * pixels <= _FEW_ROWS:
        return [GemmTile(_MIN_TILE, min(step, 4 * _STEP), min(whole, _NARROW), 4)]
    # Activations are computed for the empty part of a tile too: use either few wide blocks or blocks that fit well.
    snug = next((width for width in _WIDTHS if -outputs % width <= outputs * _MOST_EMPTY), whole)
    widths = {min(whole, _WIDE), min(snug, whole)}
    fits = min(_HEIGHTS, key=lambda height: (-pixels % height if images > 1 else 0, -height))
    heights = _HEIGHTS if len(widths) == 1 else (fits,)
    tiles = sorted((height, width) for height in heights for width in widths)
    return [GemmTile(h, min(step, _STEP), w, 8 if h * w >= _WIDE * _WIDE else 4) for h, w in tiles]


def _next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below the number, at least 16."""
    return max(_MIN_TILE, 1 << (number - 1).bit_length())


def _is_depthwise(inputs: ConvInputs, config: ConvConfig) -> bool:
    """True if this is a depthwise convolution with a small square kernel and nothing to add."""
    x, weight = inputs.x, inputs.weight
    kernel = weight.shape[-1]
    is_square = all(len(set(sides)) == 1 for sides in (weight.shape[2:], config.stride, config.padding))
    is_each = (
        config.groups == x.shape[1] == len(weight) and kernel in _DEPTHWISE_KERNELS and set(config.dilation) == {1}
    )
    return is_each and is_square and config.padding[0] <= kernel // 2 and inputs.other is None and fused.supports(x)


def _is_stem(inputs: ConvInputs, config: ConvConfig) -> bool:
    """True if the convolution can be computed over 2x2 blocks of pixels."""
    half = inputs.weight.shape[-1] // 2
    if config[:4] != ((2, 2), (half, half), (1, 1), 1) or not fused.supports_device(inputs.x):
        return False
    from reconv.kernels.ops.stem import supports

    return supports(inputs.x, inputs.weight)


def _is_channels_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last)


def _channel_divisor(channels: int) -> int:
    """The divisor of the channels that kernels may rely on for vector loads: 8 or 1."""
    return CHANNEL_MULTIPLE if channels % CHANNEL_MULTIPLE == 0 else 1


def _conv_args(config: ConvConfig) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
    return config.stride, config.padding, config.dilation, config.groups
