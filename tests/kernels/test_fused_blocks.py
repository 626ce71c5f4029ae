"""Fused networks have the outputs, gradients and statistics of plain ones in training."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from triton.runtime.interpreter import InterpretedFunction

from reconv.core.batch import Batch
from reconv.kernels.fuse import fuse
from reconv.kernels.fused.ssd import SSDFeatureMaps
from reconv.kernels.fused.sums import DualUse, single
from reconv.models import build_model
from reconv.models.architecture import SSDOutput
from reconv.models.efficientnet import EfficientNetSpec, MBConv
from reconv.models.googlenet import GoogLeNet, GoogLeNetSpec, Inception
from reconv.models.layers.batch_norm import BatchNorm2d, LayerState
from reconv.models.layers.conv import ConvNormAct
from reconv.models.mobilenet import InvertedResidual, MobileNetV2Spec

GROUPS = (2, 3)


def trained(model: nn.Module, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of one step's forward pass, and gradients and running statistics after it."""
    layers = LayerState(model)
    layers.set_micro_batch(Batch({}, torch.arange(len(images)), GROUPS), step=0)
    out = single(model(images))
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (out * weights).sum().backward()
    layers.commit(torch.tensor(True))
    found = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    found.update((name, buffer.detach().clone()) for name, buffer in model.named_buffers())
    return out.detach(), found


def both_ways(plain: nn.Module, images: Tensor) -> None:
    plain = plain.to(memory_format=torch.channels_last).train()
    for module in plain.modules():
        if isinstance(module, BatchNorm2d):  # no activation at a kink, where a last bit decides the gradient
            nn.init.normal_(module.weight, 1.0, 0.1)
            nn.init.normal_(module.bias, 0.5, 0.1)
    fused = copy.deepcopy(plain)
    assert fuse(fused) > 1
    out, expected = trained(plain, images)
    fused_out, found = trained(fused, images)
    torch.testing.assert_close(fused_out, out, rtol=1e-3, atol=1e-4)
    assert found.keys() == expected.keys() and len(found) > 5
    for name, value in expected.items():
        scale = value.double().norm().item()
        assert (found[name] - value).double().norm().item() <= 1e-3 * scale + 1e-4, name
    plain.eval()
    fused.eval()
    fused.load_state_dict(plain.state_dict())
    assert torch.equal(single(plain(images)), single(fused(images)))


@pytest.mark.parametrize(
    "name, options",
    [
        ("resnet14", {"width": 8, "depths": [2]}),
        ("resnet10", {"width": 8, "depths": [2], "se_ratio": 4}),
        pytest.param("resnet10", {"width": 8, "depths": [1, 1], "version": "v2"}, marks=pytest.mark.slow),
        ("resnet8_cifar", {}),
        pytest.param("resnet10", {"width": 8, "depths": [2, 1], "drop_path_rate": 0.5}, marks=pytest.mark.slow),
        ("resnet10", {"width": 8, "depths": [1], "padding": "same"}),
    ],
)
def test_a_fused_resnet_trains_like_the_plain_one(name, options) -> None:
    torch.manual_seed(0)
    images = torch.randn(5, 3, 16, 16).contiguous(memory_format=torch.channels_last)
    both_ways(build_model(name, num_classes=4, **options), images)


@pytest.mark.parametrize("activation", ["relu6", "silu"])
def test_a_fused_inverted_residual_trains_like_the_plain_one(activation) -> None:
    torch.manual_seed(0)
    spec = MobileNetV2Spec(activation=activation)
    block = nn.Sequential(InvertedResidual(spec, 8, 8, 2, 1), InvertedResidual(spec, 8, 16, 2, 2))
    both_ways(block, torch.randn(5, 8, 6, 6).contiguous(memory_format=torch.channels_last))


def test_an_inverted_residual_fuses_its_last_convolution() -> None:
    spec = MobileNetV2Spec()
    block = InvertedResidual(spec, 16, 16, 2, 1).half().to(memory_format=torch.channels_last).train()
    images = torch.randn(5, 16, 6, 6).half().contiguous(memory_format=torch.channels_last)
    seen = []
    block.conv[2].register_forward_hook(lambda *_: seen.append("a convolution of its own"))
    expected = trained(copy.deepcopy(block).float(), images.float())[0]
    assert seen == ["a convolution of its own"]
    fuse(block)
    found, changed = trained(block, images)
    assert len(seen) == 1
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
    assert changed["gradient of conv.2.weight"].abs().sum() > 0


