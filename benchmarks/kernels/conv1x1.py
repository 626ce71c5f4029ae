"""1x1 convolutions fused with the norm behind or around them: statistics, backward passes, expansions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.harness import DTYPE, Row, Sizes, image_bytes, random_norm, random_tensor, relative_error
from reconv.kernels import reference
from reconv.kernels.channels_last import ChannelRows, channel_rows
from reconv.kernels.ops import batch_norm as norm
from reconv.kernels.ops import conv1x1_norm_act as expansion
from reconv.kernels.ops import conv1x1_norm_backward as backward
from reconv.kernels.ops.batch_norm import NormInput, NormParams
from reconv.kernels.ops.conv1x1_norm_act import ConvNormInput, ExpansionTile
from reconv.kernels.ops.conv1x1_norm_backward import BackwardTile
from reconv.kernels.ops.conv1x1_statistics import ConvTile, conv_output, tile_config
from reconv.kernels.reference import Activation

Layer = tuple[int, int, int]  # inputs, outputs, side
NETWORKS: dict[str, dict[Layer, int]] = {  # and how many of each layer
    "ResNet-50": {
        (64, 64, 56): 1, (64, 256, 56): 4, (256, 64, 56): 2, (256, 128, 56): 1, (128, 512, 28): 4, (512, 128, 28): 3,
        (512, 256, 28): 1, (256, 1024, 14): 6, (1024, 256, 14): 5, (1024, 512, 14): 1, (512, 2048, 7): 3,
        (2048, 512, 7): 2,
    },
    "MobileNetV2": {
        (16, 96, 112): 1, (24, 144, 56): 2, (32, 192, 28): 3, (64, 384, 14): 4, (96, 576, 14): 3, (160, 960, 7): 3,
        (320, 1280, 7): 1,
    },
    "EfficientNet-B0": {
        (16, 96, 112): 1, (24, 144, 56): 2, (40, 240, 28): 2, (80, 480, 14): 3, (112, 672, 14): 3, (192, 1152, 7): 4,
        (320, 1280, 7): 1, (32, 16, 112): 1, (96, 24, 56): 1, (144, 24, 56): 1, (144, 40, 28): 1, (240, 40, 28): 1,
        (240, 80, 14): 1, (480, 80, 14): 2, (480, 112, 14): 1, (672, 112, 14): 2, (672, 192, 7): 1,
        (1152, 192, 7): 3, (1152, 320, 7): 1,
    },
    "GoogLeNet": {
        (64, 64, 56): 1, (192, 176, 28): 1, (192, 32, 28): 1, (256, 288, 28): 1, (256, 64, 28): 1, (480, 304, 14): 1,
        (480, 64, 14): 1, (512, 296, 14): 1, (512, 280, 14): 1, (512, 288, 14): 1, (512, 64, 14): 3,
        (528, 448, 14): 1, (528, 128, 14): 1, (832, 448, 7): 1, (832, 624, 7): 1, (832, 128, 7): 2,
    },
}  # fmt: skip
# Rows, outputs, inputs (None: all), warps, stages, programs per SM, limit of registers.
ALL_INPUTS = (
    ConvTile(128, 128, None, 8, 3, 2, 128), ConvTile(128, 128, None, 8, 2, 2, 128),
    ConvTile(128, 128, None, 8, 3, 4, 128), ConvTile(128, 128, None, 8, 3, 1), ConvTile(256, 128, None, 8, 2, 1),
    ConvTile(64, 128, None, 4, 3, 3, 168), ConvTile(64, 128, None, 8, 4, 3, 80),
    ConvTile(128, 64, None, 4, 3, 4, 128), ConvTile(128, 64, None, 4, 2, 3, 168),
    ConvTile(256, 64, None, 4, 2, 2),
)  # fmt: skip
SOME_INPUTS = (
    ConvTile(128, 128, 64, 8, 3, 2, 128), ConvTile(128, 128, 64, 8, 4, 1), ConvTile(128, 128, 32, 8, 4, 2, 128),
    ConvTile(256, 128, 64, 8, 3, 1), ConvTile(256, 128, 64, 8, 4, 1), ConvTile(128, 256, 64, 8, 3, 1),
    ConvTile(256, 128, 64, 8, 3, 2), ConvTile(64, 128, 64, 4, 3, 3, 168), ConvTile(128, 64, 64, 4, 3, 3, 168),
    ConvTile(128, 64, 64, 4, 4, 2, 168), ConvTile(256, 64, 64, 4, 4, 1),
)  # fmt: skip
MAX_ALL_INPUTS = 256
MAX_SHARED_BYTES = 227 * 1024

# Outputs, inputs, side, norm and ReLU before the convolution, in ResNet-50 and in ResNeXt's first stage.
BACKWARD_SHAPES = ((256, 64, 56, True), (256, 64, 56, False), (256, 128, 56, True), (512, 128, 28, True))
# By outputs and inputs: rows, warps, stages, programs per SM, register limit, channels of a tile (None: all).
BACKWARD_TILES: dict[tuple[int, int], tuple[tuple[int | None, ...], ...]] = {
    (256, 64): ((64, 8, 3, 1), (64, 8, 2, 1), (32, 8, 3, 1), (32, 8, 4, 1), (32, 4, 3, 2)),
    (256, 128): (
        (32, 8, 2, 1), (32, 8, 3, 1), (32, 8, 4, 1), (64, 8, 2, 1), (64, 16, 2, 1), (32, 16, 3, 1), (32, 16, 2, 1),
    ),
    (512, 128): (
        (64, 4, 3, 2, None, 64), (64, 4, 2, 2, None, 64), (64, 4, 4, 2, None, 64), (64, 4, 3, 3, 168, 64),
        (64, 8, 3, 2, 128, 64), (128, 8, 3, 1, None, 64), (64, 4, 3, 2, None, 32), (64, 4, 4, 2, None, 32),
        (64, 4, 4, 3, 168, 32),
    ),
}  # fmt: skip

EXPANSIONS = (  # inputs, outputs, side, and how many MobileNetV2 and EfficientNet-B0 have
    (16, 96, 112, 1, 1), (24, 144, 56, 2, 2), (32, 192, 28, 3, 0), (40, 240, 28, 0, 2), (64, 384, 14, 4, 0),
)  # fmt: skip
ACTIVATIONS: tuple[tuple[str, Activation], ...] = (("MobileNetV2", "relu6"), ("EfficientNet-B0", "silu"))
# Rows, output channels, warps, stages, limit of registers of a tile; and numbers of programs per SM.
EXPANSION_TILES: dict[str, list[tuple[int, ...]]] = {
    "statistics": [(64, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (64, 32, 4, 3), (128, 32, 4, 3), (64, 128, 4, 3)],
    "output": [(64, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (64, 32, 4, 3), (128, 32, 4, 3), (64, 128, 4, 3)],
    "gradient_sums": [
        (64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 4, 2), (64, 32, 4, 3), (128, 32, 4, 3), (128, 64, 8, 3),
        (128, 64, 4, 2), (64, 64, 4, 3, 128),
    ],
    "input_gradient": [
        (128, 32, 4, 3), (128, 32, 4, 2), (128, 32, 4, 4), (64, 32, 4, 3), (64, 64, 4, 3), (128, 64, 4, 3),
        (128, 64, 8, 3), (256, 32, 8, 3), (128, 32, 4, 3, 128),
    ],
}  # fmt: skip
PROGRAMS = {"statistics": (2, 4, 8), "output": (4, 8, 16), "gradient_sums": (2, 3, 4), "input_gradient": (1,)}
_NO_BIAS = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)  # of a 1x1 convolution's backward pass


def statistics_rows(sizes: Sizes) -> Iterator[Row]:
    """Convolutions that compute the statistics of their output, beside cuDNN's and a kernel for the statistics."""
    for layer in dict.fromkeys(layer for layers in NETWORKS.values() for layer in layers):
        inputs, outputs, full_side = layer
        side, used = sizes.side(full_side), tile_config(inputs, outputs)
        ours = partial(fused_statistics, sizes.norm_groups)
        ways: dict[str, Callable[[Any], object]] = {
            "separate": partial(separate_statistics, sizes.norm_groups),
            "cuDNN alone": convolution,
        }
        yield Row(
            name=f"{inputs} to {outputs}, {full_side}",
            draw=partial(conv_tensors, inputs, outputs, side, sizes.batch),
            ways=ways if used is None else {**ways, "ours": partial(ours, config=used)},
            num_bytes=image_bytes(sizes.batch, inputs, side) + image_bytes(sizes.batch, outputs, side),
            counts={name: layers[layer] for name, layers in NETWORKS.items() if layer in layers},
            configs=[*([] if used is None else [used]), *swept_tiles(inputs, outputs)],
            ours=ours,
            error=None if used is None else partial(statistics_error, sizes.norm_groups, used),
        )


