"""TFRecord files and the tf.train.Example in a record, read and written without TensorFlow.

A record is its length (8 bytes), the masked CRC-32C of those, the content, and the masked CRC-32C of that. Never more
than the file's size is allocated.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from reconv.core.errors import DataError
from reconv.storage.files import atomic_writer
from reconv.storage.local import ReadWindow, read, size_bytes
from reconv.storage.tensorflow_encoding import (
    MalformedError,
    bytes_field_spans,
    encode_bytes_field,
    encode_varint,
    masked_crc32c,
    read_message,
    read_varint,
)

HEADER_BYTES = 12
FOOTER_BYTES = 4
_LENGTH = struct.Struct("<QI")
_GZIP = b"\x1f\x8b"
_NAME_TAG = b"\x0a"  # of field 1, which is bytes
_BYTES, _FLOATS, _INTS = 1, 2, 3  # fields of tf.train.Feature

Values = Sequence[bytes] | Sequence[float] | Sequence[int]


def record_spans(window: ReadWindow) -> Iterator[tuple[int, int]]:
    """Offset and length of each record's content; verifies the checksums of the lengths."""
    at, end = 0, size_bytes(window.path)
    while at < end:
        if end - at < HEADER_BYTES + FOOTER_BYTES:
            raise record_error(window.path, at, f"truncated record: {end - at} bytes are left in the file")
        length = _read_length(window.path, at, window.read(at, HEADER_BYTES))
        start = at + HEADER_BYTES
        at = start + length + FOOTER_BYTES
        if at > end:
            what = f"truncated record: it has {length} bytes, {end - start} are left in the file"
            raise record_error(window.path, start - HEADER_BYTES, what)
        yield start, length


def read_record(path: str | Path, start: int, length: int) -> bytes:
    """The content of the record at `start`; verifies both checksums."""
    framed = read(path, start - HEADER_BYTES, HEADER_BYTES + length + FOOTER_BYTES)
    if _read_length(path, start - HEADER_BYTES, framed[:HEADER_BYTES]) != length:
        raise record_error(path, start - HEADER_BYTES, "the record's length differs from the index")
    content = framed[HEADER_BYTES:-FOOTER_BYTES]
    if masked_crc32c(content) != int.from_bytes(framed[-FOOTER_BYTES:], "little"):
        raise record_error(path, start - HEADER_BYTES, "wrong checksum of a record")
    return content


def parse_example(data: bytes) -> dict[str, Values]:
    """Every feature of a tf.train.Example by name."""
    features: dict[str, Values] = {}
    for field, message in read_message(data):
        for entry_field, entry in read_message(message) if field == 1 and isinstance(message, bytes) else ():
            if entry_field == 1 and isinstance(entry, bytes):
                name, value = _parse_entry(entry)
                features[name] = value
    return features


def peek_features(window: ReadWindow, start: int, length: int, wanted: Sequence[str]) -> dict[str, Values]:
    """The wanted features of the Example at `start`; others, such as the image, are not read."""
    prefixes = tuple(encode_bytes_field(1, name.encode()) for name in wanted)
    longest = max(map(len, prefixes))
    features: dict[str, Values] = {}
    for field, low, high in bytes_field_spans(window.read, start, start + length):
        for entry_field, entry_low, entry_high in bytes_field_spans(window.read, low, high) if field == 1 else ():
            # Writers put the name before the value; an entry that does not start with its name is read completely.
            prefix = window.read(entry_low, min(longest, entry_high - entry_low))
            if entry_field == 1 and (prefix.startswith(prefixes) or prefix[:1] != _NAME_TAG):
                name, value = _parse_entry(window.read(entry_low, entry_high - entry_low))
                if name in wanted:
                    features[name] = value
    return features


def encode_example(features: Mapping[str, Values]) -> bytes:
    """A serialized tf.train.Example with its features sorted by name."""
    entries = b""
    for name in sorted(features):
        entry = encode_bytes_field(1, name.encode()) + encode_bytes_field(2, _encode_feature(features[name]))
        entries += encode_bytes_field(1, entry)
    return encode_bytes_field(1, entries)


def write_record(file: BinaryIO, content: bytes) -> None:
    """Append one record to an open file."""
    length = len(content).to_bytes(8, "little")
    file.write(length + masked_crc32c(length).to_bytes(4, "little") + content)
    file.write(masked_crc32c(content).to_bytes(4, "little"))


def write_records(path: str | Path, contents: Iterable[bytes]) -> int:
    """Write a file of records atomically; returns their number."""
    count = 0
    with atomic_writer(Path(path)) as file:
        for content in contents:
            write_record(file, content)
            count += 1
    return count


def record_error(path: str | Path, at: int, what: str, why: str = "", hint: str = "") -> DataError:
    """The error for a bad record at byte `at`."""
    return DataError(
        what,
        where=f"{path}, byte {at}",
        why=why or "the file is damaged, or was not completely written or copied",
        hint=hint or "copy, download or convert this file again",
    )


def _read_length(path: str | Path, at: int, header: bytes) -> int:
    length, stored = _LENGTH.unpack(header)
    if masked_crc32c(header[:8]) != stored:
        if at == 0 and header.startswith(_GZIP):
            raise record_error(
                path, 0, "compressed record file", "random access needs uncompressed files", "decompress it with gunzip"
            )
        raise record_error(path, at, "wrong checksum of a record's length")
    return int(length)


def _parse_entry(data: bytes) -> tuple[str, Values]:
    """Name and values of an entry of the features map."""
    pair = dict(read_message(data))
    name, value = pair.get(1, b""), pair.get(2, b"")
    if not isinstance(name, bytes) or not isinstance(value, bytes):
        raise MalformedError("a feature is not a name and a value")
    return name.decode("utf-8", "replace"), _parse_feature(value)


def _parse_feature(data: bytes) -> Values:
    """The list in a feature; the last one if there are several, as protocol buffers define."""
    values: Values = []
    for kind, message in read_message(data):
        if not isinstance(message, bytes) or kind not in (_BYTES, _FLOATS, _INTS):
            continue
        items = [item for number, item in read_message(message) if number == 1]
        if kind == _BYTES:
            values = [item for item in items if isinstance(item, bytes)]
        elif kind == _FLOATS:
            packed = b"".join(item if isinstance(item, bytes) else item.to_bytes(4, "little") for item in items)
            if len(packed) % 4:
                raise MalformedError("a list of floats is truncated")
            values = list(struct.unpack(f"<{len(packed) // 4}f", packed))
        else:
            values = [number for item in items for number in ([item] if isinstance(item, int) else _unpack_ints(item))]
            values = [number - (1 << 64) if number >> 63 else number for number in values]
    return values


def _unpack_ints(packed: bytes) -> Iterator[int]:
    view, at = memoryview(packed), 0
    while at < len(view):
        number, at = read_varint(view, at)
        yield number


def _encode_feature(values: Values) -> bytes:
    if all(isinstance(value, bytes) for value in values):
        return encode_bytes_field(
            _BYTES, b"".join(encode_bytes_field(1, value) for value in values if isinstance(value, bytes))
        )
    if all(isinstance(value, int) for value in values):
        return encode_bytes_field(
            _INTS, encode_bytes_field(1, b"".join(encode_varint(value) for value in values if isinstance(value, int)))
        )
    floats = [float(value) for value in values if not isinstance(value, bytes)]
    return encode_bytes_field(_FLOATS, encode_bytes_field(1, struct.pack(f"<{len(floats)}f", *floats)))
