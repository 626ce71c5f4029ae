"""Measure the time and bandwidth of the fused kernels on a CUDA GPU.

    python -m benchmarks.kernels [--batch 256] [--peak 4.3] [--stock] [--projections] [--json FILE]

Bandwidth is the bytes that must move over the time of a kernel, as a fraction of what a copy reaches (TB/s, reads and
writes counted), for every kernel and shape of a ResNet-50 step, with the sum over the step. Inputs rotate, so that none
stays in the L2 cache. `--stock` adds torch.compile of the same batch norm, ReLU and sum; `--projections` measures
instead the last convolutions of MobileNetV2's blocks with the norm before them, fused and separate.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reconv.kernels.channels_last import channel_rows
from reconv.kernels.ops import batch_norm as norm
from reconv.kernels.ops import norm_conv1x1 as projection
from reconv.kernels.ops import norm_max_pool as pool
from reconv.kernels.ops.batch_norm import NormInput, NormParams

ROTATED_BYTES = 400e6
REPEATS = 3
STAGES = ((64, 56, 3), (128, 28, 4), (256, 14, 6), (512, 7, 3))  # planes, side, blocks of ResNet-50
PROJECTIONS = (  # channels, outputs, side and number of MobileNetV2's
    (32, 16, 112, 1), (96, 24, 56, 1), (144, 24, 56, 1), (144, 32, 28, 1), (192, 32, 28, 2), (192, 64, 14, 1),
    (384, 64, 14, 3), (384, 96, 14, 1), (576, 96, 14, 2),
)  # fmt: skip


def random_tensor(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype).contiguous(memory_format=torch.channels_last)


def random_norm(channels: int) -> NormParams:
    weight, bias = torch.randn(2, channels, device="cuda").unbind()
    return NormParams(weight.requires_grad_(), bias.requires_grad_(), torch.ones(channels, device="cuda"), 1e-5)


def gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    """A forward and a backward pass."""
    return torch.autograd.grad(function(*inputs), inputs, dy)


def time_ms(calls: list[Callable[[], Any]]) -> float:
    """Milliseconds per call, in a CUDA graph of all of them."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    rounds = max(1, 8 // len(calls))
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / (rounds * len(calls)))
    return float(median(times))


def try_time(calls: list[Callable[[], Any]]) -> float:
    """Milliseconds, or infinity where the launch fails."""
    try:
        return time_ms(calls)
    except Exception as error:  # out of shared memory or registers: the next configuration may fit
        print(f"  failed: {repr(error)[:90]}", flush=True)
        return float("inf")


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference over that of the expected values."""
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


Calls = dict[str, tuple[float, Callable[[], Any]]]  # bytes that must move, in tensors of the layer's size, and a call


def pool_calls(a: NormInput, groups: tuple[int, ...]) -> Calls:
    """The kernels between a stem's statistics and the gradient of its convolution."""
    _, peak, place = pool.write_pooled(a, groups)
    peaks, pooled = NormInput(peak, a.stats, a.weight, a.bias), channel_rows(peak, groups)
    first, second, dz = torch.randn_like(peak), torch.randn_like(peak), torch.empty_like(peak)
    sums = norm.gradient_sums(first, second, peaks, None, None, dz, pooled, "relu")
    return {
        "pool": (1 + 0.25 * 2.5, lambda: pool.write_pooled(a, groups)),
        "sums": (1, lambda: norm.gradient_sums(first, second, peaks, None, None, dz, pooled, "relu")),
        "gradient": (2 + 0.25 * 1.5, lambda: pool.input_gradient(dz, place, a, sums, groups)),
    }


def plain_calls(a: NormInput, groups: tuple[int, ...]) -> Calls:
    """The kernels of a norm and its ReLU."""
    rows, dy = channel_rows(a.x, groups), torch.randn_like(a.x)
    sums = norm.gradient_sums(dy, None, a, None, None, None, rows, "relu")
    return {
        "normalize": (2, lambda: norm.write_output(a, None, None, rows, "relu")),
        "sums": (2, lambda: norm.gradient_sums(dy, None, a, None, None, None, rows, "relu")),
        "gradient": (3, lambda: norm.input_gradients(dy, a, None, sums, rows, "relu")),
    }


