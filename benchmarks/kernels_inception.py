"""Measure GoogLeNet's inception blocks and stem on a CUDA GPU, with and without fused concatenation and pools.

    python -m benchmarks.kernels_inception [--batch 256] [--blocks 3a,4c] [--sweep] [--profile 4c]

Times are of forward and backward pass in bfloat16, in a CUDA graph with rotated inputs. "separate" is the path with a
norm per branch, `torch.cat`, copies of its gradient's slices, sums of gradients by autograd, and in the stem max-pools
of their own. `--sweep` tries launch configs of the norms' kernels and prints the best of each kernel and shape.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.kernels import ROTATED_BYTES, gradients, random_tensor, relative_error, time_ms
from reconv.core.batch import Batch
from reconv.kernels.channels_last import LaunchConfig
from reconv.kernels.fuse import fuse
from reconv.kernels.fused.blocks import FusedGoogLeNet, FusedInception
from reconv.kernels.fused.norm import FusedBatchNorm2d
from reconv.kernels.jit.compile_ahead import compile_ahead
from reconv.kernels.jit.launch import KernelVariant, trace_launches
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
SWEPT = ("3a", "3b", "4c", "5b")
REDUCTIONS = (  # the first is the current one
    LaunchConfig(8, 3, 1), LaunchConfig(8, 2, 1), LaunchConfig(4, 3, 2), LaunchConfig(4, 2, 2), LaunchConfig(4, 3, 1),
    LaunchConfig(8, 1, 2), LaunchConfig(4, 1, 4), LaunchConfig(8, 2, 2),
)  # fmt: skip
PASSES = (
    LaunchConfig(), LaunchConfig(8), LaunchConfig(2), LaunchConfig(4, 1, 4), LaunchConfig(4, 1, 8),
    LaunchConfig(4, 2, 4),
)  # fmt: skip
TRIED = {"statistics": REDUCTIONS, "normalize": PASSES, "gradient_sums": REDUCTIONS, "gradient": PASSES}
DTYPE = torch.bfloat16


class SeparateInception(FusedInception):
    """A block whose branches are normalized one by one and concatenated by torch."""

    def forward(self, x: Tensor) -> Tensor:
        layers = [m for m in (self.branch1, self.branch2[0], self.branch3[0]) if isinstance(m, BasicConv2d)]
        norms = [m.bn for m in layers if isinstance(m.bn, FusedBatchNorm2d)]
        y = F.conv2d(x, torch.cat([layer.conv.weight for layer in layers]))
        own = [bn.norm_params() for bn in norms]
        weight, bias, running_var = (
            torch.cat([getattr(params, name) for params in own]) for name in ("weight", "bias", "running_var")
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


def prepared(model: nn.Module, batch: int) -> nn.Module:
    """The fused model on the GPU, for training on one group of images."""
    model = model.to("cuda").to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.to(DTYPE)
    fuse(model)
    LayerState(model).set_micro_batch(Batch({}, torch.arange(batch, device="cuda"), (batch,)), step=0)
    return model


def block(name: str, kind: type[Inception], batch: int) -> nn.Module:
    torch.manual_seed(0)
    channels, _, widths = BLOCKS[name]
    model = prepared(Inception(GoogLeNetSpec(), channels, widths), batch)
    model.__class__ = kind
    return model


def stem(kind: type[GoogLeNet], batch: int) -> nn.Module:
    torch.manual_seed(0)
    model = GoogLeNet(GoogLeNetSpec(aux_heads=False))
    for name in [name for name, _ in model.named_children() if not name.startswith(("conv", "maxpool"))]:
        delattr(model, name)
    prepared(model, batch)
    model.__class__ = kind
    model.forward = model._stem  # type: ignore[method-assign, assignment]
    return model


def check(batch: int = 16) -> None:
    """Compare outputs and gradients of both paths; exits where they differ by more than bfloat16 explains.

    The stem differs more: a max-pool of its own sees rounded values, so that another of almost equal ones may win.
    """
    for name, make, shape, kinds in (
        ("3a", partial(block, "3a"), (192, 28, 28), (SeparateInception, FusedInception)),
        ("4b", partial(block, "4b"), (512, 14, 14), (SeparateInception, FusedInception)),
        ("stem", stem, (3, 224, 224), (SeparateGoogLeNet, FusedGoogLeNet)),
    ):
        x, results = random_tensor(batch, *shape, dtype=DTYPE).requires_grad_(name != "stem"), []
        dy: Tensor | None = None
        for kind in kinds:
            model: nn.Module = make(kind, batch)  # type: ignore[arg-type]
            leaves = [tensor for tensor in (x, *model.parameters()) if tensor.requires_grad]
            y = model(x)
            dy = random_tensor(*y.shape, dtype=DTYPE) if dy is None else dy
            results.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
        errors = [relative_error(found, expected) for expected, found in zip(*results, strict=True)]
        print(f"{name}: largest relative difference of output and {len(errors) - 1} gradients {max(errors):.2e}")
        if not max(errors) < (0.2 if name == "stem" else 0.02):
            raise SystemExit(f"{name}: the paths differ")


def rotated(model: nn.Module, shape: Sequence[int], batch: int) -> list[Callable[[], Any]]:
    """Training passes over several inputs."""
    sets = max(2, min(8, round(ROTATED_BYTES / (batch * shape[0] * shape[1] * shape[2] * 2))))
    calls: list[Callable[[], Any]] = []
    for _ in range(sets):
        x = random_tensor(batch, *shape, dtype=DTYPE).requires_grad_(shape[0] > 3)
        with torch.no_grad():
            dy = torch.randn_like(model(x))
        leaves = [tensor for tensor in (x, *model.parameters()) if tensor.requires_grad]
        calls.append(partial(gradients, lambda *given, x=x: model(x), leaves, dy))
    return calls


def measure(names: Sequence[str], batch: int) -> None:
    """Print the times of both paths of the stem and of each block, and their sums."""
    print("part   separate  fused ms   saved")
    totals = [0.0, 0.0]
    cases: list[tuple[str, Callable[..., nn.Module], tuple[int, int, int], tuple[Any, Any]]] = [
        ("stem", stem, (3, 224, 224), (SeparateGoogLeNet, FusedGoogLeNet))
    ]
    for name in names:
        channels, side, _ = BLOCKS[name]
        shape = (channels, side, side)
        cases.append((name, partial(block, name), shape, (SeparateInception, FusedInception)))
    for name, make, shape, kinds in cases:
        ms = []
        for kind in kinds:
            calls = rotated(make(kind, batch), shape, batch)
            ms.append(time_ms(calls))
            del calls
            torch.cuda.empty_cache()
        totals = [total + one for total, one in zip(totals, ms, strict=True)]
        print(f"{name:5} {ms[0]:9.4f} {ms[1]:9.4f} {ms[0] - ms[1]:8.4f}", flush=True)
    print(f"sum   {totals[0]:9.4f} {totals[1]:9.4f} {totals[0] - totals[1]:8.4f}")


def profile(name: str, batch: int, count: int = 12) -> None:
    """Print the kernels of one fused block that take longest."""
    channels, side, _ = BLOCKS[name]
    calls = rotated(block(name, FusedInception, batch), (channels, side, side), batch)
    for call in calls:
        call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for call in calls:
            call()
        torch.cuda.synchronize()
    events = sorted(found.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events) / len(calls)
    print(f"{name}: {total:.0f} µs in {sum(event.count for event in events) // len(calls)} kernels, the longest:")
    for event in events[:count]:
        times, us = event.count / len(calls), event.self_device_time_total / len(calls)
        print(f"{us:8.1f} µs {times:4.0f} x  {event.key[:90]}")


@dataclass(frozen=True, slots=True)
class BlockRows(PartRows):
    """Rows with a given block of channels."""

    forced: int

    @property
    def block(self) -> int:
        return self.forced


def with_block(rows: PartRows, channels: int) -> PartRows:
    return BlockRows(
        rows.num_rows, rows.channels, rows.group_rows, rows.num_groups, rows.num_sms, rows.shared_bytes, rows.widths,
        channels,
    )  # fmt: skip


def kernel_calls(name: str, is_split: bool, batch: int, on: str, channels: int) -> dict[str, Callable[[], Any]]:
    """The four kernels of a block's narrow convolutions' norms (a split), or of its other branches' norms."""
    _, side, (one, three_reduce, three, five_reduce, five, pooled) = BLOCKS[name]
    widths = (one, three_reduce, five_reduce) if is_split else (three, five, pooled)
    num_channels = one + three + five + pooled

    def tensor(width: int) -> Tensor:
        return ones(batch, width, side, side, on=on)

    parameters = tuple(torch.ones(width, device=on) for width in widths)
    norms = [NormParams(parameter, parameter, parameter, 1e-3) for parameter in parameters]
    wide = tensor(num_channels)
    if is_split:
        source, result = tensor(sum(widths)), tensor(sum(widths))
        x, dx = Columns.of_range(source, widths), Columns.of_range(result, widths)
        y = Columns.of_first(wide, [tensor(width) for width in widths[1:]], one)
    else:
        x, dx = (Columns.of_tensors([tensor(width) for width in widths]) for _ in range(2))
        y = Columns.of_range(wide, widths, one)
    rows = with_block(ops.part_rows(wide, (batch,), widths), channels)
    stats = torch.ones(1, 3, sum(widths), device=on)
    sums = torch.ones(2, 1, sum(widths), device=on)
    operand = PartNorms(x, stats, parameters, parameters)
    return {
        "statistics": lambda: ops.statistics(x, norms, rows),
        "normalize": lambda: ops.write_output(operand, y, rows),
        "gradient_sums": lambda: ops.gradient_sums(y, operand, rows),
        "gradient": lambda: ops.write_input_gradients(y, operand, sums, dx, rows),
    }


