"""FastNet: its size, shapes, whitening layer and trained parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from reconv.models import build_model, stages_of
from reconv.models.fastnet import FastNet, whitening_filters


def correlated_images(num_images: int = 64, side: int = 12) -> Tensor:
    """Smooth colorful noise: neighboring pixels and channels go together, as in photographs."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(num_images, 3, side + 1, side + 1, generator=generator)
    smooth = noise[..., 1:, 1:] + 0.7 * noise[..., :-1, 1:] + 0.7 * noise[..., 1:, :-1]
    return smooth + 0.5 * smooth.mean(1, keepdim=True) + 0.3


def test_fastnet_parameter_count() -> None:
    whitening = 24 * 3 * 2 * 2 + 24
    convolutions = 9 * (24 * 64 + 64 * 64 + 64 * 256 + 256 * 256 + 256 * 256 + 256 * 256)
    norms = 2 * 2 * (64 + 256 + 256)
    model = build_model("fastnet_cifar", num_classes=10)
    assert sum(p.numel() for p in model.parameters()) == whitening + convolutions + norms + 2560 == 1_972_792


@pytest.mark.parametrize("side", [8, 32])
def test_stages_in_order_equal_the_forward_pass_and_halve_the_side(side: int) -> None:
    model = build_model("fastnet_cifar", num_classes=7, widths=[16, 32]).eval()
    images = torch.randn(2, 3, side, side)
    value, sides = images, []
    for _, stage in stages_of(model):
        value = stage(value)
        sides.append(value.shape[-1])
    assert torch.equal(value, model(images))
    assert value.shape == (2, 7)
    assert sides[:3] == [side - 1, (side - 1) // 2, (side - 1) // 4]


def test_whitened_patches_have_identity_covariance() -> None:
    images = correlated_images()
    outputs = torch.nn.functional.conv2d(images.double(), whitening_filters(images, smallest=0.0))
    rows = outputs.permute(1, 0, 2, 3).flatten(1)
    assert len(rows) == 12
    torch.testing.assert_close(torch.cov(rows, correction=0), torch.eye(12, dtype=torch.float64), atol=1e-9, rtol=0)


def test_whitening_filters_have_the_bits_of_those_from_unfolded_images() -> None:
    images = correlated_images(side=9)[..., :7]
    patches = images.double().unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 12)
    mean = patches.mean(0)
    variances, directions = torch.linalg.eigh(patches.T @ patches / len(patches) - torch.outer(mean, mean))
    expected = (directions.T / (variances[:, None] + 5e-4).sqrt()).flip(0).reshape(-1, 3, 2, 2)
    assert torch.equal(whitening_filters(images), expected)


def test_the_first_layer_has_each_filter_and_its_negative() -> None:
    model = build_model("fastnet_cifar", num_classes=10)
    assert isinstance(model, FastNet)
    images = correlated_images()
    model.set_whitening(whitening_filters(images))
    first, second = model.whitening.weight.chunk(2)
    assert torch.equal(first, -second)
    assert torch.equal(first, whitening_filters(images).float())
    # The direction that varies most, the mean brightness, comes first and has the smallest filter.
    assert first[0].norm() == first.flatten(1).norm(dim=1).min()


def test_only_whitening_filters_and_norm_scales_are_frozen() -> None:
    model = build_model("fastnet_cifar", num_classes=10)
    fixed = {name for name, p in model.named_parameters() if not p.requires_grad}
    scales = {f"groups.{g}.norm{n}.weight" for g in range(3) for n in (1, 2)}
    assert fixed == {"whitening.weight", *scales}
    quiet = build_model("fastnet_cifar", num_classes=10, whiten_bias=False)
    assert {name for name, p in quiet.named_parameters() if not p.requires_grad} == fixed | {"whitening.bias"}


def test_convolutions_are_initialized_to_the_identity() -> None:
    model = build_model("fastnet_cifar", num_classes=10)
    assert isinstance(model, FastNet)
    group = model.groups[1]
    images = torch.randn(2, 64, 9, 9)
    outputs = group.get_submodule("conv1")(images)
    assert outputs.shape[1] == 256
    torch.testing.assert_close(outputs[:, :64], images)
    assert outputs[:, 64:].std() > 0.1