def join_calls(a: NormInput, groups: tuple[int, ...], has_norm: bool) -> Calls:
    """The kernels of a residual join, whose shortcut may have a norm of its own."""
    rows, first, second = channel_rows(a.x, groups), torch.randn_like(a.x), torch.randn_like(a.x)
    other = NormInput(torch.randn_like(a.x), a.stats, a.weight, a.bias)
    added, normed = (other, other) if has_norm else (other.x, None)
    bits, dz = norm.empty_relu_mask(rows, a.x.device, "relu"), torch.empty_like(a.x)
    norm.write_output(a, added, bits, rows, "relu")
    sums = norm.gradient_sums(first, second, a, normed, bits, dz, rows, "relu")
    return {
        "normalize": (3 + 1 / 16, lambda: norm.write_output(a, added, bits, rows, "relu")),
        "sums": (4 + has_norm + 1 / 16, lambda: norm.gradient_sums(first, second, a, normed, bits, dz, rows, "relu")),
        "gradient": (3 + 2 * has_norm, lambda: norm.input_gradients(dz, a, normed, sums, rows, "none")),
    }


def layer_calls(kind: str, channels: int, side: int, batch: int) -> Calls:
    """All kernels of one layer, on their own tensors."""
    x, of, groups = random_tensor(batch, channels, side, side, dtype=torch.bfloat16), random_norm(channels), (batch,)
    rows = channel_rows(x, groups)
    a = NormInput(x, norm.statistics(x, of, rows), of.weight.detach(), of.bias.detach())
    calls: Calls = {"statistics": (1, lambda: norm.statistics(x, of, rows))}
    if kind == "pool":
        return calls | pool_calls(a, groups)
    return calls | (plain_calls(a, groups) if kind == "plain" else join_calls(a, groups, kind == "join_norms"))


def layers() -> list[tuple[str, int, int, int]]:
    """Kind, channels, side and number of the batch norms of ResNet-50 v1.5; a join of norms holds two."""
    found = [("pool", 64, 112, 1)]
    for planes, side, blocks in STAGES:
        wider = 0 if side == 56 else 1
        if wider:
            found.append(("plain", planes, side * 2, 1))
        found.append(("plain", planes, side, 2 * blocks - wider))
        found += [("join_norms", planes * 4, side, 1), ("join", planes * 4, side, blocks - 1)]
    return found


def measure(batch: int, peak: float, select: Callable[[str, int, int], bool] = lambda *_: True) -> dict[str, Any]:
    """Print time and bandwidth of every kernel of a step, and their sum."""
    rows, total_ms, least_ms = [], 0.0, 0.0
    print(f"{'kind':10} {'channels':>8} {'side':>4} {'x':>2}  kernel      ms      TB/s  fraction of {peak} TB/s")
    for kind, channels, side, times in layers():
        if not select(kind, channels, side):
            continue
        layer_bytes = batch * channels * side * side * 2
        sets = max(2, min(8, round(ROTATED_BYTES / layer_bytes)))
        rotated = [layer_calls(kind, channels, side, batch) for _ in range(sets)]
        for name, (tensors, _) in rotated[0].items():
            count = times * (2 if kind == "join_norms" and name == "statistics" else 1)
            num_bytes = tensors * layer_bytes
            ms = time_ms([calls[name][1] for calls in rotated])
            rate = num_bytes / ms / 1e9
            total_ms, least_ms = total_ms + count * ms, least_ms + count * num_bytes / peak / 1e9
            rows.append({"kind": kind, "channels": channels, "side": side, "count": count, "kernel": name, "ms": ms,
                         "tb_per_s": rate})  # fmt: skip
            print(
                f"{kind:10} {channels:8} {side:4} {count:2}  {name:10} {ms:.4f}  {rate:5.2f}  {rate / peak:.0%}",
                flush=True,
            )
        torch.cuda.empty_cache()
    print(f"all norms of a step: {total_ms:.2f} ms; at {peak} TB/s {least_ms:.2f} ms ({least_ms / total_ms:.0%})")
    return {"kernels": rows, "total_ms": total_ms, "least_ms": least_ms}


