"""Files of JSON records, one per line with a checksum, and the checks of what is read from them.

The checksum is the last key of a line, `crc32c` of the bytes before it. It finds damage, not forgery. A reader takes at
most `MAX_LINE_BYTES` per line, `MAX_LINES` and `MAX_FILE_BYTES`, so that no file can exhaust the memory.
"""

from __future__ import annotations

import json
import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, BinaryIO

import google_crc32c

from reconv.storage.bounded import open_file
from reconv.storage.transient import naming

MAX_LINE_BYTES = 4 << 20
MAX_LINES = 4_000_000
MAX_FILE_BYTES = 1 << 30
CHECKSUM = "crc32c"
_SEALED = re.compile(rb'(?P<content>\{.*),"crc32c":"(?P<checksum>[0-9a-f]{8})"\}', re.DOTALL)
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file, without its newline."""

    number: int  # from 1
    content: bytes | None  # None: longer than MAX_LINE_BYTES
    has_newline: bool
    is_beyond_limit: bool = False  # of lines or bytes: it and the lines after it are not read


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a file that are not blank; those beyond the limits as one without content."""
    num_bytes = 0
    with naming(path), open_file(path) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            num_bytes += len(line)
            if number > MAX_LINES or num_bytes > MAX_FILE_BYTES:
                yield Line(number, None, True, is_beyond_limit=True)
                return
            has_newline = line.endswith(b"\n")
            if len(line) > MAX_LINE_BYTES and not has_newline:
                num_skipped, has_newline = _skip_line(file, MAX_FILE_BYTES - num_bytes)
                num_bytes += num_skipped
                yield Line(number, None, has_newline)
            elif line.strip():
                yield Line(number, line.removesuffix(b"\n"), has_newline)


def _skip_line(file: BinaryIO, max_bytes: int) -> tuple[int, bool]:
    """Read to the end of the line or of the limit; returns the number of bytes, and whether the line has an end."""
    num_bytes = 0
    while num_bytes <= max_bytes and (part := file.readline(MAX_LINE_BYTES)):
        num_bytes += len(part)
        if part.endswith(b"\n"):
            return num_bytes, True
    return num_bytes, False


def add_checksum(line: bytes) -> bytes:
    """A JSON object with the checksum of its other keys as the last one."""
    content = line[:-1]
    return content + b',"%s":"%08x"}' % (CHECKSUM.encode(), google_crc32c.value(content))


def verify_checksum(line: bytes) -> bool | None:
    """True if a line is as it was written; None: it has no checksum."""
    found = _SEALED.fullmatch(line)
    if found is None:
        return None
    return bool(int(found["checksum"], 16) == google_crc32c.value(found["content"]))


def parse_record(line: bytes) -> dict[str, Any]:
    """The JSON object in a line; raises ValueError where there is none."""
    try:
        record = json.loads(line.decode(), parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("too many nested values") from None
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    return record


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def is_record(line: bytes) -> bool:
    """True if a line is a whole JSON object."""
    try:
        parse_record(line)
    except ValueError:
        return False
    return True


def encodable(value: Any) -> Any:
    """A value that strict JSON can hold: non-finite numbers become strings, tuples lists and keys text."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {str(key): encodable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encodable(item) for item in value]
    return value


Reader = Callable[[Any], Any]  # from a JSON value to that of a field; raises ValueError for another type


def field_readers(cls: type) -> dict[str, Reader]:
    """For each field of a dataclass, the function that checks its JSON value and returns its value."""
    hints = typing.get_type_hints(cls)
    return {name: _reader(hint) for name, hint in hints.items() if typing.get_origin(hint) is not typing.ClassVar}


def _reader(hint: Any) -> Reader:
    arguments = typing.get_args(hint)
    match typing.get_origin(hint):
        case origin if origin is UnionType:
            return _optional(_reader(arguments[0]))
        case origin if origin is tuple:
            return _tuple_of(_reader(arguments[0]))
        case origin if origin is Mapping:
            return _mapping_to(_reader(arguments[1]))
    return {int: _integer, float: _number, str: _text, bool: _boolean, Any: _any}[hint]


def _optional(reader: Reader) -> Reader:
    return lambda value: None if value is None else reader(value)


def _tuple_of(reader: Reader) -> Reader:
    return lambda value: tuple(map(reader, _expect(value, list)))


def _mapping_to(reader: Reader) -> Reader:
    return lambda value: {key: reader(item) for key, item in _expect(value, dict).items()}


def _integer(value: Any) -> Any:
    if isinstance(value, bool) or _expect(value, int) not in _INT64:
        raise ValueError(f"{value!r:.40} is not a 64-bit integer")
    return value


def _number(value: Any) -> Any:
    if isinstance(value, str) and value in _NON_FINITE:
        return _NON_FINITE[value]
    return value if isinstance(value, float) else _integer(value)


def _text(value: Any) -> Any:
    return _expect(value, str)


def _boolean(value: Any) -> Any:
    return _expect(value, bool)


def _any(value: Any) -> Any:
    json.dumps(value, allow_nan=False)  # 1e999 is read as infinity, which cannot be written
    return value


def _expect(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{value!r:.40} is not of type {kind.__name__}")
    return value