Operands = tuple[Tensor, Tensor, NormParams]  # x, filters, norm


def conv_tensors(inputs: int, outputs: int, side: int, batch: int, device: str) -> Operands:
    x = random_tensor(batch, inputs, side, side, device=device) + 0.5
    return x, random_tensor(outputs, inputs, 1, 1, device=device), random_norm(outputs, device)


def convolution(tensors: Operands) -> Tensor:
    return F.conv2d(tensors[0], tensors[1])


def separate_statistics(groups: tuple[int, ...], tensors: Operands) -> tuple[Tensor, Tensor]:
    """cuDNN's convolution and the kernel of the statistics."""
    y = convolution(tensors)
    return y, norm.statistics(y, tensors[2], channel_rows(y, groups))


def fused_statistics(groups: tuple[int, ...], tensors: Operands, config: ConvTile) -> tuple[Tensor, Tensor]:
    x, filters, of = tensors
    return conv_output(x, filters, of, groups, config)


def swept_tiles(inputs: int, outputs: int) -> list[ConvTile]:
    """Configurations that fit into shared memory."""
    tiles = [*(ALL_INPUTS if inputs <= MAX_ALL_INPUTS else ()), *(SOME_INPUTS if inputs > 64 else ())]
    tiles = [tile for tile in tiles if tile.outputs <= max(64, 2 * outputs)]
    return [tile for tile in tiles if shared_bytes(inputs, tile) <= MAX_SHARED_BYTES]


