"""Measure 1x1 convolutions that compute the batch norm statistics of their output, on a CUDA GPU.

    python -m benchmarks.kernels_conv1x1_stats [--batch 256] [--sweep] [--networks resnet50 ...] [--json FILE]

Beside cuDNN's convolution alone and with the kernel of the statistics after it, for the layers of four networks; the
sums are over a step. `--sweep` tries other launch configs too, and prints the best ones of each layer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels import ROTATED_BYTES, random_norm, random_tensor, time_ms
from reconv.kernels.channels_last import channel_rows
from reconv.kernels.jit.compile_ahead import compile_ahead
from reconv.kernels.jit.launch import KernelVariant, trace_launches
from reconv.kernels.ops.batch_norm import NormParams, statistics
from reconv.kernels.ops.conv1x1_statistics import ConvTile, conv_output, tile_config

Layer = tuple[int, int, int]  # inputs, outputs, side
NETWORKS: dict[str, dict[Layer, int]] = {  # and how many of each layer
    "resnet50": {
        (64, 64, 56): 1, (64, 256, 56): 4, (256, 64, 56): 2, (256, 128, 56): 1, (128, 512, 28): 4, (512, 128, 28): 3,
        (512, 256, 28): 1, (256, 1024, 14): 6, (1024, 256, 14): 5, (1024, 512, 14): 1, (512, 2048, 7): 3,
        (2048, 512, 7): 2,
    },
    "mobilenet_v2": {
        (16, 96, 112): 1, (24, 144, 56): 2, (32, 192, 28): 3, (64, 384, 14): 4, (96, 576, 14): 3, (160, 960, 7): 3,
        (320, 1280, 7): 1,
    },
    "efficientnet_b0": {
        (16, 96, 112): 1, (24, 144, 56): 2, (40, 240, 28): 2, (80, 480, 14): 3, (112, 672, 14): 3, (192, 1152, 7): 4,
        (320, 1280, 7): 1, (32, 16, 112): 1, (96, 24, 56): 1, (144, 24, 56): 1, (144, 40, 28): 1, (240, 40, 28): 1,
        (240, 80, 14): 1, (480, 80, 14): 2, (480, 112, 14): 1, (672, 112, 14): 2, (672, 192, 7): 1,
        (1152, 192, 7): 3, (1152, 320, 7): 1,
    },
    "googlenet": {
        (64, 64, 56): 1, (192, 176, 28): 1, (192, 32, 28): 1, (256, 288, 28): 1, (256, 64, 28): 1, (480, 304, 14): 1,
        (480, 64, 14): 1, (512, 296, 14): 1, (512, 280, 14): 1, (512, 288, 14): 1, (512, 64, 14): 3,
        (528, 448, 14): 1, (528, 128, 14): 1, (832, 448, 7): 1, (832, 624, 7): 1, (832, 128, 7): 2,
    },
}  # fmt: skip
# Rows, outputs, inputs, warps, stages, programs per SM, limit of registers.
ALL_INPUTS = (
    ConvTile(128, 128, None, 8, 3, 2, 128), ConvTile(128, 128, None, 8, 2, 2, 128),
    ConvTile(128, 128, None, 8, 3, 4, 128), ConvTile(128, 128, None, 8, 3, 1), ConvTile(256, 128, None, 8, 2, 1),
    ConvTile(64, 128, None, 4, 3, 3, 168), ConvTile(64, 128, None, 8, 4, 3, 80),
    ConvTile(128, 64, None, 4, 3, 4, 128), ConvTile(128, 64, None, 4, 2, 3, 168),
    ConvTile(256, 64, None, 4, 2, 2),
)  # fmt: skip
SOME_INPUTS = (
    ConvTile(128, 128, 64, 8, 3, 2, 128), ConvTile(128, 128, 64, 8, 4, 1), ConvTile(128, 128, 32, 8, 4, 2, 128),
    ConvTile(256, 128, 64, 8, 3, 1), ConvTile(256, 128, 64, 8, 4, 1), ConvTile(128, 256, 64, 8, 3, 1),
    ConvTile(256, 128, 64, 8, 3, 2), ConvTile(64, 128, 64, 4, 3, 3, 168), ConvTile(128, 64, 64, 4, 3, 3, 168),
    ConvTile(128, 64, 64, 4, 4, 2, 168), ConvTile(256, 64, 64, 4, 4, 1),
)  # fmt: skip
MAX_ALL_INPUTS = 256
MAX_SHARED_BYTES = 227 * 1024
PRINTED = 3


def layers(networks: Sequence[str]) -> list[Layer]:
    """The distinct layers of some networks."""
    return list(dict.fromkeys(layer for name in networks for layer in NETWORKS[name]))


def swept(inputs: int, outputs: int) -> list[ConvTile]:
    """The configs that a sweep tries for a layer."""
    found = [*(ALL_INPUTS if inputs <= MAX_ALL_INPUTS else ()), *(SOME_INPUTS if inputs > 64 else ())]
    found = [config for config in found if config.outputs <= max(64, 2 * outputs)]
    return [config for config in found if shared_bytes(inputs, config) <= MAX_SHARED_BYTES]


def shared_bytes(inputs: int, config: ConvTile) -> int:
    """Shared memory of a program, at least."""
    if config.inputs is not None:
        return config.stages * (config.rows + config.outputs) * config.inputs * 2
    return (config.stages * config.rows + config.outputs) * max(16, 1 << (inputs - 1).bit_length()) * 2


def configs(layer: Layer, is_sweep: bool) -> list[ConvTile]:
    """The config in use first, if there is one."""
    used = tile_config(*layer[:2])
    found = ([] if used is None else [used]) + (swept(*layer[:2]) if is_sweep else [])
    return list(dict.fromkeys(found))


def compile_all(wanted: Sequence[Layer], is_sweep: bool) -> None:
    """Compile the variants of all layers in parallel; the first launch waits for them."""
    found: dict[KernelVariant, None] = {}
    for layer in wanted:
        for config in configs(layer, is_sweep):
            with trace_launches() as traced:
                call(layer, 2, config, torch.device("meta"))()
            found.update(traced)
    compile_ahead(list(found), torch.device("cuda", torch.cuda.current_device()), lambda text: print(text[:200]))
    print(f"{len(found)} variants to compile", flush=True)


def call(layer: Layer, batch: int, config: ConvTile, device: torch.device) -> Callable[[], Any]:
    """The new kernel on tensors of its own."""
    inputs, outputs, side = layer
    x = torch.empty(batch, inputs, side, side, dtype=torch.bfloat16, device=device)
    filters = torch.empty(outputs, inputs, 1, 1, dtype=torch.bfloat16, device=device)
    weight, bias, running_var = torch.empty(3, outputs, device=device).unbind()
    norm = NormParams(weight, bias, running_var, 1e-5)
    return partial(conv_output, x.contiguous(memory_format=torch.channels_last), filters, norm, (batch,), config)


def separate(x: Tensor, filters: Tensor, norm: NormParams, groups: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """cuDNN's convolution and the kernel of the statistics."""
    y = F.conv2d(x, filters)
    return y, statistics(y, norm, channel_rows(y, groups))


