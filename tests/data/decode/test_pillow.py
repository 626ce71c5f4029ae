"""Decoding with Pillow: every mode and orientation, and files that are damaged or too large."""

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
from data_examples import encode, noise
from PIL import Image

from reconv.core.errors import DataError, ExitCode
from reconv.data.decode.jpeg_header import count_scans
from reconv.data.decode.pillow import decode

GRADIENT = np.add.outer(np.arange(20) * 4, np.arange(30) * 5).astype(np.uint8)


COLOR = np.stack([GRADIENT, 255 - GRADIENT, np.full_like(GRADIENT, 90)], axis=2)


def saved(image: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def test_every_mode_becomes_three_or_one_channels() -> None:
    color, gray = Image.fromarray(COLOR), Image.fromarray(GRADIENT)
    palette = color.quantize(32)
    transparent = palette.copy()
    transparent.info["transparency"] = bytes(range(32))
    with_alpha = color.copy()
    with_alpha.putalpha(gray)
    files = {
        "rgb": encode(COLOR),
        "gray": encode(GRADIENT),
        "gray-jpeg": saved(gray, "JPEG"),
        "bilevel": saved(gray.convert("1"), "PNG"),
        "cmyk-jpeg": saved(color.convert("CMYK"), "JPEG"),
        "palette": saved(palette, "PNG"),
        "palette-with-transparency": saved(transparent, "PNG"),
        "rgba": saved(with_alpha, "PNG"),
        "gray-alpha": saved(with_alpha.convert("LA"), "PNG"),
        "16-bit": encode(GRADIENT.astype(np.uint16) * 257),
        "16-bit-tiff": encode(GRADIENT.astype(np.uint16) * 257, "TIFF"),
        "32-bit-tiff": encode(GRADIENT.astype(np.int32) * 257, "TIFF"),
        "float-tiff": encode(GRADIENT.astype(np.float32), "TIFF"),
        "webp": saved(color, "WEBP", lossless=True),
        "bmp": encode(COLOR, "BMP"),
    }
    for name, data in files.items():
        assert decode(data, 3).shape == (20, 30, 3), name
        assert decode(data, 1).shape == (20, 30, 1), name
        assert decode(data, 3).dtype == np.uint8, name
    for name in ("rgb", "rgba", "webp", "bmp"):
        assert np.array_equal(decode(files[name], 3), COLOR), name
    for name in ("gray", "16-bit", "16-bit-tiff", "32-bit-tiff", "float-tiff"):
        assert np.array_equal(decode(files[name], 3), np.repeat(GRADIENT[:, :, None], 3, axis=2)), name
        assert np.array_equal(decode(files[name], 1)[:, :, 0], GRADIENT), name
    assert np.abs(decode(files["cmyk-jpeg"], 3).astype(int) - COLOR).mean() < 4


def test_exif_orientation_is_applied() -> None:
    turned = {
        1: COLOR, 2: COLOR[:, ::-1], 3: COLOR[::-1, ::-1], 4: COLOR[::-1], 5: COLOR.transpose(1, 0, 2),
        6: COLOR.transpose(1, 0, 2)[:, ::-1], 7: COLOR.transpose(1, 0, 2)[::-1, ::-1],
        8: COLOR.transpose(1, 0, 2)[::-1],
    }  # fmt: skip
    for orientation, expected in turned.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        assert np.array_equal(decode(saved(Image.fromarray(COLOR), "PNG", exif=exif), 3), expected), orientation


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
def test_a_decompression_bomb_is_rejected_before_it_is_decoded(side: int) -> None:
    chunk = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    with pytest.raises(DataError, match="too large") as caught:
        decode(header + struct.pack(">I", 100) + b"IDAT", 3, "bomb.png")
    assert caught.value.where == "bomb.png"


SMOOTH = np.dstack(
    [
        np.add.outer(np.arange(48) * 2, np.arange(64)),
        np.add.outer(np.arange(48), 200 - np.arange(64) * 2),
        np.full((48, 64), 80),
    ]
).astype(np.uint8)


def png_of_16_bits(pixels: np.ndarray) -> bytes:
    """A color PNG of 16 bits a channel, which Pillow does not write."""
    height, width, channels = pixels.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 16, {3: 2, 4: 6}[channels], 0, 0, 0)
    pieces = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    chunks = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in pieces
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_16_bit_colors_keep_their_upper_8_bits() -> None:
    wide = SMOOTH.astype(np.uint16) * 257
    assert np.array_equal(decode(png_of_16_bits(wide), 3), SMOOTH)
    opaque = np.dstack([wide, np.full((48, 64), 65535, np.uint16)])
    assert np.array_equal(decode(png_of_16_bits(opaque), 3), SMOOTH)


