"""GoogLeNet's inception blocks and stem, with and without fused concatenation and pools.

"separate" is the path with a norm per branch, `torch.cat`, copies of its gradient's slices, sums of gradients by
autograd, and in the stem max-pools of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.kernels.harness import DTYPE, Row, Sizes, image_bytes, random_tensor, relative_error
from reconv.core.batch import Batch
from reconv.kernels.channels_last import LaunchConfig
from reconv.kernels.fuse import fuse
from reconv.kernels.fused.blocks import FusedGoogLeNet, FusedInception
from reconv.kernels.fused.norm import FusedBatchNorm2d
from reconv.kernels.jit.launch import KernelVariant
from reconv.kernels.ops import norm_concat as ops
from reconv.kernels.ops.batch_norm import NormParams, batch_norm_act
from reconv.kernels.ops.norm_concat import Columns, PartNorms, PartRows
from reconv.kernels.trace import trace_kernels
from reconv.models.googlenet import BasicConv2d, GoogLeNet, GoogLeNetSpec, Inception
from reconv.models.layers.batch_norm import LayerState

# Input channels, side, and widths (1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool projection) of each block.
BLOCKS = {
    "3a": (192, 28, (64, 96, 128, 16, 32, 32)), "3b": (256, 28, (128, 128, 192, 32, 96, 64)),
    "4a": (480, 14, (192, 96, 208, 16, 48, 64)), "4b": (512, 14, (160, 112, 224, 24, 64, 64)),
    "4c": (512, 14, (128, 128, 256, 24, 64, 64)), "4d": (512, 14, (112, 144, 288, 32, 64, 64)),
    "4e": (528, 14, (256, 160, 320, 32, 128, 128)), "5a": (832, 7, (256, 160, 320, 32, 128, 128)),
    "5b": (832, 7, (384, 192, 384, 48, 128, 128)),
}  # fmt: skip
MEASURED_NORMS = ("3a", "3b", "4c", "5b")
REDUCTIONS = (  # the first is the one in use
    LaunchConfig(8, 3, 1), LaunchConfig(8, 2, 1), LaunchConfig(4, 3, 2), LaunchConfig(4, 2, 2), LaunchConfig(4, 3, 1),
    LaunchConfig(8, 1, 2), LaunchConfig(4, 1, 4), LaunchConfig(8, 2, 2),
)  # fmt: skip
PASSES = (
    LaunchConfig(), LaunchConfig(8), LaunchConfig(2), LaunchConfig(4, 1, 4), LaunchConfig(4, 1, 8),
    LaunchConfig(4, 2, 4),
)  # fmt: skip
NORM_CONFIGS = {"statistics": REDUCTIONS, "normalize": PASSES, "gradient_sums": REDUCTIONS, "gradient": PASSES}


class SeparateInception(FusedInception):
    """A block whose branches are normalized one by one and concatenated by torch."""

    def forward(self, x: Tensor) -> Tensor:
        layers = [m for m in (self.branch1, self.branch2[0], self.branch3[0]) if isinstance(m, BasicConv2d)]
        norms = [m.bn for m in layers if isinstance(m.bn, FusedBatchNorm2d)]
        y = F.conv2d(x, torch.cat([layer.conv.weight for layer in layers]))
        params = [bn.norm_params() for bn in norms]
        weight, bias, running_var = (
            torch.cat([getattr(one, name) for one in params]) for name in ("weight", "bias", "running_var")
        )
        joined = NormParams(weight, bias, running_var, norms[0].eps)
        y, _ = batch_norm_act(y, joined, norms[0].group_sizes(y), "relu")
        one, *parts = y.split([bn.num_features for bn in norms], 1)
        three, five = (part.contiguous(memory_format=torch.channels_last) for part in parts)
        return torch.cat([one, self.branch2[1](three), self.branch3[1](five), self.branch4(x)], 1)


class SeparateGoogLeNet(FusedGoogLeNet):
    """A network whose stem has max-pools of their own."""

    def conv_pool(self, layer: BasicConv2d, pool: nn.Module, x: Tensor) -> Tensor:
        return GoogLeNet.conv_pool(self, layer, pool, x)


def prepared(model: nn.Module, sizes: Sizes, device: str) -> nn.Module:
    """The fused model, for training on batches in these groups."""
    model = model.to(device).to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.to(DTYPE)
    fuse(model)
    positions = torch.arange(sizes.batch, device=device)
    LayerState(model).set_micro_batch(Batch({}, positions, sizes.norm_groups), step=0)
    return model


def block(name: str, kind: type[Inception], sizes: Sizes, device: str) -> nn.Module:
    torch.manual_seed(0)
    channels, _, widths = BLOCKS[name]
    model = prepared(Inception(GoogLeNetSpec(), channels, widths), sizes, device)
    model.__class__ = kind
    return model


def stem(kind: type[GoogLeNet], sizes: Sizes, device: str) -> nn.Module:
    torch.manual_seed(0)
    model = GoogLeNet(GoogLeNetSpec(aux_heads=False))
    for name in [name for name, _ in model.named_children() if not name.startswith(("conv", "maxpool"))]:
        delattr(model, name)
    prepared(model, sizes, device)
    model.__class__ = kind
    model.forward = model._stem  # type: ignore[method-assign, assignment]
    return model


Models = dict[str, Callable[[Sizes, str], nn.Module]]


@dataclass(frozen=True, slots=True)
class BlockTensors:
    """Both models with the same weights, an input and the gradient of the output."""

    models: dict[str, nn.Module]
    x: Tensor
    dy: Tensor

    def run(self, way: str) -> list[Tensor]:
        """The output and all gradients."""
        model = self.models[way]
        leaves = [tensor for tensor in (self.x, *model.parameters()) if tensor.requires_grad]
        y = model(self.x)
        return [y.detach(), *torch.autograd.grad(y, leaves, self.dy)]

    def error(self, _: object) -> float:
        pairs = zip(self.run("ours"), self.run("separate"), strict=True)
        return max(relative_error(actual, expected) for actual, expected in pairs)


def block_rows(sizes: Sizes) -> Iterator[Row]:
    """Forward and backward pass of the stem and of each block."""
    stems: Models = {"separate": partial(stem, SeparateGoogLeNet), "ours": partial(stem, FusedGoogLeNet)}
    # A max-pool of its own sees rounded values, so that another of almost equal ones may win.
    yield row_of("stem", stems, (3, 224 if sizes.max_side is None else 8 * sizes.max_side), sizes, 0.2)
    for name, (channels, side, _) in BLOCKS.items():
        kinds = {"separate": SeparateInception, "ours": FusedInception}
        models: Models = {way: partial(block, name, kind) for way, kind in kinds.items()}
        yield row_of(name, models, (channels, sizes.side(side)), sizes, 0.02)


def row_of(name: str, models: Models, shape: tuple[int, int], sizes: Sizes, tolerance: float) -> Row:
    return Row(
        name=name,
        draw=partial(block_tensors, models, shape, sizes),
        ways={way: partial(BlockTensors.run, way=way) for way in models},
        num_bytes=2 * image_bytes(sizes.batch, *shape),
        counts={"GoogLeNet": 1},
        error=BlockTensors.error,
        tolerance=tolerance,
        trace=partial(block_kernels, models, shape),
    )


def block_tensors(models: Models, shape: tuple[int, int], sizes: Sizes, device: str) -> BlockTensors:
    channels, side = shape
    x = random_tensor(sizes.batch, channels, side, side, device=device).requires_grad_(channels > 3)
    made = {way: make(sizes, device) for way, make in models.items()}
    with torch.no_grad():
        dy = torch.randn_like(made["ours"](x))
    return BlockTensors(made, x, dy)


def block_kernels(models: Models, shape: tuple[int, int]) -> Iterable[KernelVariant]:
    channels, side = shape
    for make in models.values():
        model = make(Sizes(batch=2), "cuda")
        if channels > 3:  # the input of a block has a gradient
            model = nn.Sequential(nn.Conv2d(channels, channels, 1, bias=False, device="cuda", dtype=DTYPE), model)
        yield from trace_kernels(model, (channels, side, side), DTYPE, nullcontext())


def norm_rows(sizes: Sizes) -> Iterator[Row]:
    """The kernels of the norms of a block: of its narrow convolutions (split), and of its other branches (concat)."""
    for name, part in product(MEASURED_NORMS, ("split", "concat")):
        widths, _ = norm_widths(name, part)
        used = ops.part_rows(torch.empty(1, 8, 1, 1, device="meta"), (1,), widths).block
        side = sizes.side(BLOCKS[name][1])
        for kernel, configs in NORM_CONFIGS.items():
            pairs = [(config, block) for config in configs for block in (used, *({64, 32} - {used}))]
            yield Row(
                name=f"{name}, {part}: {kernel}",
                draw=partial(norm_tensors, name, part, side, sizes),
                ways={"ours": partial(norm_kernel, kernel, config=pairs[0])},
                num_bytes=image_bytes(sizes.batch, sum(widths), side) * (1 if kernel == "statistics" else 2),
                configs=pairs,
                ours=partial(norm_kernel, kernel),
            )


def norm_widths(name: str, part: str) -> tuple[tuple[int, int, int], int]:
    """Channels of the three norms, and of the block's output."""
    one, three_reduce, three, five_reduce, five, pooled = BLOCKS[name][2]
    widths = (one, three_reduce, five_reduce) if part == "split" else (three, five, pooled)
    return widths, one + three + five + pooled