def ones(*shape: int, on: str) -> Tensor:
    return torch.ones(shape, dtype=DTYPE, device=on).contiguous(memory_format=torch.channels_last)


@contextmanager
def configured(kernel: str, config: LaunchConfig, configs: dict[str, LaunchConfig] = ops.CONFIGS) -> Iterator[None]:
    before = configs[kernel]
    configs[kernel] = config
    try:
        yield
    finally:
        configs[kernel] = before


def own_block(name: str, is_split: bool) -> int:
    """The block of channels that the kernels choose."""
    _, _, (one, three_reduce, three, five_reduce, five, pooled) = BLOCKS[name]
    widths = (one, three_reduce, five_reduce) if is_split else (three, five, pooled)
    return ops.part_rows(torch.empty(1, 8, 1, 1, device="meta"), (1,), widths).block


def sweep(batch: int) -> None:
    """Print the times of the current launch config and of the best ones of each kernel and shape."""
    print("block part   kernel         current ms   best: ms (warps, stages, programs per SM, block of channels)")
    for name in SWEPT:
        for is_split in (True, False):
            own = own_block(name, is_split)
            found: dict[str, list[tuple[float, str, bool]]] = {kernel: [] for kernel in TRIED}
            for channels in (64, 32):
                sets = [kernel_calls(name, is_split, batch, "cuda", channels) for _ in range(4)]
                for kernel, configs in TRIED.items():
                    for config in configs:
                        label = f"({config.warps}, {config.stages}, {config.programs_per_sm}, {channels})"
                        try:
                            with configured(kernel, config):
                                ms = time_ms([calls[kernel] for calls in sets])
                        except Exception as error:
                            print(f"{name} {kernel} {label}: {type(error).__name__} {str(error)[:80]}")
                            continue
                        found[kernel].append((ms, label, config == configs[0] and channels == own))
                del sets
            for kernel, times in found.items():
                current = next((ms for ms, _, is_current in times if is_current), float("nan"))
                best = "  ".join(f"{ms:.4f} {label}" for ms, label, _ in sorted(times)[:3])
                part = "split" if is_split else "concat"
                print(f"{name:5} {part:6} {kernel:14} {current:8.4f} ({own:2})   {best}", flush=True)
            torch.cuda.empty_cache()


