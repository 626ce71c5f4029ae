"""What a network costs: floating point operations and bytes of its convolutions and linear layers, and the time that
a device needs at least.

Owns the counting rule and the table of devices. Refuses to know how long anything took. Invariant: a device or a
precision that is not in the table has no roofline; nothing is estimated for it.

The rule. One multiplication and addition is two operations. Training is three times the forward pass: as many again
for the gradient of the inputs, and for that of the weights; frozen layers and the first one count like all others. The
least time of a layer is the greater of its operations at the device's peak and its bytes at its bandwidth: input,
weights and output once forward; input, weights, output gradient and both gradients once backward. Norms, activations,
sums, pooling, optimizer and averages are free. No program is that good: the share shows what is left in principle.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

TRAINING_PASSES = 3  # the forward pass counts once, the backward pass twice


@dataclass(frozen=True, slots=True)
class Peak:
    """What a device reaches at most in one precision."""

    flops_per_s: float
    bytes_per_s: float
    element_bytes: int
    source: str


# By a part of the device's own name, and the precision. Only what was measured, not what is advertised.
_H200_BF16 = Peak(
    790e12, 4.3e12, 2, "measured 2026-11-15 on one H200: matrix product in bf16; copy, reads and writes counted"
)
PEAKS: dict[tuple[str, str], Peak] = {("H200", "bf16"): _H200_BF16, ("H200", "bf16-all"): _H200_BF16}


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer's forward pass, for one image; weights are read once for a whole batch."""

    flops: float
    inputs: float  # elements
    outputs: float
    weights: int


def find_peak(device: str, precision: str) -> Peak | None:
    """The peak of a device by its description, or None where it is not known."""
    return next((peak for (name, mode), peak in PEAKS.items() if name in device and mode == precision), None)


def layer_costs(model: nn.Module, shape: Sequence[int], *, training: bool) -> list[LayerCost]:
    """Each call of a convolution or linear layer in one pass over an image of this shape; auxiliary heads answer in
    training only."""
    watched = copy.deepcopy(model).to("meta").train(training)
    costs: list[LayerCost] = []
    num_images = 2  # batch norm in training refuses one value a channel

    def count(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(module, nn.Conv2d | nn.Linear)
        weights = module.weight.numel()
        per_output = weights // module.weight.shape[0]  # multiplications for one value
        outputs, inputs = output.numel() / num_images, args[0].numel() / num_images
        costs.append(LayerCost(2 * outputs * per_output, inputs, outputs, weights))

    for module in watched.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(count)
    dtype = next(watched.parameters()).dtype
    with torch.no_grad():
        watched(torch.empty(num_images, *shape, device="meta", dtype=dtype))
    return costs


def forward_flops(costs: Sequence[LayerCost]) -> float:
    """Operations of the forward pass of one image."""
    return sum(cost.flops for cost in costs)


def _passes(costs: Sequence[LayerCost], batch: int, peak: Peak, *, training: bool) -> Iterator[tuple[float, float]]:
    """Each layer's pass forward, and in training backward: the least time of its operations, and of its bytes."""

    def least(flops: float, elements: float) -> tuple[float, float]:
        return flops / peak.flops_per_s, elements * peak.element_bytes / peak.bytes_per_s

    for cost in costs:
        moved = batch * (cost.inputs + cost.outputs) + cost.weights
        yield least(batch * cost.flops, moved)
        if training:
            yield least((TRAINING_PASSES - 1) * batch * cost.flops, moved + batch * cost.inputs + cost.weights)


def least_s(costs: Sequence[LayerCost], batch: int, peak: Peak, *, training: bool) -> float:
    """The time that a batch takes at least, by the rule above."""
    return sum(max(times) for times in _passes(costs, batch, peak, training=training))


def bytes_share(costs: Sequence[LayerCost], batch: int, peak: Peak, *, training: bool) -> float:
    """The share of that least time in which layers are limited by bytes; the rest is limited by operations."""
    passes = list(_passes(costs, batch, peak, training=training))
    return sum(moved_s for flops_s, moved_s in passes if moved_s > flops_s) / sum(max(times) for times in passes)


def shares(
    costs: Sequence[LayerCost], batch: int, measured_s: float, device: str, precision: str, *, training: bool
) -> dict[str, Any]:
    """What was reached of the device's peak and of the roofline; null, with the reason, where that is unknown."""
    flops = forward_flops(costs) * (TRAINING_PASSES if training else 1)
    peak = find_peak(device, precision)
    known: dict[str, Any] = {
        "flops_per_image": flops,
        "flops_rule": "3 x the forward pass of convolutions and linear layers"
        if training
        else "the forward pass of convolutions and linear layers",
        "flop_utilisation": None,
        "roofline_fraction": None,
    }
    if peak is None:
        return {**known, "roofline_note": f"the peak of {device} in {precision} is not known"}
    known["flop_utilisation"] = flops * batch / measured_s / peak.flops_per_s
    known["roofline_fraction"] = least_s(costs, batch, peak, training=training) / measured_s
    return {**known, "roofline_note": peak.source}
