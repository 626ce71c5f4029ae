"""Plain JPEG files: whichever decoder is used, and whatever part is decoded, the pixels are those of Pillow."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import simplejpeg
from data_examples import encode, noise
from loading_examples import each_row, host_train
from PIL import Image

from reconv.core.errors import DataError
from reconv.data.decode.jpeg_header import PixelBox, cut_to_box, read_header
from reconv.data.decode.pillow import decode
from reconv.data.decode.simplejpeg import decode_with_pillow, jpeg_decoder, matches_pillow
from reconv.data.transforms.geometry import crop_params
from reconv.recipe.parts.data import AugmentConfig, PreprocessConfig

SPEC = PreprocessConfig(size=32)


def blurred(height: int, width: int, seed: int, channels: int = 3) -> Image.Image:
    """An image with edges and slopes, as photographs have them."""
    small = Image.fromarray(noise(height // 8 + 1, width // 8 + 1, 3, seed))
    image = small.resize((width, height), Image.Resampling.BICUBIC)
    return image if channels == 3 else image.convert("L")


def jpeg(image: Image.Image, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", **options)
    return file.getvalue()


def turned(image: Image.Image, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return jpeg(image, exif=exif.tobytes())


def with_factors(data: bytes, factors: int) -> bytes:
    """A gray file with other sampling factors in its header, which have no effect with a single component."""
    at = data.index(b"\xff\xc0") + 11
    return data[:at] + bytes([factors]) + data[at + 1 :]


PLAIN = {
    "4:4:4": jpeg(blurred(90, 131, 1), subsampling="4:4:4"),
    "4:2:2": jpeg(blurred(90, 131, 2), subsampling="4:2:2"),
    "4:2:0": jpeg(blurred(91, 130, 3), subsampling="4:2:0", quality=60),
    "gray": jpeg(blurred(90, 131, 4, 1)),
    "restarts": jpeg(blurred(90, 131, 5), restart_marker_rows=1),
    "restarts in 4:4:4": jpeg(blurred(91, 130, 13), restart_marker_rows=1, subsampling="4:4:4"),
    "restarts in gray": jpeg(blurred(90, 131, 14, 1), restart_marker_rows=1),
    "restarts in odd gray": with_factors(jpeg(blurred(90, 131, 15, 1), restart_marker_rows=1), 0x22),
    "restarts in whole blocks": jpeg(blurred(96, 128, 16), restart_marker_rows=1),
    "upright by its Exif": turned(blurred(90, 131, 6), 1),
    "after its end": jpeg(blurred(90, 131, 7)) + b"trailing bytes",
}


OTHERS = {
    "progressive": jpeg(blurred(90, 131, 8), progressive=True),
    "on its side": turned(blurred(90, 131, 9), 6),
    "CMYK": jpeg(blurred(90, 131, 10).convert("CMYK")),
    "PNG": encode(np.asarray(blurred(90, 131, 11))),
    "RGB inside": jpeg(blurred(90, 131, 12), keep_rgb=True),
}


SEGMENTED = {kind: 8 if "4:4:4" in kind or "gray" in kind else 16 for kind in PLAIN if kind.startswith("restarts")}


@pytest.mark.parametrize("kind", PLAIN)
def test_a_file_cut_to_a_box_has_the_same_pixels(kind: str) -> None:
    data = PLAIN[kind]
    found = read_header(data)
    assert found is not None
    whole = decode(data, 3)
    assert whole.shape == (found.height, found.width, 3)
    rows = []
    for bottom in range(1, found.height + 1):
        for top in {0, bottom // 2, bottom - 1}:
            part, (left, above, right, below) = cut_to_box(data, found, (3, top, found.width - 2, bottom))
            pixels = decode(bytes(part), 3)
            assert np.array_equal(pixels[above:below, left:right], whole[top:bottom, 3:-2])
            rows.append(len(pixels) - (below - above))
    assert max(rows) <= SEGMENTED.get(kind, found.height) + 4
    assert (found.segments is not None) == (kind in SEGMENTED)


def test_restarts_inside_rows_or_out_of_order_are_not_used() -> None:
    image = blurred(90, 131, 5)  # 6 rows of 9 blocks: after every 10 there are as many restarts as after every row
    files = [jpeg(image, **options) for options in ({"restart_marker_blocks": 10}, {"restart_marker_rows": 2})]
    data = PLAIN["restarts"]
    second, last = data.index(b"\xff\xd1"), data.rindex(b"\xff\xd4")
    files.append(data[:second] + b"\xff\xd2" + data[second + 2 :])
    files.append(data[:last] + b"\xff\xd9")  # a row too few
    for file in files:
        found = read_header(file)
        assert found is not None and found.segments is None


@pytest.fixture
def without_simplejpeg(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pillow decodes, as on a machine without simplejpeg."""
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    jpeg_decoder.cache_clear()
    yield
    jpeg_decoder.cache_clear()


@pytest.mark.parametrize("kind", PLAIN)
def test_a_training_image_does_not_depend_on_the_decoder(kind: str, request: pytest.FixtureRequest) -> None:
    augment = AugmentConfig()
    rows = []
    for name in ("simplejpeg", "Pillow"):
        if name == "Pillow":
            request.getfixturevalue("without_simplejpeg")
        assert jpeg_decoder()[0] == name
        for params in each_row(crop_params(augment, 0, np.arange(6, dtype=np.int64))):
            rows.append(host_train(PLAIN[kind], SPEC, augment, params))
    assert np.array_equal(rows[:6], rows[6:])