def compile_all(names: Sequence[str], with_sweep: bool) -> None:
    """Compile the kernels of everything that is measured, in parallel."""
    variants: dict[KernelVariant, None] = {}
    for name in {*names, "3a", "4b"}:
        channels, side, _ = BLOCKS[name]
        for kind in (SeparateInception, FusedInception):
            first = nn.Conv2d(channels, channels, 1, bias=False, device="cuda", dtype=DTYPE)
            model = nn.Sequential(first, block(name, kind, 2))
            variants |= dict.fromkeys(trace_kernels(model, (channels, side, side), DTYPE, nullcontext()))
    for network in (SeparateGoogLeNet, FusedGoogLeNet):
        variants |= dict.fromkeys(trace_kernels(stem(network, 2), (3, 224, 224), DTYPE, nullcontext()))
    if with_sweep:
        with trace_launches() as traced:
            for name in SWEPT:
                for is_split in (True, False):
                    for channels in (64, 32):
                        calls = kernel_calls(name, is_split, 2, "meta", channels)
                        for kernel, configs in TRIED.items():
                            for config in configs:
                                with configured(kernel, config):
                                    calls[kernel]()
        variants |= traced
    compile_ahead(list(variants), torch.device("cuda", torch.cuda.current_device()), print)
    print(f"{len(variants)} kernels to compile", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--blocks", type=lambda text: text.split(","), default=list(BLOCKS))
    parser.add_argument("--sweep", action="store_true", help="try launch configs of the norms' kernels")
    parser.add_argument("--profile", default="4c", help="the block whose kernels are listed")
    given = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    start = time.perf_counter()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, batch {given.batch}, bfloat16")
    compile_all(given.blocks, given.sweep)
    check()
    measure(given.blocks, given.batch)
    profile(given.profile, given.batch)
    print(f"after {time.perf_counter() - start:.0f} s", flush=True)
    if given.sweep:
        sweep(given.batch)
        print(f"after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
