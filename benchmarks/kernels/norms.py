"""Batch norms of ResNet-50 with what is fused with them, max-pools, and the projections of MobileNetV2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.harness import UNTRACED, Row, Sizes, entry, gradients, image_bytes, random_norm, random_tensor
from reconv.kernels.channels_last import channel_rows
from reconv.kernels.ops import batch_norm as norm
from reconv.kernels.ops import max_pool
from reconv.kernels.ops import norm_conv1x1 as projection
from reconv.kernels.ops import norm_max_pool as norm_pool
from reconv.kernels.ops.batch_norm import NormInput
from reconv.kernels.window import STEM_WINDOW, PoolWindow

Calls = dict[str, Callable[[], object]]
STAGES = ((64, 56, 3), (128, 28, 4), (256, 14, 6), (512, 7, 3))  # planes, side, blocks of ResNet-50
# Bytes that must be moved, in tensors of the layer's size; the mask of a ReLU has a bit per value. A join is the sum of
# a residual block, whose shortcut may have a norm of its own.
TENSORS_MOVED: dict[str, dict[str, float]] = {
    "pool": {"statistics": 1, "pool": 1 + 0.25 * 2.5, "sums": 1, "gradient": 2 + 0.25 * 1.5},
    "plain": {"statistics": 1, "normalize": 2, "sums": 2, "gradient": 3},
    "join": {"statistics": 1, "normalize": 3 + 1 / 16, "sums": 4 + 1 / 16, "gradient": 3},
    "join_norms": {"statistics": 1, "normalize": 3 + 1 / 16, "sums": 5 + 1 / 16, "gradient": 5},
}
PROJECTIONS = (  # channels, outputs, side and number of MobileNetV2's
    (32, 16, 112, 1), (96, 24, 56, 1), (144, 24, 56, 1), (144, 32, 28, 1), (192, 32, 28, 2), (192, 64, 14, 1),
    (384, 64, 14, 3), (384, 96, 14, 1), (576, 96, 14, 2),
)  # fmt: skip
POOLS = (  # channels, side, window
    (192, 28, PoolWindow(3, 1, 1, True)), (256, 28, PoolWindow(3, 1, 1, True)), (480, 28, PoolWindow(3, 2, 0, True)),
    (512, 14, PoolWindow(3, 1, 1, True)), (832, 7, PoolWindow(3, 1, 1, True)),
)  # fmt: skip
NORM_POOLS = ((64, 112, STEM_WINDOW), (192, 56, PoolWindow(3, 2, 0, True)))
STRIPS = [None, *product((4, 8, 16), (7, 16, 32))]  # columns and lines of a program; None: those in use


def resnet50_norms() -> list[tuple[str, int, int, int]]:
    """Kind, channels, side and number of the batch norms of ResNet-50 v1.5; a join of norms holds two."""
    layers = [("pool", 64, 112, 1)]
    for planes, side, blocks in STAGES:
        wider = 0 if side == 56 else 1
        if wider:
            layers.append(("plain", planes, side * 2, 1))
        layers.append(("plain", planes, side, 2 * blocks - wider))
        layers += [("join_norms", planes * 4, side, 1), ("join", planes * 4, side, blocks - 1)]
    return layers


def norms(sizes: Sizes) -> Iterator[Row]:
    """Every kernel of every norm of ResNet-50."""
    for kind, channels, full_side, count in resnet50_norms():
        side = sizes.side(full_side)
        for kernel, tensors_moved in TENSORS_MOVED[kind].items():
            twice = 2 if kind == "join_norms" and kernel == "statistics" else 1
            yield Row(
                name=f"{kind} {channels}, {full_side}: {kernel}",
                draw=partial(norm_calls, kind, channels, side, sizes),
                ways={"ours": entry(kernel)},
                num_bytes=tensors_moved * image_bytes(sizes.batch, channels, side),
                counts={"ResNet-50": count * twice},
            )


def norm_calls(kind: str, channels: int, side: int, sizes: Sizes, device: str) -> Calls:
    """The kernels of one layer on tensors of their own."""
    x, groups = random_tensor(sizes.batch, channels, side, side, device=device), sizes.norm_groups
    of, rows = random_norm(channels, device), channel_rows(x, groups)
    a = NormInput(x, norm.statistics(x, of, rows), of.weight.detach(), of.bias.detach())
    calls: Calls = {"statistics": lambda: norm.statistics(x, of, rows)}
    if kind == "pool":
        return calls | pool_calls(a, groups)
    return calls | (plain_calls(a, groups) if kind == "plain" else join_calls(a, groups, kind == "join_norms"))


def pool_calls(a: NormInput, groups: tuple[int, ...]) -> Calls:
    """The kernels between a stem's statistics and the gradient of its convolution."""
    _, peak, place = norm_pool.write_pooled(a, groups)
    peaks, pooled = NormInput(peak, a.stats, a.weight, a.bias), channel_rows(peak, groups)
    first, second, dz = torch.randn_like(peak), torch.randn_like(peak), torch.empty_like(peak)
    sums = norm.gradient_sums(first, second, peaks, None, None, dz, pooled, "relu")
    return {
        "pool": lambda: norm_pool.write_pooled(a, groups),
        "sums": lambda: norm.gradient_sums(first, second, peaks, None, None, dz, pooled, "relu"),
        "gradient": lambda: norm_pool.input_gradient(dz, place, a, sums, groups),
    }


