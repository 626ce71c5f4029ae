"""Measure grouped 3x3 convolutions of stride 1 beside cuDNN's, on a CUDA GPU.

    python -m benchmarks.kernels_grouped_conv [--batch 256] [--sweep] [--json FILE]

Output, input gradient and weight gradient of the layers of ResNeXt-101 32x4d, in bfloat16; the sums are over a step.
`--sweep` tries other launch configs too, and prints the best ones of each layer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels import ROTATED_BYTES, random_tensor, relative_error, time_ms
from reconv.kernels.jit.compile_ahead import compile_ahead
from reconv.kernels.jit.launch import KernelVariant, trace_launches
from reconv.kernels.ops import grouped_conv as ops
from reconv.kernels.ops.grouped_conv import GroupedConvTile, GroupedGradientTile

Config = GroupedConvTile | GroupedGradientTile
Layer = tuple[int, int, int, int]  # channels per group, channels, side, number of layers
LAYERS: tuple[Layer, ...] = ((4, 128, 56, 3), (8, 256, 28, 3), (16, 512, 14, 22), (32, 1024, 7, 2))
KERNELS = ("forward", "dx", "dweight")
TABLES: dict[str, Mapping[int, Config | None]] = {
    "forward": ops.FORWARD, "dx": ops.INPUT_GRADIENT, "dweight": ops.WEIGHT_GRADIENT,
}  # fmt: skip
# Columns, blocks, lines ahead, parts (varied too), limit of registers. None of them spills registers.
CONV = (
    GroupedConvTile(16, 4, 1, 1), GroupedConvTile(16, 4, 2, 1), GroupedConvTile(32, 4, 1, 1),
    GroupedConvTile(32, 4, 2, 1), GroupedConvTile(32, 4, 2, 1, 168),
)  # fmt: skip
CONV_32 = (GroupedConvTile(16, 4, 1, 1), GroupedConvTile(16, 4, 1, 1, 168), GroupedConvTile(16, 4, 2, 1))
MIN_LINES = 7
# The last one spills for groups of 32. Limits of 128 and 168 registers would spill in the loop.
GRADIENT = (
    GroupedGradientTile(16, 4, 1, 2), GroupedGradientTile(16, 4, 1, 3), GroupedGradientTile(16, 4, 1, 6),
    GroupedGradientTile(16, 4, 2, 2), GroupedGradientTile(32, 4, 1, 2), GroupedGradientTile(32, 4, 1, 4),
    GroupedGradientTile(32, 4, 2, 2),
)  # fmt: skip
PRINTED = 4
CHECKED_BATCH = 8
TOLERANCE = 4e-3


def swept(kernel: str, layer: Layer) -> list[Config]:
    """The configs that a sweep tries for a layer."""
    if kernel == "dweight":
        return list(GRADIENT if layer[0] < 32 else GRADIENT[:-1])
    found = CONV if layer[0] < 32 else CONV_32
    parts = [parts for parts in (1, 2, 4, 8) if layer[2] // parts >= MIN_LINES]
    return [replace(config, parts=number) for config in found for number in parts]


def configs(kernel: str, layer: Layer, is_sweep: bool) -> list[Config]:
    """The config in use first, if there is one."""
    used = TABLES[kernel].get(layer[0])
    found = ([] if used is None else [used]) + (swept(kernel, layer) if is_sweep else [])
    return list(dict.fromkeys(found))


def ours(kernel: str, x: Tensor, weight: Tensor, dy: Tensor, config: Any) -> Tensor:
    """Our kernel's result."""
    if kernel == "forward":
        return ops.conv_output(x, weight, config)
    if kernel == "dx":
        return ops.input_gradient(dy, weight, config)
    return ops.weight_gradient(dy, x, weight, config)


