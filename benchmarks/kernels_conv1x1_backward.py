"""Measure the backward pass of 1x1 convolutions with the norm behind them, fused and separate, on a CUDA GPU.

    python -m benchmarks.kernels_conv1x1_backward [--batch 256] [--sweep]

"Separate" is the gradient of the norm's input, the convolution's two gradients by cuDNN and, where a norm and ReLU are
before it, their gradient sums; "fused" is one kernel and the sum of its parts of the weight gradient, or cuDNN's weight
gradient. Inputs are bfloat16 and rotate, so that none stays in the L2 cache. `--sweep` also tries other launch
configurations.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels import random_norm, random_tensor, relative_error, time_ms, try_time
from reconv.kernels.channels_last import ChannelRows, channel_rows
from reconv.kernels.jit.compile_ahead import compile_ahead
from reconv.kernels.jit.launch import trace_launches
from reconv.kernels.ops import batch_norm as norm
from reconv.kernels.ops import conv1x1_norm_backward as ops
from reconv.kernels.ops.batch_norm import NormInput
from reconv.kernels.ops.conv1x1_norm_backward import BackwardTile

# Outputs, inputs, side, norm and ReLU before the convolution, in ResNet-50 and in ResNeXt's first stage.
SHAPES = ((256, 64, 56, True), (256, 64, 56, False), (256, 128, 56, True), (512, 128, 28, True))
# By outputs and inputs: rows, warps, stages, programs per SM, register limit, channels of a tile (None: all).
SWEEP: dict[tuple[int, int], tuple[tuple[int | None, ...], ...]] = {
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
TOLERANCE = 5e-3
SETS = 3  # of inputs, which do not fit into the L2 cache together


@dataclass(frozen=True, slots=True)
class Case:
    """The tensors of one backward pass."""

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
        """By separate kernels."""
        dy, _ = norm.input_gradients(self.dz, self.behind, None, self.sums, self.rows, "none")
        given, dfilters, _ = torch.ops.aten.convolution_backward(
            dy, self.used, self.filters, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False]
        )
        if self.before is None:
            return given, dfilters, None
        return given, dfilters, norm.gradient_sums(given, None, self.before, None, None, None, self.x_rows, "relu")

    def fused(self, config: BackwardTile | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """By the fused kernel."""
        behind = self.behind, self.sums[0], self.sums[1]
        dx, dfilters, sums = ops.gradients(
            self.dz, behind, self.before or self.x, self.filters, self.x_rows, self.used, config
        )
        assert dfilters is not None
        return dx, dfilters, sums


def make_case(outputs: int, inputs: int, side: int, has_norm: bool, batch: int) -> Case:
    groups, dtype = (batch,), torch.bfloat16
    dz, y = (random_tensor(batch, outputs, side, side, dtype=dtype) for _ in range(2))
    x, filters = (
        random_tensor(batch, inputs, side, side, dtype=dtype),
        random_tensor(outputs, inputs, 1, 1, dtype=dtype),
    )
    rows, x_rows = channel_rows(y, groups), channel_rows(x, groups)
    of, x_of = random_norm(outputs), random_norm(inputs)
    behind = NormInput(y, norm.statistics(y, of, rows), of.weight.detach(), of.bias.detach())
    before = NormInput(x, norm.statistics(x, x_of, x_rows), x_of.weight.detach(), x_of.bias.detach())
    sums = norm.gradient_sums(dz, None, behind, None, None, None, rows, "none")
    used = norm.write_output(before, None, None, x_rows, "relu") if has_norm else x
    return Case(dz, behind, sums, before if has_norm else None, x, used, filters.contiguous(), rows, x_rows)


def error(case: Case, config: BackwardTile | None = None) -> float:
    """The largest relative difference between both ways."""
    given, dfilters, sums = case.separate()
    found, found_filters, found_sums = case.fused(config)
    pairs = [(found_filters, dfilters)]
    if case.before is not None and sums is not None:
        pairs.append((found_sums, sums[:2]))
        given = torch.where(case.used > 0, given, 0)
    return max(relative_error(a, b) for a, b in [(found, given), *pairs])


def tile_configs(outputs: int, inputs: int, has_norm: bool, sweep: bool) -> list[BackwardTile]:
    """The configurations to measure; the first is the one in use."""
    tried = [BackwardTile(*values) for values in SWEEP[outputs, inputs]] if sweep else []  # type: ignore[arg-type]
    return list(dict.fromkeys((ops.CONFIGS[outputs, inputs, has_norm], *tried)))


def compile_all(sweep: bool) -> None:
    """Start compiling all configurations, each in a process of its own; the first launch waits for them."""
    vector = torch.empty(1, device="meta")
    with trace_launches() as traced:
        for outputs, inputs, _side, has_norm in SHAPES:
            x, y = (
                torch.empty(2, c, 4, 4, dtype=torch.bfloat16, device="meta").to(memory_format=torch.channels_last)
                for c in (inputs, outputs)
            )
            behind, before = NormInput(y, vector, vector, vector), NormInput(x, vector, vector, vector)
            filters = x.new_empty(outputs, inputs, 1, 1)
            for config in tile_configs(outputs, inputs, has_norm, sweep):
                rows, behind_it = channel_rows(x, (2,)), (behind, vector, vector)
                if config.block is None:
                    ops.gradients_of_all(y, behind_it, before if has_norm else x, filters, rows, config)
                else:
                    ops.gradients_in_blocks(y, behind_it, before, filters, rows, config)
    print(f"compiling {compile_ahead(list(traced), torch.device('cuda', 0), print)} variants", flush=True)


def measure(batch: int, sweep: bool) -> None:
    compile_all(sweep)
    print("outputs inputs side norm | separate  fused ms   TB/s   error")
    for outputs, inputs, side, has_norm in SHAPES:
        cases = [make_case(outputs, inputs, side, has_norm, batch) for _ in range(SETS)]
        num_bytes = 2 * batch * side * side * (2 * outputs + 2 * inputs)
        separate, fused = time_ms([case.separate for case in cases]), try_time([case.fused for case in cases])
        rate, off = num_bytes / fused / 1e9, error(cases[0])
        print(
            f"{outputs:7} {inputs:6} {side:4} {has_norm!s:5}| {separate:8.4f} {fused:9.4f} {rate:6.2f} {off:.1e}",
            flush=True,
        )
        assert off < TOLERANCE, "the fused kernel is wrong"
        times = {}
        for config in tile_configs(outputs, inputs, has_norm, sweep)[1:]:
            calls: list[Callable[[], Any]] = [partial(case.fused, config) for case in cases]
            times[config] = try_time(calls)
            if times[config] < float("inf") and error(cases[0], config) >= TOLERANCE:
                print(f"   wrong: {astuple(config)}")
        for config in sorted(times, key=lambda config: times[config])[:6]:
            print(f"   {times[config]:.4f} {astuple(config)}", flush=True)
        del cases
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--sweep", action="store_true", help="try other launch configurations")
    given = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, batch {given.batch}, bfloat16")
    measure(given.batch, given.sweep)


if __name__ == "__main__":
    main()
