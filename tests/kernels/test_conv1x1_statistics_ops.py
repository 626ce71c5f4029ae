"""A 1x1 convolution with the statistics of its output equals plain operations, forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import as_float64, assert_near, draw, pairwise, parameters
from torch import Tensor, nn

from reconv.core.batch import Batch
from reconv.kernels import channels_last
from reconv.kernels.channels_last import channel_rows
from reconv.kernels.fuse import fuse
from reconv.kernels.fused.conv1x1 import conv_norm_act
from reconv.kernels.fused.norm import FusedBatchNorm2d
from reconv.kernels.fused.sums import single
from reconv.kernels.ops import batch_norm as norm_ops
from reconv.kernels.ops import conv1x1_statistics as ops
from reconv.kernels.ops.conv1x1_statistics import ConvTile, conv1x1_statistics, supports
from reconv.models import build_model
from reconv.models.layers.batch_norm import LayerState

SHAPES = [
    ((3, 24, 5, 7), 40, (3,)),
    ((5, 64, 6, 6), 136, (2, 3)),
    ((2, 136, 9, 8), 72, (2,)),
    ((2, 8, 13, 13), 256, (1, 1)),
    ((4, 320, 5, 5), 56, (4,)),
]
DTYPES = [torch.float16, torch.bfloat16]
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


def exact_statistics(y: Tensor, groups: tuple[int, ...], eps: float) -> Tensor:
    """Mean, unbiased variance and 1 / std of each group in float64."""
    found = []
    for part in y.double().split(groups):
        values = part.transpose(0, 1).flatten(1)
        biased = values.var(1, correction=0)
        found.append(torch.stack([values.mean(1), values.var(1), (biased + eps).rsqrt()]))
    return torch.stack(found)


@pytest.mark.parametrize("case, dtype", pairwise(SHAPES, DTYPES), ids=str)
def test_a_convolution_with_statistics_equals_plain_operations(case, dtype) -> None:
    shape, outputs, groups = case
    x, filters, norm = draw(shape, dtype, 0, 0.5), draw((outputs, shape[1], 1, 1), dtype, 1), parameters(outputs, 2)
    y, stats = conv1x1_statistics(x, filters, norm, groups)
    exact, exact_filters = as_float64(x), as_float64(filters)
    expected = F.conv2d(exact, exact_filters)
    assert y.is_contiguous(memory_format=torch.channels_last) and y.dtype == dtype
    assert not stats.requires_grad
    assert_near(y, expected, TOLERANCE[dtype])
    assert_near(stats, exact_statistics(y.detach(), groups, norm.eps), 1e-5)  # of the rounded output
    dy = draw(y.shape, dtype, 3).detach()
    y.backward(dy)
    expected.backward(dy.double())
    assert_near(x.grad, exact.grad, TOLERANCE[dtype])
    assert_near(filters.grad, exact_filters.grad, TOLERANCE[dtype])


@pytest.mark.parametrize("inputs", [None, *(pytest.param(n, marks=pytest.mark.slow) for n in (16, 32))])
def test_every_number_of_programs_and_tiles_gives_the_statistics_of_a_pass_of_their_own(inputs, monkeypatch) -> None:
    x, filters, norm = draw((7, 24, 11, 9), torch.float16, 0), draw((72, 24, 1, 1), torch.float16, 1), parameters(72, 2)
    groups, x, filters = (3, 4), x.detach(), filters.detach()
    for config in (ConvTile(32, 64, inputs, 4, 1, 2), ConvTile(16, 32, inputs, 2, 2, 40)):
        monkeypatch.setattr(channels_last, "_device_limits", lambda device: (3, 0))  # SMs, shared memory
        y, stats = ops.conv_output(x, filters, norm, groups, config)
        assert_near(y, F.conv2d(x.double(), filters.double()), 4e-3)
        assert_near(stats, norm_ops.statistics(y, norm, channel_rows(y, groups)).double(), 1e-6)


def test_squares_do_not_cancel_where_the_mean_is_large() -> None:
    x = draw((4, 16, 9, 9), torch.bfloat16, 0, offset=100.0)
    filters, norm = (draw((64, 16, 1, 1), torch.bfloat16, 1).abs() + 0.5).detach(), parameters(64, 2)
    y, stats = conv1x1_statistics(x, filters, norm, (4,))
    exact = exact_statistics(y.detach(), (4,), norm.eps)
    assert (exact[:, 0] ** 2 / exact[:, 1]).min() > 500
    torch.testing.assert_close(stats.double(), exact, rtol=1e-5, atol=0)


def test_a_group_of_one_value_keeps_the_running_variance() -> None:
    x, filters, norm = draw((2, 16, 1, 1), torch.float16, 0), draw((64, 16, 1, 1), torch.float16, 1), parameters(64, 2)
    y, stats = conv1x1_statistics(x, filters, norm, (1, 1))
    assert torch.equal(stats[:, 1], norm.running_var.expand(2, -1))
    torch.testing.assert_close(stats[:, 0], y.detach()[:, :, 0, 0].float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(stats[:, 2], torch.full_like(stats[:, 2], norm.eps**-0.5), rtol=1e-3, atol=0)


@pytest.mark.parametrize("image", [0, 3])
def test_nan_reaches_the_statistics_of_its_group_alone(image) -> None:
    x, filters, norm = draw((4, 24, 9, 9), torch.float16, 0), draw((64, 24, 1, 1), torch.float16, 1), parameters(64, 2)
    with torch.no_grad():
        x[image, 3, 5, 5] = float("nan")
    y, stats = conv1x1_statistics(x, filters, norm, (2, 2))
    group = image // 2
    assert stats[group].isnan().all() and not stats[1 - group].isnan().any()
    assert y.isnan().sum() == 64


def test_only_wanted_gradients_are_computed() -> None:
    x, filters, norm = draw((2, 16, 4, 4), torch.float16, 0), draw((64, 16, 1, 1), torch.float16, 1), parameters(64, 2)
    y, _ = conv1x1_statistics(x.detach(), filters, norm, (2,))
    y.sum().backward()
    assert filters.grad is not None and x.grad is None
    y, _ = conv1x1_statistics(x, filters.detach(), norm, (2,))
    y.sum().backward()
    assert x.grad is not None


def test_other_convolutions_are_not_supported() -> None:
    x = draw((2, 64, 4, 4), torch.float16, 0)
    assert supports(x, torch.empty(256, 64, 1, 1))
    assert not supports(x.float(), torch.empty(256, 64, 1, 1))  # tensor cores do not multiply float32
    for shape in ((256, 64, 3, 3), (256, 32, 1, 1), (20, 64, 1, 1)):
        assert not supports(x, torch.empty(shape))
    assert not supports(x, torch.empty(2**31 // 32, 64, 1, 1, device="meta"))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Inputs and outputs of the convolutions that the kernels compute."""
    found, run = [], ops.conv_output

    def noting(x, filters, *args):  # type: ignore[no-untyped-def]
        found.append((x.shape[1], len(filters)))
        return run(x, filters, *args)

    monkeypatch.setattr(ops, "conv_output", noting)
    return found


