"""Prove on a CUDA GPU that the fused kernels equal their plain references, then measure their bandwidth.

    python tools/prove_kernels.py [--batch 256] [--peak 4.3] [--stock] [--json FILE]

Equality: forward and backward against float64 over ResNet-50's shapes, in bfloat16, float16 and float32. Bandwidth:
bytes that must move over the time of a kernel, as a share of what a copy reaches (TB/s, read and write counted), for
every kernel and shape of a ResNet-50 step, with the sum over the step. Inputs rotate, so that none stays in the L2
cache. `--stock` adds torch.compile of the same batch norm, ReLU and sum. The exit code says whether all are equal.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reconv.boxes.anchors import default_boxes
from reconv.kernels import excite, max_pool, norm, pool, reference, stem
from reconv.kernels.box_losses import Layout, Truth, box_losses
from reconv.kernels.norm import Norm, Operand
from reconv.kernels.rows import rows_of
from reconv.kernels.window import Window
from reconv.models.conv import SameMaxPool2d
from reconv.models.network import BoxMaps
from reconv.tasks.detection import Rules, image_losses

TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
STAGES = ((64, 56, 3), (128, 28, 4), (256, 14, 6), (512, 7, 3))  # planes, side, blocks of ResNet-50
ROTATED_BYTES = 400e6
REPEATS = 3


def gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    """A pass forward and backward."""
    return torch.autograd.grad(function(*inputs), inputs, dy)


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    values = torch.randn(*shape, device="cuda", dtype=torch.float32)
    return values.to(dtype).contiguous(memory_format=torch.channels_last)


def draw_norm(channels: int) -> Norm:
    weight, bias = torch.randn(2, channels, device="cuda").unbind()
    return Norm(weight.requires_grad_(), bias.requires_grad_(), torch.ones(channels, device="cuda"), 1e-5)


def wide(tensor: Tensor) -> Tensor:
    return tensor.detach().double().requires_grad_()


def plain(x: Tensor, of: Norm, groups: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    """The norm of x in float64, and its parameters there."""
    weight, bias = wide(of.weight), wide(of.bias)
    return reference.batch_norm(x, weight, bias, of.running_var.double(), of.eps, groups)[0], [weight, bias]


def error(actual: Tensor | None, expected: Tensor | None) -> float:
    assert actual is not None and expected is not None
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


def far_from_kinks(z: Tensor) -> Tensor:
    """Where float32 and float64 agree on the side of a ReLU's kink."""
    return ((z.abs() > 1e-4) & ((z - 6).abs() > 1e-4)).contiguous(memory_format=torch.channels_last)