def plain_calls(a: NormInput, groups: tuple[int, ...]) -> Calls:
    """The kernels of a norm and its ReLU."""
    rows, dy = channel_rows(a.x, groups), torch.randn_like(a.x)
    sums = norm.gradient_sums(dy, None, a, None, None, None, rows, "relu")
    return {
        "normalize": lambda: norm.write_output(a, None, None, rows, "relu"),
        "sums": lambda: norm.gradient_sums(dy, None, a, None, None, None, rows, "relu"),
        "gradient": lambda: norm.input_gradients(dy, a, None, sums, rows, "relu"),
    }


def join_calls(a: NormInput, groups: tuple[int, ...], has_norm: bool) -> Calls:
    """The kernels of a residual join."""
    rows, first, second = channel_rows(a.x, groups), torch.randn_like(a.x), torch.randn_like(a.x)
    other = NormInput(torch.randn_like(a.x), a.stats, a.weight, a.bias)
    added, normed = (other, other) if has_norm else (other.x, None)
    bits, dz = norm.empty_relu_mask(rows, a.x.device, "relu"), torch.empty_like(a.x)
    norm.write_output(a, added, bits, rows, "relu")
    sums = norm.gradient_sums(first, second, a, normed, bits, dz, rows, "relu")
    return {
        "normalize": lambda: norm.write_output(a, added, bits, rows, "relu"),
        "sums": lambda: norm.gradient_sums(first, second, a, normed, bits, dz, rows, "relu"),
        "gradient": lambda: norm.input_gradients(dz, a, normed, sums, rows, "none"),
    }


def norms_compiled(sizes: Sizes) -> Iterator[Row]:
    """Forward and backward pass of three of these norms, beside torch.compile's."""
    for kind, channels, full_side in (("plain", 64, 56), ("join", 256, 56), ("join", 512, 28)):
        side = sizes.side(full_side)
        yield Row(
            name=f"{kind} {channels}, {full_side}: forward and backward",
            draw=partial(layer_calls, kind, channels, side, sizes),
            ways={UNTRACED: entry("compiled"), "ours": entry("ours")},
            num_bytes=sum(TENSORS_MOVED[kind].values()) * image_bytes(sizes.batch, channels, side),
        )


def layer_calls(kind: str, channels: int, side: int, sizes: Sizes, device: str) -> Calls:
    x, identity, dy = (random_tensor(sizes.batch, channels, side, side, device=device) for _ in range(3))
    of, groups = random_norm(channels, device), sizes.norm_groups
    mean, var = torch.zeros(channels, device=device), torch.ones(channels, device=device)
    inputs = [x.requires_grad_(), of.weight, of.bias, *([identity.requires_grad_()] if kind == "join" else [])]

    def plain(x: Tensor, weight: Tensor, bias: Tensor, *identity: Tensor) -> Tensor:
        y = F.batch_norm(x, mean, var, weight, bias, True, 0.1, 1e-5)
        return F.relu(y + identity[0] if identity else y)

    def ours(x: Tensor, weight: Tensor, bias: Tensor, *identity: Tensor) -> Tensor:
        if identity:
            return norm.batch_norm_add_act(x, of, identity[0], groups, "relu")[0]
        return norm.batch_norm_act(x, of, groups, "relu")[0]

    compiled = torch.compile(plain, dynamic=False) if device == "cuda" else plain
    return {"compiled": partial(gradients, compiled, inputs, dy), "ours": partial(gradients, ours, inputs, dy)}


def projections(sizes: Sizes) -> Iterator[Row]:
    """Norm, ReLU6 and 1x1 convolution at the end of MobileNetV2's blocks, fused and separate."""
    for channels, outputs, full_side, count in PROJECTIONS:
        side = sizes.side(full_side)
        yield Row(
            name=f"{channels} to {outputs}, {full_side}: forward and backward",
            draw=partial(projection_calls, channels, outputs, side, sizes),
            ways={way: entry(way) for way in ("separate", "ours", "product", "sums", "gradient")},
            num_bytes=6 * image_bytes(sizes.batch, channels, side) + 4 * image_bytes(sizes.batch, outputs, side),
            counts={"MobileNetV2": count},
        )


