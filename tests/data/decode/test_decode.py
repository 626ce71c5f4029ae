"""Decoding, resizing and cropping on the host."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from data_examples import encode, noise
from hypothesis import given
from hypothesis import strategies as st
from loading_examples import each_row, host_eval, host_train
from PIL import Image

from reconv.data.dataset import select_rows
from reconv.data.decode.pillow import decode
from reconv.data.transforms.geometry import (
    CROP_AREA,
    CROP_CORNER,
    CROP_POSITION,
    CROP_RATIO,
    crop_params,
    pad_crop,
    random_flips,
    random_resized_crop_box,
)
from reconv.data.transforms.host_transforms import resized_shorter_side, train_preprocess
from reconv.errors import DataError, ExitCode
from reconv.recipe.data_fields import AugmentConfig, PreprocessConfig

GRADIENT = np.add.outer(np.arange(20) * 4, np.arange(30) * 5).astype(np.uint8)
COLOUR = np.stack([GRADIENT, 255 - GRADIENT, np.full_like(GRADIENT, 90)], axis=2)


def saved(image: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def test_every_mode_becomes_three_or_one_channels() -> None:
    colour, grey = Image.fromarray(COLOUR), Image.fromarray(GRADIENT)
    palette = colour.quantize(32)
    transparent = palette.copy()
    transparent.info["transparency"] = bytes(range(32))
    with_alpha = colour.copy()
    with_alpha.putalpha(grey)
    files = {
        "rgb": encode(COLOUR),
        "grey": encode(GRADIENT),
        "grey-jpeg": saved(grey, "JPEG"),
        "bilevel": saved(grey.convert("1"), "PNG"),
        "cmyk-jpeg": saved(colour.convert("CMYK"), "JPEG"),
        "palette": saved(palette, "PNG"),
        "palette-with-transparency": saved(transparent, "PNG"),
        "rgba": saved(with_alpha, "PNG"),
        "grey-alpha": saved(with_alpha.convert("LA"), "PNG"),
        "16-bit": encode(GRADIENT.astype(np.uint16) * 257),
        "16-bit-tiff": encode(GRADIENT.astype(np.uint16) * 257, "TIFF"),
        "32-bit-tiff": encode(GRADIENT.astype(np.int32) * 257, "TIFF"),
        "float-tiff": encode(GRADIENT.astype(np.float32), "TIFF"),
        "webp": saved(colour, "WEBP", lossless=True),
        "bmp": encode(COLOUR, "BMP"),
    }
    for name, data in files.items():
        assert decode(data, 3).shape == (20, 30, 3), name
        assert decode(data, 1).shape == (20, 30, 1), name
        assert decode(data, 3).dtype == np.uint8, name
    for name in ("rgb", "rgba", "webp", "bmp"):
        assert np.array_equal(decode(files[name], 3), COLOUR), name
    for name in ("grey", "16-bit", "16-bit-tiff", "32-bit-tiff", "float-tiff"):
        assert np.array_equal(decode(files[name], 3), np.repeat(GRADIENT[:, :, None], 3, axis=2)), name
        assert np.array_equal(decode(files[name], 1)[:, :, 0], GRADIENT), name
    assert np.abs(decode(files["cmyk-jpeg"], 3).astype(int) - COLOUR).mean() < 4


def test_pictures_are_turned_upright() -> None:
    turned = {
        1: COLOUR, 2: COLOUR[:, ::-1], 3: COLOUR[::-1, ::-1], 4: COLOUR[::-1], 5: COLOUR.transpose(1, 0, 2),
        6: COLOUR.transpose(1, 0, 2)[:, ::-1], 7: COLOUR.transpose(1, 0, 2)[::-1, ::-1],
        8: COLOUR.transpose(1, 0, 2)[::-1],
    }  # fmt: skip
    for orientation, expected in turned.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        assert np.array_equal(decode(saved(Image.fromarray(COLOUR), "PNG", exif=exif), 3), expected), orientation


def test_a_damaged_file_is_a_data_error_with_its_path() -> None:
    whole = encode(noise(50, 50, 3, 0), "JPEG")
    png = encode(noise(50, 50, 3, 0))
    damaged = {
        "truncated.jpg": whole[: len(whole) // 2],
        "truncated.png": png[: len(png) // 2],
        "header.png": png[:20],
        "text.jpg": b"this is no image",
        "empty.jpg": b"",
        "script.eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    }
    for name, data in damaged.items():
        with pytest.raises(DataError) as caught:
            decode(data, 3, name)
        assert (caught.value.where, caught.value.code) == (name, ExitCode.DATA)


@pytest.mark.parametrize("side", [9_500, 60_000])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_decompression_bomb_is_refused_before_it_is_decoded(side: int) -> None:
    chunk = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    with pytest.raises(DataError, match="too large") as caught:
        decode(header + struct.pack(">I", 100) + b"IDAT", 3, "bomb.png")
    assert caught.value.where == "bomb.png"


def test_evaluation_resizes_the_shorter_side_and_takes_the_centre() -> None:
    for (height, width), interpolation in (((90, 140), "bilinear"), ((200, 64), "bicubic"), ((40, 41), "nearest")):
        image = noise(height, width, 3, 1)
        preprocess = PreprocessConfig(size=32, resize=40, interpolation=interpolation)  # type: ignore[arg-type]
        scaled = (40 * width // min(width, height), 40 * height // min(width, height))
        whole = Image.fromarray(image).resize(scaled, getattr(Image.Resampling, interpolation.upper()))
        left, top = round((scaled[0] - 32) / 2), round((scaled[1] - 32) / 2)
        expected = np.asarray(whole.crop((left, top, left + 32, top + 32))).transpose(2, 0, 1)
        assert np.abs(host_eval(image, preprocess).astype(int) - expected).max() <= 1


def test_extreme_and_tiny_pictures_still_become_squares() -> None:
    for shape in ((1, 1), (1, 5000), (5000, 1), (3, 2)):
        for resize in (None, 40):
            preprocess = PreprocessConfig(size=32, resize=resize)
            image = np.full((*shape, 3), 77, np.uint8)
            assert np.array_equal(host_eval(image, preprocess), np.full((3, 32, 32), 77))
            for crop in ("none", "random", "random_resized"):
                augment = AugmentConfig(crop=crop, padding=0)  # type: ignore[arg-type]
                params = select_rows(crop_params(augment, 0, np.array([5], np.int64)), 0)
                assert np.array_equal(host_train(image, preprocess, augment, params), np.full((3, 32, 32), 77))


def test_an_image_of_the_right_size_is_untouched() -> None:
    image = noise(32, 32, 3, 2)
    for resize in (None, 32):
        assert np.array_equal(host_eval(image, PreprocessConfig(size=32, resize=resize)), image.transpose(2, 0, 1))
    grey = host_eval(image, PreprocessConfig(size=32, resize=None, channels=1, mean=(0.5,), std=(0.5,)))
    assert np.array_equal(grey[0], np.asarray(Image.fromarray(image).convert("L")))


@given(width=st.integers(1, 700), height=st.integers(1, 700), position=st.integers(0, 2**40))
def test_a_resized_crop_lies_inside_the_image(width: int, height: int, position: int) -> None:
    augment = AugmentConfig(crop="random_resized")
    [params] = each_row(crop_params(augment, 0, np.array([position], np.int64)))
    left, top, right, bottom = random_resized_crop_box(width, height, params, augment)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


def test_resized_crops_have_the_areas_and_ratios_asked_for() -> None:
    augment = AugmentConfig(crop="random_resized", scale=(0.2, 0.8), ratio=(0.5, 2.0))
    params = crop_params(augment, 0, np.arange(4000, dtype=np.int64))
    boxes = np.array([random_resized_crop_box(1000, 1000, row, augment) for row in each_row(params)])
    widths, heights = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    areas, ratios = widths * heights / 1e6, widths / heights
    assert areas.min() > 0.198
    assert areas.max() < 0.802
    # Large boxes of extreme ratio do not fit and are drawn again, so the mean is a little below the middle.
    assert 0.44 < areas.mean() < 0.5
    assert abs(np.log(ratios).mean()) < 0.03
    assert ratios.min() > 0.49
    assert ratios.max() < 2.04
    fixed = random_resized_crop_box(
        640, 480, select_rows(params, 0), AugmentConfig(scale=(1.0, 1.0), ratio=(640 / 480, 640 / 480))
    )
    assert fixed == (0, 0, 640, 480)


def test_more_attempts_find_a_box_where_ten_do_not() -> None:
    positions = np.arange(300, dtype=np.int64)
    missed = {}
    for attempts in (10, 100):
        augment = AugmentConfig(scale=(0.05, 1.0), attempts=attempts, fallback="whole")
        boxes = [
            random_resized_crop_box(90, 1000, row, augment) for row in each_row(crop_params(augment, 0, positions))
        ]
        missed[attempts] = sum(box == (0, 0, 90, 1000) for box in boxes)
    assert missed[10] > 100
    assert missed[100] < missed[10] / 10
    # Without a fitting box: the largest centred one, or the whole image.
    never = dict.fromkeys((CROP_AREA, CROP_RATIO), np.full(10, 0.999)) | {CROP_POSITION: np.full(2, 0.999)}
    assert random_resized_crop_box(90, 1000, never, AugmentConfig()) == (0, 440, 90, 560)
    assert random_resized_crop_box(90, 1000, never, AugmentConfig(fallback="whole")) == (0, 0, 90, 1000)


def test_the_side_before_the_centre_crop_follows_the_rule() -> None:
    sides = [resized_shorter_side(PreprocessConfig(size=size, resize="auto-ratio")) for size in (224, 380, 32, 288)]
    assert sides == [256, 434, 36, 329]
    assert resized_shorter_side(PreprocessConfig(size=380, resize="auto-plus32")) == 412
    assert resized_shorter_side(PreprocessConfig()) == 256
    assert resized_shorter_side(PreprocessConfig(resize=None)) is None
    image = noise(90, 140, 3, 1)
    for rule, side in (("auto-ratio", 36), ("auto-plus32", 64)):
        by_rule = host_eval(image, PreprocessConfig(size=32, resize=rule))  # type: ignore[arg-type]
        assert np.array_equal(by_rule, host_eval(image, PreprocessConfig(size=32, resize=side)))


def test_training_at_another_size_keeps_the_share_of_the_image_shown() -> None:
    spec = train_preprocess(PreprocessConfig(size=224, resize=256), AugmentConfig(interpolation="bicubic"), 112)
    assert (spec.size, spec.resize, spec.interpolation) == (112, 128, "bicubic")
    assert train_preprocess(PreprocessConfig(size=224, resize=None), AugmentConfig(), 112).resize is None
    assert (
        train_preprocess(PreprocessConfig(size=224, resize="auto-plus32"), AugmentConfig(), 112).resize == "auto-plus32"
    )
    assert train_preprocess(PreprocessConfig(), AugmentConfig(), 224) == PreprocessConfig()


def test_the_interpolation_of_training_is_its_own() -> None:
    image = noise(60, 60, 3, 3)
    augment = AugmentConfig(scale=(1.0, 1.0), ratio=(1.0, 1.0), interpolation="nearest")
    spec = train_preprocess(PreprocessConfig(size=32), augment, 32)
    [params] = each_row(crop_params(augment, 0, np.array([3], np.int64)))
    whole = Image.fromarray(image).resize((32, 32), Image.Resampling.NEAREST)
    assert np.array_equal(host_train(image, spec, augment, params), np.asarray(whole).transpose(2, 0, 1))


def test_pad_crop_shifts_the_image_and_fills_with_black() -> None:
    images = np.stack([noise(6, 6, 3, seed).transpose(2, 0, 1) for seed in range(3)])
    corners = np.array([[0, 0], [2, 2], [4, 0]])
    top_left, centre, bottom = pad_crop(images, corners, 2)
    assert np.array_equal(top_left[:, 2:, 2:], images[0, :, :4, :4])
    assert not top_left[:, :2].any()
    assert np.array_equal(centre, images[1])
    assert np.array_equal(bottom[:, :4, 2:], images[2, :, 2:, :4])
    assert not bottom[:, 4:].any()


def test_pad_crops_reach_every_shift_equally_often() -> None:
    augment = AugmentConfig(crop="random", padding=1)
    corners = crop_params(augment, 0, np.arange(9000, dtype=np.int64))[CROP_CORNER]
    image = np.arange(1, 10, dtype=np.uint8).reshape(1, 1, 3, 3)
    crops = pad_crop(np.repeat(image, 9000, axis=0), corners, 1)
    centres, counts = np.unique(crops[:, 0, 1, 1], return_counts=True)
    assert centres.tolist() == list(range(1, 10))
    assert counts.min() > 850


def test_flips_follow_their_share_and_depend_on_position_alone() -> None:
    positions = np.arange(10_000, dtype=np.int64)
    flips = random_flips(AugmentConfig(hflip=0.3), 1, positions)
    assert abs(flips.mean() - 0.3) < 0.02
    assert np.array_equal(random_flips(AugmentConfig(hflip=0.3), 1, positions[17:40]), flips[17:40])
    assert not random_flips(AugmentConfig(hflip=0), 1, positions).any()
    assert random_flips(AugmentConfig(hflip=1), 1, positions).all()
