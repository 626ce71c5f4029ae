"""The optional compiled JPEG decoder: a resized crop straight from a file's bytes.

Owns the library's loading and its calls. Refuses to know what becomes of a file it does not take: False or None
means that the plain way must judge it, never that it is bad. Invariant: the same bytes, box and size give the same
pixels on every processor and thread; the GIL is released while it works; nothing outside `out` changes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from reconv.data.dataset import I64, U8
from reconv.errors import RecipeError
from reconv.recipe.data_fields import Decoder

LIBRARY = Path(__file__).with_name("_jpeg.so")
VERSION = 2  # of the library's calls and of the pixels it makes

F64 = npt.NDArray[np.float64]

FILTERS = {"bilinear": 0, "bicubic": 1}


class Here(NamedTuple):
    """What one process has: why there is no decoder (or nothing), and whether it would be the faster way."""

    trouble: str
    is_fast: bool


def in_this_process() -> Here:
    """What this process has; without vector instructions the plain way is no slower."""
    why = trouble()
    return Here(why, not why and bool(load(LIBRARY).reconv_jpeg_has_avx2()))


def choose_decoder(
    wish: Decoder | Literal["auto"], kept: Decoder | None = None, everywhere: Sequence[Here] | None = None
) -> Decoder:
    """Who makes crops of JPEG files, the same in every process of a run.

    `kept` is who did so when the run began, and `auto` keeps to that; `everywhere` is what each process has.
    """
    there = [in_this_process()] if everywhere is None else everywhere
    usual: Decoder = "native" if all(here.is_fast for here in there) else "pillow"
    chosen = wish if wish != "auto" else kept or usual
    why = next((here.trouble for here in there if here.trouble), "")
    if chosen == "native" and why:
        raise RecipeError(
            "the compiled JPEG decoder is not here",
            where=f"augment.decoder: {wish}",
            why=why if kept is None else f"this run began with it, and {why}",
            then="compile it: pip install . with a C compiler there (make native in a checkout)"
            + (", or leave augment.decoder out" if kept is None else ""),
        )
    return chosen


def available() -> bool:
    """Whether the decoder was compiled here and is of this version."""
    return not trouble()


@cache
def trouble() -> str:
    """Why there is no decoder, or nothing."""
    try:
        version: int = ctypes.CDLL(str(LIBRARY)).reconv_jpeg_version()  # not by `load`: another has other calls
    except OSError as error:
        return "it was not compiled" if not LIBRARY.exists() else f"it does not load: {error}"
    return "" if version == VERSION else f"it is version {version} and not {VERSION}: compile it again"


@cache
def load(path: Path) -> ctypes.CDLL:
    """The library, its calls declared."""
    library = ctypes.CDLL(str(path))
    number, pointer = ctypes.c_int, ctypes.c_void_p
    library.reconv_jpeg_crop.argtypes = (
        *(pointer, ctypes.c_size_t),
        *(ctypes.c_double,) * 4,
        *(number, pointer),
        *(number,) * 6,
    )
    library.reconv_jpeg_read.argtypes = (pointer, number, pointer, ctypes.c_int64, pointer, pointer)
    library.reconv_jpeg_crops.argtypes = (*(pointer,) * 2, number, *(pointer,) * 2, *(number,) * 3, pointer)
    library.reconv_jpeg_crops.restype = None
    return library


@cache
def _load_holding(path: Path) -> ctypes.PyDLL:
    """The same for a call too short to let go of the GIL: taking it again may cost a sleep."""
    library = ctypes.PyDLL(str(path))
    library.reconv_jpeg_size.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return library


def picture_size(data: bytes | memoryview) -> tuple[int, int] | None:
    """Width and height of a file of the kind that is decoded here; None for any other."""
    found = (ctypes.c_int32 * 2)()
    is_other = _load_holding(LIBRARY).reconv_jpeg_size(_address(data), len(data), found)
    return None if is_other else (found[0], found[1])


def crop_resize(
    data: bytes | memoryview,
    box: tuple[float, float, float, float],
    out: U8,
    *,
    interpolation: str = "bilinear",
    antialias: bool = True,
    is_cut: bool = True,
    is_interleaved: bool = False,
    may_use_vectors: bool = True,
) -> bool:
    """Fill `out` [3, height, width] (interleaved: [height, width, 3]) from a box (left, top, right, bottom).

    False: the file, box or interpolation is not for this decoder, and `out` holds nothing of use. `is_cut` keeps
    every look inside the box, as if it had been cut out first; otherwise the filter sees what lies around it.
    """
    height, width, channels = out.shape if is_interleaved else (*out.shape[1:], out.shape[0])
    if channels != 3 or out.dtype != np.uint8 or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(f"three planes of uint8 in one piece, not {out.dtype} {out.shape}")
    if interpolation not in FILTERS:
        return False
    is_other = load(LIBRARY).reconv_jpeg_crop(
        *(_address(data), len(data)),
        *box,
        *(is_cut, out.ctypes.data),
        *(height, width, is_interleaved, antialias, FILTERS[interpolation], may_use_vectors),
    )
    return not is_other


def read_files(paths: Sequence[bytes], buffer: U8) -> tuple[I64, list[tuple[int, int]]]:
    """Read as many files as fit into `buffer`: where each ends there, and its width and height.

    Those are 0 for a file that cannot be read or is not of the kind that is decoded here.
    """
    names = (ctypes.c_char_p * len(paths))(*paths)
    ends, sizes = np.empty(len(paths), np.int64), np.empty((len(paths), 2), np.int32)
    num_read = load(LIBRARY).reconv_jpeg_read(
        names, len(paths), buffer.ctypes.data, buffer.nbytes, ends.ctypes.data, sizes.ctypes.data
    )
    return ends[:num_read], [(width, height) for width, height in sizes[:num_read].tolist()]


def crop_files(
    buffer: U8, ends: I64, boxes: F64, out: U8, *, interpolation: str, antialias: bool
) -> npt.NDArray[np.bool_]:
    """`crop_resize` of each file that `read_files` put into `buffer` to rows [n, 3, size, size]; which were made.

    None is made of a box that is empty.
    """
    num_files, size = len(ends), out.shape[-1]
    if out.shape != (num_files, 3, size, size) or boxes.shape != (num_files, 4):
        raise ValueError(f"a box and square planes for each of {num_files} files, not {boxes.shape} and {out.shape}")
    if out.dtype != np.uint8 or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(f"planes of uint8 in one piece, not {out.dtype}")
    is_made = np.zeros(num_files, np.bool_)
    load(LIBRARY).reconv_jpeg_crops(
        *(buffer.ctypes.data, ends.ctypes.data, num_files, np.ascontiguousarray(boxes).ctypes.data, out.ctypes.data),
        *(size, antialias, FILTERS[interpolation], is_made.ctypes.data),
    )
    return is_made


def _address(data: bytes | memoryview) -> bytes | int:
    """What ctypes passes as a pointer to the first byte; the caller keeps `data` alive."""
    return data if isinstance(data, bytes) else np.frombuffer(data, np.uint8).ctypes.data
