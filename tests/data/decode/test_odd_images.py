"""Odd images become what a careful person expects, in training and in evaluation."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from data_examples import encode
from loading_examples import each_row, host_eval, host_train
from PIL import Image

from reconv.data.decode.pillow import decode
from reconv.data.transforms.geometry import crop_params
from reconv.errors import DataError
from reconv.recipe.data_fields import AugmentConfig, PreprocessConfig

SMOOTH = np.dstack(
    [
        np.add.outer(np.arange(48) * 2, np.arange(64)),
        np.add.outer(np.arange(48), 200 - np.arange(64) * 2),
        np.full((48, 64), 80),
    ]
).astype(np.uint8)
MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I", "F", "CMYK")


def saved(image: Image.Image, form: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def png_of_16_bits(pixels: np.ndarray) -> bytes:
    """A colour PNG of 16 bits a channel, which Pillow does not write."""
    height, width, channels = pixels.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 16, {3: 2, 4: 6}[channels], 0, 0, 0)
    pieces = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    chunks = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in pieces
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_colours_of_16_bits_keep_their_upper_8() -> None:
    wide = SMOOTH.astype(np.uint16) * 257
    assert np.array_equal(decode(png_of_16_bits(wide), 3), SMOOTH)
    opaque = np.dstack([wide, np.full((48, 64), 65535, np.uint16)])
    assert np.array_equal(decode(png_of_16_bits(opaque), 3), SMOOTH)


def test_cmyk_has_the_colours_people_see() -> None:
    """Adobe's programs store CMYK inverted; either way red is red."""
    red = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    for data in (saved(red, "JPEG", quality=95), saved(red, "TIFF")):
        r, g, b = decode(data, 3)[8, 8].tolist()
        assert r > 230
        assert max(g, b) < 40


def png_beginning(width: int, height: int) -> bytes:
    """The first bytes of a PNG file of some size."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return header + struct.pack(">I", 100) + b"IDAT"


def test_a_palette_has_its_colours_with_and_without_transparency() -> None:
    palette = Image.fromarray(SMOOTH).quantize(16)
    expected = np.asarray(palette.convert("RGB"))
    assert np.array_equal(decode(saved(palette, "PNG"), 3), expected)
    assert np.array_equal(decode(saved(palette, "PNG", transparency=0), 3), expected)
    assert np.array_equal(decode(saved(palette, "GIF"), 3), expected)


@pytest.mark.parametrize("mode", MODES)
def test_one_pixel_of_any_mode_fills_the_square(mode: str) -> None:
    form = {"CMYK": "TIFF", "F": "TIFF", "I": "TIFF"}.get(mode, "PNG")
    value = {"I;16": 200 * 257, "I": 200 * 257, "1": 1}.get(mode, 200)
    dot = (
        Image.new("L", (1, 1), value).convert(mode)
        if mode in ("LA", "RGB", "RGBA", "CMYK")
        else Image.new(mode, (1, 1), value)
    )
    colour = decode(saved(dot, form), 3)
    assert colour.shape == (1, 1, 3)
    if mode not in ("1", "P"):
        assert abs(int(colour[0, 0, 1]) - 200) <= 1
    preprocess = PreprocessConfig(size=32, resize=40)
    assert (host_eval(colour, preprocess) == colour[0, 0, 1]).all()
    [params] = each_row(crop_params(AugmentConfig(), 0, np.array([3], np.int64)))
    assert (host_train(colour, preprocess, AugmentConfig(), params) == colour[0, 0, 1]).all()


@pytest.mark.parametrize("shape", [(20_000, 60), (60, 20_000)])
def test_a_picture_of_20_000_pixels_is_decoded_and_cropped(shape: tuple[int, int]) -> None:
    ramp = np.linspace(0, 255, 20_000).astype(np.uint8)
    pixels = np.broadcast_to(ramp[:, None] if shape[0] > 60 else ramp[None, :], shape)
    image = decode(encode(np.ascontiguousarray(pixels)), 3)
    assert image.shape == (*shape, 3)
    centre = host_eval(image, PreprocessConfig(size=32, resize=40))
    assert centre.shape == (3, 32, 32)
    assert abs(float(centre.mean()) - 127.5) < 2
    for position in range(5):
        [params] = each_row(crop_params(AugmentConfig(), 0, np.array([position], np.int64)))
        assert host_train(image, PreprocessConfig(size=32), AugmentConfig(), params).shape == (3, 32, 32)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_square_of_20_000_pixels_is_refused_and_says_how_large_it_is() -> None:
    with pytest.raises(DataError, match="too large") as caught:
        decode(png_beginning(20_000, 20_000), 3, "large.png")
    assert "pixels" in caught.value.why


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_nonsense_in_exif_leaves_the_picture_as_it_is() -> None:
    plain = decode(saved(Image.fromarray(SMOOTH), "JPEG"), 3)
    wrong = [b"Exif\0\0garbage", b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff"]
    for orientation in (0, 9, 300):
        exif = Image.Exif()
        exif[0x0112] = orientation
        wrong.append(exif.tobytes())
    wrong.append(wrong[-1][:20])
    assert len(wrong) == 7
    for exif_bytes in wrong:
        assert np.array_equal(decode(saved(Image.fromarray(SMOOTH), "JPEG", exif=exif_bytes), 3), plain), exif_bytes


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_a_file_cut_anywhere_is_a_data_error_or_the_whole_picture(form: str) -> None:
    whole = saved(Image.fromarray(SMOOTH), form)
    expected = decode(whole, 3)
    num_refused = 0
    for length in range(0, len(whole), max(1, len(whole) // 60)):
        try:
            assert np.array_equal(decode(whole[:length], 3, "cut"), expected), length
        except DataError as error:
            assert error.where == "cut"
            num_refused += 1
    assert num_refused > 50


def test_a_machine_without_memory_is_not_taken_for_a_damaged_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*given: object, **named: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Image, "open", exhausted)
    with pytest.raises(MemoryError):
        decode(b"any", 3)


def test_pillow_does_not_warn_past_us_of_a_picture_that_is_refused() -> None:
    program = """
from reconv.data.decode.pillow import decode
from reconv.errors import DataError
from test_odd_images import png_beginning
try:
    decode(png_beginning(12_000, 9_000), 3)
except DataError as error:
    print(error.what)
"""
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("image is too large to decode safely\n", "")
