"""Bottlenecks pass their unfinished sums on where kernels support it, and nothing else about a network changes."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reconv.core.batch import Batch
from reconv.kernels.fuse import fuse
from reconv.kernels.fused.conv1x1 import conv_output, norm_act_conv_output
from reconv.kernels.fused.ssd import SSDFeatureMaps
from reconv.kernels.fused.sums import DualUse
from reconv.kernels.ops import conv1x1_norm_backward as backward
from reconv.kernels.ops import stem_max_pool
from reconv.kernels.ops import sum_conv1x1 as ops
from reconv.kernels.ops.batch_norm import NormInput
from reconv.models import build_model
from reconv.models.activation_checkpoint import checkpointed_forward
from reconv.models.layers.batch_norm import BatchNorm2d, LayerState

NUM_IMAGES = 2
NUM_BLOCKS = 3


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each fused sum and convolution: whether the sum is of two norms."""
    found: list[bool] = []
    fused = ops.batch_norm_add_relu_conv1x1

    def counted(x, norm, other, other_norm, *others):  # type: ignore[no-untyped-def]
        found.append(other_norm is not None)
        return fused(x, norm, other, other_norm, *others)

    monkeypatch.setattr(ops, "batch_norm_add_relu_conv1x1", counted)
    return found


@pytest.fixture(autouse=True)
def deferred(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each convolution whose backward pass includes that of the norm behind it: whether a norm is before
    it. Those of the first stage do, as in networks of full width."""
    found: list[bool] = []
    gradients, tile = backward.gradients, backward.BackwardTile(32, 4, 2, 1)

    def counted(dz, behind, x, *others):  # type: ignore[no-untyped-def]
        found.append(isinstance(x, NormInput))
        return gradients(dz, behind, x, *others)

    monkeypatch.setattr(backward, "CONFIGS", {(64, 16, has_norm): tile for has_norm in (True, False)})
    monkeypatch.setattr(backward, "gradients", counted)
    return found


def network(name: str = "resnet14", **options: Any) -> nn.Module:
    """A fused network of three bottlenecks in two stages."""
    torch.manual_seed(0)
    options = {"width": 16, "depths": [2, 1], **options}
    model = build_model(name, num_classes=4, **options).to(memory_format=torch.channels_last).train()
    for module in model.modules():
        if isinstance(module, BatchNorm2d):  # no activation at a kink, where a last bit decides the gradient
            nn.init.normal_(module.weight, 1.0, 0.1)
            nn.init.normal_(module.bias, 0.5, 0.1)
    fuse(model)
    return model


def images(side: int = 16) -> Tensor:
    values = torch.randn(NUM_IMAGES, 3, side, side, generator=torch.Generator().manual_seed(1))
    return values.contiguous(memory_format=torch.channels_last)


def loss_of(output: Any) -> Tensor:
    tensors = output.output() if isinstance(output, SSDFeatureMaps) else (output,)
    return sum((tensor.float().sin().sum() for tensor in tensors), torch.zeros(()))


def forward_loss(model: nn.Module, layers: LayerState, forward: Any = None, side: int = 16, number: int = 0) -> Tensor:
    layers.set_micro_batch(Batch({}, torch.arange(NUM_IMAGES), (NUM_IMAGES,)), step=0)
    with torch.autocast("cpu", torch.float16):
        return loss_of((forward or model)(images(side) + number))


def step(model: nn.Module, batches: int = 1, forward: Any = None, side: int = 16) -> dict[str, Tensor]:
    """Outputs, gradients and running statistics of a step in float16 under autocast."""
    layers, found = LayerState(model), {}
    for number in range(batches):
        loss = forward_loss(model, layers, forward, side, number)
        loss.backward()
        found[f"loss {number}"] = loss.detach()
    layers.commit(torch.tensor(True))
    found.update((name, buffer.detach().clone().float()) for name, buffer in model.named_buffers())
    found.update((f"gradient of {name}", p.grad.clone()) for name, p in model.named_parameters() if p.grad is not None)
    model.zero_grad()
    return found


def assert_like_separate(model: nn.Module, monkeypatch: pytest.MonkeyPatch, **options: Any) -> dict[str, Tensor]:
    """One step has the results of one with separate kernels."""
    separate = copy.deepcopy(model)
    found = step(model, **options)
    with monkeypatch.context() as context:
        context.setattr(ops, "MAX_OUTPUTS", 0)
        expected = step(separate, **options)
    assert found.keys() == expected.keys() and len(found) > 20
    assert_close(found, expected)
    return found


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Values that cancel, such as the gradient of a bias before another norm, may differ by 1e-4 of the largest."""
    largest = max(value.double().norm().item() for value in expected.values())
    for name, value in expected.items():
        error = (found[name] - value).double().norm().item()
        assert error <= 2e-2 * value.double().norm().item() + 1e-4 * largest, name


def test_each_sum_is_computed_with_the_next_blocks_first_convolution(calls, deferred, monkeypatch) -> None:
    found = assert_like_separate(network(), monkeypatch)
    assert calls == [True, False]  # the last sum has no convolution behind it
    assert sorted(deferred) == [False, True, True], "the first block's shortcut has a convolution but no norm before it"
    model = network()
    assert {f"gradient of {name}" for name, _ in model.named_parameters()} <= found.keys()


@pytest.mark.parametrize(
    "options, expected",
    [
        pytest.param(
            {"version": "v1"}, [True], marks=pytest.mark.slow
        ),  # the second stage's first convolution has stride 2
        pytest.param({"depths": [1, 1]}, [True], marks=pytest.mark.slow),
        ({"depths": [2], "se_ratio": 4}, []),
        ({"depths": [2], "version": "v2"}, []),
        pytest.param({"drop_path_rate": 0.5}, [True], marks=pytest.mark.slow),  # the first block drops nothing
        ({"width": 8, "depths": [2]}, []),  # the ReLU mask of 32 channels has other tiles
        pytest.param({"padding": "same"}, [True, False], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_variants_of_the_network(options, expected, calls, monkeypatch) -> None:
    assert_like_separate(network(**options), monkeypatch)
    assert calls == expected


@pytest.mark.slow
def test_a_detectors_backbone(calls, monkeypatch) -> None:
    options = {"backbone": "resnet14", "depths": [1, 1, 1], "extra_widths": [16], "boxes_per_cell": [4, 6]}
    assert_like_separate(network("ssd_resnet34", **options), monkeypatch, side=32)
    assert calls == [True, True]


@pytest.mark.slow
def test_micro_batches_accumulate(calls, monkeypatch) -> None:
    assert_like_separate(network(), monkeypatch, batches=2)
    assert len(calls) == 2 * (NUM_BLOCKS - 1)


def test_float32_and_evaluation_are_not_fused(calls) -> None:
    model = network()
    LayerState(model).set_micro_batch(Batch({}, torch.arange(NUM_IMAGES), (NUM_IMAGES,)), step=0)
    model(images()).sum().backward()
    model.eval()
    plain = build_model("resnet14", num_classes=4, width=16, depths=[2, 1]).to(memory_format=torch.channels_last)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(images()), plain.eval()(images()))
    assert calls == []


@pytest.mark.slow
def test_frozen_layers(calls, monkeypatch) -> None:
    model = network()
    model.get_parameter("layer1.1.conv1.weight").requires_grad_(False)
    found = assert_like_separate(model, monkeypatch)
    assert "gradient of layer1.1.conv1.weight" not in found and "gradient of layer1.0.bn3.weight" in found
    assert len(calls) == NUM_BLOCKS - 1
    calls.clear()
    for name in ("layer1.0.bn3", "layer1.0.downsample.1"):
        norm = model.get_submodule(name)
        assert isinstance(norm, BatchNorm2d)
        norm.frozen = True
    assert_like_separate(model, monkeypatch)
    assert calls == [False], "the first sum has frozen norms"


@pytest.mark.parametrize(
    "name, num_fused",
    [
        ("layer1.1", 0),
        ("layer1.1.conv1", 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("layer1.0", 1), ("layer1", 0), ("layer2", 1))),
    ],
)
def test_hooks_see_what_they_see_without_it(name, num_fused, calls, monkeypatch) -> None:
    model, seen = network(), []

    def see(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        seen.extend((type(args[0]), type(output)))

    model.get_submodule(name).register_forward_hook(see)
    layers = LayerState(model)
    forward_loss(model, layers)
    assert len(calls) == num_fused
    now = seen.copy()
    monkeypatch.setattr(ops, "MAX_OUTPUTS", 0)
    forward_loss(model, layers)
    assert seen == now * 2 and set(seen) <= {Tensor, DualUse}


@pytest.mark.parametrize("name, num_deferred", [("layer1.0.conv3", 2), ("layer1.0.downsample.0", 2)])
def test_a_hook_of_a_convolution_sees_its_own_gradient(name, num_deferred, deferred, monkeypatch) -> None:
    seen: list[Tensor] = []
    model = network()
    separate = copy.deepcopy(model)
    for each in (model, separate):
        each.get_submodule(name).register_full_backward_hook(lambda *args: seen.append(args[2][0].float()))
    forward_loss(model, LayerState(model)).backward()
    assert len(deferred) == num_deferred
    monkeypatch.setattr(ops, "MAX_OUTPUTS", 0)
    forward_loss(separate, LayerState(separate)).backward()
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("name", ["layer1.0.bn3.bias", "layer1.0.bn3.weight", "layer1.0.downsample.1.bias"])
def test_what_the_hook_of_a_gradient_changes_in_place_reaches_no_other_gradient(name) -> None:
    found = []
    for factor in (1, 0):
        model = network()

        def change(parameter: nn.Parameter, factor: int = factor) -> None:
            with torch.no_grad():
                parameter.grad.mul_(factor)
                parameter.mul_(2 - factor)  # as an optimizer that steps within the backward pass

        model.get_parameter(name).register_post_accumulate_grad_hook(change)
        forward_loss(model, LayerState(model)).backward()
        found.append([model.get_parameter(f"layer1.0.{conv}.weight").grad for conv in ("conv3", "downsample.0")])
    assert all(map(torch.equal, *found))


def test_a_gradient_that_is_never_taken_does_not_keep_the_graph(monkeypatch) -> None:
    class Canary:
        pass

    alive: list[weakref.ref[Canary]] = []
    node = stem_max_pool._StemConvNormReluMaxPool
    forward = node.forward

    def watched(ctx: Any, *args: Any) -> Any:
        ctx.canary = Canary()
        alive.append(weakref.ref(ctx.canary))
        return forward(ctx, *args)

    monkeypatch.setattr(node, "forward", staticmethod(watched))
    model = network()
    gc.collect()
    gc.disable()
    try:
        loss = forward_loss(model, LayerState(model))
        torch.autograd.grad(loss, model.get_parameter("layer1.0.bn3.weight"))
        del loss
        assert alive[0]() is None
    finally:
        gc.enable()


def test_a_batch_of_other_groups_is_computed_by_separate_kernels(deferred) -> None:
    model = network()
    bn2, bn3 = (model.get_submodule(f"layer1.0.{name}") for name in ("bn2", "bn3"))
    conv, act = model.get_submodule("layer1.0.conv3"), nn.ReLU()
    LayerState(model).set_micro_batch(Batch({}, torch.arange(NUM_IMAGES), (NUM_IMAGES,)), step=0)
    x = torch.randn(NUM_IMAGES, 16, 4, 4).half().contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.float16):
        assert norm_act_conv_output(bn2, x, act, conv, bn3).deferred is not None
        assert norm_act_conv_output(bn2, x, nn.ReLU6(), conv, bn3).deferred is not None  # of the convolution alone
        assert conv_output(conv, bn3, x.repeat(2, 1, 1, 1)).deferred is None, "more rows than the groups have"
        bn3.groups = (1, 1)
        found = norm_act_conv_output(bn2, x, act, conv, bn3)
    found.y.sum().backward()
    assert deferred == []


def test_a_global_hook_turns_it_off(calls) -> None:
    model, blocks = network(), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: blocks.append(type(module).__name__))
    try:
        forward_loss(model, LayerState(model))
    finally:
        handle.remove()
    assert calls == [] and blocks.count("FusedBottleneck") == NUM_BLOCKS


@pytest.mark.parametrize(
    "segments",
    [
        [("layer1.0",), ("layer1.1",)],
        pytest.param([("stem", "layer1.0", "layer1.1")], marks=pytest.mark.slow),
    ],
)
def test_activation_checkpointing_keeps_the_results(segments, calls) -> None:
    model = network()
    expected = step(copy.deepcopy(model))
    calls.clear()
    forward = checkpointed_forward(model, segments, lambda: torch.autocast("cpu", torch.float16))
    found = step(model, forward=forward)
    assert calls == []
    assert_close(found, expected)


@pytest.mark.slow
def test_copies_and_pickles_compute_the_same(calls) -> None:
    model = network()
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    expected = step(model)
    for other in copies:
        found = step(other)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert len(calls) == 3 * (NUM_BLOCKS - 1)


def test_a_block_called_alone_returns_a_dual_use() -> None:
    block = network().get_submodule("layer1.1")
    LayerState(block).set_micro_batch(Batch({}, torch.arange(NUM_IMAGES), (NUM_IMAGES,)), step=0)
    x = torch.randn(NUM_IMAGES, 64, 4, 4).half().contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.float16):
        assert isinstance(block(x), DualUse)
