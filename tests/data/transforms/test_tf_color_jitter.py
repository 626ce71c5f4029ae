"""Colour jitter on the device against the operations one by one, pixel by pixel."""

from __future__ import annotations

import colorsys

import numpy as np
import pytest
import torch

from reconv.batch import Batch
from reconv.data.transforms.color import device_color_params, jitter_on_device
from reconv.data.transforms.device_transforms import TrainPreprocess
from reconv.data.transforms.params import COLOR_JITTER
from reconv.recipe.data_fields import AugmentConfig, ColorJitterConfig, PreprocessConfig


def slow(image: np.ndarray, added: float, contrast: float, saturation: float, turn: float) -> np.ndarray:
    """One image [3, h, w], pixel by pixel, through Python's own colour conversions."""
    pixels = image / 255 + added
    means = pixels.mean((1, 2), keepdims=True)
    pixels = (pixels - means) * contrast + means
    out = np.empty_like(pixels)
    for y in range(pixels.shape[1]):
        for x in range(pixels.shape[2]):
            hue, strength, value = colorsys.rgb_to_hsv(*pixels[:, y, x])
            out[:, y, x] = colorsys.hsv_to_rgb((hue + turn) % 1, min(max(strength * saturation, 0), 1), value)
    return out * 255


def test_the_four_changes_are_those_of_single_pixels() -> None:
    rng = np.random.default_rng(0)
    # Bright enough that no value falls below 0, where Python's conversion is another one.
    images = rng.integers(110, 200, (4, 3, 5, 6), dtype=np.uint8)
    images[3, :, 0, 0] = 140  # a grey pixel
    drawn = np.array([[0.1, 1.2, 0.6, 0.03], [-0.1, 0.7, 1.5, -0.05], [0, 1, 1, 0], [0.05, 1, 0, 0.5]], np.float32)
    expected = np.stack([slow(image, *row) for image, row in zip(images.astype(float), drawn.tolist(), strict=True)])
    result = jitter_on_device(torch.from_numpy(images), torch.from_numpy(drawn), torch.float64)
    assert result.numpy() == pytest.approx(expected, abs=1e-4)
    assert result[2].numpy() == pytest.approx(images[2].astype(float), abs=1e-9)


def test_extreme_draws_stay_finite_and_a_row_does_not_depend_on_the_others() -> None:
    rng = np.random.default_rng(1)
    images = torch.from_numpy(rng.integers(0, 256, (6, 3, 8, 8), dtype=np.uint8))
    images[0], images[1] = 0, 255
    drawn = torch.tensor([[-0.5, 1.5, 1.5, 0.5]] * 6)
    whole = jitter_on_device(images, drawn, torch.float32)
    assert torch.isfinite(whole).all()
    for row in range(6):
        assert torch.equal(jitter_on_device(images[row : row + 1], drawn[row : row + 1], torch.float32)[0], whole[row])


def test_grey_pictures_have_brightness_and_contrast_alone() -> None:
    images = torch.tensor([[[[0, 100], [100, 200]]]], dtype=torch.uint8)
    result = jitter_on_device(images, torch.tensor([[0.1, 0.5, 0.0, 0.3]]), torch.float64)
    assert result.flatten().tolist() == pytest.approx([75.5, 125.5, 125.5, 175.5], abs=1e-4)


def test_draws_lie_in_the_published_ranges_and_depend_on_the_position_alone() -> None:
    augment = AugmentConfig(
        color_jitter=ColorJitterConfig(
            brightness=0.125, contrast=0.5, saturation=0.5, hue=0.05, implementation="tensorflow"
        )
    )
    drawn = device_color_params(augment.color_jitter, 3, np.arange(4000))
    for column, (low, high) in enumerate([(-0.125, 0.125), (0.5, 1.5), (0.5, 1.5), (-0.05, 0.05)]):
        assert low <= drawn[:, column].min() < low + 0.01 * (high - low)
        assert high - 0.01 * (high - low) < drawn[:, column].max() <= high
    assert np.array_equal(device_color_params(augment.color_jitter, 3, np.array([70, 5])), drawn[[70, 5]])
    strong = AugmentConfig(color_jitter=ColorJitterConfig(contrast=3, implementation="tensorflow"))
    assert device_color_params(strong.color_jitter, 0, np.arange(100))[:, 1].min() == 0


def test_jittered_images_are_normalised_unrounded() -> None:
    preprocess = PreprocessConfig(size=4, resize=None)
    prepare = TrainPreprocess(preprocess, AugmentConfig(hflip=0.0), 10, torch.float32)
    images = torch.full((1, 3, 4, 4), 100, dtype=torch.uint8)
    tensors = {"images": images, COLOR_JITTER: torch.tensor([[0.1, 1.0, 1.0, 0.0]])}
    result = prepare(Batch(tensors, torch.arange(1), (1,)), 0)["images"]
    for channel, (mean, std) in enumerate(zip(preprocess.mean, preprocess.std, strict=True)):
        assert result[0, channel, 0, 0].item() == pytest.approx((100 / 255 + 0.1 - mean) / std, abs=1e-5)
