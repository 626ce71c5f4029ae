"""A stem as one operation equals its convolution, norm, ReLU and max-pool, forward and backward."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import as_float64, assert_near, norm_as_float64, pairwise, parameters, plain
from test_norm_max_pool_ops import plain_pool
from torch import Tensor, nn

from reconv.core.batch import Batch
from reconv.kernels import channels_last
from reconv.kernels.fuse import fuse
from reconv.kernels.fused.layers import FusedStemConv2d
from reconv.kernels.fused.sums import DualUse, conv_norm_act_pool, single
from reconv.kernels.ops import stem
from reconv.kernels.ops import stem_max_pool as ops
from reconv.kernels.ops.batch_norm import NormParams
from reconv.kernels.ops.norm_max_pool import batch_norm_relu_max_pool
from reconv.kernels.ops.stem_max_pool import StemGradientTile, stem_conv_norm_relu_max_pool
from reconv.kernels.window import STEM_KERNELS, STEM_WINDOWS, PoolWindow
from reconv.models import build_model
from reconv.models.layers.batch_norm import LayerState

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2}
SHAPES = [  # groups, sides of the images, outputs
    ((3,), (20, 18), 64),
    ((2, 3), (12, 10), 24),
    ((2, 1), (18, 44), 72),
    ((2,), (6, 22), 16),
]


def drawn(groups: tuple[int, ...], sides: tuple[int, int], outputs: int, kernel: int, dtype: torch.dtype) -> Tensor:
    """Blocks of images, and a weight whose values the dtype has."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(sum(groups), 3, *sides, generator=generator)
    weight = torch.randn(outputs, 3, kernel, kernel, generator=generator).to(dtype).float()
    return stem.space_to_depth(images, kernel, dtype), weight.requires_grad_()


def relative_error(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None and expected is not None
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize(
    "case, uses, kernel, dtype, window", pairwise(SHAPES, [1, 2], STEM_KERNELS, list(TOLERANCE), STEM_WINDOWS), ids=str
)
def test_a_stem_as_one_operation_equals_plain_operations(case, uses, kernel, dtype, window) -> None:
    groups, sides, outputs = case
    blocks, weight = drawn(groups, sides, outputs, kernel, dtype)
    norm = parameters(outputs, 2)
    found = stem_conv_norm_relu_max_pool(blocks, stem.space_to_depth_weight(weight), norm, groups, window)
    # The rounded output of the convolution is exact from here on: a last bit would decide which value is the largest.
    rounded, _ = stem.conv_output(blocks, stem.space_to_depth_weight(weight.detach()), norm, groups)
    weight64, norm64, x64 = as_float64(weight), norm_as_float64(norm), as_float64(rounded)
    conv = F.conv2d(blocks.double(), stem.space_to_depth_weight(weight64))
    z64, recorded = plain(x64, norm64, groups)
    y64 = plain_pool(F.relu(z64), window)
    assert found[0].is_contiguous(memory_format=torch.channels_last) and found[0].dtype == dtype
    assert_near(found[0], y64, TOLERANCE[dtype])
    assert_near(found[2][:, :2], recorded, 2e-5)
    gradients = [torch.randn_like(found[0]) for _ in range(uses)]
    torch.autograd.backward(found[:uses], gradients)
    y64.backward(torch.stack([g.double() for g in gradients]).sum(0))
    conv.backward(x64.grad)
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    assert relative_error(weight.grad, weight64.grad) < TOLERANCE[dtype]
    assert relative_error(norm.weight.grad, norm64.weight.grad) < TOLERANCE[dtype]
    assert relative_error(norm.bias.grad, norm64.bias.grad) < TOLERANCE[dtype]


def separate(blocks: Tensor, filters: Tensor, norm: NormParams, groups: tuple[int, ...], window: PoolWindow) -> Tensor:
    y, stats = stem.stem_conv_statistics(blocks, filters, norm, groups)
    return batch_norm_relu_max_pool(y, norm, groups, window, stats)[0]


@pytest.mark.parametrize("window", STEM_WINDOWS, ids=str)
def test_every_number_of_programs_and_tiles_gives_the_gradient_of_separate_kernels(window, monkeypatch) -> None:
    groups, norm = (2, 3), parameters(24, 2)
    blocks, weight = drawn(groups, (10, 14), 24, 7, torch.float16)
    filters = stem.space_to_depth_weight(weight.detach()).requires_grad_()
    y = separate(blocks, filters, norm, groups, window)
    dy = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, filters, dy)
    monkeypatch.setattr(channels_last, "_device_limits", lambda device: (3, 0))  # SMs, shared memory
    run = ops.weight_gradient
    for config in (StemGradientTile(32, 64, 4, 1, 1), StemGradientTile(16, 16, 2, 2, 5)):
        monkeypatch.setattr(ops, "weight_gradient", lambda *args, config=config: run(*args, config))
        y = stem_conv_norm_relu_max_pool(blocks, filters, norm, groups, window)[0]
        found = [torch.autograd.grad(y, filters, dy, retain_graph=True)[0] for _ in range(2)]
        assert torch.equal(*found), "sums are in a fixed order"
        assert relative_error(found[0], expected) < 1e-3


