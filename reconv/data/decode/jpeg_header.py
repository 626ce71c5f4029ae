"""The beginning of a JPEG file, and a file of some of its rows.

Owns what is read from markers without decoding. Refuses to know colours, crops and files that are not plain: for those
there is Pillow. Invariant: `head` describes a file only if Pillow would decode it to the same pixels in the same place:
baseline, one scan without strange markers down to its end, grey or YCbCr, lying upright. Nothing that libjpeg warns of
precedes its scan: after a warning simplejpeg takes an error for one too, and returns memory that nobody has written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from PIL import Image
from PIL.ExifTags import Base

from reconv.data.transforms.random_params import Box

_START, _END = b"\xff\xd8", b"\xff\xd9"
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7]", re.DOTALL)  # in a scan: neither the byte 255 nor a restart
_BASELINE, _SCAN, _INTERVAL, _APP0, _APP1, _APP14 = 0xC0, 0xDA, 0xDD, 0xE0, 0xE1, 0xEE
_ALL = b"\x00\x3f\x00"  # a scan has all coefficients, in one go
_RESTART, _RESTARTS = 0xD0, 8  # the first of them, and how many there are
_TABLES = frozenset({0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE})  # what a plain file has before its scan, and comments
_TELLING = frozenset({_APP0, _APP1, _APP14})  # of those: what may say that the pixels are to be taken otherwise
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_YCBCR = 1  # Adobe's number of it
_ROWS_BESIDE = 2  # what smoothing of halved colours looks at above and under a row


@dataclass(frozen=True, slots=True)
class JpegHeader:
    """Size and number of components of a plain JPEG file, and where its height is written."""

    width: int
    height: int
    num_components: int  # 1 or 3
    height_at: int
    unit: tuple[int, int]  # width and height of what is coded together
    segments: Segments | None = None  # where each is known


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Parts of a scan that decode by themselves, each of so many whole rows."""

    rows: int  # of each but the last
    start: int  # of the first
    restarts: npt.NDArray[np.int64]  # where the markers between them are
    end: int

    def part(self, data: bytes, first: int, last: int) -> bytearray:
        """The file with these segments alone, their markers counted from the first again."""
        begin = self.start if first == 0 else int(self.restarts[first - 1]) + 2
        end = self.end if last == len(self.restarts) else int(self.restarts[last])
        part = bytearray(data[: self.start]) + data[begin:end] + _END
        numbers = np.arange(last - first, dtype=np.uint8) % _RESTARTS
        np.frombuffer(part, np.uint8)[self.restarts[first:last] - begin + self.start + 1] = _RESTART + numbers
        return part


def head(data: bytes) -> JpegHeader | None:
    """What a plain JPEG file begins with; None for any other."""
    found: JpegHeader | None = None
    interval = 0
    at = 2 if data.startswith(_START) else len(data)
    while at + 4 < len(data) and data[at] == 0xFF:
        marker, end = data[at + 1], at + 2 + (data[at + 2] << 8 | data[at + 3])
        if marker == _SCAN:
            if found is None or data[at + 4] != found.num_components or data[end - len(_ALL) : end] != _ALL:
                return None
            if interval:
                return _with_segments(data, found, end, interval)
            return found if _is_whole(data, end) else None
        if marker == _BASELINE and found is None:
            found = _frame(data[at + 4 : end], at + 4)
            if found is None:
                return None
        elif marker not in _TABLES or (marker in _TELLING and _is_odd(marker, data[at + 4 : end])):
            return None
        if marker == _INTERVAL:
            interval = int.from_bytes(data[at + 4 : at + 6], "big")
        at = end
    return None


def _is_whole(data: bytes, start: int) -> bool:
    """Whether a scan ends well: decoders differ in what they bear of one that breaks off, or is interrupted."""
    next_marker = _MARKER.search(data, _first_marker(data, start))
    return next_marker is not None and next_marker[0] == _END


def _with_segments(data: bytes, found: JpegHeader, start: int, interval: int) -> JpegHeader | None:
    """The same where a scan has restarts, and where they are if each ends as many rows as are coded together."""
    scan = np.frombuffer(data, np.uint8)[start:]
    markers = np.flatnonzero((scan[:-1] == 0xFF) & (scan[1:] != 0))
    codes = scan[markers + 1]
    others = np.flatnonzero((codes < _RESTART) | (codes >= _RESTART + _RESTARTS))
    if not len(others) or codes[others[0]] != _END[1]:
        return None
    number, (width, height) = int(others[0]), found.unit
    is_told = interval == -(-found.width // width) and number == -(-found.height // height) - 1
    if not is_told or (codes[:number] != _RESTART + np.arange(number) % _RESTARTS).any():
        return found
    return replace(found, segments=Segments(height, start, markers[:number] + start, int(markers[number]) + start))


def _first_marker(data: bytes, start: int) -> int:
    """Where a scan's first 255 that no 0 follows is: a restart, or the end; the end of the file where there is none.

    By numpy, mostly without the GIL, 30 us a photograph; looking by `re` alone held it for 75 us.
    """
    scan = np.frombuffer(data, np.uint8)[start:]
    if len(scan) < 2:
        return len(data)
    marked = (scan[1:] != 0).view(np.uint8)
    marked *= scan[:-1]
    at = int(marked.argmax())
    return start + at if marked[at] == 0xFF else len(data)


def part_of(data: bytes, found: JpegHeader, box: Box) -> tuple[bytearray, Box]:
    """A file that has the pixels of a box, and where in it: few rows below the box, and few above it where that can be.

    The height is lowered, so that no row further below is decoded; what is above can be left out where a scan has
    segments.
    """
    left, top, right, bottom = box
    height = min(found.height, bottom + _ROWS_BESIDE)
    above, segments = 0, found.segments
    if segments is None or top < segments.rows + _ROWS_BESIDE:
        part = bytearray(data)
    else:
        first = (top - _ROWS_BESIDE) // segments.rows
        above = first * segments.rows
        part = segments.part(data, first, (height - 1) // segments.rows)
    part[found.height_at : found.height_at + 2] = (height - above).to_bytes(2, "big")
    return part, (left, top - above, right, bottom - above)


def _frame(segment: bytes, at: int) -> JpegHeader | None:
    if len(segment) < 6:
        return None
    height, width = int.from_bytes(segment[1:3], "big"), int.from_bytes(segment[3:5], "big")
    bits, num_components, names = segment[0], segment[5], segment[6::3]
    if bits != 8 or not width or not height or (num_components, len(names)) not in ((1, 1), (3, 3)) or names == b"RGB":
        return None
    factors = (
        (1, 1) if num_components == 1 else (max(f >> 4 for f in segment[7::3]), max(f & 15 for f in segment[7::3]))
    )
    if 0 in factors:
        return None
    return JpegHeader(width, height, num_components, at + 1, (8 * factors[0], 8 * factors[1]))


def _is_odd(marker: int, segment: bytes) -> bool:
    """Whether a segment says, or may say, that colours are no YCbCr, that the image does not lie upright, or that its
    form is not the known one."""
    if marker == _APP0:
        return segment.startswith(b"JFIF\0") and segment[5:6] != b"\x01"
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
    except Exception:  # damaged bytes may raise anything; what then becomes of the image is for Pillow to say
        return True