def test_cmyk_is_converted_to_the_right_colors() -> None:
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


def test_palettes_are_converted_with_and_without_transparency() -> None:
    palette = Image.fromarray(SMOOTH).quantize(16)
    expected = np.asarray(palette.convert("RGB"))
    assert np.array_equal(decode(saved(palette, "PNG"), 3), expected)
    assert np.array_equal(decode(saved(palette, "PNG", transparency=0), 3), expected)
    assert np.array_equal(decode(saved(palette, "GIF"), 3), expected)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_with_too_many_pixels_is_an_error_that_names_its_size() -> None:
    with pytest.raises(DataError, match="too large") as caught:
        decode(png_beginning(20_000, 20_000), 3, "large.png")
    assert "pixels" in caught.value.why


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_invalid_exif_data_is_ignored() -> None:
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
def test_a_truncated_file_is_a_data_error_or_the_whole_image(form: str) -> None:
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


def test_running_out_of_memory_is_not_a_bad_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*given: object, **named: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Image, "open", exhausted)
    with pytest.raises(MemoryError):
        decode(b"any", 3)


def test_pillow_warnings_are_not_shown() -> None:
    program = """
from reconv.data.decode.jpeg_header import count_scans
from reconv.data.decode.pillow import decode
from reconv.core.errors import DataError
from test_pillow import png_beginning
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


def with_scans(data: bytes, count: int) -> bytes:
    """A JPEG file with its last scan repeated, which takes a few bytes each time."""
    start = data.rindex(b"\xff\xda")
    return data[:-2] + data[start:-2] * count + b"\xff\xd9"


FLAT = Image.fromarray(np.full((1000, 1000), 128, np.uint8))


def test_a_file_of_many_scans_is_refused_before_it_takes_minutes() -> None:
    data = with_scans(saved(FLAT, "JPEG", progressive=True), 100_000)
    assert len(data) < 2_000_000
    with pytest.raises(DataError, match="too large to decode safely") as error:
        decode(data, 1, "scans.jpg")
    assert "scans, more than 250" in str(error.value.why)


@pytest.mark.parametrize("progressive", [False, True])
def test_ordinary_files_and_those_with_previews_are_not_refused(progressive: bool) -> None:
    """Segments of previews and colors may have bytes that look like scans."""
    data = saved(FLAT, "JPEG", progressive=progressive)
    note = b"\xff\xfe" + (102).to_bytes(2, "big") + b"\xff\xda" * 50
    assert decode(data[:2] + note * (1 if progressive else 10) + data[2:], 1).shape == (1000, 1000, 1)


def test_scans_are_counted_where_the_frame_lies_about_its_components() -> None:
    data = with_scans(saved(FLAT, "JPEG"), 1000)
    frame = data.index(b"\xff\xc0")
    assert count_scans(data) == 1
    assert count_scans(data[: frame + 9] + b"\x03" + data[frame + 10 :]) == 1001


def test_a_plain_file_of_many_comments_is_refused_before_it_takes_minutes() -> None:
    pixels = b"7 " * 1_000_000
    assert decode(b"P2 # from a camera\n1000 1000 255\n" + pixels, 1)[0, 0, 0] == 7
    with pytest.raises(DataError, match="too large to decode safely"):
        decode(b"P2 1000 1000 255\n" + b"#\n" * 1_000_000 + pixels, 1)
