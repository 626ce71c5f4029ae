"""The compiled JPEG decoder: its pixels, the files it leaves to Pillow, and its safety with damaged bytes."""

from __future__ import annotations

import io
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from jpeg_examples import encoded, halved_down, inserted, photograph, replaced, segment_at
from PIL import Image

from reconv.data.decode import native

FIXTURES = Path(__file__).parent / "fixtures" / "jpeg"
pytestmark = [pytest.mark.native, pytest.mark.usefixtures("compiled_decoder")]

Box = tuple[float, float, float, float]
U8 = npt.NDArray[np.uint8]


def _native(data: bytes, box: Box, size: tuple[int, int], **options: bool | str) -> U8 | None:
    out = np.zeros((3, *size), np.uint8)
    return out if native.crop_resize(data, box, out, **options) else None  # type: ignore[arg-type]


def _pillow(data: bytes, box: tuple[int, int, int, int], size: tuple[int, int], filter: int = 2) -> U8:
    image = Image.open(io.BytesIO(data)).convert("RGB").crop(box).resize(size[::-1], Image.Resampling(filter))
    return np.asarray(image).transpose(2, 0, 1)


def _apart(first: U8 | None, second: U8) -> float:
    assert first is not None, "the decoder did not take the file"
    return float(np.abs(first.astype(np.int64) - second).mean())


FORMS = {
    "4:4:4": {"subsampling": "4:4:4"},
    "4:2:2": {"subsampling": "4:2:2"},
    "4:2:0": {"subsampling": "4:2:0"},
    "gray": {"mode": "L"},
    "restart by blocks": {"restart_marker_blocks": 3},
    "restart by rows": {"restart_marker_rows": 1, "subsampling": "4:4:4"},
    "own codes": {"optimize": True},
    "quality 30": {"quality": 30},
    "quality 100": {"quality": 100, "subsampling": "4:4:4"},
}


@pytest.mark.parametrize("form", FORMS)
def test_pixels_are_those_of_pillow_within_half_a_gray_level(form: str) -> None:
    rng = np.random.default_rng(5)
    worst = 0.0
    for width, height in ((200, 131), (97, 150), (64, 64), (333, 40)):
        data = encoded(photograph(width, height, width), **FORMS[form])
        for _ in range(6):
            left, top = int(rng.integers(0, width - 8)), int(rng.integers(0, height - 8))
            box = (left, top, int(rng.integers(left + 8, width + 1)), int(rng.integers(top + 8, height + 1)))
            size = (int(rng.integers(5, 120)), int(rng.integers(5, 120)))
            worst = max(worst, _apart(_native(data, box, size), _pillow(data, box, size)))
    assert 0 < worst <= 0.5


def test_chroma_of_half_the_height_is_upsampled_as_by_pillow() -> None:
    data = halved_down(96, 96)
    assert _apart(_native(data, (3, 5, 90, 77), (50, 60)), _pillow(data, (3, 5, 90, 77), (50, 60))) <= 0.5


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (7, 1), (2, 2), (5, 4), (8, 8), (17, 15)])
@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:0"])
def test_the_smallest_images_are_decoded(size: tuple[int, int], subsampling: str) -> None:
    data = encoded(photograph(*size), subsampling=subsampling)
    box = (0, 0, *size)
    assert native.image_size(data) == size
    assert _apart(_native(data, box, (11, 13)), _pillow(data, box, (11, 13))) <= 0.7


def test_bicubic_and_pixels_around_a_box_match_pillow() -> None:
    data = encoded(photograph(180, 140))
    box = (20.25, 31.5, 120.75, 111.5)
    image = Image.open(io.BytesIO(data)).convert("RGB")
    for name, filter in (("bilinear", Image.Resampling.BILINEAR), ("bicubic", Image.Resampling.BICUBIC)):
        expected = np.asarray(image.resize((50, 44), filter, box=box)).transpose(2, 0, 1)
        assert _apart(_native(data, box, (44, 50), interpolation=name, crop_first=False), expected) <= 0.4


def test_without_antialias_pixels_are_sampled() -> None:
    data = encoded(photograph(300, 200), subsampling="4:4:4")
    pixels = np.array(Image.open(io.BytesIO(data)).convert("RGB")).transpose(2, 0, 1)
    expected = F.interpolate(torch.from_numpy(pixels)[None].float(), (40, 60), mode="bilinear")[0].numpy()
    sampled = _native(data, (0, 0, 300, 200), (40, 60), antialias=False)
    assert _apart(sampled, expected.round().astype(np.uint8)) <= 0.5
    assert _apart(sampled, _pillow(data, (0, 0, 300, 200), (40, 60))) > 1


def test_large_reductions_match_pillow() -> None:
    data = encoded(photograph(900, 700))
    for size in ((64, 64), (9, 5), (1, 1)):
        assert _apart(_native(data, (0, 0, 900, 700), size), _pillow(data, (0, 0, 900, 700), size)) <= 0.5


