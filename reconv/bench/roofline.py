"""FLOPs and memory traffic of convolutions and linear layers, and the time a device needs at least (roofline).

One multiply-add is two FLOPs. Training is three times the forward pass: once more for the gradient of the inputs and
once for that of the weights; frozen layers and the first layer are counted like all others. The minimum time of a layer
is the larger of its FLOPs at the device's peak and its bytes at the device's bandwidth: forward, input, weights and
output once; backward, input, weights, output gradient and both gradients once. Norms, activations, additions, pooling,
optimizer and EMA count as free. A device or precision without a measured peak has no roofline.
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
    """The measured peak of a device in one precision."""

    flops_per_s: float
    bytes_per_s: float
    element_bytes: int
    source: str


# By a part of the device's name and the precision: measured values, not advertised ones.
_H200_BF16 = Peak(
    790e12, 4.3e12, 2, "measured 2026-11-15 on one H200: matrix product in bf16; copy, reads and writes counted"
)
PEAKS: dict[tuple[str, str], Peak] = {("H200", "bf16"): _H200_BF16, ("H200", "bf16-all"): _H200_BF16}


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The forward pass of one layer for one image; weights are read once per batch."""

    flops: float
    inputs: float  # elements
    outputs: float
    weights: int


def find_peak(device: str, precision: str) -> Peak | None:
    """The peak of a device by its description; None if it is unknown."""
    return next((peak for (name, mode), peak in PEAKS.items() if name in device and mode == precision), None)


def layer_costs(model: nn.Module, shape: Sequence[int], *, training: bool) -> list[LayerCost]:
    """The cost of each convolution and linear layer called for an image of this shape [channels, height, width].

    Auxiliary heads are called in training only.
    """
    hooked = copy.deepcopy(model).to("meta").train(training)
    costs: list[LayerCost] = []
    num_images = 2  # batch norm in training needs more than one value per channel

    def count(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(module, nn.Conv2d | nn.Linear)
        weights = module.weight.numel()
        per_output = weights // module.weight.shape[0]  # multiply-adds per output value
        outputs, inputs = output.numel() / num_images, args[0].numel() / num_images
        costs.append(LayerCost(2 * outputs * per_output, inputs, outputs, weights))

    for module in hooked.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(count)
    dtype = next(hooked.parameters()).dtype
    with torch.no_grad():
        hooked(torch.empty(num_images, *shape, device="meta", dtype=dtype))
    return costs


def forward_flops(costs: Sequence[LayerCost]) -> float:
    """FLOPs of the forward pass of one image."""
    return sum(cost.flops for cost in costs)


def _passes(costs: Sequence[LayerCost], batch: int, peak: Peak, *, training: bool) -> Iterator[tuple[float, float]]:
    """The minimum time of FLOPs and of bytes, for each forward and, in training, backward pass of a layer."""

    def times(flops: float, elements: float) -> tuple[float, float]:
        return flops / peak.flops_per_s, elements * peak.element_bytes / peak.bytes_per_s

    for cost in costs:
        moved = batch * (cost.inputs + cost.outputs) + cost.weights
        yield times(batch * cost.flops, moved)
        if training:
            yield times((TRAINING_PASSES - 1) * batch * cost.flops, moved + batch * cost.inputs + cost.weights)


def min_time_s(costs: Sequence[LayerCost], batch: int, peak: Peak, *, training: bool) -> float:
    """The roofline time of a batch in seconds."""
    return sum(max(pair) for pair in _passes(costs, batch, peak, training=training))


def memory_bound_fraction(costs: Sequence[LayerCost], batch: int, peak: Peak, *, training: bool) -> float:
    """The fraction of the roofline time spent in memory-bound layers."""
    passes = list(_passes(costs, batch, peak, training=training))
    return sum(moved_s for flops_s, moved_s in passes if moved_s > flops_s) / sum(max(pair) for pair in passes)


def utilization(
    costs: Sequence[LayerCost], batch: int, measured_s: float, device: str, precision: str, *, training: bool
) -> dict[str, Any]:
    """The fraction of the device's peak FLOPs and of the roofline that was reached; None where the peak is unknown."""
    flops = forward_flops(costs) * (TRAINING_PASSES if training else 1)
    peak = find_peak(device, precision)
    known: dict[str, Any] = {
        "flops_per_image": flops,
        "flops_rule": "3 x the forward pass of convolutions and linear layers"
        if training
        else "the forward pass of convolutions and linear layers",
        "flop_utilization": None,
        "roofline_fraction": None,
    }
    if peak is None:
        return {**known, "roofline_note": f"the peak of {device} in {precision} is unknown"}
    known["flop_utilization"] = flops * batch / measured_s / peak.flops_per_s
    known["roofline_fraction"] = min_time_s(costs, batch, peak, training=training) / measured_s
    return {**known, "roofline_note": peak.source}