def test_a_decoder_with_other_pixels_than_pillow_is_not_used() -> None:
    def hasty(data: bytes, box: PixelBox) -> np.ndarray:
        left, top, right, bottom = box
        return simplejpeg.decode_jpeg(data, "RGB", fastdct=True, fastupsample=True)[top:bottom, left:right]

    assert matches_pillow(decode_with_pillow)
    assert matches_pillow(jpeg_decoder()[1])
    assert not matches_pillow(hasty)


@pytest.mark.parametrize("kind", [*PLAIN, *OTHERS])
@pytest.mark.parametrize("antialias", [True, False])
def test_a_training_image_from_a_file_equals_that_from_its_pixels(kind: str, antialias: bool) -> None:
    data = (PLAIN | OTHERS)[kind]
    assert (read_header(data) is None) == (kind in OTHERS)
    augment = AugmentConfig(antialias=antialias)
    pixels = decode(data, 3)
    for params in each_row(crop_params(augment, 0, np.arange(6, dtype=np.int64))):
        assert np.array_equal(host_train(data, SPEC, augment, params), host_train(pixels, SPEC, augment, params))


@pytest.mark.parametrize("kind", PLAIN)
def test_a_truncated_file_is_an_error_whichever_part_is_cropped(kind: str) -> None:
    data = PLAIN[kind]
    cut = data[: len(data) * 9 // 10] if kind != "after its end" else data[: data.rfind(b"\xff\xd9")]
    assert read_header(cut) is None
    augment = AugmentConfig(scale=(0.08, 0.1))
    for params in each_row(crop_params(augment, 0, np.arange(5, dtype=np.int64))):
        with pytest.raises(DataError, match="does not decode"):
            host_train(cut, SPEC, augment, params)


def test_truncated_or_damaged_headers_are_handled() -> None:
    """Cut anywhere before the scan, or with one byte of the markers changed, a file is plain or it is not."""
    data = PLAIN["upright by its Exif"]
    scan = data.index(b"\xff\xda")
    assert all(read_header(data[:length]) is None for length in range(scan + 4))
    for at in range(scan):
        for value in (0, 0xFF, data[at] ^ 0x55):
            read_header(data[:at] + bytes([value]) + data[at + 1 :])


@pytest.mark.parametrize("kind", ["4:2:0", "restarts"])
def test_a_scan_with_other_markers_than_restarts_is_not_plain(kind: str) -> None:
    data = PLAIN[kind]
    scan, end = data.index(b"\xff\xda"), data.index(b"\xff\xd9")
    at = next(at for at in range((scan + end) // 2, end) if 0xFF not in data[at - 1 : at + 1])
    plain = [value for value in range(256) if read_header(data[:at] + bytes([0xFF, value]) + data[at:]) is not None]
    assert plain == [0, *range(0xD0, 0xD8), 0xD9]
    assert all(read_header(data[:length]) is None for length in range(scan + 4, end + 2))


def made(data: bytes | np.ndarray, params: np.ndarray) -> bytes | str:
    """The row, or what is wrong with the file."""
    try:
        return host_train(data, SPEC, AugmentConfig(), params).tobytes()
    except DataError as error:
        return error.what


def test_a_damaged_scan_gives_the_pixels_of_pillow() -> None:
    rng = np.random.default_rng(0)
    outcomes = []
    for kind in PLAIN:
        data = PLAIN[kind]
        scan, end = data.index(b"\xff\xda"), data.rfind(b"\xff\xd9")
        for _ in range(12):
            damaged = bytearray(data)
            for at in rng.integers(scan + 20, end, 5).tolist():
                damaged[at] = int(rng.integers(0, 256))
            try:
                pixels: np.ndarray | None = decode(bytes(damaged), 3)
            except DataError:
                pixels = None
            for params in each_row(crop_params(AugmentConfig(), 0, np.arange(3, dtype=np.int64))):
                wanted = "image does not decode" if pixels is None else made(pixels, params)
                assert made(bytes(damaged), params) == wanted
                outcomes.append(pixels is None)
    assert len(outcomes) == len(PLAIN) * 36
    assert 0 < sum(outcomes) < len(outcomes) // 2


@pytest.mark.parametrize("kind", ["4:2:0", "restarts"])
def test_an_error_after_a_warning_is_an_error_by_every_decoder(kind: str) -> None:
    """Scans that refer to missing tables, which libjpeg only warns about, must not give undefined pixels."""
    data = PLAIN[kind]
    scan, form = data.index(b"\xff\xda"), data.index(b"JFIF")
    [params] = each_row(crop_params(AugmentConfig(), 0, np.arange(1, dtype=np.int64)))
    for warned_of in (form + 5, scan + 11, scan + 12, scan + 13):
        damaged = bytearray(data)
        damaged[warned_of] ^= 2
        assert made(bytes(damaged), params) == made(decode(bytes(damaged), 3), params)
        damaged[scan + 10] = 0x33
        assert made(bytes(damaged), params) == "image does not decode"
