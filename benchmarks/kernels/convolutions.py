"""Convolutions over windows: depthwise, grouped, and the stems of networks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from benchmarks.kernels.harness import DTYPE, Row, Sizes, image_bytes, random_norm, random_tensor, relative_error
from reconv.kernels.channels_last import channel_rows
from reconv.kernels.ops import depthwise, grouped_conv, stem
from reconv.kernels.ops import norm_max_pool as pool
from reconv.kernels.ops import stem_max_pool as stem_pool
from reconv.kernels.ops.batch_norm import NormInput, NormParams, gradient_sums, statistics
from reconv.kernels.ops.depthwise import StripTile
from reconv.kernels.ops.grouped_conv import GroupedConvTile, GroupedGradientTile
from reconv.kernels.ops.stem import CONV_CONFIGS, StemConvTile
from reconv.kernels.ops.stem_max_pool import GRADIENT_CONFIG, StemGradientTile
from reconv.kernels.window import STEM_WINDOW, STEM_WINDOWS, PoolWindow

DEPTHWISE = (  # channels, side, kernel, stride, how many of them MobileNetV2 and EfficientNet-B0 have
    (32, 112, 3, 1, 1, 1), (144, 56, 3, 1, 1, 1), (192, 28, 3, 1, 2, 0), (384, 14, 3, 1, 4, 0), (576, 14, 3, 1, 2, 0),
    (960, 7, 3, 1, 3, 0), (240, 28, 5, 1, 0, 1), (480, 14, 3, 1, 0, 2), (480, 14, 5, 1, 0, 1), (672, 14, 5, 1, 0, 2),
    (1152, 7, 5, 1, 0, 3), (1152, 7, 3, 1, 0, 1), (96, 112, 3, 2, 1, 1), (144, 56, 3, 2, 1, 0), (192, 28, 3, 2, 1, 0),
    (576, 14, 3, 2, 1, 0), (144, 56, 5, 2, 0, 1), (240, 28, 3, 2, 0, 1), (672, 14, 5, 2, 0, 1),
)  # fmt: skip
STRIPS = [StripTile(*values) for values in product((4, 7), (2,), (4,), (2, 3, 4, 6, 8))]

GROUPED = ((4, 128, 56, 3), (8, 256, 28, 3), (16, 512, 14, 22), (32, 1024, 7, 2))  # size, channels, side, number
GroupedTile = GroupedConvTile | GroupedGradientTile
GROUPED_IN_USE: dict[str, Mapping[int, GroupedTile | None]] = {
    "forward": grouped_conv.FORWARD, "input gradient": grouped_conv.INPUT_GRADIENT,
    "weight gradient": grouped_conv.WEIGHT_GRADIENT,
}  # fmt: skip
# Columns, blocks, lines ahead, parts (varied too), limit of registers. None of them spills registers.
GROUPED_TILES = (
    GroupedConvTile(16, 4, 1, 1), GroupedConvTile(16, 4, 2, 1), GroupedConvTile(32, 4, 1, 1),
    GroupedConvTile(32, 4, 2, 1), GroupedConvTile(32, 4, 2, 1, 168),
)  # fmt: skip
GROUPED_TILES_32 = (GroupedConvTile(16, 4, 1, 1), GroupedConvTile(16, 4, 1, 1, 168), GroupedConvTile(16, 4, 2, 1))
MIN_LINES = 7
# The last one spills for groups of 32. Limits of 128 and 168 registers would spill in the loop.
GROUPED_GRADIENT_TILES = (
    GroupedGradientTile(16, 4, 1, 2), GroupedGradientTile(16, 4, 1, 3), GroupedGradientTile(16, 4, 1, 6),
    GroupedGradientTile(16, 4, 2, 2), GroupedGradientTile(32, 4, 1, 2), GroupedGradientTile(32, 4, 1, 4),
    GroupedGradientTile(32, 4, 2, 2),
)  # fmt: skip

STEMS = {7: 64, 3: 32}  # outputs by kernel: ResNet's stem and MobileNetV2's
STEM_SIDE = 224
# Columns, outputs, rows of taps per load, warps, stages, programs per SM, limit of registers.
STEM_TILES = {
    7: (
        (64, 64, 1, 4, 2, 2), (64, 64, 2, 4, 2, 2), (64, 64, 4, 4, 2, 2), (64, 64, 1, 4, 3, 1), (64, 64, 4, 4, 3, 1),
        (128, 64, 2, 4, 2, 1), (128, 64, 4, 8, 2, 1), (32, 64, 1, 4, 3, 2), (32, 64, 1, 4, 4, 2, 128),
    ),
    3: (
        (64, 64, 1, 4, 3, 3, 168), (64, 64, 2, 4, 3, 3, 168), (64, 64, 2, 4, 3, 4, 128), (128, 64, 2, 4, 3, 2),
        (64, 32, 2, 2, 3, 6), (128, 32, 2, 2, 3, 4), (256, 32, 2, 4, 2, 2),
    ),
}  # fmt: skip
# Columns, outputs, warps, stages, programs per SM, limit of registers.
STEM_GRADIENT_TILES = (
    (32, 64, 4, 2, 2), (32, 64, 4, 1, 2), (16, 64, 4, 2, 2), (16, 64, 4, 3, 2), (32, 32, 4, 2, 2),
    (32, 32, 4, 2, 3, 168), (16, 64, 4, 4, 2), (32, 64, 8, 2, 1), (16, 64, 4, 3, 1),
)  # fmt: skip
_NO_BIAS = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)  # of a convolution's backward pass, over blocks of a stem


@dataclass(frozen=True, slots=True)
class DepthwiseTensors:
    x: Tensor
    weight: Tensor
    dy: Tensor
    norm: NormParams
    stride: int
    groups: tuple[int, ...]

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of F.conv2d."""
        return {"stride": self.stride, "padding": self.weight.shape[-1] // 2, "groups": len(self.weight)}

    def cudnn(self, way: str) -> object:
        if way == "forward":
            y = F.conv2d(self.x, self.weight, **self.options)
            return y, statistics(y, self.norm, channel_rows(y, self.groups))
        if way == "input gradient":  # at stride 1
            return F.conv2d(self.x, self.weight.flip(2, 3), **self.options)
        half = [self.weight.shape[-1] // 2] * 2
        options = ([self.stride] * 2, half, [1, 1], False, [0, 0], len(self.weight))
        gradients = torch.ops.aten.convolution_backward(
            self.dy, self.x, self.weight, None, *options, [False, True, False]
        )
        return gradients[1]

    def ours(self, way: str, tile: StripTile | None = None) -> object:
        key = self.weight.shape[-1], self.stride
        conv = tile or depthwise.CONV[key]
        if way == "forward":
            return depthwise.conv_and_statistics(self.x, self.weight, self.stride, self.norm, self.groups, conv)
        if way == "input gradient":
            return depthwise.conv_output(self.x, self.weight, self.stride, conv, flip=True)
        tile = tile or depthwise.WEIGHT_GRADIENT[key]
        return depthwise.weight_gradient(self.dy, self.x, self.weight, self.stride, tile)

    def error(self) -> float:
        """The largest error of forward pass and gradients against float32, and of the statistics."""
        x, filters = self.x.float().requires_grad_(), self.weight.float().requires_grad_()
        expected = F.conv2d(x, filters, **self.options)
        expected.backward(self.dy.float())
        leaves = self.x.detach().requires_grad_(), self.weight.detach().requires_grad_()
        y, stats = depthwise.depthwise_conv_statistics(*leaves, self.stride, self.norm, self.groups)
        y.backward(self.dy)
        exact_stats = statistics(y.detach(), self.norm, channel_rows(y, self.groups))
        pairs = (
            (y.detach(), expected.detach()),
            *((a.grad, b.grad) for a, b in zip(leaves, (x, filters), strict=True)),
        )
        errors = [relative_error(a, b) for a, b in pairs if a is not None and b is not None]
        return max(*errors, relative_error(stats, exact_stats))


def depthwise_rows(sizes: Sizes) -> Iterator[Row]:
    """Depthwise convolutions; forward includes the statistics of the output, which cuDNN leaves to another kernel."""
    for channels, full_side, kernel, stride, *counts in DEPTHWISE:
        side = sizes.side(full_side)
        num_bytes = image_bytes(sizes.batch, channels, side) + image_bytes(sizes.batch, channels, -(-side // stride))
        for way in ("forward", *(("input gradient",) if stride == 1 else ()), "weight gradient"):
            yield Row(
                name=f"{channels}, {full_side}, {kernel}x{kernel}, stride {stride}: {way}",
                draw=partial(depthwise_tensors, channels, side, kernel, stride, sizes),
                ways={
                    "cuDNN": partial(DepthwiseTensors.cudnn, way=way),
                    "ours": partial(DepthwiseTensors.ours, way=way),
                },
                num_bytes=num_bytes,
                counts=dict(zip(("MobileNetV2", "EfficientNet-B0"), counts, strict=True)),
                configs=[None, *STRIPS],
                ours=partial(depthwise_with, way),
                error=(lambda tensors, config: tensors.error()) if way == "forward" else None,
                tolerance=2e-2,
            )


def depthwise_with(way: str, tensors: DepthwiseTensors, tile: StripTile | None) -> object:
    return tensors.ours(way, tile)


def depthwise_tensors(
    channels: int, side: int, kernel: int, stride: int, sizes: Sizes, device: str
) -> DepthwiseTensors:
    x, out = random_tensor(sizes.batch, channels, side, side, device=device), -(-side // stride)
    weight = (torch.randn(channels, 1, kernel, kernel, device=device) / kernel).to(DTYPE)
    dy = random_tensor(sizes.batch, channels, out, out, device=device)
    return DepthwiseTensors(x, weight, dy, random_norm(channels, device), stride, sizes.norm_groups)


Grouped = tuple[Tensor, Tensor, Tensor]  # x, weight, dy


def grouped_rows(sizes: Sizes) -> Iterator[Row]:
    """Grouped 3x3 convolutions of ResNeXt-101 32x4d: output, input gradient and weight gradient."""
    for size, channels, full_side, count in GROUPED:
        side = sizes.side(full_side)
        for kernel, in_use in GROUPED_IN_USE.items():
            used = in_use.get(size)
            ways: dict[str, Callable[[Any], object]] = {"cuDNN": partial(grouped_cudnn, kernel)}
            if used is not None:
                ways["ours"] = partial(grouped_ours, kernel, config=used)
            yield Row(
                name=f"{channels} in groups of {size}, {full_side}: {kernel}",
                draw=partial(grouped_tensors, size, channels, side, sizes.batch),
                ways=ways,
                num_bytes=2 * image_bytes(sizes.batch, channels, side),
                counts={"ResNeXt-101 32x4d": count},
                configs=[*([] if used is None else [used]), *grouped_tiles(kernel, size, full_side)],
                ours=partial(grouped_ours, kernel),
                error=None if used is None else partial(grouped_error, kernel, used),
            )


def grouped_tensors(size: int, channels: int, side: int, batch: int, device: str) -> Grouped:
    x, dy = (random_tensor(batch, channels, side, side, device=device) for _ in range(2))
    return x, random_tensor(channels, size, 3, 3, device=device), dy


def grouped_tiles(kernel: str, size: int, side: int) -> list[GroupedTile]:
    if kernel == "weight gradient":
        return list(GROUPED_GRADIENT_TILES if size < 32 else GROUPED_GRADIENT_TILES[:-1])
    tiles = GROUPED_TILES if size < 32 else GROUPED_TILES_32
    parts = [parts for parts in (1, 2, 4, 8) if side // parts >= MIN_LINES]
    return [replace(tile, parts=number) for tile in tiles for number in parts]


def grouped_ours(kernel: str, tensors: Grouped, config: Any) -> Tensor:
    x, weight, dy = tensors
    if kernel == "forward":
        return grouped_conv.conv_output(x, weight, config)
    if kernel == "input gradient":
        return grouped_conv.input_gradient(dy, weight, config)
    return grouped_conv.weight_gradient(dy, x, weight, config)


def grouped_cudnn(kernel: str, tensors: Grouped) -> Tensor:
    x, weight, dy = tensors
    if kernel == "forward":
        return F.conv2d(x, weight, padding=1, groups=len(weight) // weight.shape[1])
    wanted = [kernel == "input gradient", kernel == "weight gradient"]
    dx, dweight = grouped_conv.cudnn_gradients(dy, x, weight, wanted)
    gradient = dx if wanted[0] else dweight
    assert gradient is not None
    return gradient


def grouped_error(kernel: str, used: GroupedTile, tensors: Grouped, config: GroupedTile | None) -> float:
    """The error against float64."""
    x, weight, dy = (one.double().requires_grad_() for one in tensors)
    exact = F.conv2d(x, weight, padding=1, groups=len(weight) // weight.shape[1])
    if kernel != "forward":
        exact = torch.autograd.grad(exact, x if kernel == "input gradient" else weight, dy)[0]
    return relative_error(grouped_ours(kernel, tensors, config or used), exact.detach())


@dataclass(frozen=True, slots=True)
class StemTensors:
    images: Tensor
    blocks: Tensor
    filters: Tensor
    norm: NormParams
    groups: tuple[int, ...]
    window: PoolWindow
    operand: NormInput
    place: Tensor
    dz: Tensor
    sums: Tensor

    def rearrange(self, kernel: int) -> Tensor:
        """Blocks of pixels."""
        return stem.space_to_depth(self.images, kernel, DTYPE)

    def pool(self) -> object:
        """The norm, ReLU and pool."""
        return pool.write_pooled(self.operand, self.groups, self.window)

    def separate_forward(self) -> Tensor:
        """cuDNN's convolution and the kernel of the statistics."""
        y = F.conv2d(self.blocks, self.filters)
        return statistics(y, self.norm, channel_rows(y, self.groups))

    def forward(self, config: StemConvTile | None = None) -> tuple[Tensor, Tensor]:
        return stem.conv_output(self.blocks, self.filters, self.norm, self.groups, config)

    def forward_error(self, config: StemConvTile | None) -> float:
        y, stats = self.forward(config)
        exact = F.conv2d(self.blocks.double(), self.filters.double())
        return max(
            relative_error(y, exact), relative_error(stats, statistics(y, self.norm, channel_rows(y, self.groups)))
        )

    def pool_gradient(self) -> Tensor:
        """The gradient of the convolution's output."""
        return pool.input_gradient(self.dz, self.place, self.operand, self.sums, self.groups, self.window)

    def separate_backward(self) -> Tensor:
        """cuDNN's weight gradient of it."""
        gradients = torch.ops.aten.convolution_backward(
            self.pool_gradient(), self.blocks, self.filters, None, *_NO_BIAS, [False, True, False]
        )
        dfilters: Tensor = gradients[1]
        return dfilters

    def backward(self, config: StemGradientTile | None = None) -> Tensor:
        """The weight gradient by one kernel and the sum over its programs."""
        operands = self.dz, self.place, self.operand, self.sums, self.blocks, self.groups, self.window
        return stem_pool.weight_gradient(*operands, config=config or GRADIENT_CONFIG)

    def backward_error(self, config: StemGradientTile | None) -> float:
        exact = conv2d_weight(self.blocks.double(), list(self.filters.shape), self.pool_gradient().double())
        return relative_error(self.backward(config), exact)


def stem_tensors(kernel: int, side: int, window: PoolWindow, sizes: Sizes, device: str) -> StemTensors:
    groups, outputs = sizes.norm_groups, STEMS[kernel]
    images, norm = random_tensor(sum(groups), 3, side, side, device=device), random_norm(outputs, device)
    weight = random_tensor(outputs, 3, kernel, kernel, device=device)
    blocks, filters = stem.space_to_depth(images, kernel, DTYPE), stem.space_to_depth_weight(weight)
    x, stats = stem.conv_output(blocks, filters, norm, groups)
    operand = NormInput(x, stats, norm.weight.detach(), norm.bias.detach())
    _, peak, place = pool.write_pooled(operand, groups, window)
    peaks, dz = NormInput(peak, *operand.tensors()[1:]), torch.empty_like(peak)
    first, second = torch.randn_like(peak), torch.randn_like(peak)
    sums = gradient_sums(first, second, peaks, None, None, dz, channel_rows(peak, groups), "relu")
    return StemTensors(images, blocks, filters, norm, groups, window, operand, place, dz, sums)


def stem_rows(sizes: Sizes) -> Iterator[Row]:
    """The stems of ResNet (7x7, max-pool) and MobileNetV2 (3x3), fused and separate."""
    side = STEM_SIDE if sizes.max_side is None else 4 * sizes.max_side
    for kernel, window in ((7, STEM_WINDOW), (3, STEM_WINDOW), *((7, w) for w in STEM_WINDOWS if w != STEM_WINDOW)):
        name = f"{kernel}x{kernel}" if window == STEM_WINDOW else f"{kernel}x{kernel}, {window}"
        draw = partial(stem_tensors, kernel, side, window, sizes)
        num_bytes = image_bytes(sizes.batch, STEMS[kernel], side // 2)
        gradient_tiles = [StemGradientTile(*values) for values in STEM_GRADIENT_TILES] if kernel == 7 else []
        yield Row(
            name=f"{name}: forward",
            draw=draw,
            ways={"separate": StemTensors.separate_forward, "ours": StemTensors.forward},
            num_bytes=num_bytes,
            configs=[CONV_CONFIGS[kernel], *(StemConvTile(*values) for values in STEM_TILES[kernel])],
            ours=StemTensors.forward,
            error=StemTensors.forward_error,
            tolerance=1e-2,
        )
        yield Row(
            name=f"{name}: backward",
            draw=draw,
            ways={"separate": StemTensors.separate_backward, "ours": StemTensors.backward},
            num_bytes=num_bytes,
            configs=[GRADIENT_CONFIG, *gradient_tiles],
            ours=StemTensors.backward,
            error=StemTensors.backward_error,
            tolerance=1e-2,
        )
        for part, call in (
            ("blocks of pixels", partial(StemTensors.rearrange, kernel=kernel)),
            ("norm and pool", StemTensors.pool),
            ("gradient of norm and pool", StemTensors.pool_gradient),
        ):
            yield Row(name=f"{name}: {part}", draw=draw, ways={"ours": call}, num_bytes=num_bytes)