def check(layer: Layer, config: ConvTile, groups: tuple[int, ...]) -> bool:
    """Whether the kernel's output is cuDNN's, and its statistics are exactly those of its own output; prints errors."""
    inputs, outputs, side = layer
    x = random_tensor(sum(groups), inputs, side, side, dtype=torch.bfloat16) + 0.5
    filters, norm = random_tensor(outputs, inputs, 1, 1, dtype=torch.bfloat16), random_norm(outputs)
    y, stats = conv_output(x, filters, norm, groups, config)
    again, stats_again = conv_output(x, filters, norm, groups, config)
    exact = F.conv2d(x.double(), filters.double())
    error = float((y.double() - exact).norm() / exact.norm())
    expected = torch.stack([exact_statistics(part, norm.eps) for part in y.double().split(groups)])
    off = float(((stats - expected).abs() / (expected.abs() + 1e-2)).max())
    same = torch.equal(y, again) and torch.equal(stats, stats_again)
    is_good = error < 4e-3 and off < 1e-3 and same
    words = f"output off by {error:.1e}, statistics by {off:.1e}, repeated bits {'equal' if same else 'DIFFER'}"
    print(f"{'ok  ' if is_good else 'BAD '} {layer} {astuple(config)} groups {groups}: {words}", flush=True)
    return is_good


