"""Evaluation and training images: which part of the image they show, and how it is resized."""

from __future__ import annotations

import io

import numpy as np
import pytest
from data_examples import encode, noise
from loading_examples import each_row, host_eval, host_train
from PIL import Image

from reconv.data.dataset import select_rows
from reconv.data.decode.pillow import decode
from reconv.data.transforms.geometry import (
    crop_params,
    random_resized_crop_box,
)
from reconv.data.transforms.host import resized_shorter_side, train_preprocess
from reconv.recipe.parts.data import AugmentConfig, PreprocessConfig


def saved(image: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def test_evaluation_resizes_the_shorter_side_and_crops_the_center() -> None:
    for (height, width), interpolation in (((90, 140), "bilinear"), ((200, 64), "bicubic"), ((40, 41), "nearest")):
        image = noise(height, width, 3, 1)
        preprocess = PreprocessConfig(size=32, resize=40, interpolation=interpolation)  # type: ignore[arg-type]
        scaled = (40 * width // min(width, height), 40 * height // min(width, height))
        whole = Image.fromarray(image).resize(scaled, getattr(Image.Resampling, interpolation.upper()))
        left, top = round((scaled[0] - 32) / 2), round((scaled[1] - 32) / 2)
        expected = np.asarray(whole.crop((left, top, left + 32, top + 32))).transpose(2, 0, 1)
        assert np.abs(host_eval(image, preprocess).astype(int) - expected).max() <= 1


def test_extreme_and_tiny_images_are_transformed() -> None:
    for shape in ((1, 1), (1, 5000), (5000, 1), (3, 2)):
        for resize in (None, 40):
            preprocess = PreprocessConfig(size=32, resize=resize)
            image = np.full((*shape, 3), 77, np.uint8)
            assert np.array_equal(host_eval(image, preprocess), np.full((3, 32, 32), 77))
            for crop in ("none", "random", "random_resized"):
                augment = AugmentConfig(crop=crop, padding=0)  # type: ignore[arg-type]
                params = select_rows(crop_params(augment, 0, np.array([5], np.int64)), 0)
                assert np.array_equal(host_train(image, preprocess, augment, params), np.full((3, 32, 32), 77))


def test_an_image_of_the_right_size_is_unchanged() -> None:
    image = noise(32, 32, 3, 2)
    for resize in (None, 32):
        assert np.array_equal(host_eval(image, PreprocessConfig(size=32, resize=resize)), image.transpose(2, 0, 1))
    gray = host_eval(image, PreprocessConfig(size=32, resize=None, channels=1, mean=(0.5,), std=(0.5,)))
    assert np.array_equal(gray[0], np.asarray(Image.fromarray(image).convert("L")))


def test_the_shorter_side_before_the_center_crop() -> None:
    sides = [resized_shorter_side(PreprocessConfig(size=size, resize="auto-ratio")) for size in (224, 380, 32, 288)]
    assert sides == [256, 434, 36, 329]
    assert resized_shorter_side(PreprocessConfig(size=380, resize="auto-plus32")) == 412
    assert resized_shorter_side(PreprocessConfig()) == 256
    assert resized_shorter_side(PreprocessConfig(resize=None)) is None
    image = noise(90, 140, 3, 1)
    for rule, side in (("auto-ratio", 36), ("auto-plus32", 64)):
        by_rule = host_eval(image, PreprocessConfig(size=32, resize=rule))  # type: ignore[arg-type]
        assert np.array_equal(by_rule, host_eval(image, PreprocessConfig(size=32, resize=side)))


def test_training_at_another_size_shows_the_same_fraction_of_the_image() -> None:
    spec = train_preprocess(PreprocessConfig(size=224, resize=256), AugmentConfig(interpolation="bicubic"), 112)
    assert (spec.size, spec.resize, spec.interpolation) == (112, 128, "bicubic")
    assert train_preprocess(PreprocessConfig(size=224, resize=None), AugmentConfig(), 112).resize is None
    assert (
        train_preprocess(PreprocessConfig(size=224, resize="auto-plus32"), AugmentConfig(), 112).resize == "auto-plus32"
    )
    assert train_preprocess(PreprocessConfig(), AugmentConfig(), 224) == PreprocessConfig()


def test_training_can_have_another_interpolation() -> None:
    image = noise(60, 60, 3, 3)
    augment = AugmentConfig(scale=(1.0, 1.0), ratio=(1.0, 1.0), interpolation="nearest")
    spec = train_preprocess(PreprocessConfig(size=32), augment, 32)
    [params] = each_row(crop_params(augment, 0, np.array([3], np.int64)))
    whole = Image.fromarray(image).resize((32, 32), Image.Resampling.NEAREST)
    assert np.array_equal(host_train(image, spec, augment, params), np.asarray(whole).transpose(2, 0, 1))


SPEC = PreprocessConfig(size=32)


def blurred(height: int, width: int, seed: int, channels: int = 3) -> Image.Image:
    """An image with edges and slopes, as photographs have them."""
    small = Image.fromarray(noise(height // 8 + 1, width // 8 + 1, 3, seed))
    image = small.resize((width, height), Image.Resampling.BICUBIC)
    return image if channels == 3 else image.convert("L")


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_training_images_match_pillow_within_rounding(interpolation: str) -> None:
    augment, spec = AugmentConfig(), PreprocessConfig(size=32, interpolation=interpolation)  # type: ignore[arg-type]
    image = blurred(90, 131, 3)
    for params in each_row(crop_params(augment, 0, np.arange(20, dtype=np.int64))):
        box = random_resized_crop_box(131, 90, params, augment)
        expected = image.crop(box).resize((32, 32), getattr(Image.Resampling, interpolation.upper()))
        apart = np.abs(
            host_train(np.asarray(image), spec, augment, params).astype(int) - np.asarray(expected).transpose(2, 0, 1)
        )
        assert apart.max() <= 1
        assert apart.mean() < 0.2


def test_without_antialias_pixels_between_samples_are_ignored() -> None:
    """Downscaled by 8, only rows 3 and 4 of each 8 are sampled; the others count only with antialias."""
    pixels = np.zeros((256, 256, 3), np.uint8)
    pixels[::8] = 255
    whole = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0)}
    [params] = each_row(crop_params(AugmentConfig(), 0, np.arange(1, dtype=np.int64)))
    assert host_train(pixels, SPEC, AugmentConfig(antialias=False, **whole), params).max() == 0
    assert host_train(pixels, SPEC, AugmentConfig(**whole), params).min() > 10


MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I", "F", "CMYK")


@pytest.mark.parametrize("mode", MODES)
def test_a_single_pixel_of_any_mode_fills_the_image(mode: str) -> None:
    form = {"CMYK": "TIFF", "F": "TIFF", "I": "TIFF"}.get(mode, "PNG")
    value = {"I;16": 200 * 257, "I": 200 * 257, "1": 1}.get(mode, 200)
    dot = (
        Image.new("L", (1, 1), value).convert(mode)
        if mode in ("LA", "RGB", "RGBA", "CMYK")
        else Image.new(mode, (1, 1), value)
    )
    color = decode(saved(dot, form), 3)
    assert color.shape == (1, 1, 3)
    if mode not in ("1", "P"):
        assert abs(int(color[0, 0, 1]) - 200) <= 1
    preprocess = PreprocessConfig(size=32, resize=40)
    assert (host_eval(color, preprocess) == color[0, 0, 1]).all()
    [params] = each_row(crop_params(AugmentConfig(), 0, np.array([3], np.int64)))
    assert (host_train(color, preprocess, AugmentConfig(), params) == color[0, 0, 1]).all()


@pytest.mark.parametrize("shape", [(20_000, 60), (60, 20_000)])
def test_an_image_with_a_side_of_20_000_pixels_is_decoded_and_cropped(shape: tuple[int, int]) -> None:
    ramp = np.linspace(0, 255, 20_000).astype(np.uint8)
    pixels = np.broadcast_to(ramp[:, None] if shape[0] > 60 else ramp[None, :], shape)
    image = decode(encode(np.ascontiguousarray(pixels)), 3)
    assert image.shape == (*shape, 3)
    center = host_eval(image, PreprocessConfig(size=32, resize=40))
    assert center.shape == (3, 32, 32)
    assert abs(float(center.mean()) - 127.5) < 2
    for position in range(5):
        [params] = each_row(crop_params(AugmentConfig(), 0, np.array([position], np.int64)))
        assert host_train(image, PreprocessConfig(size=32), AugmentConfig(), params).shape == (3, 32, 32)