@pytest.mark.parametrize("image", [0, 3])
def test_nan_reaches_the_output_and_all_gradients(image) -> None:
    blocks, weight = drawn((2, 2), (16, 16), 16, 7, torch.float16)
    blocks[image, 3, 5, 5] = float("nan")
    norm = parameters(16, 2)
    y, _, stats = stem_conv_norm_relu_max_pool(blocks, stem.space_to_depth_weight(weight), norm, (2, 2))
    group = image // 2
    assert stats[group].isnan().all() and not stats[1 - group].isnan().any()
    assert y[2 * group : 2 * group + 2].isnan().any() and not y[2 - 2 * group : 4 - 2 * group].isnan().any()
    y.sum().backward()
    assert weight.grad is not None and weight.grad.isnan().all()


def test_only_wanted_gradients_are_computed(monkeypatch) -> None:
    monkeypatch.delattr(ops, "weight_gradient")
    blocks, weight = drawn((2,), (16, 16), 16, 7, torch.float16)
    norm = parameters(16, 2)
    filters = stem.space_to_depth_weight(weight.detach())
    stem_conv_norm_relu_max_pool(blocks, filters, norm, (2,))[0].sum().backward()
    assert norm.weight.grad is not None and norm.bias.grad is not None


def trained(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """The output of a step in mixed precision, and gradients and running statistics after it."""
    layers = LayerState(model)
    layers.set_micro_batch(Batch({}, torch.arange(len(images)), (2, 3)), step=0)
    with torch.autocast("cpu", torch.float16):
        out = single(model(images)).float()
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    layers.commit(torch.tensor(True))
    return {"output": out.detach(), **{n: p.grad for n, p in model.named_parameters()}, **dict(model.named_buffers())}


def test_a_network_trains_alike_with_the_kernels_and_without(monkeypatch) -> None:
    torch.manual_seed(0)
    model = build_model("resnet10", num_classes=4, width=16, depths=[1])
    model = model.to(memory_format=torch.channels_last).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # no activation at a kink, where a last bit decides the gradient
            nn.init.constant_(module.bias, 4.0)
    fuse(model)
    other, calls, run = copy.deepcopy(model), [], ops.weight_gradient
    monkeypatch.setattr(ops, "weight_gradient", lambda *args: calls.append(1) or run(*args))
    images = torch.randn(5, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    found = trained(model, images)
    assert len(calls) == 1
    monkeypatch.setattr(FusedStemConv2d, "supports_statistics", lambda *_: False)
    expected = trained(other, images)
    assert len(calls) == 1
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        error = (found[name] - value).double().norm().item()
        assert error <= 3e-2 * value.double().norm().item() + 1e-3, name


def layers_of(kernel: int = 7) -> tuple[FusedStemConv2d, nn.Module, nn.Module, nn.Module]:
    """A stem's layers, for a batch in groups of 2 and 3."""
    conv = nn.Conv2d(3, 16, kernel, 2, kernel // 2, bias=False)
    layers = nn.Sequential(conv, build_model("resnet10", width=16, depths=[1]).get_submodule("bn1")).half().train()
    fuse(layers)
    LayerState(layers).set_micro_batch(Batch({}, torch.arange(5), (2, 3)), step=0)
    return layers[0], layers[1], nn.ReLU(), nn.MaxPool2d(3, 2, 1)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stem's operations that are computed."""
    found: list[str] = []
    for name in ("forward_statistics", "forward_norm_relu_pool"):
        run = getattr(FusedStemConv2d, name)
        noting = lambda *args, name=name, run=run: found.append(name) or run(*args)  # noqa: E731
        monkeypatch.setattr(FusedStemConv2d, name, noting)
    return found


def test_other_stems_are_computed_by_separate_kernels(launched) -> None:
    images = torch.randn(5, 3, 12, 12).half().contiguous(memory_format=torch.channels_last)
    conv, norm, relu, pool = layers_of()
    expected = pool(relu(norm(conv(images))))
    assert isinstance(conv_norm_act_pool(conv, norm, images, relu, pool), DualUse)
    assert launched == ["forward_norm_relu_pool"]
    launched.clear()
    for act, other in ((nn.ReLU6(), pool), (relu, nn.MaxPool2d(2, 2)), (relu, nn.Identity())):
        found = single(conv_norm_act_pool(conv, norm, images, act, other))
        torch.testing.assert_close(found, other(act(norm(conv(images)))), rtol=2e-2, atol=2e-2)
    assert launched == ["forward_statistics"] * 3
    launched.clear()
    calls: list[str] = []
    handle = conv.register_forward_hook(lambda *_: calls.append("hooked"))
    torch.testing.assert_close(single(conv_norm_act_pool(conv, norm, images, relu, pool)), expected)
    assert calls == ["hooked"]
    handle.remove()
    inputs = images.clone().requires_grad_()
    single(conv_norm_act_pool(conv, norm, inputs, relu, pool)).sum().backward()
    assert inputs.grad is not None
    with torch.no_grad():
        single(conv_norm_act_pool(conv, norm, images[:4], relu, pool))  # not the number of images of the groups
        single(conv_norm_act_pool(conv.float(), norm.float(), images.float(), relu, pool))
        single(conv_norm_act_pool(conv.eval(), norm.eval(), images.float(), relu, pool))
    assert not launched
