"""Measure the depthwise convolutions of stride 1 of MobileNetV2 and EfficientNet-B0 on a CUDA GPU, ours and cuDNN's.

    python -m benchmarks.kernels_depthwise [--batch 256] [--sweep]

Times are of bfloat16 images in a CUDA graph with rotated inputs; "bytes" is the time in which a copy moves what must be
read and written. The forward pass includes the statistics of its output, which cuDNN leaves to another kernel. cuDNN's
input gradient is its convolution with flipped filters. `--sweep` tries sizes of tiles.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels import ROTATED_BYTES, random_norm, random_tensor, relative_error, try_time
from reconv.kernels.batch_norm.ops import NormParams, statistics
from reconv.kernels.channels_last import channel_rows
from reconv.kernels.depthwise import ops
from reconv.kernels.depthwise.ops import StripTile
from reconv.kernels.jit.compile_ahead import compile_ahead
from reconv.kernels.jit.launch import trace_launches

DTYPE = torch.bfloat16
COPY_BYTES_PER_S = 4.2e12
LAYERS = (  # channels, side, kernel, how many of them MobileNetV2 and EfficientNet-B0 have
    (32, 112, 3, 1, 1), (144, 56, 3, 1, 1), (192, 28, 3, 2, 0), (384, 14, 3, 4, 0), (576, 14, 3, 2, 0),
    (960, 7, 3, 3, 0), (240, 28, 5, 0, 1), (480, 14, 3, 0, 2), (480, 14, 5, 0, 1), (672, 14, 5, 0, 2),
    (1152, 7, 5, 0, 3), (1152, 7, 3, 0, 1),
)  # fmt: skip
SWEPT = [StripTile(*values) for values in product((4, 7), (2, 4), (4,), (4, 6, 8, 12))]

Calls = dict[str, list[Callable[[], Any]]]


def cudnn_calls(images: list[Tensor], weight: Tensor, dy: Tensor, norm: NormParams) -> Calls:
    def conv(x: Tensor, filters: Tensor) -> Tensor:
        return F.conv2d(x, filters, padding=filters.shape[-1] // 2, groups=len(filters))

    def forward(x: Tensor) -> None:
        y = conv(x, weight)
        statistics(y, norm, channel_rows(y, (len(y),)))

    def weight_gradient(x: Tensor) -> Tensor:
        half = [weight.shape[-1] // 2] * 2
        args = (dy, x, weight, None, [1, 1], half, [1, 1], False, [0, 0], len(weight), [False, True, False])
        gradient: Tensor = torch.ops.aten.convolution_backward(*args)[1]
        return gradient

    return {
        "forward": [partial(forward, x) for x in images],
        "dx": [partial(lambda x: conv(x, weight.flip(2, 3)), x) for x in images],
        "dweight": [partial(weight_gradient, x) for x in images],
    }


def our_calls(images: list[Tensor], weight: Tensor, dy: Tensor, norm: NormParams, config: StripTile) -> Calls:
    groups = (len(dy),)
    return {
        "forward": [partial(ops.conv_and_statistics, x, weight, norm, groups, config) for x in images],
        "dx": [partial(ops.conv_output, x, weight, config, flip=True) for x in images],
        "dweight": [partial(ops.weight_gradient, dy, x, weight, config) for x in images],
    }


def layer_tensors(batch: int, channels: int, side: int, kernel: int) -> tuple[list[Tensor], Tensor, Tensor, NormParams]:
    copies = max(2, int(ROTATED_BYTES / (batch * channels * side * side * DTYPE.itemsize)))
    images = [random_tensor(batch, channels, side, side, dtype=DTYPE) for _ in range(copies)]
    weight = torch.randn(channels, 1, kernel, kernel, device="cuda").to(DTYPE) / kernel
    return images, weight, random_tensor(batch, channels, side, side, dtype=DTYPE), random_norm(channels)


def compile_all(batch: int, configs: list[StripTile]) -> None:
    """Compile every kernel in parallel."""
    with trace_launches() as traced:
        for (channels, side, kernel, *_), config in product(LAYERS, configs):
            x = torch.empty(batch, channels, side, side, dtype=DTYPE, device="meta")
            x = x.contiguous(memory_format=torch.channels_last)
            weight = torch.empty(channels, 1, kernel, kernel, dtype=DTYPE, device="meta")
            values = torch.empty(channels, device="meta")
            for calls in our_calls([x], weight, x, NormParams(values, values, values, 1e-5), config).values():
                calls[0]()
    compile_ahead(traced, torch.device("cuda", 0), print)


def check(images: list[Tensor], weight: Tensor, dy: Tensor, norm: NormParams, config: StripTile) -> str:
    """The relative errors of our forward pass and gradients, and the largest difference of its statistics."""
    x, filters = images[0].float().requires_grad_(), weight.float().requires_grad_()
    expected = F.conv2d(x, filters, padding=weight.shape[-1] // 2, groups=len(weight))
    expected.backward(dy.float())
    y, stats = ops.conv_and_statistics(images[0], weight, norm, (len(dy),), config)
    dx = ops.conv_output(dy, weight, config, flip=True)
    dweight = ops.weight_gradient(dy, images[0], weight, config)
    assert x.grad is not None and filters.grad is not None
    pairs = ((y, expected.detach()), (dx, x.grad), (dweight, filters.grad))
    difference = (stats - statistics(y, norm, channel_rows(y, (len(y),)))).abs().max()
    return " ".join(f"{relative_error(a, b):.1e}" for a, b in pairs) + f" {float(difference):.1e}"


def rows(batch: int, *, sweep: bool) -> Iterator[str]:
    totals = dict.fromkeys(product(("cudnn", "ours"), ("forward", "dx", "dweight"), (0, 1)), 0.0)
    for channels, side, kernel, *counts in LAYERS:
        tensors = layer_tensors(batch, channels, side, kernel)
        bytes_us = 1e6 * 2 * tensors[2].nbytes / COPY_BYTES_PER_S
        name = f"{channels}, {side}, {kernel}x{kernel}"
        cudnn = {key: try_time(calls) * 1000 for key, calls in cudnn_calls(*tensors).items()}
        configs = {"forward": ops.CONV, "dx": ops.CONV, "dweight": ops.WEIGHT_GRADIENT}
        cells = []
        for key, table in configs.items():
            ours = try_time(our_calls(*tensors, table[kernel])[key]) * 1000
            cells.append(f"{cudnn[key]:6.0f} {ours:6.0f}")
            for network, count in enumerate(counts):
                totals["cudnn", key, network] += count * cudnn[key]
                totals["ours", key, network] += count * ours
        yield f"{name:>15} {bytes_us:6.0f}  " + "  ".join(cells) + f"  {check(*tensors, ops.CONV[kernel])}"
        if sweep:
            for key in configs:
                times = {config: try_time(our_calls(*tensors, config)[key]) * 1000 for config in SWEPT}
                best = sorted(times, key=lambda config: times[config])[:5]
                found = [f"{c.pixels}px {c.channels}ch {c.programs_per_sm}/SM: {times[c]:.0f}" for c in best]
                yield f"{key:>22}  " + "  ".join(found)
    for network, name in enumerate(("MobileNetV2", "EfficientNet-B0")):
        sums = [f"{totals['cudnn', k, network]:6.0f} {totals['ours', k, network]:6.0f}" for k in configs]
        yield f"{name:>22}  " + "  ".join(sums)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--sweep", action="store_true")
    given = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    compile_all(given.batch, [*ops.CONV.values(), *ops.WEIGHT_GRADIENT.values(), *(SWEPT if given.sweep else ())])
    print(f"{'us':>15}  bytes  forward cuDNN, ours; dx cuDNN, ours; dweight cuDNN, ours; errors")
    for row in rows(given.batch, sweep=given.sweep):
        print(row, flush=True)


if __name__ == "__main__":
    main()
