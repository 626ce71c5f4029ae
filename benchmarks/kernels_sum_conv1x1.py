"""Measure residual sums whose output a 1x1 convolution reads, fused and separate, on a CUDA GPU.

    python -m benchmarks.kernels_sum_conv1x1 [--batch 256] [--sweep] [--all-outputs] [--json FILE]

Backward, "separate" is cuDNN's input gradient of the convolution and the gradient sums of the norm; forward it is the
sum and the convolution with statistics; "fused" is one kernel. Shapes
are those of ResNet-50 and ResNeXt-101 32x4d in bfloat16; inputs rotate, so that none stays in the L2 cache. `--sweep`
also tries other launch configurations and prints the fastest of each shape.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels import ROTATED_BYTES, random_norm, random_tensor, relative_error, time_ms, try_time
from reconv.kernels.channels_last import ChannelRows, channel_rows
from reconv.kernels.conv_output import ConvOutput
from reconv.kernels.jit.compile_ahead import compile_ahead
from reconv.kernels.jit.launch import trace_launches
from reconv.kernels.ops import batch_norm as norm
from reconv.kernels.ops import conv1x1_statistics as conv1x1
from reconv.kernels.ops import sum_conv1x1 as ops
from reconv.kernels.ops.batch_norm import NormInput, NormParams
from reconv.kernels.ops.sum_conv1x1 import SumConvTile, SumForwardTile

# Channels, outputs of the convolution, side, sum of two norms, number in ResNet-50, in ResNeXt-101 32x4d.
SHAPES = (
    (256, 64, 56, False, 1, 0), (256, 64, 56, True, 1, 0), (256, 128, 56, False, 1, 1), (256, 128, 56, True, 0, 1),
    (512, 128, 28, False, 2, 0), (512, 128, 28, True, 1, 0), (512, 256, 28, False, 1, 2), (512, 256, 28, True, 0, 1),
    (1024, 256, 14, False, 4, 0), (1024, 256, 14, True, 1, 0), (1024, 512, 14, False, 1, 21),
    (1024, 512, 14, True, 0, 1), (2048, 512, 7, False, 1, 0), (2048, 512, 7, True, 1, 0),
)  # fmt: skip

# By outputs and norms of the sum: rows, channels, warps, stages, programs per SM, register limit. Those left out spill.
SWEEP: dict[tuple[int, int], list[tuple[int, ...]]] = {
    (64, 1): [
        (64, 64, 4, 2, 4), (64, 64, 4, 3, 3), (64, 64, 4, 3, 4, 128), (128, 64, 4, 2, 2), (128, 64, 4, 2, 3, 168),
        (128, 64, 4, 3, 2), (128, 64, 8, 2, 2, 128), (64, 128, 8, 2, 2, 128), (64, 128, 8, 3, 2, 128),
        (64, 128, 4, 3, 2), (128, 128, 8, 2, 1), (64, 256, 8, 2, 1),
    ],
    (64, 2): [
        (64, 64, 4, 2, 3), (64, 64, 4, 3, 3), (64, 64, 4, 3, 4, 128), (128, 64, 4, 2, 2), (128, 64, 4, 3, 2),
        (64, 128, 8, 2, 2, 128), (128, 128, 8, 2, 1),
    ],
    (128, 1): [
        (64, 64, 4, 2, 4), (64, 64, 4, 3, 3, 128), (128, 64, 4, 2, 2), (128, 64, 8, 2, 2, 128), (64, 128, 4, 2, 2),
        (64, 128, 8, 2, 1), (64, 128, 8, 2, 2, 128), (64, 128, 8, 3, 1), (64, 128, 8, 3, 2, 128), (128, 128, 8, 2, 1),
        (64, 256, 8, 2, 1), (128, 128, 16, 2, 1, 128),
    ],
    (128, 2): [
        (64, 64, 4, 2, 3), (64, 64, 4, 3, 3), (128, 64, 4, 2, 2), (64, 128, 8, 2, 1), (64, 128, 8, 3, 1),
        (64, 128, 8, 2, 2, 128), (128, 128, 8, 2, 1),
    ],
    (256, 1): [
        (64, 64, 4, 2, 2), (64, 64, 4, 1, 3), (128, 64, 8, 2, 1), (64, 128, 4, 2, 1), (64, 128, 8, 2, 1),
        (64, 128, 8, 3, 1), (64, 256, 8, 2, 1), (64, 128, 8, 1, 2, 128), (128, 64, 8, 1, 2, 128),
        (128, 128, 8, 1, 1), (128, 128, 16, 1, 1, 128), (64, 256, 16, 2, 1, 128),
    ],
    (256, 2): [
        (64, 64, 4, 2, 2), (64, 64, 4, 1, 2), (64, 128, 8, 2, 1), (64, 128, 8, 3, 1), (64, 128, 8, 1, 2, 128),
        (128, 128, 8, 1, 1),
    ],
    (512, 1): [(64, 64, 4, 1, 1), (64, 64, 8, 1, 1), (64, 64, 4, 2, 1), (64, 64, 8, 2, 1), (64, 128, 8, 1, 1)],
    (512, 2): [(64, 64, 8, 1, 1), (64, 64, 8, 2, 1), (64, 128, 8, 1, 1)],
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """The tensors of one backward pass."""

    dy: Tensor
    filters: Tensor
    second: Tensor
    operand: NormInput
    other: NormInput | None
    bits: Tensor
    dz: Tensor
    y: Tensor
    rows: ChannelRows

    def input_gradient(self) -> Tensor:
        """cuDNN's input gradient of the convolution."""
        found: tuple[Tensor, None, None] = torch.ops.aten.convolution_backward(
            *(self.dy, self.y, self.filters, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, False, False])
        )
        return found[0]

    def separate(self) -> Tensor:
        """Sums by separate kernels; writes dz."""
        given = (self.operand, self.other, self.bits, self.dz, self.rows)
        return norm.gradient_sums(self.input_gradient(), self.second, *given, "relu")

    def fused(self, config: SumConvTile | None = None) -> Tensor:
        """Sums by the fused kernel; writes dz."""
        given = (self.operand, self.other, self.bits, self.dz, self.rows)
        return ops.gradient_sums(self.dy, self.filters, self.second, *given, config)


