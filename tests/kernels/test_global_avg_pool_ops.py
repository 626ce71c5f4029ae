"""Global average pooling has torch's outputs and gradients, bit for bit; the gradient is written in channels_last."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reconv.core.batch import Batch
from reconv.kernels.fuse import fuse
from reconv.kernels.ops import global_avg_pool as ops
from reconv.kernels.ops.global_avg_pool import global_avg_pool
from reconv.models import build_model
from reconv.models.layers.batch_norm import LayerState
from reconv.precision.autocast import CastOps


def both(x: Tensor, dmeans: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Means and gradients of torch and of ours."""
    results = []
    for pool in (lambda images: F.adaptive_avg_pool2d(images, 1), global_avg_pool):
        images = x.clone().requires_grad_()
        means = pool(images)
        (gradient,) = torch.autograd.grad(means, images, dmeans.to(means.dtype))
        results.append([means.detach(), gradient])
    return results[0], results[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("channels, height, width", [(8, 7, 7), (72, 3, 6), (256, 5, 4), (264, 1, 1)])
def test_means_and_gradients_have_torchs_bits(channels, height, width, dtype) -> None:
    generator = torch.Generator().manual_seed(channels)
    x = torch.randn(3, channels, height, width, generator=generator).to(dtype)
    dmeans = torch.randn(3, channels, 1, 1, generator=generator).to(dtype)
    (means, gradient), (our_means, our_gradient) = both(x.contiguous(memory_format=torch.channels_last), dmeans)
    assert torch.equal(our_means, means)
    assert our_gradient.is_contiguous(memory_format=torch.channels_last) and our_gradient.dtype == dtype
    assert torch.equal(our_gradient, gradient)


@pytest.mark.parametrize("layout", ["expanded", "transposed"])
def test_any_layout_of_the_means_gradient(layout) -> None:
    x = torch.randn(4, 16, 3, 3).contiguous(memory_format=torch.channels_last)
    values = torch.randn(16, 4).t() if layout == "transposed" else torch.randn(1, 16).expand(4, 16)
    (_, gradient), (_, our_gradient) = both(x, values[:, :, None, None])
    assert torch.equal(our_gradient, gradient)


def test_means_in_float32_of_bfloat16_images_give_a_bfloat16_gradient() -> None:
    x = torch.randn(2, 8, 7, 7).to(torch.bfloat16).contiguous(memory_format=torch.channels_last)
    with CastOps({F.adaptive_avg_pool2d: torch.float32}):
        (means, gradient), (our_means, our_gradient) = both(x, torch.randn(2, 8, 1, 1))
    assert our_means.dtype == means.dtype == torch.float32 and torch.equal(our_means, means)
    assert our_gradient.dtype == torch.bfloat16 and torch.equal(our_gradient, gradient)


NETWORKS = {"resnet10": {"width": 8}, "mobilenet_v2": {}, "efficientnet_b0": {}, "googlenet": {"aux_heads": False}}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_head_of_each_family_passes_on_a_gradient_in_channels_last(name: str) -> None:
    model = build_model(name, num_classes=8, **NETWORKS[name]).to(memory_format=torch.channels_last).train()
    fuse(model)
    LayerState(model).set_micro_batch(Batch({}, torch.arange(2), (2,)), step=0)
    head = model.stages()[-1][1]
    x = torch.randn(2, sum(p.shape[1] for p in head.parameters() if p.dim() == 2), 3, 3)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    (gradient,) = torch.autograd.grad(head(x).square().sum(), x)
    assert gradient.is_contiguous(memory_format=torch.channels_last) and not gradient.is_contiguous()
    assert gradient.abs().sum() > 0


def test_evaluation_and_contiguous_images_use_torchs_pool(monkeypatch) -> None:
    model = build_model("resnet10", num_classes=8, width=8)
    fuse(model)
    x = torch.randn(2, 64, 3, 3)
    channels_last = x.contiguous(memory_format=torch.channels_last)
    called: list[Tensor] = []
    monkeypatch.setattr(ops, "global_avg_pool", lambda images: called.append(images) or global_avg_pool(images))
    model.train().global_avg_pool(x)
    model.eval().global_avg_pool(channels_last)
    assert not called
    model.train().global_avg_pool(channels_last)
    assert len(called) == 1
