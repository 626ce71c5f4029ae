"""Test-time augmentation: the mean over explicit passes, with weights that add up to 1."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from reconv.tasks.evaluation import average_views, views

IMAGES = torch.rand(3, 2, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture
def model() -> nn.Module:
    """A model that sees where a pixel is, so that every view has other logits."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 5)).double()


def shift(images: Tensor, by: int) -> Tensor:
    """The images shifted by a pixel down and right (1) or up and left (-1), reflected at the border."""
    last = images.shape[-1] - 1
    index = [last - abs(last - abs(i - by)) for i in range(last + 1)]
    return images[..., index, :][..., index]


def test_flip_averages_the_image_and_its_mirror_image(model: nn.Module) -> None:
    expected = (model(IMAGES) + model(IMAGES.flip(-1))) / 2
    torch.testing.assert_close(average_views(model, "flip")(IMAGES), expected)


def test_flip_translate_averages_six_explicit_passes(model: nn.Module) -> None:
    flipped = average_views(model, "flip")
    expected = flipped(IMAGES) / 2 + (flipped(shift(IMAGES, 1)) + flipped(shift(IMAGES, -1))) / 4
    torch.testing.assert_close(average_views(model, "flip-translate")(IMAGES), expected)
    assert not torch.allclose(expected, flipped(IMAGES))


@pytest.mark.parametrize(("tta", "num_views"), [("flip", 2), ("flip-translate", 6)])
def test_view_weights_sum_to_one(tta: str, num_views: int) -> None:
    weights = [weight for _, weight in views(IMAGES, tta)]
    assert len(weights) == num_views
    assert sum(weights) == 1


def test_no_tta_returns_the_model(model: nn.Module) -> None:
    assert average_views(model, "none") is model
