"""The beginning of a JPEG file, and its rows from the top down to one.

Owns what is read from markers without decoding. Refuses to know colours, crops and files that are not plain: for those
there is Pillow. Invariant: `head` describes a file only if Pillow would decode it to the same pixels in the same place:
baseline, one scan without strange markers down to its end, grey or YCbCr, lying upright.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from PIL import Image
from PIL.ExifTags import Base

_START, _END = b"\xff\xd8", b"\xff\xd9"
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7]", re.DOTALL)  # in a scan: neither the byte 255 nor a restart
_BASELINE, _SCAN, _APP1, _APP14 = 0xC0, 0xDA, 0xE1, 0xEE
_TABLES = frozenset({0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE})  # what a plain file has before its scan, and comments
_TELLING = frozenset({_APP1, _APP14})  # of those: what may say that the pixels are to be taken otherwise
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_YCBCR = 1  # Adobe's number of it
_ROWS_BELOW = 2  # what smoothing of halved colours looks at under a row


@dataclass(frozen=True, slots=True)
class Head:
    """Size and number of components of a plain JPEG file, and where its height is written."""

    width: int
    height: int
    num_components: int  # 1 or 3
    height_at: int


def head(data: bytes) -> Head | None:
    """What a plain JPEG file begins with; None for any other."""
    found: Head | None = None
    at = 2 if data.startswith(_START) else len(data)
    while at + 4 < len(data) and data[at] == 0xFF:
        marker, end = data[at + 1], at + 2 + (data[at + 2] << 8 | data[at + 3])
        if marker == _SCAN:
            is_all = found is not None and data[at + 4] == found.num_components
            next_marker = _MARKER.search(data, _first_marker(data, end))
            # Decoders differ in what they bear of a scan that breaks off, or that another marker interrupts.
            return found if is_all and next_marker is not None and next_marker[0] == _END else None
        if marker == _BASELINE and found is None:
            found = _frame(data[at + 4 : end], at + 4)
            if found is None:
                return None
        elif marker not in _TABLES or (marker in _TELLING and _is_odd(marker, data[at + 4 : end])):
            return None
        at = end
    return None


def _first_marker(data: bytes, start: int) -> int:
    """Where a scan's first 255 that no 0 follows is: a restart, or the end; the end of the file where there is none.

    By numpy, mostly without the interpreter's lock, 30 us a photograph; looking by `re` alone held it for 75 us.
    """
    scan = np.frombuffer(data, np.uint8)[start:]
    if len(scan) < 2:
        return len(data)
    marked = (scan[1:] != 0).view(np.uint8)
    marked *= scan[:-1]
    at = int(marked.argmax())
    return start + at if marked[at] == 0xFF else len(data)


def down_to(data: bytes, found: Head, bottom: int) -> bytearray:
    """The file with its height lowered, so that no row far below `bottom` is decoded; rows above it stay the same."""
    lowered = bytearray(data)
    height = min(found.height, bottom + _ROWS_BELOW)
    lowered[found.height_at : found.height_at + 2] = height.to_bytes(2, "big")
    return lowered


def _frame(segment: bytes, at: int) -> Head | None:
    if len(segment) < 6:
        return None
    height, width = int.from_bytes(segment[1:3], "big"), int.from_bytes(segment[3:5], "big")
    bits, num_components, names = segment[0], segment[5], segment[6::3]
    if bits != 8 or not width or not height or (num_components, len(names)) not in ((1, 1), (3, 3)) or names == b"RGB":
        return None
    return Head(width, height, num_components, at + 1)


def _is_odd(marker: int, segment: bytes) -> bool:
    """Whether a segment says, or may say, that colours are no YCbCr or that the picture does not lie upright."""
    if marker == _APP14 and segment.startswith(b"Adobe"):
        return segment[11:12] != bytes([_YCBCR])
    if marker != _APP1:
        return False
    if not segment.startswith(b"Exif\0\0"):
        said = _XMP_ORIENTATION.search(segment)
        return said is not None and said[1] != b"1"
    exif = Image.Exif()
    try:
        exif.load(segment)
        return bool(exif.get(Base.Orientation, 1) != 1)
    except Exception:  # damaged bytes may raise anything; what then becomes of the picture is for Pillow to say
        return True