def residual() -> nn.Module:
    return build_model("resnet14", num_classes=4, width=8, depths=[2])


def squeezing() -> nn.Module:
    return build_model("resnet14", num_classes=4, width=8, depths=[1], se_ratio=4)


def trained(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """The output of a step in mixed precision, and gradients and running statistics after it."""
    layers = LayerState(model)
    layers.set_micro_batch(Batch({}, torch.arange(len(images)), (2, 2)), step=0)
    with torch.autocast("cpu", torch.float16):
        out = single(model(images)).float()
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    layers.commit(torch.tensor(True))
    return {"output": out.detach(), **{n: p.grad for n, p in model.named_parameters()}, **dict(model.named_buffers())}


@pytest.mark.parametrize(
    "build, convs",
    [
        (residual, [(8, 8), (8, 32), (8, 32), (32, 8), (8, 32)]),
        pytest.param(squeezing, [(8, 8), (8, 32)], marks=pytest.mark.slow),
    ],
)
def test_networks_train_alike_with_the_kernels_and_without(
    build: Callable[[], nn.Module], convs, launched, monkeypatch
) -> None:
    torch.manual_seed(0)
    model = build().to(memory_format=torch.channels_last).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # no activation at a kink, where a last bit decides the gradient
            nn.init.normal_(module.weight, 1.0, 0.1)
            nn.init.constant_(module.bias, 4.0)
    fuse(model)
    other = copy.deepcopy(model)
    images = torch.randn(4, 3, 16, 16).contiguous(memory_format=torch.channels_last)
    found = trained(model, images)
    assert launched == convs
    monkeypatch.setattr(ops, "_CONFIGS", ())
    expected = trained(other, images)
    assert launched == convs
    for name, value in expected.items():
        assert found[name].dtype == value.dtype == (torch.int64 if "num_batches" in name else torch.float32)
        error = (found[name] - value).double().norm().item()
        assert error <= 2e-2 * value.double().norm().item() + 1e-3, name


def test_other_layers_are_called(launched) -> None:
    class Doubled(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    x, norm, act, calls = draw((2, 16, 4, 4), torch.float16, 0), FusedBatchNorm2d(32), nn.ReLU(), []
    norm.groups = (2,)
    hooked = nn.Conv2d(16, 32, 1, bias=False)
    hooked.register_forward_hook(lambda *_: calls.append("hooked"))
    others = [
        nn.Conv2d(16, 32, 1),
        nn.Conv2d(16, 32, 1, stride=2, bias=False),
        nn.Conv2d(16, 32, 1, groups=2, bias=False),
        nn.Conv2d(16, 32, 1, padding=1, bias=False),
        nn.Conv2d(16, 32, 3, bias=False),
        Doubled(16, 32, 1, bias=False),
        hooked,
    ]
    for conv in others:
        conv.half()
        torch.testing.assert_close(conv_norm_act(conv, norm, x, act), act(norm(conv(x))))
    assert not launched and len(calls) == 2
    conv = nn.Conv2d(16, 32, 1, bias=False).half()
    torch.testing.assert_close(conv_norm_act(conv, norm, x, act), act(norm(conv(x))), rtol=2e-2, atol=2e-2)
    assert launched == [(16, 32)]
    conv_norm_act(conv, norm.eval(), x, act)
    assert len(launched) == 1