def errors(form: str, channels: int, side: int, groups: tuple[int, ...], dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of one form's output and gradients."""
    shape = (sum(groups), channels, side, side)
    x, of, other, other_of = (
        draw(*shape, dtype=dtype),
        draw_norm(channels),
        draw(*shape, dtype=dtype),
        draw_norm(channels),
    )
    x64, other64 = wide(x), wide(other)
    leaves, leaves64 = [x.requires_grad_(), of.weight, of.bias], [x64]
    z, parameters = plain(x64, of, groups)
    leaves64 += parameters
    if form in ("relu", "relu6", "silu", "none"):
        y64, outputs = reference.FUNCTIONS[form](z), [norm.normalise(x, of, groups, form)[0]]  # type: ignore[arg-type]
    elif form == "pool":
        y64, outputs = F.max_pool2d(F.relu(z), 3, 2, 1), list(pool.normalise_pool(x, of, groups)[:2])
    elif form == "pool_same":
        y64 = SameMaxPool2d(3, 2)(F.relu(z))
        outputs = list(pool.normalise_pool(x, of, groups, Window(3, 2, "same"))[:2])
    elif form == "join":
        leaves.append(other.requires_grad_())
        leaves64.append(other64)
        z = z + other64
        y64, outputs = F.relu(z), list(norm.join(x, of, other, groups, "relu")[:2])
    else:
        leaves += [other.requires_grad_(), other_of.weight, other_of.bias]
        added, parameters = plain(other64, other_of, groups)
        leaves64 += [other64, *parameters]
        z = z + added
        y64, outputs = F.relu(z), list(norm.join_norms(x, of, other, other_of, groups, "relu")[:2])
    keep = 1 if form.startswith("pool") else far_from_kinks(z)
    dy = [torch.randn_like(output) * keep for output in outputs]
    torch.autograd.backward(outputs, dy)
    y64.backward(sum(g.double() for g in dy))
    names = ("dx", "dweight", "dbias", "dother", "dweight2", "dbias2")
    found = {name: error(a.grad, b.grad) for name, a, b in zip(names, leaves, leaves64, strict=False)}
    return {"y": error(outputs[0], y64), **found}


def prove() -> bool:
    """Print the worst errors of every form and type; whether all are within the tolerance."""
    shapes = [(64, 112), *((p * k, side) for p, side, _ in STAGES for k in (1, 4))]
    is_right = True
    print(f"{'form':10} {'type':9} shapes  worst relative error (tolerance)")
    for form in ("none", "relu", "relu6", "silu", "join", "join_norms", "pool", "pool_same"):
        for dtype, tolerance in TOLERANCES.items():
            worst: dict[str, float] = {}
            for channels, side in [*shapes, (72, 13)]:  # the last fills no block of channels and no tile of rows
                for groups in ((8,), (3, 3, 2)):
                    for name, value in errors(form, channels, side, groups, dtype).items():
                        worst[name] = max(worst.get(name, 0.0), value if value == value else float("inf"))
            is_right &= max(worst.values()) <= tolerance
            words = " ".join(f"{name} {value:.1e}" for name, value in worst.items())
            print(f"{form:10} {str(dtype)[6:]:9} {len(shapes) * 2 + 2:6}  {words} ({tolerance:.0e})", flush=True)
    return is_right & prove_stem() & prove_max_pool() & prove_excite() & prove_box_losses()


def prove_stem() -> bool:
    """Print the error of the stem's other form against the plain convolution, both in float64."""
    images, weight = draw(4, 3, 224, 224, dtype=torch.bfloat16), torch.randn(64, 3, 7, 7, device="cuda").double()
    blocks = F.conv2d(stem.stem_images(images, images.dtype).double(), stem.stem_weight(weight))
    worst = error(blocks, F.conv2d(images.double(), weight, stride=2, padding=3))
    print(f"{'stem':10} {'float64':9} {1:6}  y {worst:.1e} (1e-12)")
    return worst < 1e-12


def prove_max_pool() -> bool:
    """Print whether the max-pools of GoogLeNet and ResNet give torch's bits, values and gradients."""
    is_right = True
    windows = (Window(3, 1, 1, True), Window(3, 2, 0, True), Window(2, 2, 0, True))
    for window in (*windows, Window(3, 2, 1, False)):
        for dtype in TOLERANCES:
            x = draw(8, 192, 29, 28, dtype=dtype).mul(2).round().requires_grad_()  # many equal values
            again = x.detach().clone().requires_grad_()
            y = max_pool.max_pool(x, window)
            assert window.pad != "same"
            expected = F.max_pool2d(again, window.side, window.stride, window.pad, ceil_mode=window.ceil)
            dy = torch.randn_like(y).round()
            y.backward(dy)
            expected.backward(dy)
            is_right &= torch.equal(y, expected) and torch.equal(x.grad, again.grad)  # type: ignore[arg-type]
    print(f"{'max_pool':10} {'all':9} {4:6}  {'equal bits' if is_right else 'NOT EQUAL'}")
    return is_right


def prove_excite() -> bool:
    """Print the worst errors of squeeze and excitation over EfficientNet-B0's shapes."""
    is_right = True
    for dtype, tolerance in TOLERANCES.items():
        worst = 0.0
        for channels, side in ((32, 112), (96, 56), (144, 56), (240, 28), (672, 14), (1152, 7)):
            x = draw(8, channels, side, side, dtype=dtype).requires_grad_()
            x64 = wide(x)
            y = excite.squeeze_excite(x, torch.sigmoid)
            y64 = x64 * torch.sigmoid(x64.mean((2, 3), keepdim=True))
            dy = torch.randn_like(y)
            y.backward(dy)
            y64.backward(dy.double())
            worst = max(worst, error(y, y64), error(x.grad, x64.grad))
        is_right &= worst <= tolerance
        print(f"{'excite':10} {str(dtype)[6:]:9} {6:6}  y, dx {worst:.1e} ({tolerance:.0e})")
    return is_right


def prove_box_losses() -> bool:
    """Print the worst errors of SSD's losses and of the gradients of its maps, against the plain losses."""
    sides, per_cell, num_classes, n = (38, 19, 10, 5, 3, 1), (4, 6, 6, 6, 4, 4), 81, 8
    ratios = [(2.0,), (2.0, 3.0), (2.0, 3.0), (2.0, 3.0), (2.0,), (2.0,)]
    anchors = default_boxes([1 / side for side in sides], sides, [0.07, 0.15, 0.33, 0.51, 0.69, 0.87, 1.05], ratios)
    layout, rules = Layout(per_cell, num_classes), Rules()
    low = torch.rand(n, 200, 2, device="cuda") * 0.7
    boxes = torch.cat([low, low + 0.02 + 0.28 * torch.rand_like(low)], dim=2)
    labels = torch.randint(1, num_classes, (n, 200), device="cuda")
    counts = torch.tensor([0, 1, 2, 5, 10, 20, 50, 200], device="cuda")
    shown = (boxes, labels, counts, anchors.cuda())
    truth = Truth(*shown, rules.variances, rules.threshold, rules.negatives)
    is_right = True
    for dtype, tolerance in TOLERANCES.items():
        pairs = zip(sides, per_cell, strict=True)
        maps = [draw(n, layout.channels(b), s, s, dtype=dtype).requires_grad_() for s, b in pairs]
        again = [x.detach().clone().requires_grad_() for x in maps]
        biases = tuple(
            (torch.randn(num_classes * b, device="cuda"), torch.randn(4 * b, device="cuda")) for b in per_cell
        )
        found = box_losses(maps, biases, layout, truth)
        expected = image_losses(*BoxMaps(tuple(again), biases, per_cell, num_classes).answers(), *shown, rules)
        worst = max(error(a, b) for a, b in zip(found, expected, strict=True))
        torch.stack(found).sum().backward()
        torch.stack(expected).sum().backward()
        worst = max(worst, *(error(a.grad, b.grad) for a, b in zip(maps, again, strict=True)))
        is_right &= worst <= tolerance
        print(f"{'box_losses':10} {str(dtype)[6:]:9} {6:6}  losses, dx {worst:.1e} ({tolerance:.0e})")
    return is_right


def time_ms(calls: list[Callable[[], Any]]) -> float:
    """Milliseconds of one call, in a graph that goes round all of them."""
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


Calls = dict[str, tuple[float, Callable[[], Any]]]  # bytes that must move, in tensors of the layer's size, and a call


def pool_calls(a: Operand, groups: tuple[int, ...]) -> Calls:
    """The kernels between a stem's statistics and the gradient of its convolution."""
    _, peak, place = pool.write_pooled(a, groups)
    peaks, pooled = Operand(peak, a.stats, a.weight, a.bias), rows_of(peak, groups)
    first, second, dz = torch.randn_like(peak), torch.randn_like(peak), torch.empty_like(peak)
    sums = norm.gradient_sums(first, second, peaks, None, None, dz, pooled, "relu")
    return {
        "pool": (1 + 0.25 * 2.5, lambda: pool.write_pooled(a, groups)),
        "sums": (1, lambda: norm.gradient_sums(first, second, peaks, None, None, dz, pooled, "relu")),
        "gradient": (2 + 0.25 * 1.5, lambda: pool.input_gradient(dz, place, a, sums, groups)),
    }


def plain_calls(a: Operand, groups: tuple[int, ...]) -> Calls:
    """The kernels of a norm and its ReLU."""
    rows, dy = rows_of(a.x, groups), torch.randn_like(a.x)
    sums = norm.gradient_sums(dy, None, a, None, None, None, rows, "relu")
    return {
        "normalise": (2, lambda: norm.write_output(a, None, None, rows, "relu")),
        "sums": (2, lambda: norm.gradient_sums(dy, None, a, None, None, None, rows, "relu")),
        "gradient": (3, lambda: norm.input_gradients(dy, a, None, sums, rows, "relu")),
    }


def join_calls(a: Operand, groups: tuple[int, ...], has_norm: bool) -> Calls:
    """The kernels of a residual join, whose shortcut may have a norm of its own."""
    rows, first, second = rows_of(a.x, groups), torch.randn_like(a.x), torch.randn_like(a.x)
    other = Operand(torch.randn_like(a.x), a.stats, a.weight, a.bias)
    added, normed = (other, other) if has_norm else (other.x, None)
    bits, dz = norm.empty_bits(rows, a.x.device, "relu"), torch.empty_like(a.x)
    norm.write_output(a, added, bits, rows, "relu")
    sums = norm.gradient_sums(first, second, a, normed, bits, dz, rows, "relu")
    return {
        "normalise": (3 + 1 / 16, lambda: norm.write_output(a, added, bits, rows, "relu")),
        "sums": (4 + has_norm + 1 / 16, lambda: norm.gradient_sums(first, second, a, normed, bits, dz, rows, "relu")),
        "gradient": (3 + 2 * has_norm, lambda: norm.input_gradients(dz, a, normed, sums, rows, "none")),
    }


def layer_calls(kind: str, channels: int, side: int, batch: int) -> Calls:
    """All kernels of one layer, on tensors of their own."""
    x, of, groups = draw(batch, channels, side, side, dtype=torch.bfloat16), draw_norm(channels), (batch,)
    rows = rows_of(x, groups)
    a = Operand(x, norm.statistics(x, of, rows), of.weight.detach(), of.bias.detach())
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
    print(f"{'kind':10} {'channels':>8} {'side':>4} {'x':>2}  kernel      ms      TB/s  share of {peak} TB/s")
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
    """Print the forward and backward time of the same layers as torch.compile makes them, beside the fused ones."""
    found = []
    for kind, channels, side in (("plain", 64, 56), ("join", 256, 56), ("join", 512, 28)):
        x, identity, dy = (draw(batch, channels, side, side, dtype=torch.bfloat16) for _ in range(3))
        of = draw_norm(channels)
        mean, var = torch.zeros(channels, device="cuda"), torch.ones(channels, device="cuda")
        inputs = [x.requires_grad_(), of.weight, of.bias] + ([identity.requires_grad_()] if kind == "join" else [])

        @torch.compile(dynamic=False)
        def layer(*given: Tensor) -> Tensor:
            y = F.batch_norm(given[0], mean, var, given[1], given[2], True, 0.1, 1e-5)  # noqa: B023
            return F.relu(y + given[3] if len(given) == 4 else y)

        def fused(*given: Tensor) -> Tensor:
            if len(given) == 4:
                return norm.join(given[0], of, given[3], (batch,), "relu")[0]  # noqa: B023
            return norm.normalise(given[0], of, (batch,), "relu")[0]  # noqa: B023

        ms = {}
        for name, function in (("compiled", layer), ("fused", fused)):
            ms[name] = time_ms([partial(gradients, function, inputs, dy)])
        print(f"{kind:10} {channels:8} {side:4}  forward and backward: torch.compile {ms['compiled']:.3f} ms, "
              f"fused {ms['fused']:.3f} ms, {ms['compiled'] / ms['fused']:.2f} x", flush=True)  # fmt: skip
        found.append({"kind": kind, "channels": channels, "side": side, **ms})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--peak", type=float, default=4.3, help="TB/s of a copy")
    parser.add_argument("--stock", action="store_true", help="measure torch.compile too")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    started = time.perf_counter()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, batch {arguments.batch}, bfloat16")
    is_right = prove()
    print(
        f"proven in {time.perf_counter() - started:.0f} s, compilation included: {'equal' if is_right else 'NOT EQUAL'}"
    )
    result = measure(arguments.batch, arguments.peak)
    if arguments.stock:
        result["stock"] = stock(arguments.batch)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