def test_interleaved_output_equals_planes() -> None:
    data = encoded(photograph(90, 80))
    out = np.zeros((33, 21, 3), np.uint8)
    assert native.crop_resize(data, (3, 4, 80, 70), out, is_interleaved=True)
    planes = _native(data, (3, 4, 80, 70), (33, 21))
    assert planes is not None
    assert np.array_equal(out.transpose(2, 0, 1), planes)


def test_memory_views_are_read_in_place() -> None:
    data = encoded(photograph(90, 80))
    out = np.zeros((3, 20, 20), np.uint8)
    view = memoryview(b"before" + data + b"after")[6:-5]
    assert native.image_size(view) == (90, 80)
    assert native.crop_resize(view, (0, 0, 90, 80), out)
    whole = _native(data, (0, 0, 90, 80), (20, 20))
    assert whole is not None
    assert np.array_equal(out, whole)


def _damaged(data: bytes, seed: int, most: int = 12) -> bytes:
    rng = np.random.default_rng(seed)
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, most))):
        changed[int(rng.integers(2, len(data) - 2))] = int(rng.integers(256))
    return bytes(changed)


def test_simd_and_plain_c_give_the_same_bits_even_for_damaged_files() -> None:
    taken = 0
    for seed in range(300):
        form = list(FORMS.values())[seed % len(FORMS)]
        data = encoded(photograph(70 + seed % 31, 90 - seed % 17, seed), **form)
        data = _damaged(data, seed, 3) if seed % 3 else data
        size = (8 + seed % 41, 30 + seed % 37)
        options = {"antialias": seed % 5 > 0, "interpolation": "bicubic" if seed % 7 == 0 else "bilinear"}
        with_vectors = _native(data, (1, 2, 60, 70), size, **options)
        without = _native(data, (1, 2, 60, 70), size, use_simd=False, **options)
        assert (with_vectors is None) == (without is None)
        if with_vectors is not None and without is not None:
            taken += 1
            assert np.array_equal(with_vectors, without)
    assert taken > 150


def test_threads_do_not_interfere() -> None:
    files = [encoded(photograph(120 + i, 100, i), **form) for i, form in enumerate(FORMS.values())]
    alone = [_native(data, (0, 0, 110, 90), (64, 64)) for data in files]

    def again(number: int) -> bool:
        made = _native(files[number % len(files)], (0, 0, 110, 90), (64, 64))
        return np.array_equal(made, alone[number % len(files)])  # type: ignore[arg-type]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(again, range(400)))


def _crop_group(files: list[bytes], num_threads: int) -> tuple[list[bool], U8]:
    out = np.zeros((len(files), 3, 24, 24), np.uint8)
    boxes = np.array([[0, 0, 40, 30]] * len(files), np.float64).reshape(-1, 4)
    filled = native.FilesInMemory(files).crop_resize(boxes, out, interpolation="bilinear", num_threads=num_threads)
    return filled.tolist(), out


def test_the_threads_of_the_decoder_give_the_pixels_of_one() -> None:
    files = [encoded(photograph(48, 40, seed)) for seed in range(20)]
    files[7] = b"no image"
    expected, pixels = _crop_group(files, 1)
    assert expected == [number != 7 for number in range(20)]
    pixels[7] = 0  # undefined
    with ThreadPoolExecutor(6) as threads:
        for filled, found in threads.map(lambda _: _crop_group(files, 3), range(12)):
            found[7] = 0
            assert filled == expected and (found == pixels).all()
    assert _crop_group([], 3)[0] == []


def test_a_forked_process_has_threads_of_its_own() -> None:
    files = [encoded(photograph(48, 40, seed)) for seed in range(4)]
    _, pixels = _crop_group(files, 2)
    child = os.fork()
    if child == 0:
        os._exit(0 if (_crop_group(files, 2)[1] == pixels).all() else 1)
    assert os.waitpid(child, 0)[1] == 0


