"""Measure the fused 1x1 expansions of MobileNetV2 and EfficientNet-B0 on a CUDA GPU, beside separate kernels.

    python -m benchmarks.kernels_expansion [--batch 256] [--sweep]

Prints errors of both against float64 at one shape, then the forward and backward time of each layer in bfloat16:
convolution, norm and activation as separate kernels (cuDNN's convolutions) and fused. `--sweep` instead measures the
fused kernels with other tiles, and prints the best for each layer as they stand in `conv1x1_norm_act.ops.CONFIGS`.
Inputs rotate, so that none stays in the L2 cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels import ROTATED_BYTES, random_norm, random_tensor, time_ms
from reconv.kernels import reference
from reconv.kernels.channels_last import channel_rows
from reconv.kernels.jit.compile_ahead import compile_ahead
from reconv.kernels.jit.launch import KernelVariant, trace_launches
from reconv.kernels.ops import batch_norm as norm
from reconv.kernels.ops import conv1x1_norm_act as fused
from reconv.kernels.ops.batch_norm import NormInput, NormParams
from reconv.kernels.ops.conv1x1_norm_act import ConvNormInput, ExpansionTile
from reconv.kernels.reference import Activation

LAYERS = (  # inputs, outputs, side, and how many MobileNetV2 and EfficientNet-B0 have
    (16, 96, 112, 1, 1), (24, 144, 56, 2, 2), (32, 192, 28, 3, 0), (40, 240, 28, 0, 2), (64, 384, 14, 4, 0),
)  # fmt: skip
NETWORKS: tuple[tuple[str, Activation], ...] = (("MobileNetV2", "relu6"), ("EfficientNet-B0", "silu"))
# Rows, output channels, warps and stages of a tile, and a limit of registers; and programs per SM, which need no other
# compilation.
TILES: dict[str, list[tuple[int, ...]]] = {
    "statistics": [(64, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (64, 32, 4, 3), (128, 32, 4, 3), (64, 128, 4, 3)],
    "output": [(64, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (64, 32, 4, 3), (128, 32, 4, 3), (64, 128, 4, 3)],
    "gradient_sums": [
        (64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 4, 2), (64, 32, 4, 3), (128, 32, 4, 3), (128, 64, 8, 3),
        (128, 64, 4, 2), (64, 64, 4, 3, 128),
    ],
    "input_gradient": [
        (128, 32, 4, 3), (128, 32, 4, 2), (128, 32, 4, 4), (64, 32, 4, 3), (64, 64, 4, 3), (128, 64, 4, 3),
        (128, 64, 8, 3), (256, 32, 8, 3), (128, 32, 4, 3, 128),
    ],
}  # fmt: skip
PROGRAMS = {"statistics": (2, 4, 8), "output": (4, 8, 16), "gradient_sums": (2, 3, 4), "input_gradient": (1,)}
BEST = 3  # configs that a sweep prints
Calls = dict[str, Callable[[], Any]]
Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def operands(inputs: int, outputs: int, side: int, batch: int, device: str = "cuda") -> Operands:
    """x, the gradient of the activation, filters, and the norm's weight and bias."""
    if device == "meta":
        with torch.device("meta"):
            x, da = (torch.empty(batch, side, side, n).bfloat16().permute(0, 3, 1, 2) for n in (inputs, outputs))
            return x, da, torch.empty(outputs, inputs, 1, 1).bfloat16(), torch.empty(outputs), torch.empty(outputs)
    x, da = (random_tensor(batch, n, side, side, dtype=torch.bfloat16) for n in (inputs, outputs))
    filters = random_tensor(outputs, inputs, 1, 1, dtype=torch.bfloat16) / inputs**0.5
    of = random_norm(outputs)
    return x, da, filters, of.weight.detach(), of.bias.detach()


def fused_calls(x: Tensor, da: Tensor, filters: Tensor, weight: Tensor, bias: Tensor, act: Activation) -> Calls:
    """The kernels of the fused layer."""
    rows, of = channel_rows(x, (len(x),)), NormParams(weight, bias, torch.ones_like(weight), 1e-5)
    operand = ConvNormInput(x, filters, fused.statistics(x, filters, of, rows), weight, bias)
    parts = fused.gradient_sums(da, operand, rows, act)
    _, _, lines = fused.weight_gradients(parts, operand, rows)
    return {
        "statistics": lambda: fused.statistics(x, filters, of, rows),
        "output": lambda: fused.write_output(operand, rows, act),
        "gradient_sums": lambda: fused.gradient_sums(da, operand, rows, act),
        "weight_gradients": lambda: fused.weight_gradients(parts, operand, rows),
        "input_gradient": lambda: fused.input_gradient(da, operand, lines, rows, act),
    }


