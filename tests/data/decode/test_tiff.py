"""TIFF files of unusual depth: read rightly, or refused with what they hold."""

from __future__ import annotations

import io
import struct

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from reconv.core.errors import DataError
from reconv.data.decode.pillow import decode
from reconv.data.readers.detection.box_table_dataset import upright_size

GRAY = np.add.outer(np.arange(20) * 4, np.arange(30) * 5).astype(np.uint8)
COLOR = np.stack([GRAY, 255 - GRAY, np.full_like(GRAY, 90)], axis=2)
UNSIGNED, SIGNED, FLOAT = 1, 2, 3


def tiff(pixels: npt.NDArray[np.generic], sample_format: int) -> bytes:
    """An uncompressed TIFF of any depth, which Pillow does not write."""
    height, width, *rest = pixels.shape
    num_samples, bits, data = rest[0] if rest else 1, 8 * pixels.dtype.itemsize, pixels.tobytes()
    numbers = {256: width, 257: height, 259: 1, 262: 2 if rest else 1, 277: num_samples, 278: height, 279: len(data)}
    arrays = {258: [bits] * num_samples, 339: [sample_format] * num_samples}
    after = 8 + 2 + 12 * (len(numbers) + len(arrays) + 1) + 4
    extra, entries = b"", {}
    for tag, values in arrays.items():
        packed = struct.pack(f"<{len(values)}H", *values)
        if len(values) > 2:
            packed, extra = struct.pack("<I", after + len(extra)), extra + packed
        entries[tag] = struct.pack("<HHI", tag, 3, len(values)) + packed.ljust(4, b"\0")
    numbers[273] = after + len(extra)
    entries |= {tag: struct.pack("<HHII", tag, 4, 1, value) for tag, value in numbers.items()}
    directory = struct.pack("<H", len(entries)) + b"".join(entry for _, entry in sorted(entries.items()))
    return b"II*\0" + struct.pack("<I", 8) + directory + bytes(4) + extra + data


@pytest.mark.parametrize(
    ("pixels", "sample_format"),
    [
        (GRAY.astype(np.uint16) * 257, UNSIGNED),
        (GRAY.astype(np.int16), SIGNED),
        (GRAY.astype(np.int32), SIGNED),
        (GRAY.astype(np.int32) * 257, SIGNED),
        (GRAY.astype(np.uint32), UNSIGNED),
        (GRAY.astype(np.float32), FLOAT),
        (np.float32(GRAY / 255 + 1e-4), FLOAT),
    ],
)
def test_gray_of_any_depth_keeps_its_upper_8_bits(pixels: npt.NDArray[np.generic], sample_format: int) -> None:
    assert np.array_equal(decode(tiff(pixels, sample_format), 1)[:, :, 0], GRAY)


def test_16_bit_color_is_read() -> None:
    assert np.array_equal(decode(tiff(COLOR.astype(np.uint16) * 257, UNSIGNED), 3), COLOR)


def test_the_first_page_is_read() -> None:
    file = io.BytesIO()
    Image.fromarray(COLOR).save(file, "TIFF", save_all=True, append_images=[Image.fromarray(255 - COLOR)])
    assert np.array_equal(decode(file.getvalue(), 3), COLOR)


@pytest.mark.parametrize(
    ("pixels", "sample_format", "why"),
    [
        (GRAY.astype(np.float64), FLOAT, "1 sample of 64-bit float per pixel"),
        (GRAY.astype(np.float16), FLOAT, "1 sample of 16-bit float per pixel"),
        (COLOR.astype(np.float32), FLOAT, "3 samples of 32-bit float per pixel"),
        (COLOR.astype(np.uint32), UNSIGNED, "3 samples of 32-bit unsigned integer per pixel"),
        (np.repeat(COLOR, 2, axis=2), UNSIGNED, "6 samples of 8-bit unsigned integer per pixel"),
    ],
)
def test_an_unsupported_tiff_is_described(pixels: npt.NDArray[np.generic], sample_format: int, why: str) -> None:
    data = tiff(pixels, sample_format)
    for read in (lambda: decode(data, 3, "a.tif"), lambda: upright_size(data, "a.tif")):
        with pytest.raises(DataError, match="this kind of TIFF is not supported") as caught:
            read()
        assert why in caught.value.why and "8-bit" in caught.value.hint and caught.value.where == "a.tif"


@pytest.mark.parametrize(
    ("pixels", "sample_format", "why"),
    [
        (GRAY.astype(np.int32) - 5, SIGNED, "its integers are -5 to"),
        (GRAY.astype(np.uint32) * 2**20, UNSIGNED, "only 0 to 255 and 0 to 65535"),
        (np.full_like(GRAY, np.nan, dtype=np.float32), FLOAT, "not finite"),
    ],
)
def test_values_without_a_known_range_are_refused(
    pixels: npt.NDArray[np.generic], sample_format: int, why: str
) -> None:
    with pytest.raises(DataError, match="pixel values are not supported") as caught:
        decode(tiff(pixels, sample_format), 3, "a.tif")
    assert why in caught.value.why and caught.value.where == "a.tif"