def test_a_hook_of_a_depthwise_convolution_sees_its_output() -> None:
    block = InvertedResidual(MobileNetV2Spec(), 16, 16, 2, 1).half().to(memory_format=torch.channels_last).train()
    fuse(block)
    depthwise = block.conv[1]
    assert isinstance(depthwise, ConvNormAct)
    seen: list[torch.Tensor] = []
    depthwise[0].register_forward_hook(lambda module, given, output: seen.append(output))
    trained(block, torch.randn(5, 16, 6, 6).half().contiguous(memory_format=torch.channels_last))
    assert len(seen) == 1 and seen[0].shape == (5, 32, 6, 6)


@pytest.mark.parametrize(
    "large_kernel, padding", [(5, "torch"), *(pytest.param(3, p, marks=pytest.mark.slow) for p in ("torch", "same"))]
)
def test_a_fused_inception_block_trains_like_the_plain_one(large_kernel, padding) -> None:
    torch.manual_seed(0)
    spec = GoogLeNetSpec(large_kernel=large_kernel, padding=padding)
    block = nn.Sequential(
        Inception(spec, 16, (8, 8, 16, 8, 8, 8)),
        Inception(spec, 40, (24, 16, 8, 8, 8, 16)),
        spec.make_max_pool(3, 2, ceil=True),
    )
    images = torch.randn(5, 16, 6, 6).contiguous(memory_format=torch.channels_last)
    both_ways(block, images)
    fuse(block)
    assert launches(block, images)["norm_concat"] == 2 * 8


def launches(model: nn.Module, images: Tensor) -> dict[str, int]:
    """How many kernels of each operation a training step of a fused model launches."""
    found: Counter[str] = Counter()
    run = InterpretedFunction.run

    def counting(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        found[self.fn.__module__.rpartition(".")[2]] += 1
        return run(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", counting)
        trained(model.train(), images)
    return dict(found)


def inception() -> tuple[nn.Module, Tensor]:
    block = Inception(GoogLeNetSpec(), 16, (8, 8, 16, 8, 8, 8)).to(memory_format=torch.channels_last).train()
    fuse(block)
    return block, torch.randn(5, 16, 4, 4).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "name",
    [
        "branch3.1.conv",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("branch1", "branch2.0", "branch4", "branch4.0")),
    ],
)
def test_a_layer_with_hooks_in_an_inception_block_is_called(name: str) -> None:
    block, images = inception()
    expected, gradients = trained(copy.deepcopy(block), images)
    seen: list[Tensor] = []
    block.get_submodule(name).register_forward_hook(lambda module, given, output: seen.append(output))
    out, found = trained(block, images)
    assert len(seen) == 1
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert found.keys() == gradients.keys()