def stock(batch: int) -> list[dict[str, Any]]:
    """Print forward and backward times of the same layers under torch.compile beside the fused ones."""
    found = []
    for kind, channels, side in (("plain", 64, 56), ("join", 256, 56), ("join", 512, 28)):
        x, identity, dy = (random_tensor(batch, channels, side, side, dtype=torch.bfloat16) for _ in range(3))
        of = random_norm(channels)
        mean, var = torch.zeros(channels, device="cuda"), torch.ones(channels, device="cuda")
        inputs = [x.requires_grad_(), of.weight, of.bias] + ([identity.requires_grad_()] if kind == "join" else [])

        @torch.compile(dynamic=False)
        def layer(*given: Tensor) -> Tensor:
            y = F.batch_norm(given[0], mean, var, given[1], given[2], True, 0.1, 1e-5)  # noqa: B023
            return F.relu(y + given[3] if len(given) == 4 else y)

        def fused(*given: Tensor) -> Tensor:
            if len(given) == 4:
                return norm.batch_norm_add_act(given[0], of, given[3], (batch,), "relu")[0]  # noqa: B023
            return norm.batch_norm_act(given[0], of, (batch,), "relu")[0]  # noqa: B023

        ms = {}
        for name, function in (("compiled", layer), ("fused", fused)):
            ms[name] = time_ms([partial(gradients, function, inputs, dy)])
        print(f"{kind:10} {channels:8} {side:4}  forward and backward: torch.compile {ms['compiled']:.3f} ms, "
              f"fused {ms['fused']:.3f} ms, {ms['compiled'] / ms['fused']:.2f} x", flush=True)  # fmt: skip
        found.append({"kind": kind, "channels": channels, "side": side, **ms})
    return found


def measure_projections(batch: int) -> dict[str, Any]:
    """Print the time of each part of fused norm, ReLU6 and 1x1 convolution, and of separate kernels."""
    found, sums_ms = [], [0.0, 0.0]
    print("channels  out side  x  product    sums  gradient   all (separate) ms")
    for channels, outputs, side, times in PROJECTIONS:
        sets = max(2, min(8, round(ROTATED_BYTES / (batch * channels * side * side * 2))))
        rotated = [projection_calls(channels, outputs, side, batch) for _ in range(sets)]
        ms = {name: time_ms([calls[name] for calls in rotated]) for name in rotated[0]}
        sums_ms = [sums_ms[0] + times * ms["all"], sums_ms[1] + times * ms["separate"]]
        found.append({"channels": channels, "outputs": outputs, "side": side, "count": times, **ms})
        words = f"{ms['product']:8.4f} {ms['sums']:7.4f} {ms['gradient']:9.4f} {ms['all']:8.4f} ({ms['separate']:.4f})"
        print(f"{channels:8} {outputs:4} {side:4} {times:2} {words}", flush=True)
        torch.cuda.empty_cache()
    print(f"all of a step: {sums_ms[0]:.2f} ms, separate {sums_ms[1]:.2f} ms")
    return {"projections": found}


def projection_calls(channels: int, outputs: int, side: int, batch: int) -> dict[str, Callable[[], Any]]:
    x = random_tensor(batch, channels, side, side, dtype=torch.bfloat16).requires_grad_()
    filters = random_tensor(outputs, channels, 1, 1, dtype=torch.bfloat16).requires_grad_()
    dy, of, groups = random_tensor(batch, outputs, side, side, dtype=torch.bfloat16), random_norm(channels), (batch,)
    rows = channel_rows(x, groups)
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
        "all": partial(gradients, together, inputs, dy),
        "separate": partial(gradients, apart, inputs, dy),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--peak", type=float, default=4.3, help="TB/s of a copy")
    parser.add_argument("--stock", action="store_true", help="measure torch.compile too")
    parser.add_argument("--projections", action="store_true", help="measure MobileNetV2's projections instead")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, batch {given.batch}, bfloat16")
    result = measure_projections(given.batch) if given.projections else measure(given.batch, given.peak)
    if given.stock:
        result["stock"] = stock(given.batch)
    if given.json:
        given.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
