"""The optional compiled JPEG decoder: a resized crop straight from a file's bytes, with the GIL released.

False or None from a call means that the file is not for this decoder, and Pillow must decode or reject it. The same
bytes, box and size give the same pixels on every processor and thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from reconv.core.errors import RecipeError
from reconv.core.message import message
from reconv.data.dataset import I64, U8
from reconv.recipe.parts.data import Decoder

LIBRARY = Path(__file__).with_name("_jpeg.so")
VERSION = 5  # of the functions and of the pixels they give

F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

FILTERS = {"bilinear": 0, "bicubic": 1}


@message
class NativeSupport(NamedTuple):
    """Support for the decoder in one process: the problem if it cannot be used, and if it is faster than Pillow."""

    problem: str
    is_fast: bool


def native_support() -> NativeSupport:
    """Support for the decoder in this process; without vector instructions the decoder is no faster than Pillow."""
    found = problem()
    return NativeSupport(found, not found and bool(load(LIBRARY).reconv_jpeg_has_avx2()))


def choose_decoder(
    setting: Decoder | Literal["auto"],
    resumed: Decoder | None = None,
    all_ranks: Sequence[NativeSupport] | None = None,
) -> Decoder:
    """The decoder of JPEG crops, the same in every process of a run.

    `resumed` is the decoder the run began with, which `auto` keeps; `all_ranks` is what each process can use.
    """
    supports = [native_support()] if all_ranks is None else all_ranks
    fastest: Decoder = "native" if all(support.is_fast for support in supports) else "pillow"
    chosen = setting if setting != "auto" else resumed or fastest
    why = next((support.problem for support in supports if support.problem), "")
    if chosen == "native" and why:
        raise RecipeError(
            "the compiled JPEG decoder is not available",
            where=f"augment.decoder: {setting}",
            why=why if resumed is None else f"this run began with it, and {why}",
            hint="compile it: pip install . with a C compiler on the machine (make native in a checkout)"
            + (", or leave augment.decoder out" if resumed is None else ""),
        )
    return chosen


def available() -> bool:
    """True if the decoder is compiled and of this version."""
    return not problem()


@cache
def problem() -> str:
    """Reason why the decoder cannot be used; empty if it can."""
    try:
        version: int = ctypes.CDLL(str(LIBRARY)).reconv_jpeg_version()  # not by `load`: another version has other calls
    except OSError as error:
        return "it was not compiled" if not LIBRARY.exists() else f"it does not load: {error}"
    return "" if version == VERSION else f"it has version {version} instead of {VERSION}: compile it again"


@cache
def load(path: Path) -> ctypes.CDLL:
    """The library with its functions declared."""
    library = ctypes.CDLL(str(path))
    number, pointer = ctypes.c_int, ctypes.c_void_p
    library.reconv_jpeg_crop.argtypes = (
        *(pointer, ctypes.c_size_t),
        *(ctypes.c_double,) * 4,
        *(number, pointer),
        *(number,) * 6,
    )
    library.reconv_jpeg_read.argtypes = (pointer, number, pointer, ctypes.c_int64, pointer, pointer)
    library.reconv_jpeg_sizes.argtypes = (*(pointer,) * 2, number, pointer)
    library.reconv_jpeg_sizes.restype = None
    library.reconv_jpeg_crops.argtypes = (
        *(*(pointer,) * 2, number, pointer, number, pointer),
        *(*(number,) * 3, pointer, number),
    )
    library.reconv_jpeg_crops.restype = None
    return library


@cache
def _load_keeping_gil(path: Path) -> ctypes.PyDLL:
    """The same for a call too short to release the GIL: taking it back may cost a sleep."""
    library = ctypes.PyDLL(str(path))
    pointer, stride = ctypes.c_void_p, ctypes.c_int64
    library.reconv_jpeg_size.argtypes = (pointer, ctypes.c_size_t, pointer)
    rows = (pointer, stride)
    library.reconv_crop_boxes.argtypes = (pointer, ctypes.c_int, stride, *rows, *rows, *rows, pointer, pointer)
    library.reconv_crop_boxes.restype = None
    return library


def image_size(data: bytes | memoryview) -> tuple[int, int] | None:
    """Width and height of a JPEG file that this decoder supports; None for any other file."""
    size = (ctypes.c_int32 * 2)()
    is_unsupported = _load_keeping_gil(LIBRARY).reconv_jpeg_size(_address(data), len(data), size)
    return None if is_unsupported else (size[0], size[1])


def crop_resize(
    data: bytes | memoryview,
    box: tuple[float, float, float, float],
    out: U8,
    *,
    interpolation: str = "bilinear",
    antialias: bool = True,
    crop_first: bool = True,
    is_interleaved: bool = False,
    use_simd: bool = True,
) -> bool:
    """Fill `out` [3, height, width] (interleaved: [height, width, 3]) from a box (left, top, right, bottom).

    False: the file, box or interpolation is not supported, and the content of `out` is undefined. With `crop_first`
    the filter reads nothing outside the box, as if it had been cut out first; otherwise it reads around its edges.
    """
    height, width, channels = out.shape if is_interleaved else (*out.shape[1:], out.shape[0])
    if channels != 3 or out.dtype != np.uint8 or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(f"expected a writable contiguous uint8 array of 3 channels, not {out.dtype} {out.shape}")
    if interpolation not in FILTERS:
        return False
    is_unsupported = load(LIBRARY).reconv_jpeg_crop(
        *(_address(data), len(data)),
        *box,
        *(crop_first, out.ctypes.data),
        *(height, width, is_interleaved, antialias, FILTERS[interpolation], use_simd),
    )
    return not is_unsupported


def read_files(paths: Sequence[bytes], buffer: U8) -> tuple[I64, I32]:
    """Read as many files as fit into `buffer`: the offset where each ends [n], and its width and height [n, 2].

    The latter are 0 for a file that cannot be read or is not supported.
    """
    names = (ctypes.c_char_p * len(paths))(*paths)
    ends, sizes = np.empty(len(paths), np.int64), np.empty((len(paths), 2), np.int32)
    num_read = load(LIBRARY).reconv_jpeg_read(
        names, len(paths), buffer.ctypes.data, buffer.nbytes, ends.ctypes.data, sizes.ctypes.data
    )
    return ends[:num_read], sizes[:num_read]


class CropRule(ctypes.Structure):
    """Rule by which `random_resized_crop_box` maps uniforms to a box."""

    _fields_ = (
        ("min_scale", ctypes.c_double),
        ("max_scale", ctypes.c_double),
        ("min_ratio", ctypes.c_double),
        ("max_ratio", ctypes.c_double),
        ("num_attempts", ctypes.c_int),
        ("falls_back_to_whole", ctypes.c_int),
    )


def crop_boxes(sizes: I32, max_pixels: int, areas: F64, ratios: F64, positions: F64, rule: CropRule) -> F64:
    """The boxes [n, 4] of random resized crops of images [n, 2]; empty where an image has no or too many pixels.

    `areas` and `ratios` [n, attempts] and `positions` [n, 2] are uniforms, as in `random_resized_crop_box`.
    """
    boxes = np.empty((len(sizes), 4))
    _load_keeping_gil(LIBRARY).reconv_crop_boxes(
        *(sizes.ctypes.data, len(sizes), max_pixels),
        *_rows_of(areas, rule.num_attempts),
        *_rows_of(ratios, rule.num_attempts),
        *_rows_of(positions, 2),
        *(ctypes.byref(rule), boxes.ctypes.data),
    )
    return boxes


def _rows_of(array: F64, length: int) -> tuple[int, int]:
    """The address of an array of rows of doubles, and their stride in numbers."""
    if array.dtype != np.float64 or array.shape[1:] != (length,) or array.strides[1] != array.itemsize:
        raise ValueError(f"expected rows of {length} float64, not {array.dtype} {array.shape}")
    return array.ctypes.data, array.strides[0] // array.itemsize


def crop_files(
    buffer: U8,
    ends: I64,
    boxes: F64,
    out: U8,
    *,
    interpolation: str,
    antialias: bool,
    crop_first: bool = True,
    num_threads: int = 1,
) -> Bools:
    """`crop_resize` of each file that `read_files` put into `buffer`, into `out` [n, 3, size, size].

    Returns which rows were filled; a file with an empty box is skipped. More than one thread: all calls share so many
    threads of the decoder's own.
    """
    starts = np.concatenate([[0], ends])[: len(ends)]
    options = (crop_first, antialias, interpolation)
    return _crop_each(buffer.ctypes.data + starts, ends - starts, boxes, out, options, num_threads)


class FilesInMemory:
    """Encoded files that are decoded in one call, without the GIL."""

    def __init__(self, files: Sequence[bytes]) -> None:
        self._pointers = (ctypes.c_char_p * len(files))(*files)  # keeps them alive
        self._lengths = np.fromiter(map(len, files), np.int64, len(files))

    def sizes(self) -> npt.NDArray[np.int32]:
        """Width and height [n, 2] of each file; 0 for one that is not supported."""
        sizes = np.empty((len(self._lengths), 2), np.int32)
        load(LIBRARY).reconv_jpeg_sizes(
            self._pointers, self._lengths.ctypes.data, len(self._lengths), sizes.ctypes.data
        )
        return sizes

    def crop_resize(
        self,
        boxes: F64,
        out: U8,
        *,
        interpolation: str,
        antialias: bool = True,
        crop_first: bool = False,
        num_threads: int = 1,
    ) -> Bools:
        """The box of each file, as `crop_resize`, into `out` [n, 3, size, size]; which rows were filled.

        More than one thread: all calls share so many threads of the decoder's own.
        """
        starts = np.frombuffer(bytes(self._pointers), np.uintp)
        return _crop_each(starts, self._lengths, boxes, out, (crop_first, antialias, interpolation), num_threads)


def _crop_each(
    starts: npt.NDArray[np.integer[Any]],
    lengths: I64,
    boxes: F64,
    out: U8,
    options: tuple[bool, bool, str],
    num_threads: int = 1,
) -> Bools:
    """Crop files at addresses that the caller keeps alive; `options` are crop_first, antialias and interpolation."""
    num_files, size = len(starts), out.shape[-1]
    crop_first, antialias, interpolation = options
    if out.shape != (num_files, 3, size, size) or boxes.shape != (num_files, 4):
        raise ValueError(
            f"expected a box and a square image for each of {num_files} files, not {boxes.shape} and {out.shape}"
        )
    if out.dtype != np.uint8 or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(f"expected a writable contiguous uint8 array, not {out.dtype}")
    is_filled, boxes = np.zeros(num_files, np.bool_), np.ascontiguousarray(boxes, np.float64)
    load(LIBRARY).reconv_jpeg_crops(
        *(starts.ctypes.data, lengths.ctypes.data, num_files, boxes.ctypes.data, crop_first, out.ctypes.data),
        *(size, antialias, FILTERS[interpolation], is_filled.ctypes.data, num_threads),
    )
    return is_filled


def _address(data: bytes | memoryview) -> bytes | int:
    """The address of the first byte for ctypes; the caller keeps `data` alive."""
    return data if isinstance(data, bytes) else np.frombuffer(data, np.uint8).ctypes.data