def _turned(data: bytes, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return inserted(data, 0xE1, exif.tobytes())


XMP = b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="%d"/>'
PLAIN = encoded(photograph(48, 40))
LEFT_TO_PILLOW = {
    "progressive": encoded(photograph(48, 40), progressive=True),
    "CMYK": encoded(photograph(48, 40), mode="CMYK"),
    "RGB": encoded(photograph(48, 40), keep_rgb=True),
    "turned by EXIF": _turned(PLAIN, 6),
    "turned by XMP": inserted(PLAIN, 0xE1, XMP % 8),
    "damaged EXIF": inserted(PLAIN, 0xE1, b"Exif\0\0MM\0*\0\0\xff\xff"),
    "several images": inserted(PLAIN, 0xE2, b"MPF\0" + bytes(20)),
    "another Adobe transform": inserted(PLAIN, 0xEE, b"Adobe\0\x64\0\0\0\0\2"),
    "12 bits": replaced(PLAIN, segment_at(PLAIN, 0xC0), b"\x0c"),
    "arithmetic codes": replaced(PLAIN, segment_at(PLAIN, 0xC0) - 3, b"\xc9"),
    "no height": replaced(PLAIN, segment_at(PLAIN, 0xC0) + 1, b"\0\0"),
    "other sampling": replaced(PLAIN, segment_at(PLAIN, 0xC0) + 7, b"\x41"),
    "16-bit quantizers": replaced(PLAIN, segment_at(PLAIN, 0xDB), b"\x10"),
    "no such table": replaced(PLAIN, segment_at(PLAIN, 0xDA) + 2, b"\x33"),
    "PNG": b"\x89PNG\r\n\x1a\n" + bytes(64),
    "empty": b"",
}


@pytest.mark.parametrize("form", LEFT_TO_PILLOW)
def test_unusual_files_are_left_to_pillow(form: str) -> None:
    assert native.image_size(LEFT_TO_PILLOW[form]) is None
    assert _native(LEFT_TO_PILLOW[form], (0, 0, 8, 8), (8, 8)) is None


@pytest.mark.parametrize("data", [_turned(PLAIN, 1), inserted(PLAIN, 0xE1, XMP % 1), inserted(PLAIN, 0xFE, b"words")])
def test_files_with_upright_orientation_are_supported(data: bytes) -> None:
    assert native.image_size(data) == (48, 40)
    assert np.array_equal(_native(data, (0, 0, 48, 40), (9, 9)), _native(PLAIN, (0, 0, 48, 40), (9, 9)))  # type: ignore[arg-type]


def test_a_truncated_file_is_left_to_pillow() -> None:
    assert len(PLAIN) > 500
    assert all(_native(PLAIN[:end], (0, 0, 8, 8), (8, 8)) is None for end in range(len(PLAIN) - 1))


@pytest.mark.parametrize("box", [(-1, 0, 8, 8), (0, 0, 49, 8), (0, 0, 8, 41), (8, 0, 8, 8), (0, float("nan"), 8, 8)])
def test_boxes_outside_the_image_are_rejected(box: Box) -> None:
    assert _native(PLAIN, box, (8, 8)) is None


def test_unsupported_outputs_are_rejected() -> None:
    assert _native(PLAIN, (0, 0, 8, 8), (8, 8), interpolation="nearest") is None
    with pytest.raises(ValueError, match="array of 3 channels"):
        native.crop_resize(PLAIN, (0, 0, 8, 8), np.zeros((1, 8, 8), np.uint8))
    with pytest.raises(ValueError, match="array of 3 channels"):
        native.crop_resize(PLAIN, (0, 0, 8, 8), np.zeros((3, 8, 16), np.uint8)[:, :, ::2])


def test_a_lost_restart_marker_is_left_to_pillow() -> None:
    data = encoded(photograph(64, 64), restart_marker_rows=1)
    assert _native(data, (0, 0, 64, 64), (8, 8)) is not None
    at = data.index(b"\xff\xd1")
    assert _native(data[:at] + data[at + 2 :], (0, 0, 64, 64), (8, 8)) is None


def test_every_supported_file_is_decoded_by_pillow_too() -> None:
    taken = 0
    for seed in range(400):
        data = _damaged(PLAIN, seed, 4)
        if _native(data, (0, 0, 8, 8), (8, 8)) is not None:
            taken += 1
            with Image.open(io.BytesIO(data)) as image:
                image.load()
    assert taken > 100


def test_the_seed_files_of_fuzzing_are_supported() -> None:
    files = sorted(FIXTURES.glob("*.jpg"))
    assert len(files) >= 10
    for file in files:
        size = native.image_size(file.read_bytes())
        assert size is not None
        assert _native(file.read_bytes(), (0, 0, *size), (16, 16)) is not None


_FILES = [encoded(photograph(40, 36), **form) for form in FORMS.values()]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(_FILES),
    st.lists(st.tuples(st.integers(0, 4000), st.binary(min_size=1, max_size=4)), max_size=8),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.booleans(),
)
def test_damaged_bytes_never_write_outside_the_output(
    data: bytes, changes: list[tuple[int, bytes]], size: tuple[int, int], is_interleaved: bool
) -> None:
    for at, new in changes:
        data = replaced(data, at % len(data), new)
    height, width = size
    guarded = np.full(2 * 64 + 3 * height * width, 0xA5, np.uint8)
    inside = guarded[64:-64].reshape((height, width, 3) if is_interleaved else (3, height, width))
    native.crop_resize(data, (2, 3, 33, 30), inside, is_interleaved=is_interleaved)
    assert (guarded[:64] == 0xA5).all()
    assert (guarded[-64:] == 0xA5).all()
