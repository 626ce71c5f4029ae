"""The protocol buffer wire format: fields by number, read and written.

Owns numbers of variable length and the three shapes a field can have. Refuses to know what a message means. Invariant:
whatever the bytes, the outcome is fields that lie inside their message, or `MalformedError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

Field = int | bytes
Take = Callable[[int, int], bytes]  # the bytes from an offset, that many of them
_MAX_VARINT_BYTES = 10


class MalformedError(ValueError):
    """The bytes break the format; the text says how."""


def read_message(data: bytes) -> Iterator[tuple[int, Field]]:
    """The fields of a protocol buffer message: numbers as they are stored, everything else as bytes."""
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
            raise MalformedError("a field lies outside of its message")
        content = bytes(view[at : at + size])
        yield number, content if wire_type == 2 else int.from_bytes(content, "little")
        at += size


def read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, and where it ends."""
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
    raise MalformedError("a number is cut short or too long")


def spans(take: Take, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number, start and stop of each field of bytes in a message that lies at [at, end) of something not held whole."""
    while at < end:
        head = memoryview(take(at, min(2 * _MAX_VARINT_BYTES, end - at)))  # one piece: two were a third of the time
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
            raise MalformedError("a field lies outside of its message")
        if wire_type == 2:
            yield number, at, stop
        at = stop


def varint(value: int) -> bytes:
    """A number as seven bits a byte; a negative one takes ten, as the format has it for int64."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def bytes_field(number: int, content: bytes) -> bytes:
    """A field that holds bytes: text, a packed list or a message."""
    return varint(number << 3 | 2) + varint(len(content)) + content