def make_case(channels: int, outputs: int, side: int, has_norm: bool, batch: int, integers: bool = False) -> Case:
    groups, dtype = (batch,), torch.bfloat16
    x, second, added = (random_tensor(batch, channels, side, side, dtype=dtype) for _ in range(3))
    dy = random_tensor(batch, outputs, side, side, dtype=dtype)
    filters = random_tensor(outputs, channels, 1, 1, dtype=dtype)
    if integers:  # products then have the same bits in any order
        dy, filters = dy.round(), filters.round()
    of, rows = random_norm(channels), channel_rows(x, groups)
    operand = NormInput(x, norm.statistics(x, of, rows), of.weight.detach(), of.bias.detach())
    other = NormInput(added, norm.statistics(added, of, rows), *operand.tensors()[2:]) if has_norm else None
    bits = norm.empty_relu_mask(rows, x.device, "relu")
    y = norm.write_output(operand, added if other is None else other, bits, rows, "relu")
    return Case(dy, filters, second, operand, other, bits, torch.empty_like(x), y, rows)


def check(batch: int) -> None:
    """Compare with separate kernels, for every configuration in use and some rows that fill no tile."""
    for channels, outputs, side, has_norm in ((256, 64, 13, False), (256, 128, 13, True), (512, 256, 13, False)):
        case = make_case(channels, outputs, side, has_norm, min(batch, 31), integers=True)
        expected = case.separate().clone()
        dz = case.dz.clone()
        found = case.fused()[: 2 + has_norm]
        same = torch.equal(case.dz, dz)
        error = relative_error(found, expected[: 2 + has_norm])
        print(f"check {channels} {outputs} {side} norms={1 + has_norm}: dz equal {same}, sums differ by {error:.1e}")
        assert same and error < 1e-5, "the fused kernel is wrong"


def tile_configs(outputs: int, num_norms: int, sweep: bool) -> list[SumConvTile]:
    """The configurations to measure; the first is the one in use."""
    tried = [SumConvTile(*values) for values in SWEEP[outputs, num_norms]] if sweep else []
    return list(dict.fromkeys((ops.CONFIGS[outputs, num_norms], *tried)))