def shared_bytes(inputs: int, tile: ConvTile) -> int:
    """Shared memory of a program, at least."""
    if tile.inputs is not None:
        return tile.stages * (tile.rows + tile.outputs) * tile.inputs * 2
    return (tile.stages * tile.rows + tile.outputs) * max(16, 1 << (inputs - 1).bit_length()) * 2


def statistics_error(groups: tuple[int, ...], used: ConvTile, tensors: Operands, config: ConvTile | None) -> float:
    """The error of the output, and that of the statistics, which are those of the rounded output."""
    x, filters, of = tensors
    y, stats = conv_output(x, filters, of, groups, config or used)
    expected = torch.stack([exact_statistics(part, of.eps) for part in y.double().split(groups)])
    off = float(((stats - expected).abs() / (expected.abs() + 1e-2)).max())
    return max(relative_error(y, F.conv2d(x.double(), filters.double())), 5 * off)  # 1e-3 of them is wrong


def exact_statistics(y: Tensor, eps: float) -> Tensor:
    """Mean, unbiased variance and 1 / std of float64 images [3, channels]."""
    variance = y.var((0, 2, 3), correction=0)
    return torch.stack([y.mean((0, 2, 3)), y.var((0, 2, 3)), (variance + eps).rsqrt()])


@dataclass(frozen=True, slots=True)
class BackwardTensors:
    """The tensors of a backward pass: `behind` is the norm behind the convolution, `before` the one before it."""

    dz: Tensor
    behind: NormInput
    sums: Tensor
    before: NormInput | None
    x: Tensor
    used: Tensor  # the convolution's input
    filters: Tensor
    rows: ChannelRows
    x_rows: ChannelRows

    def separate(self) -> tuple[Tensor, Tensor, Tensor | None]:
        dy, _ = norm.input_gradients(self.dz, self.behind, None, self.sums, self.rows, "none")
        dx, dfilters, _ = torch.ops.aten.convolution_backward(
            dy, self.used, self.filters, None, *_NO_BIAS, [True, True, False]
        )
        if self.before is None:
            return dx, dfilters, None
        return dx, dfilters, norm.gradient_sums(dx, None, self.before, None, None, None, self.x_rows, "relu")

    def ours(self, config: BackwardTile | None = None) -> tuple[Tensor, Tensor, Tensor]:
        behind = self.behind, self.sums[0], self.sums[1]
        operands = self.dz, behind, self.before or self.x, self.filters, self.x_rows, self.used
        dx, dfilters, sums = backward.gradients(*operands, config)
        assert dfilters is not None
        return dx, dfilters, sums

    def trace(self, config: BackwardTile) -> None:
        """Launch the kernel of a configuration, which `ops.gradients` chooses by the tensors."""
        behind, rows = (self.behind, self.sums[0], self.sums[1]), self.x_rows
        if config.block is None:
            backward.gradients_of_all(self.dz, behind, self.before or self.x, self.filters, rows, config)
        elif self.before is not None:
            backward.gradients_in_blocks(self.dz, behind, self.before, self.filters, rows, config)

    def error(self, config: BackwardTile | None) -> float:
        """The largest relative difference between both ways."""
        dx, dfilters, sums = self.separate()
        our_dx, our_dfilters, our_sums = self.ours(config)
        pairs = [(our_dfilters, dfilters)]
        if self.before is not None and sums is not None:
            pairs.append((our_sums, sums[:2]))
            dx = torch.where(self.used > 0, dx, 0)
        return max(relative_error(actual, expected) for actual, expected in [(our_dx, dx), *pairs])


