"""Measure the kernels of a stem, fused and separate, on a CUDA GPU.

    python -m benchmarks.kernels_stem [--batch 256] [--sweep] [--json FILE]

Shapes are those of ResNet (7x7, 64 outputs, max-pool) and MobileNetV2 (3x3, 32 outputs) at 224 pixels in bfloat16;
inputs rotate, so that none stays in the L2 cache. "Separate" is cuDNN's convolution over blocks with a pass for the
statistics, and backward the gradient of norm, ReLU and pool with cuDNN's weight gradient. `--sweep` also tries other
launch configurations. Exits with 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from benchmarks.kernels import random_norm, random_tensor, relative_error, try_time
from reconv.kernels.channels_last import channel_rows
from reconv.kernels.jit.compile_ahead import compile_ahead
from reconv.kernels.jit.launch import trace_launches
from reconv.kernels.ops import norm_max_pool as pool
from reconv.kernels.ops import stem
from reconv.kernels.ops import stem_max_pool as stem_pool
from reconv.kernels.ops.batch_norm import NormInput, NormParams, gradient_sums, statistics
from reconv.kernels.ops.stem import CONV_CONFIGS, StemConvTile
from reconv.kernels.ops.stem_max_pool import GRADIENT_CONFIG, StemGradientTile
from reconv.kernels.window import STEM_WINDOW, STEM_WINDOWS, PoolWindow

OUTPUTS = {7: 64, 3: 32}  # by kernel
# Columns, outputs, rows of taps per load, warps, stages, programs per SM, limit of registers.
CONV_SWEEP = {
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
GRADIENT_SWEEP = (
    (32, 64, 4, 2, 2), (32, 64, 4, 1, 2), (16, 64, 4, 2, 2), (16, 64, 4, 3, 2), (32, 32, 4, 2, 2),
    (32, 32, 4, 2, 3, 168), (16, 64, 4, 4, 2), (32, 64, 8, 2, 1), (16, 64, 4, 3, 1),
)  # fmt: skip
TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True)
class Case:
    """The tensors of one stem."""

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

    def separate_forward(self) -> Tensor:
        """cuDNN's convolution and the kernel of the statistics."""
        y = F.conv2d(self.blocks, self.filters)
        return statistics(y, self.norm, channel_rows(y, self.groups))

    def forward(self, config: StemConvTile | None = None) -> tuple[Tensor, Tensor]:
        """Both by one kernel."""
        return stem.conv_output(self.blocks, self.filters, self.norm, self.groups, config)

    def pool_gradient(self) -> Tensor:
        """The gradient of the convolution's output."""
        return pool.input_gradient(self.dz, self.place, self.operand, self.sums, self.groups, self.window)

    def separate_backward(self) -> Tensor:
        """cuDNN's weight gradient of it."""
        found = torch.ops.aten.convolution_backward(
            *(self.pool_gradient(), self.blocks, self.filters, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
            [False, True, False],
        )
        dfilters: Tensor = found[1]
        return dfilters

    def backward(self, config: StemGradientTile = GRADIENT_CONFIG) -> Tensor:
        """The weight gradient by one kernel and the sum over its programs."""
        given = (self.dz, self.place, self.operand, self.sums, self.blocks, self.groups, self.window)
        return stem_pool.weight_gradient(*given, config=config)


def make_case(
    kernel: int, groups: tuple[int, ...], side: int, window: PoolWindow = STEM_WINDOW, device: str = "cuda"
) -> Case:
    outputs, dtype = OUTPUTS[kernel], torch.bfloat16
    if device == "cuda":
        images, norm = random_tensor(sum(groups), 3, side, side, dtype=dtype), random_norm(outputs)
        weight = random_tensor(outputs, 3, kernel, kernel, dtype=dtype)
    else:
        images = torch.empty(sum(groups), 3, side, side, dtype=dtype, device=device)
        scale, bias, running_var = torch.empty(3, outputs, device=device).unbind()
        norm = NormParams(scale, bias, running_var, 1e-5)
        weight = torch.empty(outputs, 3, kernel, kernel, dtype=dtype, device=device)
    blocks, filters = stem.space_to_depth(images, kernel, dtype), stem.space_to_depth_weight(weight)
    x, stats = stem.conv_output(blocks, filters, norm, groups)
    operand = NormInput(x, stats, norm.weight.detach(), norm.bias.detach())
    _, peak, place = pool.write_pooled(operand, groups, window)
    peaks, dz = NormInput(peak, *operand.tensors()[1:]), torch.empty_like(peak)
    first, second = (torch.randn_like(peak) if device == "cuda" else peak for _ in range(2))
    sums = gradient_sums(first, second, peaks, None, None, dz, channel_rows(peak, groups), "relu")
    return Case(images, blocks, filters, norm, groups, window, operand, place, dz, sums)


def conv_configs(kernel: int, sweep: bool) -> list[StemConvTile]:
    """The configurations to measure; the first is the one in use."""
    tried = [StemConvTile(*values) for values in CONV_SWEEP[kernel]] if sweep else []
    return list(dict.fromkeys((CONV_CONFIGS[kernel], *tried)))


def gradient_configs(sweep: bool) -> list[StemGradientTile]:
    tried = [StemGradientTile(*values) for values in GRADIENT_SWEEP] if sweep else []
    return list(dict.fromkeys((GRADIENT_CONFIG, *tried)))


def compile_all(sweep: bool) -> None:
    """Start compiling all configurations, each in a process of its own; the first launch waits for them."""
    with trace_launches() as traced:
        for kernel in OUTPUTS:
            case = make_case(kernel, (2,), 16, device="meta")
            for config in conv_configs(kernel, sweep):
                case.forward(config)
            for tile in gradient_configs(sweep and kernel == 7):
                case.backward(tile)
        case = make_case(7, (2,), 16, device="meta")
        statistics(case.operand.x, case.norm, channel_rows(case.operand.x, (2,)))
        case.pool_gradient()
    print(f"compiling {compile_ahead(list(traced), torch.device('cuda', 0), print)} variants", flush=True)


def check(kernel: int, groups: tuple[int, ...], side: int, window: PoolWindow) -> bool:
    """Whether the kernels agree with float64 and with separate ones, and repeat their bits; prints the errors."""
    case = make_case(kernel, groups, side, window)
    y, stats = case.forward()
    error = relative_error(y, F.conv2d(case.blocks.double(), case.filters.double()))
    off = relative_error(stats, statistics(y, case.norm, channel_rows(y, groups)))
    dy = case.pool_gradient().double()
    expected = conv2d_weight(case.blocks.double(), case.filters.shape, dy)
    found = case.backward()
    gradient_error = relative_error(found, expected)
    is_same = torch.equal(y, case.forward()[0]) and torch.equal(stats, case.forward()[1])
    is_same &= torch.equal(found, case.backward())
    is_good = max(error, off, gradient_error) < TOLERANCE and is_same
    print(
        f"{'ok  ' if is_good else 'BAD '} {kernel}x{kernel} groups {groups} side {side} {window}: output {error:.1e}, "
        f"statistics {off:.1e}, weight gradient {gradient_error:.1e}, repeated bits "
        f"{'equal' if is_same else 'DIFFER'}", flush=True,
    )  # fmt: skip
    return is_good


def exact_gradient(case: Case) -> Tensor:
    """The weight gradient in float64, from a gradient of the convolution's output that is not rounded."""
    x, *others = case.operand.tensors()
    exact = NormInput(x.float(), *others)
    dy = pool.input_gradient(case.dz.float(), case.place, exact, case.sums, case.groups, case.window)
    exact_filters: Tensor = conv2d_weight(case.blocks.double(), list(case.filters.shape), dy.double())
    return exact_filters


def swept(
    title: str, configs: Sequence[Any], call: Callable[[Case, Any], Any], cases: list[Case], expected: Tensor
) -> list[tuple[tuple[Any, ...], float]]:
    """Times of all configurations, fastest first; prints them, and those with wrong results."""
    times = {astuple(config): try_time([partial(call, case, config) for case in cases]) for config in configs}
    wrong = [
        astuple(config)
        for config in configs
        if times[astuple(config)] < float("inf") and relative_error(call(cases[0], config), expected) > TOLERANCE
    ]
    found = sorted(times.items(), key=lambda item: item[1])
    print(f"  {title}: " + "; ".join(f"{1000 * ms:.0f} {','.join(map(str, values))}" for values, ms in found))
    if wrong:
        print(f"  WRONG RESULTS: {wrong}", flush=True)
    return found


def measure(kernel: int, batch: int, sweep: bool) -> dict[str, Any]:
    """Microseconds of each kernel of a stem, and of the whole of it."""
    cases = [make_case(kernel, (batch,), 224) for _ in range(2)]
    calls: dict[str, Callable[[Case], Any]] = {
        "space_to_depth": lambda case: stem.space_to_depth(case.images, kernel, torch.bfloat16),
        "cuDNN convolution": lambda case: F.conv2d(case.blocks, case.filters),
        "separate forward": lambda case: case.separate_forward(),
        "fused forward": lambda case: case.forward(),
        "pool": lambda case: pool.write_pooled(case.operand, case.groups, case.window),
        "pool gradient": lambda case: case.pool_gradient(),
        "separate backward": lambda case: case.separate_backward(),
        "fused backward": lambda case: case.backward(),
    }
    found: dict[str, Any] = {"kernel": kernel}
    for name, call in calls.items():
        found[name] = 1000 * try_time([partial(call, case) for case in cases])
    if sweep:
        y, dfilters = cases[0].forward()[0], exact_gradient(cases[0])
        errors = [relative_error(found, dfilters) for found in (cases[0].separate_backward(), cases[0].backward())]
        print("  weight gradient against float64: separate {:.1e}, fused {:.1e}".format(*errors), flush=True)
        configs = conv_configs(kernel, sweep)
        found["forward sweep"] = swept("forward", configs, lambda case, c: case.forward(c)[0], cases, y)
        tiles = gradient_configs(sweep and kernel == 7)
        found["backward sweep"] = swept("backward", tiles, lambda case, c: case.backward(c), cases, dfilters)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--sweep", action="store_true", help="try other launch configurations")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, batch {given.batch}, bfloat16, times in us")
    compile_all(given.sweep)
    is_good = check(3, (5,), 90, STEM_WINDOW)
    for window in STEM_WINDOWS:
        is_good &= check(7, (8,), 224, window) & check(7, (3, 3, 2), 106, window)
    rows = []
    for kernel in OUTPUTS:
        rows.append(measure(kernel, given.batch, given.sweep))
        torch.cuda.empty_cache()
    names = [name for name in rows[0] if name != "kernel" and "sweep" not in name]
    print(f"{'':20}" + "".join(f"{kernel}x{kernel} stem".rjust(12) for kernel in OUTPUTS))
    for name in names:
        print(f"{name:20}" + "".join(f"{row[name]:12.0f}" for row in rows))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
