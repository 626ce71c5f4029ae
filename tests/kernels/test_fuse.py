"""`fuse` swaps classes and nothing else, and each family of networks launches the fused kernels it should."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from reconv.core.batch import Batch
from reconv.kernels.fuse import fuse, fuse_max_pools
from reconv.kernels.jit import launch
from reconv.kernels.trace import trace_kernels
from reconv.models import build_model
from reconv.models.layers.batch_norm import BatchNorm2d, LayerState

# Launches of each operation's kernels in one training pass in bf16 at 64 (SSD: 300) pixels.
LAUNCHES = {
    "resnet50": {
        "batch_norm": 145,
        "conv1x1_norm_backward": 8,
        "conv1x1_statistics": 18,
        "global_avg_pool": 1,
        "norm_max_pool": 1,
        "partial_sums": 5,
        "stem": 2,
        "stem_max_pool": 1,
        "sum_conv1x1": 15,
    },
    "resnext26_32x4d": {
        "batch_norm": 83,
        "conv1x1_norm_backward": 3,
        "conv1x1_statistics": 7,
        "global_avg_pool": 1,
        "grouped_conv": 14,
        "norm_max_pool": 1,
        "partial_sums": 6,
        "stem": 2,
        "stem_max_pool": 1,
        "sum_conv1x1": 4,
    },
    "se_resnext101_32x4d": {
        "batch_norm": 82,
        "conv1x1_statistics": 7,
        "excitation": 24,
        "global_avg_pool": 1,
        "grouped_conv": 14,
        "norm_max_pool": 1,
        "norm_squeeze_excite": 40,
        "partial_sums": 3,
        "stem": 2,
        "stem_max_pool": 1,
    },
    "mobilenet_v2": {
        "batch_norm": 114,
        "conv1x1_norm_act": 50,
        "conv1x1_statistics": 6,
        "depthwise": 51,
        "dropout": 2,
        "global_avg_pool": 1,
        "norm_conv1x1": 30,
        "partial_sums": 27,
        "stem": 2,
    },
    "efficientnet_b0": {
        "batch_norm": 93,
        "conv1x1_norm_act": 25,
        "conv1x1_statistics": 18,
        "depthwise": 48,
        "dropout": 2,
        "excitation": 48,
        "global_avg_pool": 1,
        "norm_squeeze_excite": 80,
        "partial_sums": 16,
        "stem": 2,
    },
    "googlenet": {
        "batch_norm": 13,
        "conv1x1_statistics": 2,
        "dropout": 6,
        "global_avg_pool": 1,
        "max_pool": 22,
        "norm_concat": 72,
        "norm_max_pool": 3,
        "partial_sums": 1,
        "stem": 2,
        "stem_max_pool": 1,
    },
    "ssd_resnet34": {
        "batch_norm": 128,
        "bias_relu": 4,
        "box_losses": 15,
        "conv1x1_statistics": 1,
        "norm_max_pool": 1,
        "partial_sums": 1,
        "stem": 2,
        "stem_max_pool": 1,
    },
    "fastnet_cifar": {
        "batch_norm": 24,
        "max_pool": 6,
    },
}
OPTIONS = {"se_resnext101_32x4d": {"depths": [2, 2, 2, 2]}}


@pytest.mark.parametrize("name", LAUNCHES)
def test_each_family_launches_its_fused_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: Counter[str] = Counter()
    variant_of = launch.variant_of

    def counting(kernel, args, constants):  # type: ignore[no-untyped-def]
        launched[kernel.fn.__module__.rpartition(".")[2]] += 1
        return variant_of(kernel, args, constants)

    monkeypatch.setattr(launch, "variant_of", counting)
    with torch.device("meta"):
        model = build_model(name, num_classes=5, **OPTIONS.get(name, {})).to(torch.bfloat16)
    fuse(model.to(memory_format=torch.channels_last))
    side = 300 if name.startswith("ssd") else 64
    trace_kernels(model, (3, side, side), torch.bfloat16, nullcontext())
    assert dict(launched) == LAUNCHES[name]


def test_a_fused_network_keeps_names_parameters_and_copies() -> None:
    plain = build_model("efficientnet_cifar", num_classes=3).eval()
    fused = copy.deepcopy(plain)
    assert fuse(fused) > 0 and fuse(fused) == 0
    assert [name for name, _ in fused.named_modules()] == [name for name, _ in plain.named_modules()]
    images = torch.randn(2, 3, 16, 16)
    for other in (fused, copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert type(other) is type(fused)
        assert list(other.state_dict()) == list(plain.state_dict())
        assert torch.equal(other(images), plain(images))


def test_layers_and_their_container_are_fused_outside_our_blocks() -> None:
    external = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    kinds = [type(layer) for layer in external]
    assert fuse(external) == 4 and type(external) is not nn.Sequential
    assert [type(layer) is kind for layer, kind in zip(external, kinds, strict=True)] == [False, False, True, False]


def test_nothing_of_a_network_without_supported_layers_is_fused() -> None:
    assert fuse(build_model("resnet8_cifar", norm="group")) == 0


def test_max_pools_alone_are_swapped_and_give_the_bits_of_a_plain_step() -> None:
    plain = (
        build_model("fastnet_cifar", num_classes=5, widths=[8, 16, 24]).to(memory_format=torch.channels_last).train()
    )
    fused = copy.deepcopy(plain)
    kinds = {name: type(module) for name, module in plain.named_modules()}
    assert fuse_max_pools(fused) == 3 and fuse_max_pools(fused) == 0
    swapped = {name for name, module in fused.named_modules() if type(module) is not kinds[name]}
    assert swapped == {f"groups.{group}.pool" for group in range(3)}
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    images = images.contiguous(memory_format=torch.channels_last)
    for model in (plain, fused):
        LayerState(model).set_micro_batch(Batch({}, torch.arange(4), (2, 2)), step=0)
        with torch.autocast("cpu", torch.bfloat16):
            model(images).float().square().sum().backward()
    grads = dict(fused.named_parameters())
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, grads[name].grad), name
    assert sum(parameter.grad is not None for parameter in plain.parameters()) == 14


@pytest.mark.parametrize(
    "pool", [nn.MaxPool2d(2, return_indices=True), nn.MaxPool2d((2, 1)), nn.MaxPool2d(2, dilation=2)]
)
def test_a_max_pool_that_kernels_do_not_know_is_not_swapped(pool: nn.Module) -> None:
    model = build_model("fastnet_cifar", num_classes=5)
    model.get_submodule("groups.1").pool = pool
    assert fuse_max_pools(model) == 2


def test_max_pools_alone_are_swapped_in_fastnet_only() -> None:
    assert fuse_max_pools(build_model("resnet10", num_classes=5)) == 0