def backward_rows(sizes: Sizes) -> Iterator[Row]:
    """The gradients of a norm's input and of the convolution before it, with the sums of the norm before that."""
    for outputs, inputs, full_side, has_norm in BACKWARD_SHAPES:
        side = sizes.side(full_side)
        tiles = [BackwardTile(*values) for values in BACKWARD_TILES[outputs, inputs]]  # type: ignore[arg-type]
        yield Row(
            name=f"{inputs} to {outputs}, {full_side}{', norm before it' if has_norm else ''}",
            draw=partial(backward_tensors, outputs, inputs, side, has_norm, sizes),
            ways={"separate": BackwardTensors.separate, "ours": BackwardTensors.ours},
            num_bytes=2 * image_bytes(sizes.batch, outputs + inputs, side),
            configs=[backward.CONFIGS[outputs, inputs, has_norm], *tiles],
            ours=lambda tensors, config: tensors.trace(config) if tensors.x.is_meta else tensors.ours(config),
            error=BackwardTensors.error,
        )


def backward_tensors(
    outputs: int, inputs: int, side: int, has_norm: bool, sizes: Sizes, device: str
) -> BackwardTensors:
    dz, y = (random_tensor(sizes.batch, outputs, side, side, device=device) for _ in range(2))
    x, filters = random_tensor(sizes.batch, inputs, side, side, device=device), torch.randn(outputs, inputs, 1, 1)
    rows, x_rows = channel_rows(y, sizes.norm_groups), channel_rows(x, sizes.norm_groups)
    of, x_of = random_norm(outputs, device), random_norm(inputs, device)
    behind = NormInput(y, norm.statistics(y, of, rows), of.weight.detach(), of.bias.detach())
    before = NormInput(x, norm.statistics(x, x_of, x_rows), x_of.weight.detach(), x_of.bias.detach())
    sums = norm.gradient_sums(dz, None, behind, None, None, None, rows, "none")
    used = norm.write_output(before, None, None, x_rows, "relu") if has_norm else x
    filters = filters.to(device, DTYPE)
    return BackwardTensors(dz, behind, sums, before if has_norm else None, x, used, filters, rows, x_rows)


Expansion = tuple[Tensor, Tensor, Tensor, NormParams]  # x, gradient of the activation, filters, norm
ExpansionCalls = dict[str, Callable[[], Any]]


def expansion_rows(sizes: Sizes) -> Iterator[Row]:
    """act(norm(conv1x1(x))) without writing the convolution's output, by pass and by kernel."""
    for number, (network, act) in enumerate(ACTIVATIONS):
        for inputs, outputs, full_side, *counts in EXPANSIONS:
            if counts[number] == 0:
                continue
            side = sizes.side(full_side)
            draw = partial(expansion_calls, inputs, outputs, side, act, sizes)
            name, num_bytes = f"{act} {inputs} to {outputs}, {full_side}", image_bytes(sizes.batch, outputs, side)
            for way, kernels in (
                ("forward", ("statistics", "output")),
                ("backward", ("gradient_sums", "weight_gradients", "input_gradient")),
            ):
                yield Row(
                    name=f"{name}: {way}",
                    draw=draw,
                    ways={"separate": partial(call_all, (way,)), "ours": partial(call_all, kernels)},
                    num_bytes=num_bytes,
                    counts={network: counts[number]},
                    error=partial(expansion_error, act, sizes.norm_groups) if way == "forward" else None,
                    tolerance=2e-2,
                )
            for kernel, tiles in EXPANSION_TILES.items():
                configs = [config_from(*pair) for pair in product(tiles, PROGRAMS[kernel])]
                yield Row(
                    name=f"{name}: kernel {kernel}",
                    draw=draw,
                    ways={"ours": partial(call_all, (kernel,))},
                    num_bytes=num_bytes,
                    configs=[None, *configs],
                    ours=partial(call_with, kernel),
                )


