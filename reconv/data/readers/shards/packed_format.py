"""The packed form: one file per shard that holds encoded files or pixels, labels, class names and digests.

Owns the bytes of a shard, written in one pass and read at random. Refuses to know folders of shards and where samples
come from. Invariant: a shard is a function of its samples and its description alone; a byte that changed is an error
that names the shard, or the sample.

    header    64 bytes: magic, version, CRC-32 of all after the payloads, counts and offsets
    payloads  each at a multiple of 64 bytes
    meta      JSON: what the shard is part of, the class names, the digest of payloads, index and names
    index     32 bytes a sample
    names     UTF-8, one after another
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from reconv.data.dataset import U8, Sample
from reconv.data.storage.local import Ranges, open_ranges
from reconv.errors import DataError

ENDING = ".packed"
_MAGIC = b"RECONVPK"
_VERSION = 1
_ALIGN_BYTES = 64  # a cache line
_HEADER = struct.Struct("<8sII6Q")
_ENTRY = np.dtype(
    [
        ("start", "<u8"),
        ("length", "<u4"),
        ("target", "<i4"),
        ("crc", "<u4"),
        ("height", "<u2"),  # 0 for an encoded file
        ("width", "<u2"),
        ("name_start", "<u4"),
        ("name_length", "<u2"),
        ("channels", "<u2"),
    ]
)
_MAX_SIDE = 2**16 - 1


@dataclass(frozen=True, slots=True)
class Description:
    """What a shard is part of; written into it."""

    split: str
    shard: int
    num_shards: int
    per_shard: int  # samples in every shard but the last
    num_samples: int  # of the whole split
    source: str  # fingerprint of what was converted
    form: str
    class_names: tuple[str, ...]


def write_shard(file: BinaryIO, description: Description, samples: Iterable[Sample]) -> int:
    """Write one shard into an empty file and say how many samples it has."""
    file.write(bytes(_HEADER.size))
    digest = hashlib.blake2b(digest_size=16)
    entries: list[tuple[int, ...]] = []
    names = bytearray()
    position = _HEADER.size
    for sample in samples:
        payload, shape = _payload(sample)
        name = sample.name.encode("utf-8", "surrogateescape")[: 2**16 - 1]
        entry = (
            position,
            len(payload),
            sample.target,
            zlib.crc32(payload),
            *shape[:2],
            len(names),
            len(name),
            shape[2],
        )
        entries.append(entry)
        names += name
        position += _write(file, digest, payload)
    index = np.array(entries, _ENTRY).tobytes()
    digest.update(index)
    digest.update(names)
    facts = {**asdict(description), "digest": digest.hexdigest()}
    meta = json.dumps(facts, ensure_ascii=True, sort_keys=True).encode()
    meta += b" " * (-len(meta) % _ALIGN_BYTES)
    tail = meta + index + names
    file.write(tail)
    end = position + len(tail)
    offsets = (len(entries), position, len(meta), len(index), len(names), end)
    file.seek(0)
    file.write(_HEADER.pack(_MAGIC, _VERSION, zlib.crc32(tail), *offsets))
    return len(entries)


def _payload(sample: Sample) -> tuple[bytes, tuple[int, int, int]]:
    if isinstance(sample.data, bytes):
        return sample.data, (0, 0, 0)
    height, width, channels = sample.data.shape
    if not (0 < height <= _MAX_SIDE and 0 < width <= _MAX_SIDE):
        raise DataError(
            f"image of {width} x {height} pixels cannot be packed raw",
            where=sample.name,
            why=f"a side may have 1 to {_MAX_SIDE:,} pixels",
            then="limit the longest side, or pack encoded files",
        )
    return np.ascontiguousarray(sample.data).tobytes(), (height, width, channels)


def _write(file: BinaryIO, digest: Any, payload: bytes) -> int:
    """Write the payload up to the next multiple of the alignment; the bytes written."""
    padding = bytes(-len(payload) % _ALIGN_BYTES)
    for piece in (payload, padding):
        file.write(piece)
        digest.update(piece)
    return len(payload) + len(padding)


class _Entry(NamedTuple):
    """One sample of the index as plain numbers: a record's fields cost more to read one by one."""

    start: int
    length: int
    target: int
    crc: int
    height: int
    width: int
    name_start: int
    name_length: int
    channels: int