def projection_calls(channels: int, outputs: int, side: int, sizes: Sizes, device: str) -> Calls:
    x = random_tensor(sizes.batch, channels, side, side, device=device).requires_grad_()
    filters = random_tensor(outputs, channels, 1, 1, device=device).requires_grad_()
    dy, groups = random_tensor(sizes.batch, outputs, side, side, device=device), sizes.norm_groups
    of, rows = random_norm(channels, device), channel_rows(x, groups)
    a = NormInput(x.detach(), norm.statistics(x.detach(), of, rows), of.weight.detach(), of.bias.detach())
    sums, _ = projection.gradient_sums(dy, a, filters.detach(), rows, "relu6")
    inputs = [x, filters, of.weight, of.bias]

    def together(*_: Tensor) -> Tensor:
        return projection.batch_norm_act_conv1x1(x, of, filters, groups, "relu6")[0]

    def apart(*_: Tensor) -> Tensor:
        return F.conv2d(norm.batch_norm_act(x, of, groups, "relu6")[0], filters)

    return {
        "product": lambda: projection.conv_output(a, filters.detach(), rows, "relu6"),
        "sums": lambda: projection.gradient_sums(dy, a, filters.detach(), rows, "relu6"),
        "gradient": lambda: projection.input_gradient(dy, a, filters.detach(), sums, rows, "relu6"),
        "ours": partial(gradients, together, inputs, dy),
        "separate": partial(gradients, apart, inputs, dy),
    }


def max_pools(sizes: Sizes) -> Iterator[Row]:
    """Max-pools of GoogLeNet, beside torch's."""
    for channels, full_side, window in POOLS:
        side = sizes.side(full_side)
        num_bytes = 1.5 * image_bytes(sizes.batch, channels, side) * (1 + 1 / window.stride**2)
        name = f"{channels}, {full_side}, stride {window.stride}"
        for is_backward, words in ((False, "forward"), (True, "forward and backward")):
            ways = {
                way: partial(pool_pass, pool, is_backward)
                for way, pool in (("torch", torch_pool(window)), ("ours", partial(max_pool.max_pool, window=window)))
            }
            yield Row(
                name=f"{name}: {words}",
                draw=partial(pool_tensors, channels, side, window, sizes),
                ways=ways,
                num_bytes=num_bytes * (1 + is_backward),
                configs=STRIPS,
                ours=partial(with_strip, ways["ours"]),
            )


def torch_pool(window: PoolWindow) -> Callable[[Tensor], Tensor]:
    assert isinstance(window.pad, int)
    return partial(F.max_pool2d, kernel_size=3, stride=window.stride, padding=window.pad, ceil_mode=window.ceil)


def pool_tensors(channels: int, side: int, window: PoolWindow, sizes: Sizes, device: str) -> tuple[Tensor, Tensor]:
    """Images and the gradient of the pooled ones."""
    x = random_tensor(sizes.batch, channels, side, side, device=device)
    return x.requires_grad_(), torch.ones_like(torch_pool(window)(x.detach()))


def pool_pass(pool: Callable[[Tensor], Tensor], is_backward: bool, tensors: tuple[Tensor, Tensor]) -> object:
    x, dy = tensors
    return gradients(pool, [x], dy) if is_backward else pool(x).detach()


def with_strip(call: Callable[[Any], object], tensors: Any, strip: tuple[int, int] | None) -> object:
    """Call with another size of the strips that a program processes."""
    with strip_of(strip):
        return call(tensors)


@contextmanager
def strip_of(strip: tuple[int, int] | None) -> Iterator[None]:
    before = max_pool._STRIP_COLUMNS, max_pool._STRIP_LINES
    max_pool._STRIP_COLUMNS, max_pool._STRIP_LINES = strip or before
    try:
        yield
    finally:
        max_pool._STRIP_COLUMNS, max_pool._STRIP_LINES = before


def norm_max_pools(sizes: Sizes) -> Iterator[Row]:
    """Max-pools with the norm and ReLU before them, of ResNet and GoogLeNet."""
    for channels, full_side, window in NORM_POOLS:
        side = sizes.side(full_side)
        num_bytes = image_bytes(sizes.batch, channels, side)
        for way, moved in (("forward", 1.625), ("gradient", 2.375)):
            yield Row(
                name=f"{channels}, {full_side}, stride {window.stride}: {way}",
                draw=partial(norm_pool_calls, channels, side, window, sizes),
                ways={"ours": entry(way)},
                num_bytes=moved * num_bytes,
            )


def norm_pool_calls(channels: int, side: int, window: PoolWindow, sizes: Sizes, device: str) -> Calls:
    x, groups = random_tensor(sizes.batch, channels, side, side, device=device), sizes.norm_groups
    of = random_norm(channels, device)
    a = NormInput(x, norm.statistics(x, of, channel_rows(x, groups)), of.weight.detach(), of.bias.detach())
    y, _, place = norm_pool.write_pooled(a, groups, window)
    sums = torch.zeros(2, len(groups), channels, device=device)
    return {
        "forward": lambda: norm_pool.write_pooled(a, groups, window),
        "gradient": lambda: norm_pool.input_gradient(y, place, a, sums, groups, window),
    }
