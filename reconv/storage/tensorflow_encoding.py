"""Encodings that TensorFlow's record files and checkpoints share: protocol buffer fields and the masked CRC-32C.

Any bytes give either fields that lie inside their message or `MalformedError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import google_crc32c

Field = int | bytes
ReadRange = Callable[[int, int], bytes]  # of offset, length
_MAX_VARINT_BYTES = 10
_CRC_MASK_DELTA = 0xA282EAD8


class MalformedError(ValueError):
    """The bytes are not a valid message; the text says why."""


def read_message(data: bytes) -> Iterator[tuple[int, Field]]:
    """Number and value of each field of a message: varints and fixed-width numbers as int, the rest as bytes."""
    view, at = memoryview(data), 0
    while at < len(view):
        tag, at = read_varint(view, at)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == 0:
            value, at = read_varint(view, at)
            yield number, value
            continue
        if wire_type == 2:
            size, at = read_varint(view, at)
        elif wire_type in (1, 5):
            size = 8 if wire_type == 1 else 4
        else:
            raise MalformedError(f"a field has the unknown wire type {wire_type}")
        if at + size > len(view):
            raise MalformedError("a field extends beyond its message")
        content = bytes(view[at : at + size])
        yield number, content if wire_type == 2 else int.from_bytes(content, "little")
        at += size


def read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """A varint at `at`, and where it ends."""
    value = 0
    for i in range(_MAX_VARINT_BYTES):
        if at + i >= len(data):
            break
        byte = data[at + i]
        value |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            if value >> 64:
                break
            return value, at + i + 1
    raise MalformedError("a varint is truncated or too long")


def bytes_field_spans(read: ReadRange, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number, start and stop of each bytes field in the message at [at, end) of a file; other bytes are not read."""
    while at < end:
        head = memoryview(read(at, min(2 * _MAX_VARINT_BYTES, end - at)))  # one read: two took a third of the time
        tag, num_read = read_varint(head, 0)
        number, wire_type = tag >> 3, tag & 7
        size = 0
        if wire_type in (0, 2):
            size, num_read = read_varint(head, num_read)
        elif wire_type in (1, 5):
            num_read += 8 if wire_type == 1 else 4
        else:
            raise MalformedError(f"a field has the unknown wire type {wire_type}")
        at += num_read
        stop = at + size if wire_type == 2 else at
        if stop > end:
            raise MalformedError("a field extends beyond its message")
        if wire_type == 2:
            yield number, at, stop
        at = stop


def encode_varint(value: int) -> bytes:
    """A number as a varint; negative int64 take ten bytes."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode_bytes_field(number: int, content: bytes) -> bytes:
    """An encoded field that holds bytes: text, a packed list or a message."""
    return encode_varint(number << 3 | 2) + encode_varint(len(content)) + content


def masked_crc32c(data: bytes) -> int:
    """The CRC-32C of the bytes, masked as TensorFlow and LevelDB store it."""
    crc: int = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + _CRC_MASK_DELTA) & 0xFFFFFFFF
