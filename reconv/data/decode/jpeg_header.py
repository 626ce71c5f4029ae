"""The header of a plain JPEG file, and cutting such a file down to the rows that a crop needs.

Plain is a file that every decoder turns into the same pixels: baseline, a single complete scan, gray or YCbCr, no
rotation by EXIF or XMP, and nothing before the scan that libjpeg warns of. (After a warning simplejpeg takes an error
for a warning too, and returns uninitialized memory.) Pillow decodes all other files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from PIL import Image
from PIL.ExifTags import Base

PixelBox = tuple[int, int, int, int]  # left, top, right, bottom in pixels

_START, _END = b"\xff\xd8", b"\xff\xd9"
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7]", re.DOTALL)  # in a scan: neither an escaped 255 nor a restart
_BASELINE, _SCAN, _INTERVAL, _APP0, _APP1, _APP14 = 0xC0, 0xDA, 0xDD, 0xE0, 0xE1, 0xEE
_SEQUENTIAL = (0xC0, 0xC1)  # frames without progression
_ALL = b"\x00\x3f\x00"  # the scan holds all coefficients at full precision
_RESTART, _NUM_RESTARTS = 0xD0, 8  # the first restart marker, and how many there are
_TABLES = frozenset({0xC4, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE})  # segments of a plain file before its scan
_MAY_CHANGE_PIXELS = frozenset({_APP0, _APP1, _APP14})  # of those: may ask for another color space or orientation
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_ADOBE_YCBCR = 1
_MARGIN_ROWS = 2  # what chroma upsampling reads above and below a row


def count_scans(data: bytes) -> int:
    """At most so many scans of a JPEG file would be decoded, each over the whole image; 1 for ordinary files."""
    at, components = len(_START), 0
    while data[at : at + 1] == b"\xff" and (marker := data[at + 1 : at + 2]) not in (b"", b"\xff"):
        if marker[0] == _SCAN:
            if components and data[at + 4 : at + 5] == bytes([components]):  # libjpeg reads no further one
                return 1
            break
        if marker[0] in _SEQUENTIAL:
            components = data[at + 9] if len(data) > at + 9 else 0
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return data.count(bytes([0xFF, _SCAN]))


@dataclass(frozen=True, slots=True)
class JpegHeader:
    """Size and layout of a plain JPEG file."""

    width: int
    height: int
    num_components: int  # 1 or 3
    height_at: int  # offset of the height in the file
    mcu_size: tuple[int, int]  # width and height of a minimum coded unit in pixels
    segments: RestartSegments | None = None  # None: unknown or none


@dataclass(frozen=True, slots=True, eq=False)
class RestartSegments:
    """Parts of a scan between restart markers; each decodes by itself and holds whole rows."""

    rows: int  # pixel rows of each segment but the last
    start: int  # offset of the first segment
    restarts: npt.NDArray[np.int64]  # offsets of the restart markers
    end: int

    def cut(self, data: bytes, first: int, last: int) -> bytearray:
        """The file with segments `first` to `last` only, restart markers renumbered."""
        begin = self.start if first == 0 else int(self.restarts[first - 1]) + 2
        end = self.end if last == len(self.restarts) else int(self.restarts[last])
        part = bytearray(data[: self.start]) + data[begin:end] + _END
        numbers = np.arange(last - first, dtype=np.uint8) % _NUM_RESTARTS
        np.frombuffer(part, np.uint8)[self.restarts[first:last] - begin + self.start + 1] = _RESTART + numbers
        return part


def read_header(data: bytes) -> JpegHeader | None:
    """The header of a plain JPEG file; None for any other file."""
    header: JpegHeader | None = None
    interval = 0
    at = 2 if data.startswith(_START) else len(data)
    while at + 4 < len(data) and data[at] == 0xFF:
        marker, end = data[at + 1], at + 2 + (data[at + 2] << 8 | data[at + 3])
        if marker == _SCAN:
            if header is None or data[at + 4] != header.num_components or data[end - len(_ALL) : end] != _ALL:
                return None
            if interval:
                return _with_segments(data, header, end, interval)
            return header if _is_complete(data, end) else None
        if marker == _BASELINE and header is None:
            header = _frame(data[at + 4 : end], at + 4)
            if header is None:
                return None
        elif marker not in _TABLES or (marker in _MAY_CHANGE_PIXELS and _changes_pixels(marker, data[at + 4 : end])):
            return None
        if marker == _INTERVAL:
            interval = int.from_bytes(data[at + 4 : at + 6], "big")
        at = end
    return None


def _is_complete(data: bytes, start: int) -> bool:
    """True if a scan runs to the end marker: decoders differ in what they make of one that breaks off."""
    next_marker = _MARKER.search(data, _first_marker(data, start))
    return next_marker is not None and next_marker[0] == _END


def _with_segments(data: bytes, header: JpegHeader, start: int, interval: int) -> JpegHeader | None:
    """The header with its restart segments if each is one row of coded units; None: the scan is not complete."""
    scan = np.frombuffer(data, np.uint8)[start:]
    markers = np.flatnonzero((scan[:-1] == 0xFF) & (scan[1:] != 0))
    codes = scan[markers + 1]
    others = np.flatnonzero((codes < _RESTART) | (codes >= _RESTART + _NUM_RESTARTS))
    if not len(others) or codes[others[0]] != _END[1]:
        return None
    count, (width, height) = int(others[0]), header.mcu_size
    is_by_row = interval == -(-header.width // width) and count == -(-header.height // height) - 1
    if not is_by_row or (codes[:count] != _RESTART + np.arange(count) % _NUM_RESTARTS).any():
        return header
    segments = RestartSegments(height, start, markers[:count] + start, int(markers[count]) + start)
    return replace(header, segments=segments)


def _first_marker(data: bytes, start: int) -> int:
    """The offset of a scan's first marker (a restart, or the end); the end of the file if there is none.

    numpy releases the GIL for most of its 30 us per photograph; searching with `re` alone held it for 75 us.
    """
    scan = np.frombuffer(data, np.uint8)[start:]
    if len(scan) < 2:
        return len(data)
    marked = (scan[1:] != 0).view(np.uint8)
    marked *= scan[:-1]
    at = int(marked.argmax())
    return start + at if marked[at] == 0xFF else len(data)


def cut_to_box(data: bytes, header: JpegHeader, box: PixelBox) -> tuple[bytearray, PixelBox]:
    """A shorter file that still has the pixels of a box, and the box in that file.

    Its height is lowered, so that no row far below the box is decoded. Rows above it can be left out only where the
    scan has restart segments.
    """
    left, top, right, bottom = box
    height = min(header.height, bottom + _MARGIN_ROWS)
    above, segments = 0, header.segments
    if segments is None or top < segments.rows + _MARGIN_ROWS:
        part = bytearray(data)
    else:
        first = (top - _MARGIN_ROWS) // segments.rows
        above = first * segments.rows
        part = segments.cut(data, first, (height - 1) // segments.rows)
    part[header.height_at : header.height_at + 2] = (height - above).to_bytes(2, "big")
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


def _changes_pixels(marker: int, segment: bytes) -> bool:
    """True if a segment asks, or may ask, for another color space or orientation, or has an unknown form."""
    if marker == _APP0:
        return segment.startswith(b"JFIF\0") and segment[5:6] != b"\x01"
    if marker == _APP14 and segment.startswith(b"Adobe"):
        return segment[11:12] != bytes([_ADOBE_YCBCR])
    if marker != _APP1:
        return False
    if not segment.startswith(b"Exif\0\0"):
        orientation = _XMP_ORIENTATION.search(segment)
        return orientation is not None and orientation[1] != b"1"
    exif = Image.Exif()
    try:
        exif.load(segment)
        return bool(exif.get(Base.Orientation, 1) != 1)
    except Exception:  # damaged bytes may raise anything; Pillow then decides what becomes of the image
        return True