def separate_calls(x: Tensor, da: Tensor, filters: Tensor, weight: Tensor, bias: Tensor, act: Activation) -> Calls:
    """Forward and backward pass by separate kernels."""
    rows, of = channel_rows(da, (len(x),)), NormParams(weight, bias, torch.ones_like(weight), 1e-5)
    y = F.conv2d(x, filters)
    operand = NormInput(y, norm.statistics(y, of, rows), weight, bias)

    def forward() -> Tensor:
        y = F.conv2d(x, filters)
        return norm.write_output(NormInput(y, norm.statistics(y, of, rows), weight, bias), None, None, rows, act)

    def backward() -> Any:
        sums = norm.gradient_sums(da, None, operand, None, None, None, rows, act)
        dy, _ = norm.input_gradients(da, operand, None, sums, rows, act)
        return torch.ops.aten.convolution_backward(
            dy, x, filters, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False]
        )

    return {"forward": forward, "backward": backward}


def check(batch: int = 8) -> None:
    """Print the relative errors of the fused layer and of separate kernels against float64."""
    for (inputs, outputs, side, *_), (_, act) in zip((LAYERS[1], LAYERS[3]), NETWORKS, strict=True):
        x, da, filters, weight, bias = operands(inputs, outputs, side, batch)
        results = []
        for kind in ("exact", "fused", "separate"):
            leaves = [t.double() if kind == "exact" else t.clone() for t in (x, filters, weight, bias)]
            x_, filters_, weight_, bias_ = (leaf.requires_grad_() for leaf in leaves)
            of = NormParams(weight_, bias_, torch.ones_like(weight_), 1e-5)
            if kind == "fused":
                a = fused.conv1x1_batch_norm_act(x_, filters_, of, (batch,), act)[0]
            elif kind == "separate":
                a = norm.batch_norm_act(F.conv2d(x_, filters_), of, (batch,), act)[0]
            else:
                z, _ = reference.batch_norm(F.conv2d(x_, filters_), weight_, bias_, of.running_var, of.eps, (batch,))
                a = reference.ACTIVATION_FUNCTIONS[act](z)
            a.backward(da.to(a.dtype))
            results.append([a.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
        exact, *others = results
        for kind, found in zip(("fused", "separate"), others, strict=True):
            errors = [float((f.double() - e).norm() / e.norm()) for f, e in zip(found, exact, strict=True)]
            words = zip(("output", "dx", "dfilters", "dweight", "dbias"), errors, strict=True)
            print(f"{kind:8} {inputs}, {outputs}, {side}, {act}:", *(f"{name} {error:.1e}" for name, error in words))


def compile_all(batch: int, acts: tuple[Activation, ...], configs: Iterator[None] | None = None) -> None:
    """Compile the kernels of all layers, in parallel, with the configs that an iterator sets one after another."""
    found: dict[KernelVariant, None] = {}
    for _ in configs or (None,):
        for (inputs, outputs, side, *_counts), act in product(LAYERS, acts):
            with trace_launches() as traced:
                for call in fused_calls(*operands(inputs, outputs, side, batch, "meta"), act).values():
                    call()
            found.update(traced)
    compile_ahead(list(found), torch.device("cuda", torch.cuda.current_device()), lambda text: print(text[:200]))


def rotated(kind: Callable[..., Calls], layer: tuple[int, ...], batch: int, act: Activation) -> list[Calls]:
    """Calls on several tensors, too many for the L2 cache."""
    inputs, outputs, side = layer[:3]
    sets = max(2, min(8, round(ROTATED_BYTES / (batch * outputs * side * side * 2))))
    return [kind(*operands(inputs, outputs, side, batch), act) for _ in range(sets)]


def measure(batch: int) -> None:
    """Print the times of each layer, and of all layers of a network."""
    compile_all(batch, tuple(act for _, act in NETWORKS))
    for number, (network, act) in enumerate(NETWORKS):
        totals = [0.0, 0.0, 0.0, 0.0]
        print(f"{network}, {act}\n in  out side x  forward: separate fused (stats output)"
              "  backward: separate fused (sums weights dx) ms")  # fmt: skip
        for layer in LAYERS:
            if layer[3 + number] == 0:
                continue
            ms: dict[str, float] = {}
            for kind in (separate_calls, fused_calls):
                calls = rotated(kind, layer, batch, act)
                ms |= {name: time_ms([each[name] for each in calls]) for name in calls[0]}
                del calls
                torch.cuda.empty_cache()
            forward = ms["statistics"] + ms["output"]
            backward = ms["gradient_sums"] + ms["weight_gradients"] + ms["input_gradient"]
            times = (ms["forward"], forward, ms["backward"], backward)
            totals = [total + layer[3 + number] * time for total, time in zip(totals, times, strict=True)]
            print(
                f"{layer[0]:3} {layer[1]:4} {layer[2]:4} {layer[3 + number]}  {ms['forward']:.4f} {forward:.4f} "
                f"({ms['statistics']:.4f} {ms['output']:.4f})  {ms['backward']:.4f} {backward:.4f} "
                f"({ms['gradient_sums']:.4f} {ms['weight_gradients']:.4f} {ms['input_gradient']:.4f})",
                flush=True,
            )
        print(f"all layers: forward {totals[0]:.3f} to {totals[1]:.3f} ms, backward {totals[2]:.3f} to {totals[3]:.3f}")


def config_from(tile: tuple[int, ...], programs: int) -> ExpansionTile:
    rows, block, warps, stages, *limit = tile
    return ExpansionTile(rows, block, warps, stages, programs, *limit)


@contextmanager
def config_of(kernel: str, config: ExpansionTile) -> Iterator[None]:
    """Launch a kernel with this config, whatever the number of inputs."""
    before = dict(fused.CONFIGS[kernel])
    fused.CONFIGS[kernel].update(dict.fromkeys(before, config))
    try:
        yield
    finally:
        fused.CONFIGS[kernel].update(before)


def each_tile() -> Iterator[None]:
    """Set the n-th tile of every kernel's list, one after another."""
    for number in range(max(map(len, TILES.values()))):
        for kernel, tiles in TILES.items():
            config = config_from(tiles[min(number, len(tiles) - 1)], 1)
            fused.CONFIGS[kernel].update(dict.fromkeys(fused.CONFIGS[kernel], config))
        yield


def sweep(batch: int, act: Activation) -> None:
    """Print the best configs of every kernel for each layer."""
    start = {kernel: dict(configs) for kernel, configs in fused.CONFIGS.items()}
    compile_all(batch, (act,), each_tile())
    fused.CONFIGS.update(start)
    for layer in LAYERS:
        calls = rotated(fused_calls, layer, batch, act)
        for kernel, tiles in TILES.items():
            found: list[tuple[float, str]] = []
            failed: list[str] = []
            for tile, programs in product(tiles, PROGRAMS[kernel]):
                config = config_from(tile, programs)
                limit = f" r{config.registers}" if config.registers else ""
                words = f"{config.rows}x{config.block} w{config.warps} s{config.stages} p{programs}{limit}"
                try:
                    with config_of(kernel, config):
                        found.append((time_ms([each[kernel] for each in calls]), words))
                except Exception as error:  # one config may need too much shared memory
                    failed.append(f"{words}: {str(error)[:60]}")
                    torch.cuda.synchronize()
            with config_of(kernel, start[kernel][max(16, 1 << (layer[0] - 1).bit_length())]):
                now = time_ms([each[kernel] for each in calls])
            best = ", ".join(f"{words} {ms:.4f}" for ms, words in sorted(found)[:BEST])
            print(f"{layer[0]:3} {layer[1]:4} {layer[2]:4} {kernel:14} now {now:.4f}; {best}", *failed[:2], flush=True)
        del calls
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--sweep", action="store_true", help="measure other tiles instead")
    parser.add_argument("--act", choices=["relu6", "silu", "hardswish"], default="relu6", help="of a sweep")
    given = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, batch {given.batch}, bfloat16")
    if given.sweep:
        sweep(given.batch, given.act)
    else:
        check()
        measure(given.batch)


if __name__ == "__main__":
    main()
