"""Measure the depthwise convolutions of MobileNetV2 and EfficientNet-B0 on a CUDA GPU, ours and cuDNN's.

    python -m benchmarks.kernels_depthwise [--batch 256] [--stride 2] [--sweep]

Times are of bfloat16 images in a CUDA graph with rotated inputs; "bytes" is the time in which a copy moves what must be
read and written. The forward pass includes the statistics of its output, which cuDNN leaves to another kernel. The
input gradient is measured at stride 1; cuDNN's is its convolution with flipped filters. `--sweep` tries sizes of tiles.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels import ROTATED_BYTES, random_norm, random_tensor, relative_error, try_time
from reconv.kernels.channels_last import channel_rows
from reconv.kernels.jit.compile_ahead import compile_ahead
from reconv.kernels.jit.launch import trace_launches
from reconv.kernels.ops import depthwise as ops
from reconv.kernels.ops.batch_norm import NormParams, statistics
from reconv.kernels.ops.depthwise import StripTile

DTYPE = torch.bfloat16
COPY_BYTES_PER_S = 4.2e12
LAYERS = (  # channels, side, kernel, stride, how many of them MobileNetV2 and EfficientNet-B0 have
    (32, 112, 3, 1, 1, 1), (144, 56, 3, 1, 1, 1), (192, 28, 3, 1, 2, 0), (384, 14, 3, 1, 4, 0), (576, 14, 3, 1, 2, 0),
    (960, 7, 3, 1, 3, 0), (240, 28, 5, 1, 0, 1), (480, 14, 3, 1, 0, 2), (480, 14, 5, 1, 0, 1), (672, 14, 5, 1, 0, 2),
    (1152, 7, 5, 1, 0, 3), (1152, 7, 3, 1, 0, 1), (96, 112, 3, 2, 1, 1), (144, 56, 3, 2, 1, 0), (192, 28, 3, 2, 1, 0),
    (576, 14, 3, 2, 1, 0), (144, 56, 5, 2, 0, 1), (240, 28, 3, 2, 0, 1), (672, 14, 5, 2, 0, 1),
)  # fmt: skip
SWEPT = [StripTile(*values) for values in product((4, 7), (2,), (4,), (2, 3, 4, 6, 8))]

Calls = dict[str, list[Callable[[], Any]]]


@dataclass(frozen=True, slots=True)
class Layer:
    """One convolution with its inputs, of which there are several copies."""

    images: list[Tensor]
    weight: Tensor
    stride: int
    dy: Tensor
    norm: NormParams

    @classmethod
    def draw(cls, batch: int, channels: int, side: int, kernel: int, stride: int) -> Layer:
        copies = max(2, int(ROTATED_BYTES / (batch * channels * side * side * DTYPE.itemsize)))
        images = [random_tensor(batch, channels, side, side, dtype=DTYPE) for _ in range(copies)]
        weight = torch.randn(channels, 1, kernel, kernel, device="cuda").to(DTYPE) / kernel
        out = -(-side // stride)
        return cls(images, weight, stride, random_tensor(batch, channels, out, out, dtype=DTYPE), random_norm(channels))

    @classmethod
    def traced(cls, batch: int, channels: int, side: int, kernel: int, stride: int) -> Layer:
        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=DTYPE, device="meta")

        def images(side: int) -> Tensor:
            return empty(batch, side, side, channels).permute(0, 3, 1, 2)

        values = torch.empty(channels, device="meta")
        norm = NormParams(values, values, values, 1e-5)
        return cls([images(side)], empty(channels, 1, kernel, kernel), stride, images(-(-side // stride)), norm)

    @property
    def table_key(self) -> tuple[int, int]:
        return self.weight.shape[-1], self.stride

    @property
    def options(self) -> dict[str, Any]:
        """Of F.conv2d."""
        return {"stride": self.stride, "padding": self.weight.shape[-1] // 2, "groups": len(self.weight)}

    @property
    def bytes_us(self) -> float:
        return 1e6 * (self.images[0].nbytes + self.dy.nbytes) / COPY_BYTES_PER_S

    def cudnn_calls(self) -> Calls:
        def forward(x: Tensor) -> None:
            y = F.conv2d(x, self.weight, **self.options)
            statistics(y, self.norm, channel_rows(y, (len(y),)))

        def weight_gradient(x: Tensor) -> Tensor:
            half = [self.weight.shape[-1] // 2] * 2
            args = (self.dy, x, self.weight, None, [self.stride] * 2, half, [1, 1], False, [0, 0], len(self.weight))
            gradient: Tensor = torch.ops.aten.convolution_backward(*args, [False, True, False])[1]
            return gradient

        calls: Calls = {
            "forward": [partial(forward, x) for x in self.images],
            "dweight": [partial(weight_gradient, x) for x in self.images],
        }
        if self.stride == 1:
            flipped = partial(lambda x: F.conv2d(x, self.weight.flip(2, 3), **self.options))
            calls["dx"] = [partial(flipped, x) for x in self.images]
        return calls

    def our_calls(self, config: StripTile | None = None) -> Calls:
        """With the configurations in use or another one."""
        conv = config or ops.CONV[self.table_key]
        args, groups = (self.weight, self.stride), (len(self.dy),)
        of_weight = config or ops.WEIGHT_GRADIENT[self.table_key]
        calls: Calls = {
            "forward": [partial(ops.conv_and_statistics, x, *args, self.norm, groups, conv) for x in self.images],
            "dweight": [partial(ops.weight_gradient, self.dy, x, *args, of_weight) for x in self.images],
        }
        if self.stride == 1:
            calls["dx"] = [partial(ops.conv_output, x, *args, conv, flip=True) for x in self.images]
        return calls

    def check(self) -> str:
        """The relative errors of our forward pass and gradients, and the largest difference of its statistics."""
        x, filters = self.images[0].float().requires_grad_(), self.weight.float().requires_grad_()
        expected = F.conv2d(x, filters, **self.options)
        expected.backward(self.dy.float())
        leaves = self.images[0].detach().requires_grad_(), self.weight.detach().requires_grad_()
        y, stats = ops.depthwise_conv_statistics(*leaves, self.stride, self.norm, (len(self.dy),))
        y.backward(self.dy)
        y = y.detach()
        pairs = ((y, expected.detach()), *((a.grad, b.grad) for a, b in zip(leaves, (x, filters), strict=True)))
        errors = [f"{relative_error(a, b):.1e}" for a, b in pairs if a is not None and b is not None]
        difference = (stats - statistics(y, self.norm, channel_rows(y, (len(y),)))).abs().max()
        return " ".join(errors) + f" {float(difference):.1e}"


def compile_all(batch: int, layers: Sequence[tuple[int, ...]], configs: Sequence[StripTile | None]) -> None:
    """Compile every kernel in parallel."""
    with trace_launches() as traced:
        for (*shape, _, _), config in product(layers, configs):
            for calls in Layer.traced(batch, *shape).our_calls(config).values():
                calls[0]()
    compile_ahead(traced, torch.device("cuda", 0), print)


def rows(batch: int, layers: Sequence[tuple[int, ...]], *, sweep: bool) -> Iterator[str]:
    passes = ("forward", "dx", "dweight")
    totals = dict.fromkeys(product(("cudnn", "ours"), passes, (0, 1)), 0.0)
    for *shape, mobilenet, efficientnet in layers:
        layer = Layer.draw(batch, *shape)
        cudnn, ours = layer.cudnn_calls(), layer.our_calls()
        cells = []
        for key in passes:
            times = [try_time(calls[key]) * 1000 if key in calls else float("nan") for calls in (cudnn, ours)]
            cells.append("".join(f"{time:6.0f} " for time in times))
            for (network, count), (name, time) in product(
                enumerate((mobilenet, efficientnet)), zip(("cudnn", "ours"), times, strict=True)
            ):
                totals[name, key, network] += count * time if key in ours else 0.0
        channels, side, kernel, stride = shape
        name = f"{channels}, {side}, {kernel}x{kernel}, {stride}"
        yield f"{name:>18} {layer.bytes_us:6.0f}  " + " ".join(cells) + layer.check()
        if sweep:
            for key in ours:
                found = {config: try_time(layer.our_calls(config)[key]) * 1000 for config in SWEPT}
                best = sorted(found, key=lambda config: found[config])[:4]
                listed = [f"{c.pixels}px {c.channels}ch {c.programs_per_sm}/SM: {found[c]:.0f}" for c in best]
                yield f"{key:>25}  " + "  ".join(listed)
    for network, name in enumerate(("MobileNetV2", "EfficientNet-B0")):
        sums = ["".join(f"{totals[which, key, network]:6.0f} " for which in ("cudnn", "ours")) for key in passes]
        yield f"{name:>25}  " + " ".join(sums)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--stride", type=int, choices=(1, 2), help="of the layers to measure; default: all")
    parser.add_argument("--sweep", action="store_true")
    given = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    layers = [layer for layer in LAYERS if given.stride in (None, layer[3])]
    compile_all(given.batch, layers, [None, *(SWEPT if given.sweep else ())])
    print(f"{'us':>15}  bytes  forward cuDNN, ours; dx cuDNN, ours; dweight cuDNN, ours; errors")
    for row in rows(given.batch, layers, sweep=given.sweep):
        print(row, flush=True)


if __name__ == "__main__":
    main()
