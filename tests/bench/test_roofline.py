"""FLOPs equal published numbers, and utilization needs a known device peak."""

from __future__ import annotations

import pytest
from torch import nn

from reconv.bench.roofline import (
    LayerCost,
    Peak,
    find_peak,
    forward_flops,
    layer_costs,
    memory_bound_fraction,
    min_time_s,
    utilization,
)
from reconv.models import build_model

# Multiplications and additions of the forward pass at 224 px, in millions, as torchvision publishes them (GFLOPS).
PUBLISHED = {"resnet18": 1814, "resnet50": 4089, "mobilenet_v2": 301, "googlenet": 1498}


@pytest.mark.parametrize("name", PUBLISHED)
def test_flops_equal_the_published_ones(name: str) -> None:
    costs = layer_costs(build_model(name), (3, 224, 224), training=False)
    assert forward_flops(costs) / 2e6 == pytest.approx(PUBLISHED[name], abs=1)


def test_auxiliary_heads_count_in_training_only() -> None:
    model = build_model("googlenet")
    in_training, in_eval = (len(layer_costs(model, (3, 224, 224), training=mode)) for mode in (True, False))
    assert in_training > in_eval


def test_flops_of_groups_and_strides() -> None:
    model = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=4), nn.Flatten(), nn.Linear(16 * 4 * 4, 10))
    conv, linear = layer_costs(model, (8, 8, 8), training=True)
    assert conv == LayerCost(flops=2 * 16 * 4 * 4 * 2 * 9, inputs=8 * 8 * 8, outputs=16 * 4 * 4, weights=16 * 2 * 9)
    assert linear == LayerCost(flops=2 * 256 * 10, inputs=256, outputs=10, weights=2560)


def test_counting_flops_does_not_change_the_model() -> None:
    model = build_model("resnet20_cifar", num_classes=10).eval()
    layer_costs(model, (3, 32, 32), training=True)
    assert not model.training
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_min_time_is_the_maximum_of_compute_and_memory_time() -> None:
    cost = [LayerCost(flops=1000, inputs=10, outputs=20, weights=5)]
    slow_memory, slow_arithmetic = Peak(1e9, 1e3, 2, ""), Peak(1e3, 1e9, 2, "")
    assert min_time_s(cost, 4, slow_memory, training=False) == pytest.approx((4 * 30 + 5) * 2 / 1e3)
    assert min_time_s(cost, 4, slow_memory, training=True) == pytest.approx((4 * 30 + 5 + 4 * 40 + 10) * 2 / 1e3)
    assert min_time_s(cost, 4, slow_arithmetic, training=False) == pytest.approx(4.0)
    assert min_time_s(cost, 4, slow_arithmetic, training=True) == pytest.approx(12.0)


def test_memory_bound_fraction() -> None:
    wide, narrow = (LayerCost(flops=flops, inputs=10, outputs=20, weights=0) for flops in (3000, 0))
    peak = Peak(1e3, 60, 2, "")  # 3 s of operations; 1 s of bytes
    assert memory_bound_fraction([wide], 1, peak, training=False) == 0
    assert memory_bound_fraction([narrow], 1, peak, training=True) == 1
    assert memory_bound_fraction([wide, narrow], 1, peak, training=False) == pytest.approx(1 / 4)


def test_utilization_of_a_known_device() -> None:
    peak = find_peak("cuda:0, NVIDIA H200", "bf16")
    assert peak is not None
    cost = [LayerCost(flops=1e9, inputs=10, outputs=20, weights=5)]
    found = utilization(cost, 100, 0.001, "cuda:0, NVIDIA H200", "bf16", training=True)
    assert found["flops_per_image"] == 3e9
    assert found["flop_utilization"] == pytest.approx(3e9 * 100 / 0.001 / peak.flops_per_s)
    assert found["roofline_fraction"] == pytest.approx(found["flop_utilization"])


@pytest.mark.parametrize(("device", "precision"), [("cpu, 1 thread", "bf16"), ("cuda:0, NVIDIA H200", "fp32")])
def test_unknown_peak_gives_no_utilization_and_a_note(device: str, precision: str) -> None:
    found = utilization([LayerCost(1e9, 1, 1, 1)], 1, 1.0, device, precision, training=True)
    assert found["roofline_fraction"] is None
    assert found["flop_utilization"] is None
    assert device in found["roofline_note"]
    assert found["flops_per_image"] == 3e9