def compile_all(sweep: bool, max_outputs: int) -> None:
    """Start compiling all configurations, each in a process of its own; the first launch waits for them."""
    vector = torch.empty(1, device="meta")
    with trace_launches() as traced:
        for outputs, num_norms in SWEEP:
            x = torch.empty(2, 1024, 4, 4, dtype=torch.bfloat16, device="meta").to(memory_format=torch.channels_last)
            dy = x[:, :outputs].contiguous(memory_format=torch.channels_last)
            filters, bits = x.new_empty(outputs, 1024, 1, 1), x.new_empty(1, dtype=torch.uint8)
            operand, rows = NormInput(x, vector, vector, vector), channel_rows(x, (2,))
            for config in tile_configs(outputs, num_norms, sweep) if outputs <= max_outputs else ():
                other = operand if num_norms == 2 else None
                ops.gradient_sums(dy, filters, x, operand, other, bits, x, rows, config)
    print(f"compiling {compile_ahead(list(traced), torch.device('cuda', 0), print)} variants", flush=True)


def is_right(case: Case, config: SumConvTile) -> bool:
    """Whether a configuration agrees with separate kernels, up to rare roundings of the product."""
    expected, dz = case.separate().clone(), case.dz.clone()
    found = case.fused(config)
    num_sums = 2 if case.other is None else 3
    errors = [relative_error(case.dz, dz), relative_error(found[:num_sums], expected[:num_sums])]
    return max(errors) < 5e-3


def measure(batch: int, sweep: bool, max_outputs: int) -> list[dict[str, Any]]:
    """Print the time of both ways for each shape, and what a step saves."""
    found, saved_ms = [], [0.0, 0.0]
    print("channels  out side norms | cuDNN dgrad  separate   fused ms   TB/s")
    for channels, outputs, side, has_norm, *numbers in SHAPES:
        if outputs > max_outputs:
            continue
        elements = batch * side * side * channels
        sets = max(2, min(6, round(ROTATED_BYTES / (2 * elements))))
        cases = [make_case(channels, outputs, side, has_norm, batch) for _ in range(sets)]
        ms = {
            "dgrad": time_ms([case.input_gradient for case in cases]),
            "separate": time_ms([case.separate for case in cases]),
            "fused": try_time([case.fused for case in cases]),
        }
        rate = elements * (2 * (3 + has_norm + outputs / channels) + 1 / 8) / ms["fused"] / 1e9
        words = f"{ms['dgrad']:11.4f} {ms['separate']:9.4f} {ms['fused']:10.4f}  {rate:5.2f}"
        print(f"{channels:8} {outputs:4} {side:4} {1 + has_norm:5} | {words}", flush=True)
        row: dict[str, Any] = {"channels": channels, "outputs": outputs, "side": side, "has_norm": has_norm, **ms}
        saved_ms = [total + n * (ms["separate"] - ms["fused"]) for total, n in zip(saved_ms, numbers, strict=True)]
        if sweep:
            configs = tile_configs(outputs, 1 + has_norm, sweep)
            times = {config: try_time([partial(case.fused, config) for case in cases]) for config in configs}
            wrong = [config for config in configs if times[config] < float("inf") and not is_right(cases[0], config)]
            if wrong:
                print(f"   wrong results: {[astuple(config) for config in wrong]}", flush=True)
            best = sorted(times, key=lambda config: times[config])
            row["sweep"] = [(astuple(config), times[config]) for config in best]
            print("   " + "  ".join(f"{times[c]:.4f} {astuple(c)}" for c in best[:4]), flush=True)
        found.append(row)
        del cases
        torch.cuda.empty_cache()
    print(f"saved per step: ResNet-50 {saved_ms[0]:.2f} ms, ResNeXt-101 32x4d {saved_ms[1]:.2f} ms")
    return found


FORWARD_SWEEP = (  # rows, warps, stages, programs per SM
    (64, 8, 2, 1), (64, 8, 3, 1), (64, 8, 1, 1), (64, 16, 2, 1), (64, 16, 3, 1), (64, 4, 2, 1), (64, 8, 1, 2),
)  # fmt: skip


def compile_forward(configs: list[SumForwardTile]) -> None:
    """Start compiling all configurations of the forward pass."""
    vector = torch.empty(1, device="meta")
    of = NormParams(vector, vector, vector, 1e-5)
    with trace_launches() as traced:
        for channels, outputs in ops.FORWARD_CONFIGS:
            x = torch.empty(2, channels, 4, 4, dtype=torch.bfloat16, device="meta")
            operand = NormInput(x.to(memory_format=torch.channels_last), vector, vector, vector)
            filters, rows = x.new_empty(outputs, channels, 1, 1), channel_rows(operand.x, (2,))
            for config in configs:
                for other in (operand.x, operand):
                    ops.sum_conv(operand, other, filters, of, rows, config)
    print(f"compiling {compile_ahead(list(traced), torch.device('cuda', 0), print)} variants", flush=True)


