"""Color jitter by Pillow, and on the device against the operations one by one, pixel by pixel."""

from __future__ import annotations

import colorsys

import numpy as np
import pytest
import torch
from data_examples import noise
from PIL import Image, ImageEnhance

from reconv.core.batch import Batch
from reconv.data.transforms.color import COLOR_JITTER, ColorJitter, device_color_params, jitter_on_device, shift_hue
from reconv.data.transforms.train import TrainPreprocess
from reconv.recipe.parts.data import (
    AugmentConfig,
    ColorJitterConfig,
    PreprocessConfig,
)


def test_color_jitter_is_pillows_enhancements_in_order() -> None:
    image, color_jitter = Image.fromarray(noise(12, 12, 3, 0)), ColorJitter(AugmentConfig()).apply
    params = {"brightness": np.array(0.8), "contrast": np.array(1.5), "saturation": np.array(0.8)}
    wanted = ImageEnhance.Brightness(image).enhance(0.8)
    wanted = ImageEnhance.Contrast(wanted).enhance(1.5)
    wanted = ImageEnhance.Color(wanted).enhance(0.8)
    assert np.array_equal(np.asarray(color_jitter(image, params)), np.asarray(wanted))
    hue = color_jitter(image, {"hue": np.array(0.25)})
    assert np.array_equal(np.asarray(hue), np.asarray(shift_hue(image, 0.25)))


def test_color_factors_cover_their_ranges_and_only_those_asked_for() -> None:
    config = ColorJitterConfig(brightness=0.2, contrast=2.0, hue=0.1)
    params = ColorJitter(AugmentConfig(color_jitter=config)).sample(0, np.arange(4000, dtype=np.int64))
    ranges = {"brightness": (0.8, 1.2), "contrast": (0.0, 3.0), "hue": (-0.1, 0.1)}
    assert params.keys() == ranges.keys()
    for name, (low, high) in ranges.items():
        assert low <= params[name].min() < low + 0.01 * (high - low)
        assert high - 0.01 * (high - low) < params[name].max() <= high


def test_hue_shifts_around_the_color_circle() -> None:
    for color in ((200, 40, 40), (10, 220, 90), (60, 60, 180)):
        image = Image.new("RGB", (2, 2), color)
        for turn in (0.0, 0.25, -0.25, 0.5):
            hue, saturation, value = colorsys.rgb_to_hsv(*(c / 255 for c in color))
            wanted = np.array(colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)) * 255
            assert np.abs(np.asarray(shift_hue(image, turn))[0, 0] - wanted).max() < 8


def slow(image: np.ndarray, added: float, contrast: float, saturation: float, turn: float) -> np.ndarray:
    """One image [3, h, w], pixel by pixel, through Python's own color conversions."""
    pixels = image / 255 + added
    means = pixels.mean((1, 2), keepdims=True)
    pixels = (pixels - means) * contrast + means
    out = np.empty_like(pixels)
    for y in range(pixels.shape[1]):
        for x in range(pixels.shape[2]):
            hue, strength, value = colorsys.rgb_to_hsv(*pixels[:, y, x])
            out[:, y, x] = colorsys.hsv_to_rgb((hue + turn) % 1, min(max(strength * saturation, 0), 1), value)
    return out * 255


def test_device_jitter_equals_the_operations_pixel_by_pixel() -> None:
    rng = np.random.default_rng(0)
    # Bright enough that no value falls below 0, where Python's conversion is another one.
    images = rng.integers(110, 200, (4, 3, 5, 6), dtype=np.uint8)
    images[3, :, 0, 0] = 140  # a gray pixel
    jitter = np.array([[0.1, 1.2, 0.6, 0.03], [-0.1, 0.7, 1.5, -0.05], [0, 1, 1, 0], [0.05, 1, 0, 0.5]], np.float32)
    expected = np.stack([slow(image, *row) for image, row in zip(images.astype(float), jitter.tolist(), strict=True)])
    result = jitter_on_device(torch.from_numpy(images), torch.from_numpy(jitter), torch.float64)
    assert result.numpy() == pytest.approx(expected, abs=1e-4)
    assert result[2].numpy() == pytest.approx(images[2].astype(float), abs=1e-9)


def test_extreme_jitter_stays_finite_and_rows_are_independent() -> None:
    rng = np.random.default_rng(1)
    images = torch.from_numpy(rng.integers(0, 256, (6, 3, 8, 8), dtype=np.uint8))
    images[0], images[1] = 0, 255
    jitter = torch.tensor([[-0.5, 1.5, 1.5, 0.5]] * 6)
    whole = jitter_on_device(images, jitter, torch.float32)
    assert torch.isfinite(whole).all()
    for row in range(6):
        assert torch.equal(jitter_on_device(images[row : row + 1], jitter[row : row + 1], torch.float32)[0], whole[row])


def test_gray_images_get_brightness_and_contrast_only() -> None:
    images = torch.tensor([[[[0, 100], [100, 200]]]], dtype=torch.uint8)
    result = jitter_on_device(images, torch.tensor([[0.1, 0.5, 0.0, 0.3]]), torch.float64)
    assert result.flatten().tolist() == pytest.approx([75.5, 125.5, 125.5, 175.5], abs=1e-4)


def test_device_jitter_covers_its_ranges_and_depends_on_the_position_alone() -> None:
    augment = AugmentConfig(
        color_jitter=ColorJitterConfig(
            brightness=0.125, contrast=0.5, saturation=0.5, hue=0.05, implementation="tensorflow"
        )
    )
    jitter = device_color_params(augment.color_jitter, 3, np.arange(4000))
    for column, (low, high) in enumerate([(-0.125, 0.125), (0.5, 1.5), (0.5, 1.5), (-0.05, 0.05)]):
        assert low <= jitter[:, column].min() < low + 0.01 * (high - low)
        assert high - 0.01 * (high - low) < jitter[:, column].max() <= high
    assert np.array_equal(device_color_params(augment.color_jitter, 3, np.array([70, 5])), jitter[[70, 5]])
    strong = AugmentConfig(color_jitter=ColorJitterConfig(contrast=3, implementation="tensorflow"))
    assert device_color_params(strong.color_jitter, 0, np.arange(100))[:, 1].min() == 0


def test_jittered_images_are_normalized_without_rounding() -> None:
    preprocess = PreprocessConfig(size=4, resize=None)
    jitter = ColorJitterConfig(brightness=0.1, implementation="tensorflow")
    prepare = TrainPreprocess(preprocess, AugmentConfig(hflip=0.0, color_jitter=jitter), 10, torch.float32)
    images = torch.full((1, 3, 4, 4), 100, dtype=torch.uint8)
    tensors = {"images": images, COLOR_JITTER: torch.tensor([[0.1, 1.0, 1.0, 0.0]])}
    result = prepare(Batch(tensors, torch.arange(1), (1,)), 0)["images"]
    for channel, (mean, std) in enumerate(zip(preprocess.mean, preprocess.std, strict=True)):
        assert result[0, channel, 0, 0].item() == pytest.approx((100 / 255 + 0.1 - mean) / std, abs=1e-5)
