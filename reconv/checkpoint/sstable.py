"""Sorted string tables of LevelDB's form, and the protocol buffer wire format: as much as a checkpoint index needs.

Owns blocks, their prefix-compressed keys and checksums, and fields by number. Refuses to know what keys and values
mean. Invariant: whatever the bytes, the outcome is strictly rising keys with their values, or `MalformedError`, in
memory that the size of the table bounds.
"""

from __future__ import annotations

from collections.abc import Iterator

from reconv.checkpoint.crc32c import crc32c, masked

_MAGIC = 0xDB4775248B80FB57.to_bytes(8, "little")
_FOOTER_BYTES = 48
_TRAILER_BYTES = 5  # how the block is compressed, and the masked CRC-32C of all before it
_MAX_KEYS_BYTES = 64 << 20  # shared prefixes can make keys far larger than the table itself

Field = int | bytes


class MalformedError(ValueError):
    """The bytes break the format; the text says how."""


def has_footer(data: bytes) -> bool:
    """Whether the bytes end like a table."""
    return len(data) >= _FOOTER_BYTES and data.endswith(_MAGIC)


def read_table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Every key and value of a table in order, checksums checked block by block."""
    if not has_footer(data):
        raise MalformedError("it does not end with the footer of an index")
    footer = memoryview(data)[-_FOOTER_BYTES:]
    _, at = _handle(footer, 0)  # of the metadata, which checkpoints leave empty
    handle, _ = _handle(footer, at)
    previous: bytes | None = None
    num_key_bytes = 0
    for _, value in _read_block(data, handle):
        for key, content in _read_block(data, _handle(memoryview(value), 0)[0]):
            if previous is not None and key <= previous:
                raise MalformedError(f"its keys are out of order after {previous[:80]!r}")
            num_key_bytes += len(key)
            if num_key_bytes > _MAX_KEYS_BYTES:
                raise MalformedError(f"its keys take more than {_MAX_KEYS_BYTES >> 20} MiB")
            previous = key
            yield key, content


def _handle(data: memoryview, at: int) -> tuple[tuple[int, int], int]:
    """Offset and size of a block, and where the handle ends."""
    offset, at = _varint(data, at)
    size, at = _varint(data, at)
    return (offset, size), at


def _read_block(data: bytes, handle: tuple[int, int]) -> Iterator[tuple[bytes, bytes]]:
    """The keys and values of one block."""
    offset, size = handle
    end = offset + size
    if end + _TRAILER_BYTES > len(data) - _FOOTER_BYTES:
        raise MalformedError(f"a block of {size} bytes at {offset} lies outside of it")
    stored = int.from_bytes(data[end + 1 : end + _TRAILER_BYTES], "little")
    if masked(crc32c(memoryview(data)[offset : end + 1])) != stored:
        raise MalformedError(f"the checksum of the block at {offset} does not match")
    if data[end] != 0:
        raise MalformedError(f"the block at {offset} is compressed (form {data[end]}), which is not supported")
    yield from _read_entries(memoryview(data)[offset:end])


def _read_entries(block: memoryview) -> Iterator[tuple[bytes, bytes]]:
    num_restarts = int.from_bytes(block[-4:], "little")
    limit = len(block) - 4 - 4 * num_restarts
    if limit < 0:
        raise MalformedError("a block is too short for its restart points")
    key, at = b"", 0
    while at < limit:
        num_shared, at = _varint(block, at)
        num_own, at = _varint(block, at)
        num_value, at = _varint(block, at)
        if num_shared > len(key) or at + num_own + num_value > limit:
            raise MalformedError("an entry lies outside of its block")
        key = key[:num_shared] + bytes(block[at : at + num_own])
        at += num_own
        yield key, bytes(block[at : at + num_value])
        at += num_value


def read_message(data: bytes) -> Iterator[tuple[int, Field]]:
    """The fields of a protocol buffer message: numbers as they are stored, everything else as bytes."""
    view, at = memoryview(data), 0
    while at < len(view):
        tag, at = _varint(view, at)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == 0:
            value, at = _varint(view, at)
            yield number, value
            continue
        if wire_type == 2:
            size, at = _varint(view, at)
        elif wire_type in (1, 5):
            size = 8 if wire_type == 1 else 4
        else:
            raise MalformedError(f"a field has the unknown wire type {wire_type}")
        if at + size > len(view):
            raise MalformedError("a field lies outside of its message")
        content = bytes(view[at : at + size])
        yield number, content if wire_type == 2 else int.from_bytes(content, "little")
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, and where it ends."""
    value = 0
    for i in range(10):
        if at + i >= len(data):
            break
        byte = data[at + i]
        value |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            if value >> 64:
                break
            return value, at + i + 1
    raise MalformedError("a number is cut short or too long")