def expansion_calls(inputs: int, outputs: int, side: int, act: Activation, sizes: Sizes, device: str) -> ExpansionCalls:
    """The kernels of the fused layer, both passes by separate kernels, and the tensors."""
    x, da = (random_tensor(sizes.batch, n, side, side, device=device) for n in (inputs, outputs))
    filters, of = random_tensor(outputs, inputs, 1, 1, device=device) / inputs**0.5, random_norm(outputs, device)
    of = NormParams(of.weight.detach(), of.bias.detach(), of.running_var, of.eps)
    x_rows, rows = channel_rows(x, sizes.norm_groups), channel_rows(da, sizes.norm_groups)
    operand = ConvNormInput(x, filters, expansion.statistics(x, filters, of, x_rows), of.weight, of.bias)
    parts = expansion.gradient_sums(da, operand, x_rows, act)
    _, _, lines = expansion.weight_gradients(parts, operand, x_rows)
    y = F.conv2d(x, filters)
    separate = NormInput(y, norm.statistics(y, of, rows), of.weight, of.bias)

    def forward() -> Tensor:
        y = F.conv2d(x, filters)
        return norm.write_output(NormInput(y, norm.statistics(y, of, rows), of.weight, of.bias), None, None, rows, act)

    def backward() -> Any:
        sums = norm.gradient_sums(da, None, separate, None, None, None, rows, act)
        dy, _ = norm.input_gradients(da, separate, None, sums, rows, act)
        return torch.ops.aten.convolution_backward(dy, x, filters, None, *_NO_BIAS, [True, True, False])

    return {
        "statistics": lambda: expansion.statistics(x, filters, of, x_rows),
        "output": lambda: expansion.write_output(operand, x_rows, act),
        "gradient_sums": lambda: expansion.gradient_sums(da, operand, x_rows, act),
        "weight_gradients": lambda: expansion.weight_gradients(parts, operand, x_rows),
        "input_gradient": lambda: expansion.input_gradient(da, operand, lines, x_rows, act),
        "forward": forward,
        "backward": backward,
        "tensors": lambda: (x, da, filters, of),
    }


def call_all(kernels: tuple[str, ...], calls: ExpansionCalls) -> list[Any]:
    return [calls[kernel]() for kernel in kernels]


def call_with(kernel: str, calls: ExpansionCalls, config: ExpansionTile | None) -> Any:
    with config_of(kernel, config):
        return calls[kernel]()


def config_from(tile: tuple[int, ...], programs: int) -> ExpansionTile:
    rows, block, warps, stages, *limit = tile
    return ExpansionTile(rows, block, warps, stages, programs, *limit)


@contextmanager
def config_of(kernel: str, config: ExpansionTile | None) -> Iterator[None]:
    """Launch a kernel with this configuration, whatever the number of inputs; None: those in use."""
    before = dict(expansion.CONFIGS[kernel])
    if config is not None:
        expansion.CONFIGS[kernel].update(dict.fromkeys(before, config))
    try:
        yield
    finally:
        expansion.CONFIGS[kernel].update(before)


def expansion_error(act: Activation, groups: tuple[int, ...], calls: ExpansionCalls, _: object) -> float:
    """The error of the layer's output and gradients against float64."""
    x, da, filters, of = calls["tensors"]()
    results = []
    for is_exact in (False, True):
        leaves = [one.double() if is_exact else one.detach().clone() for one in (x, filters, of.weight, of.bias)]
        x_, filters_, weight, bias = (leaf.requires_grad_() for leaf in leaves)
        if is_exact:
            z, _ = reference.batch_norm(F.conv2d(x_, filters_), weight, bias, of.running_var, of.eps, groups)
            a = reference.ACTIVATION_FUNCTIONS[act](z)
        else:
            params = NormParams(weight, bias, of.running_var, of.eps)
            a = expansion.conv1x1_batch_norm_act(x_, filters_, params, groups, act)[0]
        results.append([a.detach(), *torch.autograd.grad(a, leaves, da.to(a.dtype))])
    return max(relative_error(actual, expected) for actual, expected in zip(*results, strict=True))