def cudnn(kernel: str, x: Tensor, weight: Tensor, dy: Tensor) -> Tensor:
    """cuDNN's result."""
    if kernel == "forward":
        return F.conv2d(x, weight, padding=1, groups=len(weight) // weight.shape[1])
    dx, dweight = ops.cudnn_gradients(dy, x, weight, [kernel == "dx", kernel == "dweight"])
    found = dx if kernel == "dx" else dweight
    assert found is not None
    return found


def compile_all(is_sweep: bool) -> None:
    """Compile the variants of all layers in parallel; the first launch waits for them."""
    found: dict[KernelVariant, None] = {}
    for layer in LAYERS:
        size, channels, side, _ = layer
        x = torch.empty(2, side, side, channels, dtype=torch.bfloat16, device="meta").permute(0, 3, 1, 2)
        weight = torch.empty(channels, 3, 3, size, dtype=torch.bfloat16, device="meta").permute(0, 3, 1, 2)
        for kernel in KERNELS:
            for config in configs(kernel, layer, is_sweep):
                with trace_launches() as traced:
                    ours(kernel, x, weight, x, config)
                found.update(traced)
    compile_ahead(list(found), torch.device("cuda", torch.cuda.current_device()), lambda text: print(text[:200]))
    print(f"{len(found)} variants to compile", flush=True)


def tensors(layer: Layer, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and dy."""
    size, channels, side, _ = layer
    x, dy = (random_tensor(batch, channels, side, side, dtype=torch.bfloat16) for _ in range(2))
    return x, random_tensor(channels, size, 3, 3, dtype=torch.bfloat16), dy


def exactly(kernel: str, x: Tensor, weight: Tensor, dy: Tensor) -> Tensor:
    """The result in float64."""
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    y = F.conv2d(x, weight, padding=1, groups=len(weight) // weight.shape[1])
    if kernel == "forward":
        return y.detach()
    return torch.autograd.grad(y, x if kernel == "dx" else weight, dy.double())[0]


def check(kernel: str, layer: Layer, is_sweep: bool) -> bool:
    """Whether all configs give the result of float64, and the same bits twice; prints the errors."""
    given = tensors(layer, CHECKED_BATCH)
    exact = exactly(kernel, *given)
    errors = {"cudnn": relative_error(cudnn(kernel, *given), exact)}
    is_good = True
    for config in configs(kernel, layer, is_sweep):
        found, again = ours(kernel, *given, config), ours(kernel, *given, config)
        error = errors[str(astuple(config))] = relative_error(found, exact)
        if error > TOLERANCE or not torch.equal(found, again):
            is_good = False
            print(f"BAD  {kernel} {layer} {astuple(config)}: off by {error:.1e}, repeated {torch.equal(found, again)}")
    worst = max(error for name, error in errors.items() if name != "cudnn") if len(errors) > 1 else float("nan")
    print(f"{kernel:8} {layer[:3]}: {len(errors) - 1} configs off by {worst:.1e}, cuDNN by {errors['cudnn']:.1e}")
    return is_good


def measure(kernel: str, layer: Layer, batch: int, is_sweep: bool) -> dict[str, Any]:
    """Milliseconds of cuDNN and of each config."""
    _, channels, side, _ = layer
    num_bytes = 2 * batch * side * side * channels * 2
    given = [tensors(layer, batch) for _ in range(max(2, min(8, round(ROTATED_BYTES / num_bytes))))]
    found: dict[str, Any] = {
        "kernel": kernel, "layer": layer, "gb": num_bytes / 1e9,
        "cudnn": time_ms([partial(cudnn, kernel, *one) for one in given]), "configs": {},
    }  # fmt: skip
    for config in configs(kernel, layer, is_sweep):
        try:
            found["configs"][config] = time_ms([partial(ours, kernel, *one, config) for one in given])
        except Exception as error:  # such as too many registers: the other configs are still of interest
            print(f"  {astuple(config)}: {type(error).__name__} {str(error)[:120]}", flush=True)
    return found


def report(found: dict[str, Any]) -> None:
    """Print one line of a layer, and one of its best configs if there are several."""
    ms = in_use(found)
    size, channels, side, times = found["layer"]
    words = f"{found['cudnn']:8.4f} {ms:8.4f} {found['gb'] / ms:5.2f}"
    print(f"{found['kernel']:8} {size:4} {channels:5} {side:4} {times:3} {words}", flush=True)
    best = sorted(found["configs"].items(), key=lambda item: item[1])[:PRINTED]
    if len(found["configs"]) > 1:
        print(
            "      " + "; ".join(f"{ms:.4f} {','.join(map(str, astuple(config)))}" for config, ms in best), flush=True
        )


def in_use(found: dict[str, Any]) -> float:
    """Milliseconds with the config in use, or of cuDNN."""
    used = TABLES[found["kernel"]].get(found["layer"][0])
    return float(found["configs"].get(used, found["cudnn"]))


SUMS: tuple[Callable[[dict[str, Any]], float], ...] = (
    lambda found: float(found["cudnn"]),
    in_use,
    lambda found: float(min([found["cudnn"], *found["configs"].values()])),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--sweep", action="store_true", help="try other launch configs")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, batch {given.batch}, bfloat16")
    compile_all(given.sweep)
    failed = [layer for layer in LAYERS for kernel in KERNELS if not check(kernel, layer, given.sweep)]
    print("kernel   size  chan side   x    cudnn      new  TB/s   (ms)")
    results = []
    for layer in LAYERS:
        for kernel in KERNELS:
            results.append(measure(kernel, layer, given.batch, given.sweep))
            report(results[-1])
            torch.cuda.empty_cache()
    old, new, best = (sum(one["layer"][3] * ms(one) for one in results) for ms in SUMS)
    print(f"ResNeXt-101 step: cuDNN {old:.3f} ms, with configs in use {new:.3f} ms, with the best of all {best:.3f} ms")
    if given.json:
        rows = [{**one, "configs": [[astuple(c), ms] for c, ms in one["configs"].items()]} for one in results]
        given.json.write_text(json.dumps(rows, indent=1))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