def exact_statistics(y: Tensor, eps: float) -> Tensor:
    """Mean, unbiased variance and 1 / std of float64 images [3, channels]."""
    variance = y.var((0, 2, 3), correction=0)
    return torch.stack([y.mean((0, 2, 3)), y.var((0, 2, 3)), (variance + eps).rsqrt()])


def measure(layer: Layer, batch: int, is_sweep: bool) -> dict[str, Any]:
    """Milliseconds of cuDNN alone, with statistics, and of each config."""
    inputs, outputs, side = layer
    num_bytes = batch * side * side * (inputs + outputs) * 2
    sets = max(2, min(8, round(ROTATED_BYTES / num_bytes)))
    groups = (batch,)
    given = [
        (
            random_tensor(batch, inputs, side, side, dtype=torch.bfloat16),
            random_tensor(outputs, inputs, 1, 1, dtype=torch.bfloat16),
            random_norm(outputs),
        )
        for _ in range(sets)
    ]
    found: dict[str, Any] = {
        "layer": layer,
        "gb": num_bytes / 1e9,
        "cudnn": time_ms([partial(F.conv2d, x, filters) for x, filters, _ in given]),
        "separate": time_ms([partial(separate, *one, groups) for one in given]),
        "configs": {},
    }
    for config in configs(layer, is_sweep):
        try:
            found["configs"][astuple(config)] = time_ms([partial(conv_output, *one, groups, config) for one in given])
        except Exception as error:  # such as too little shared memory: the other configs are still of interest
            print(f"  {astuple(config)}: {type(error).__name__} {str(error)[:120]}", flush=True)
    return found


def report(found: dict[str, Any]) -> None:
    """Print one line of a layer, and one of its best configs if there are several."""
    inputs, outputs, side = found["layer"]
    used = tile_config(inputs, outputs)
    ms = found["configs"].get(astuple(used)) if used is not None else None
    new = "   none" if ms is None else f"{ms:7.4f} {found['gb'] / ms:5.2f}"
    print(f"{inputs:5} {outputs:5} {side:4} {found['cudnn']:8.4f} {found['separate']:8.4f}  {new}", flush=True)
    best = sorted(found["configs"].items(), key=lambda item: item[1])[:PRINTED]
    if len(found["configs"]) > 1:
        print("      " + "; ".join(f"{ms:.4f} {','.join(map(str, config))}" for config, ms in best), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--sweep", action="store_true", help="try other launch configs")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, batch {given.batch}, bfloat16")
    wanted = layers(given.networks)
    checked = ((64, 256, 56), (24, 144, 28), (40, 240, 28), (256, 64, 28), (480, 304, 14), (160, 960, 7))
    compile_all([*wanted, *checked], given.sweep)
    is_good = True
    for layer in checked:
        config = tile_config(*layer[:2])
        if config is not None:
            is_good &= check(layer, config, (8,)) & check(layer, config, (3, 3, 2))
    print("   in   out side    cudnn   +stats      new  TB/s   (ms)")
    results = {}
    for layer in wanted:
        results[layer] = measure(layer, given.batch, given.sweep)
        report(results[layer])
        torch.cuda.empty_cache()
    for name in given.networks:
        old, new, best = (sum(n * ms(results[layer]) for layer, n in NETWORKS[name].items()) for ms in SUMS)
        print(f"{name}: separate {old:.3f} ms, with configs in use {new:.3f} ms, with the best of all {best:.3f} ms")
    if given.json:
        rows = [{**one, "configs": [[*item] for item in one["configs"].items()]} for one in results.values()]
        given.json.write_text(json.dumps(rows, indent=1))
    sys.exit(0 if is_good else 1)


def _in_use(found: dict[str, Any]) -> float:
    used = tile_config(*found["layer"][:2])
    return float(found["separate"] if used is None else found["configs"].get(astuple(used), found["separate"]))


SUMS: tuple[Callable[[dict[str, Any]], float], ...] = (
    lambda found: float(found["separate"]),
    _in_use,
    lambda found: float(min([found["separate"], *found["configs"].values()])),
)


if __name__ == "__main__":
    main()