class Doubled(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize("name", ["branch1.conv", "branch2.0.conv", "branch3.0.conv"])
def test_a_convolution_of_another_class_in_an_inception_block_is_called(name: str) -> None:
    block, images = inception()
    LayerState(block).set_micro_batch(Batch({}, torch.arange(len(images)), (len(images),)), step=0)
    norm = block.get_submodule(name.removesuffix("conv") + "bn")
    assert isinstance(norm, BatchNorm2d)
    block(images)
    mean = norm.batch_stats[0][0]
    block.get_submodule(name).__class__ = Doubled
    block(images)
    torch.testing.assert_close(norm.batch_stats[0][0], 2 * mean)


@pytest.mark.slow
def test_norms_of_an_inception_block_that_differ_are_not_fused() -> None:
    block, images = inception()
    assert launches(block, images)["norm_concat"] == 8
    norm = block.get_submodule("branch2.1.bn")
    assert isinstance(norm, BatchNorm2d)
    norm.eps = 0.1
    assert "norm_concat" not in launches(block, images)
    norm.eps, norm.frozen = 1e-3, True
    assert "norm_concat" not in launches(block, images)
    norm.frozen = False
    assert launches(block, images)["norm_concat"] == 8


@pytest.mark.slow
def test_activation_checkpointing_of_an_inception_block_recomputes_the_same() -> None:
    block, images = inception()
    LayerState(block).set_micro_batch(Batch({}, torch.arange(5), GROUPS), step=0)
    images.requires_grad_()
    parameters = [images, *block.parameters()]
    expected = torch.autograd.grad(block(images).square().sum(), parameters)
    found = torch.autograd.grad(checkpoint(block, images, use_reentrant=False).square().sum(), parameters)
    assert all(torch.equal(first, second) for first, second in zip(found, expected, strict=True))


@pytest.mark.slow
def test_a_fused_googlenet_stem_trains_like_the_plain_one() -> None:
    torch.manual_seed(0)
    images = torch.randn(5, 3, 10, 12).contiguous(memory_format=torch.channels_last)
    both_ways(googlenet_stem(), images)
    stem = googlenet_stem()
    fuse(stem)
    assert launches(stem, images) == {"stem": 1, "batch_norm": 8, "norm_max_pool": 4}
    calls = []
    stem.get_submodule("conv3.act").register_forward_hook(lambda *_: calls.append("an activation of its own"))
    found = launches(stem, images)
    assert found == {"stem": 1, "batch_norm": 10, "norm_max_pool": 2, "max_pool": 2}


def googlenet_stem() -> nn.Module:
    model = GoogLeNet(GoogLeNetSpec()).to(memory_format=torch.channels_last)
    for name in [name for name, _ in model.named_children() if name[:5] not in ("conv1", "conv2", "conv3", "maxpo")]:
        delattr(model, name)
    model.forward = model._stem  # type: ignore[method-assign]
    return model


def test_an_inception_block_computes_its_1x1_convolutions_as_one() -> None:
    block = Inception(GoogLeNetSpec(), 16, (8, 8, 16, 8, 8, 8)).to(memory_format=torch.channels_last).train()
    images = torch.randn(4, 16, 6, 6).contiguous(memory_format=torch.channels_last)
    widths = []

    class Convolutions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is torch.conv2d:
                widths.append(len(args[1]))
            return func(*args, **(kwargs or {}))

    for is_fused in (False, True):
        if is_fused:
            fuse(block)
        LayerState(block).set_micro_batch(Batch({}, torch.arange(4), (4,)), step=0)
        with Convolutions():
            block(images)
    assert widths == [8, 8, 16, 8, 8, 8, *(8 + 8 + 8, 16, 8, 8)]


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_fused_mbconv_trains_like_the_plain_one(rate: float) -> None:
    torch.manual_seed(0)
    block = MBConv(EfficientNetSpec(), 8, 8, expansion=2, kernel=3, stride=1)
    block.drop_connect.rate = rate
    both_ways(block, torch.randn(5, 8, 6, 6).contiguous(memory_format=torch.channels_last))


def test_squeeze_excitation_is_fused_with_the_norm_before_it() -> None:
    block = MBConv(EfficientNetSpec(), 8, 8, expansion=2, kernel=3, stride=1).to(memory_format=torch.channels_last)
    images = torch.randn(5, 8, 6, 6).contiguous(memory_format=torch.channels_last)
    seen = []
    block.block[2].register_forward_hook(lambda *_: seen.append("squeeze and excitation of its own"))
    trained(block.train(), images)
    assert len(seen) == 1
    fuse(block)
    trained(block, images)
    assert len(seen) == 1
    assert block.block[1][1].running_mean.abs().sum() > 0


def test_only_a_fused_block_returns_a_dual_use() -> None:
    torch.manual_seed(0)
    block = build_model("resnet10", width=8, depths=[1]).get_submodule("layer1.0")
    block = block.to(memory_format=torch.channels_last).train()
    images = torch.randn(4, 8, 4, 4).contiguous(memory_format=torch.channels_last)
    assert not isinstance(block(images), DualUse)
    fuse(block)
    assert not isinstance(block(images), DualUse), "without groups the layer is torch's own"
    LayerState(block).set_micro_batch(Batch({}, torch.arange(4), (4,)), step=0)
    assert isinstance(block(images), DualUse)
    assert not isinstance(block(images.contiguous()[:, :, :3]), DualUse), "kernels support channels_last only"
    block.eval()
    assert not isinstance(block(images), DualUse)


@pytest.mark.parametrize("side", [32, 40])  # the extra map pads one end of its input, of 4 pixels, or both, of 5
def test_a_fused_detector_trains_like_the_plain_one(side: int) -> None:
    torch.manual_seed(0)
    options = {"backbone": "resnet10", "width": 8, "depths": [1, 1, 1], "extra_widths": [16], "boxes_per_cell": [4, 6]}
    plain = build_model("ssd_resnet34", num_classes=5, **options).to(memory_format=torch.channels_last).train()
    nn.init.constant_(plain.get_parameter("layer3.0.bn2.weight"), 1.0)
    kernels = copy.deepcopy(plain)
    fuse(kernels)
    images = torch.randn(5, 3, side, side).contiguous(memory_format=torch.channels_last)
    found = []
    for model in (plain, kernels):
        layers = LayerState(model)
        layers.set_micro_batch(Batch({}, torch.arange(5), GROUPS), step=0)
        outputs = model(images)
        assert isinstance(outputs, SSDFeatureMaps if model is kernels else SSDOutput)
        codes, logits = outputs.output() if isinstance(outputs, SSDFeatureMaps) else outputs
        (codes.sin().sum() + logits.cos().sum()).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert len(gradients) == len(list(model.parameters()))
        found.append({"codes": codes, "logits": logits, **gradients})
    for name, value in found[0].items():
        scale = value.double().norm().item()
        assert (found[1][name] - value).double().norm().item() <= 1e-3 * scale + 1e-4, name
    plain.eval()
    kernels.eval()
    for ours, theirs in zip(kernels(images), plain(images), strict=True):
        assert torch.equal(ours, theirs)