@dataclass(frozen=True, slots=True)
class BlockRows(PartRows):
    """Rows with another block of channels than `PartRows` chooses."""

    forced: int

    @property
    def block(self) -> int:
        return self.forced


@dataclass(frozen=True, slots=True)
class NormTensors:
    operand: PartNorms
    norms: list[NormParams]
    y: Columns
    dx: Columns
    sums: Tensor
    rows: PartRows


def norm_tensors(name: str, part: str, side: int, sizes: Sizes, device: str) -> NormTensors:
    widths, num_channels = norm_widths(name, part)

    def ones(width: int) -> Tensor:
        images = torch.ones(sizes.batch, width, side, side, dtype=DTYPE, device=device)
        return images.contiguous(memory_format=torch.channels_last)

    parameters = tuple(torch.ones(width, device=device) for width in widths)
    norms = [NormParams(parameter, parameter, parameter, 1e-3) for parameter in parameters]
    wide, first = ones(num_channels), BLOCKS[name][2][0]
    if part == "split":
        x, dx = (Columns.of_range(ones(sum(widths)), widths) for _ in range(2))
        y = Columns.of_first(wide, [ones(width) for width in widths[1:]], first)
    else:
        x, dx = (Columns.of_tensors([ones(width) for width in widths]) for _ in range(2))
        y = Columns.of_range(wide, widths, first)
    rows = ops.part_rows(wide, sizes.norm_groups, widths)
    stats = torch.ones(len(sizes.norm_groups), 3, sum(widths), device=device)
    sums = torch.ones(2, len(sizes.norm_groups), sum(widths), device=device)
    return NormTensors(PartNorms(x, stats, parameters, parameters), norms, y, dx, sums, rows)


def norm_kernel(kernel: str, tensors: NormTensors, config: tuple[LaunchConfig, int]) -> None:
    launch, channels = config
    plain = tensors.rows
    rows = BlockRows(
        plain.num_rows, plain.channels, plain.group_rows, plain.num_groups, plain.num_sms, plain.shared_bytes,
        plain.widths, channels,
    )  # fmt: skip
    with launch_config(kernel, launch):
        if kernel == "statistics":
            ops.statistics(tensors.operand.x, tensors.norms, rows)
        elif kernel == "normalize":
            ops.write_output(tensors.operand, tensors.y, rows)
        elif kernel == "gradient_sums":
            ops.gradient_sums(tensors.y, tensors.operand, rows)
        else:
            ops.write_input_gradients(tensors.y, tensors.operand, tensors.sums, tensors.dx, rows)


@contextmanager
def launch_config(kernel: str, config: LaunchConfig, configs: dict[str, LaunchConfig] = ops.CONFIGS) -> Iterator[None]:
    before = configs[kernel]
    configs[kernel] = config
    try:
        yield
    finally:
        configs[kernel] = before
