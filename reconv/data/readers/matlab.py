"""Columns of a struct array in a MATLAB 5 file, as the ImageNet development kit has one.

Owns as much of the format as that takes: little-endian, compressed or not, structs of numbers and text. Refuses
everything else. Invariant: no value is made up; what is not understood is a `MatlabError`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence

_HEADER_BYTES = 128
_MATRIX, _COMPRESSED = 14, 15
_STRUCT_CLASS = 2
_CODES = {1: "b", 2: "B", 3: "h", 4: "H", 5: "i", 6: "I", 7: "f", 9: "d", 12: "q", 13: "Q", 16: "B", 17: "H"}
_MAX_BYTES = 256 * 2**20  # unpacked; the kit's file has 4 MB


class MatlabError(Exception):
    """The file is not of the part of the format that is read."""


def struct_columns(data: bytes, variable: str, fields: Sequence[str]) -> list[list[object]]:
    """The first value (or the text) of each field, for every element of the struct array `variable`."""
    if len(data) < _HEADER_BYTES or data[126:128] != b"IM":
        raise MatlabError("not a little-endian MATLAB 5 file")
    try:
        for kind, content in _elements(data[_HEADER_BYTES:]):
            whole = content
            if kind == _COMPRESSED:
                [(kind, whole)] = _elements(_inflated(content))
            if kind == _MATRIX and (columns := _columns(whole, variable, fields)) is not None:
                return columns
    except (struct.error, zlib.error, ValueError, IndexError) as error:
        raise MatlabError(f"damaged: {error}") from error
    raise MatlabError(f"there is no struct array {variable}")


def _inflated(content: bytes) -> bytes:
    inflate = zlib.decompressobj()
    whole = inflate.decompress(content, _MAX_BYTES)
    if not inflate.eof:
        raise MatlabError(f"cut, or larger than {_MAX_BYTES:,} bytes")
    return whole


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Type and content of one element after another."""
    position = 0
    while position + 8 <= len(data):
        kind, length = struct.unpack_from("<II", data, position)
        if kind >> 16:  # a small element: its length and its content share the first 8 bytes
            kind, length = kind & 0xFFFF, kind >> 16
            yield kind, data[position + 4 : position + 4 + length]
            position += 8
            continue
        content = data[position + 8 : position + 8 + length]
        if len(content) < length:
            raise MatlabError("cut")
        yield kind, content
        # A compressed element is not padded.
        position += 8 + (length if kind == _COMPRESSED else -(-length // 8) * 8)


def _columns(matrix: bytes, variable: str, fields: Sequence[str]) -> list[list[object]] | None:
    """The columns if this is the struct array that is looked for."""
    parts = list(_elements(matrix))
    (flags, dimensions, name), rest = parts[:3], parts[3:]
    if flags[1][0] != _STRUCT_CLASS or name[1].decode("ascii", "replace") != variable:
        return None
    num_elements = 1
    for side in _numbers(*dimensions):
        num_elements *= int(side)
    (width,) = (int(number) for number in _numbers(*rest[0]))
    raw = rest[1][1]
    names = [raw[at : at + width].split(b"\0")[0].decode("ascii") for at in range(0, len(raw), width)]
    values = rest[2:]
    if len(values) != num_elements * len(names):
        raise MatlabError(f"{len(values)} values for {num_elements} x {len(names)} fields")
    columns = [names.index(field) for field in fields]
    return [[_value(values[row * len(names) + column][1]) for row in range(num_elements)] for column in columns]


def _value(matrix: bytes) -> object:
    """The text of a text, the first number of anything else."""
    parts = list(_elements(matrix))
    array_class, (kind, content) = parts[0][1][0], parts[3]
    if array_class == 4:
        return bytes(content).decode("utf-8") if kind in (1, 2, 16) else "".join(map(chr, _numbers(kind, content)))
    return _numbers(kind, content)[0]


def _numbers(kind: int, content: bytes) -> tuple[int, ...]:
    if kind not in _CODES:
        raise MatlabError(f"numbers of type {kind}")
    code = _CODES[kind]
    return struct.unpack(f"<{len(content) // struct.calcsize(code)}{code}", content)