def separate_forward(case: Case, of: NormParams, batch: int) -> Any:
    """The sum, its convolution and the statistics by two kernels."""
    config = conv1x1.tile_config(case.rows.channels, len(case.filters))
    assert config is not None
    y = norm.write_output(case.operand, case.other or case.second, case.bits, case.rows, "relu")
    return y, *conv1x1.conv_output(y, case.filters, of, (batch,), config)


def fused_forward(case: Case, of: NormParams, tile: SumForwardTile) -> Any:
    """The same by one kernel."""
    y, _bits, *out = ops.sum_conv(case.operand, case.other or case.second, case.filters, of, case.rows, tile)
    return y, *out


def measure_forward(batch: int, sweep: bool) -> None:
    """Print the time of a sum and its convolution with statistics, by two kernels and by one."""
    tried = [SumForwardTile(*values) for values in FORWARD_SWEEP] if sweep else []
    compile_forward([*ops.FORWARD_CONFIGS.values(), *tried])
    print("forward: channels out norms | ms, fastest first")
    for channels, outputs in ops.FORWARD_CONFIGS:
        for has_norm in (False, True):
            cases, of = [make_case(channels, outputs, 56, has_norm, batch) for _ in range(2)], random_norm(outputs)
            times = {"separate": time_ms([partial(separate_forward, case, of, batch) for case in cases])}
            expected = separate_forward(cases[0], of, batch)
            for tile in dict.fromkeys((ops.FORWARD_CONFIGS[channels, outputs], *tried)):
                name = str(astuple(tile))
                times[name] = try_time([partial(fused_forward, case, of, tile) for case in cases])
                if times[name] < float("inf"):
                    found = fused_forward(cases[0], of, tile)
                    errors = [relative_error(a, b) for a, b in zip(found, expected, strict=True)]
                    assert max(errors) < 5e-3, f"{tile} is wrong: {errors}"
            ordered = sorted(times.items(), key=lambda pair: pair[1])[:5]
            text = "  ".join(f"{ms:.4f} {name}" for name, ms in ordered)
            print(f"{channels:8} {outputs:4} {1 + has_norm:5} | {text}; separate {times['separate']:.4f}", flush=True)
            del cases
            torch.cuda.empty_cache()


def measure_whole(batch: int) -> None:
    """Print forward and backward time of a sum and its convolution, captured in a CUDA graph."""
    for channels, outputs, side in ((256, 64, 56), (1024, 256, 14)):
        x, other, second = (random_tensor(batch, channels, side, side, dtype=torch.bfloat16) for _ in range(3))
        filters = random_tensor(outputs, channels, 1, 1, dtype=torch.bfloat16)
        dy, of = random_tensor(batch, outputs, side, side, dtype=torch.bfloat16), random_norm(channels)
        inputs = [tensor.requires_grad_() for tensor in (x, of.weight, of.bias, other, filters)]

        def fused() -> Any:
            operands = ConvOutput(x), of, ConvOutput(other), None, filters  # noqa: B023
            y, again, *_ = ops.batch_norm_add_relu_conv1x1(*operands, (batch,))
            return torch.autograd.grad([y, again], inputs, [dy, second])  # noqa: B023

        def separate() -> Any:
            y, again, _ = norm.batch_norm_add_act(x, of, other, (batch,), "relu")  # noqa: B023
            return torch.autograd.grad([F.conv2d(y, filters), again], inputs, [dy, second])  # noqa: B023

        ms = {"fused": time_ms([fused]), "separate": time_ms([separate])}
        print(
            f"forward and backward {channels} {outputs} {side}: separate {ms['separate']:.3f}, fused {ms['fused']:.3f}"
        )
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--sweep", action="store_true", help="try other launch configurations")
    parser.add_argument("--forward", action="store_true", help="measure the forward pass only")
    parser.add_argument("--all-outputs", action="store_true", help="measure shapes that are not in use, too")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, batch {given.batch}, bfloat16")
    if given.forward:
        measure_forward(given.batch, given.sweep)
        return
    max_outputs = max(outputs for outputs, _ in SWEEP) if given.all_outputs else ops.MAX_OUTPUTS
    compile_all(given.sweep, max_outputs)
    check(given.batch)
    rows = measure(given.batch, given.sweep, max_outputs)
    measure_whole(given.batch)
    measure_forward(given.batch, given.sweep)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
