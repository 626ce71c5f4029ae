"""A reader of LevelDB's sorted string tables, as far as TensorFlow's checkpoint index needs it.

Whatever the bytes are, the result is strictly increasing keys with their values, or `MalformedError`, in memory
bounded by the size of the table.
"""

from __future__ import annotations

from collections.abc import Iterator

from reconv.storage.tensorflow_encoding import MalformedError, masked_crc32c, read_varint

_MAGIC = 0xDB4775248B80FB57.to_bytes(8, "little")
_FOOTER_BYTES = 48
_TRAILER_BYTES = 5  # compression type, and the masked CRC-32C of the block and that byte
_MAX_KEYS_BYTES = 64 << 20  # shared prefixes can make keys far larger than the table itself


def has_footer(data: bytes) -> bool:
    """True if the bytes end with the footer of a table."""
    return len(data) >= _FOOTER_BYTES and data.endswith(_MAGIC)


def read_table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Every key and value of a table in order; checksums are verified block by block."""
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
                raise MalformedError(f"its keys are not in order after {previous[:80]!r}")
            num_key_bytes += len(key)
            if num_key_bytes > _MAX_KEYS_BYTES:
                raise MalformedError(f"its keys take more than {_MAX_KEYS_BYTES >> 20} MiB")
            previous = key
            yield key, content


def _handle(data: memoryview, at: int) -> tuple[tuple[int, int], int]:
    """Offset and size of a block, and where the handle ends."""
    offset, at = read_varint(data, at)
    size, at = read_varint(data, at)
    return (offset, size), at


def _read_block(data: bytes, handle: tuple[int, int]) -> Iterator[tuple[bytes, bytes]]:
    """The keys and values of one block."""
    offset, size = handle
    end = offset + size
    if end + _TRAILER_BYTES > len(data) - _FOOTER_BYTES:
        raise MalformedError(f"a block of {size} bytes at {offset} is outside of the file")
    stored = int.from_bytes(data[end + 1 : end + _TRAILER_BYTES], "little")
    if masked_crc32c(data[offset : end + 1]) != stored:
        raise MalformedError(f"the checksum of the block at {offset} does not match")
    if data[end] != 0:
        raise MalformedError(f"the block at {offset} is compressed (type {data[end]}), which is not supported")
    yield from _read_entries(memoryview(data)[offset:end])


def _read_entries(block: memoryview) -> Iterator[tuple[bytes, bytes]]:
    num_restarts = int.from_bytes(block[-4:], "little")
    limit = len(block) - 4 - 4 * num_restarts
    if limit < 0:
        raise MalformedError("a block is too short for its restart points")
    key, at = b"", 0
    while at < limit:
        num_shared, at = read_varint(block, at)
        num_own, at = read_varint(block, at)
        num_value, at = read_varint(block, at)
        if num_shared > len(key) or at + num_own + num_value > limit:
            raise MalformedError("an entry exceeds its block")
        key = key[:num_shared] + bytes(block[at : at + num_own])
        at += num_own
        yield key, bytes(block[at : at + num_value])
        at += num_value
