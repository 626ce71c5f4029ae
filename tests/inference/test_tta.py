"""Views at evaluation: the mean over explicit passes, and weights that add up to 1."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from reconv.inference.tta import average_views, views

IMAGES = torch.rand(3, 2, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def network() -> nn.Module:
    """Sees where a pixel is, so that every view has another answer."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 5)).double()


def moved(images: Tensor, by: int) -> Tensor:
    """The images with their content moved by a pixel down-right (1) or up-left (-1), mirrored at the border."""
    last = images.shape[-1] - 1
    places = [last - abs(last - abs(i - by)) for i in range(last + 1)]
    return images[..., places, :][..., places]


def test_flip_is_the_mean_of_an_image_and_its_mirror_image() -> None:
    model = network()
    expected = (model(IMAGES) + model(IMAGES.flip(-1))) / 2
    torch.testing.assert_close(average_views(model, "flip")(IMAGES), expected)


def test_flip_translate_is_the_mean_of_six_explicit_passes() -> None:
    model = network()
    flipped = average_views(model, "flip")
    expected = flipped(IMAGES) / 2 + (flipped(moved(IMAGES, 1)) + flipped(moved(IMAGES, -1))) / 4
    torch.testing.assert_close(average_views(model, "flip-translate")(IMAGES), expected)
    assert not torch.allclose(expected, flipped(IMAGES))


@pytest.mark.parametrize(("tta", "number"), [("flip", 2), ("flip-translate", 6)])
def test_the_weights_of_all_views_add_up_to_one(tta: str, number: int) -> None:
    weights = [weight for _, weight in views(IMAGES, tta)]
    assert len(weights) == number
    assert sum(weights) == 1


def test_without_views_the_network_itself_is_called() -> None:
    model = network()
    assert average_views(model, "none") is model