class PackedShard:
    """One shard, open: `description`, `digest` and its samples by number."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ranges: Ranges = open_ranges(path)
        num_samples, position, *lengths, crc = self._header()
        tail = self._ranges.take(position, sum(lengths))
        if zlib.crc32(tail) != crc:
            raise self._damaged("its description or index has changed")
        meta, rest = tail[: lengths[0]], tail[lengths[0] :]
        facts = json.loads(bytes(meta))
        self.digest: str = facts.pop("digest")
        self.description = Description(**{**facts, "class_names": tuple(facts["class_names"])})
        self._index = np.frombuffer(rest[: lengths[1]], _ENTRY)
        self._names = rest[lengths[1] :]
        if len(self._index) != num_samples:
            raise self._damaged(f"its index has {len(self._index)} of {num_samples} samples")
        # A check reads the whole payload, so each is made once in a process and not in every epoch.
        self._checked = np.zeros(num_samples, np.bool_)

    def __reduce__(self) -> tuple[type[PackedShard], tuple[Path]]:
        """In another process the shard is opened again, and mapped where it is here."""
        return PackedShard, (self.path,)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def index_bytes(self) -> int:
        """Bytes of index and names; in the page cache, and so shared, where the file is mapped."""
        return self._index.nbytes + len(self._names) + self._checked.nbytes

    def name(self, number: int) -> str:
        """What the sample was called where it came from."""
        return self._name(self._entry(number))

    def __getitem__(self, number: int) -> Sample:
        """The encoded file, or the pixels without a copy where the file is mapped."""
        self._ranges.refuse_if_cut()
        entry = self._entry(number)
        payload = self._ranges.take(entry.start, entry.length)
        where = f"{self.path}:{self._name(entry)}"
        if not self._checked[number]:
            if zlib.crc32(payload) != entry.crc:
                raise self._damaged("the sample's bytes have changed since it was packed", where)
            self._checked[number] = True
        data: bytes | U8
        if entry.height:
            data = np.frombuffer(payload, np.uint8).reshape(entry.height, entry.width, entry.channels)
        else:
            data = bytes(payload)
        return Sample(data, entry.target, where)

    def _entry(self, number: int) -> _Entry:
        return _Entry(*self._index[number].item())

    def _name(self, entry: _Entry) -> str:
        name = bytes(self._names[entry.name_start : entry.name_start + entry.name_length])
        return name.decode("utf-8", "surrogateescape")

    def _header(self) -> tuple[int, ...]:
        """Number of samples, where the payloads end, lengths of meta, index and names, and the CRC of the three."""
        size = self._ranges.size_bytes
        header = bytes(self._ranges.take(0, min(_HEADER.size, size)))
        if not header.startswith(_MAGIC) or len(header) < _HEADER.size:
            raise self._damaged("it does not begin like a packed shard")
        _, version, crc, *numbers = _HEADER.unpack(header)
        if version != _VERSION:
            raise DataError(
                f"packed shard of version {version}",
                where=str(self.path),
                why=f"this Reconv reads version {_VERSION}",
                then="update Reconv, or convert the data again",
            )
        *counts, end = numbers
        if end != size or sum(counts[1:]) != end:
            raise self._damaged(f"it has {size:,} bytes, but {end:,} were written")
        return (*counts, crc)

    def _damaged(self, why: str, where: str = "") -> DataError:
        then = "copy it again, or convert the data again"
        return DataError("damaged packed shard", where=where or str(self.path), why=why, then=then)
