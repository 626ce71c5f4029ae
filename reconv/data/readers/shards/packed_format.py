"""The packed format: one file per shard with encoded images or pixels, labels, class names and checksums.

A shard's bytes depend only on its samples and metadata. A changed byte is an error that names the shard or the sample.

    header    64 bytes: magic, version, CRC-32 of all after the payloads, counts and offsets
    payloads  each at a multiple of 64 bytes
    meta      JSON: metadata of the shard, class names, digest of payloads, index and names
    index     32 bytes per sample
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

from reconv.core.errors import DataError
from reconv.data.dataset import I64, U8, ByteRange, Sample
from reconv.storage.bounded import parse_shallow_json
from reconv.storage.local import ByteRanges, open_ranges
from reconv.storage.remote_tree import shown_path

EXTENSION = ".packed"
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
class PackedShardInfo:
    """The metadata of a shard, stored in it."""

    split: str
    shard: int
    num_shards: int
    per_shard: int  # samples in every shard but the last
    num_samples: int  # of the whole split
    source: str  # fingerprint of the converted dataset
    form: str  # how images were re-encoded; empty if they were not
    class_names: tuple[str, ...]


def write_shard(file: BinaryIO, info: PackedShardInfo, samples: Iterable[Sample]) -> int:
    """Write one shard into an empty file; return the number of samples."""
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
    meta_facts = {**asdict(info), "digest": digest.hexdigest()}
    meta = json.dumps(meta_facts, ensure_ascii=True, sort_keys=True).encode()
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
            why=f"sides must be 1 to {_MAX_SIDE:,} pixels",
            hint="limit the longest side with --longest, or leave out --raw",
        )
    return np.ascontiguousarray(sample.data).tobytes(), (height, width, channels)


def _write(file: BinaryIO, digest: Any, payload: bytes) -> int:
    """Write the payload, padded to the alignment; return the number of bytes written."""
    padding = bytes(-len(payload) % _ALIGN_BYTES)
    for chunk in (payload, padding):
        file.write(chunk)
        digest.update(chunk)
    return len(payload) + len(padding)


def _read_info(meta: bytes) -> tuple[PackedShardInfo, str]:
    """The metadata of a shard and its digest; raises ValueError, KeyError or TypeError if they are malformed."""
    facts = parse_shallow_json(meta)
    if not isinstance(facts, dict):
        raise TypeError("not a JSON object")
    digest, names = facts.pop("digest"), facts.pop("class_names")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise TypeError("class_names is not a list of names")
    for name in ("shard", "num_shards", "per_shard", "num_samples"):
        if type(facts[name]) is not int or not (0 if name == "shard" else 1) <= facts[name] < 1 << 48:
            raise ValueError(f"{name} is {facts[name]!r:.40}")
    for name, value in (("digest", digest), *((name, facts[name]) for name in ("split", "source", "form"))):
        if not isinstance(value, str):
            raise TypeError(f"{name} is not a text")
    return PackedShardInfo(**facts, class_names=tuple(names)), digest


class _Entry(NamedTuple):
    """One row of the index as Python numbers: reading fields of a numpy record one by one is slower."""

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
    """An open shard: `info`, `digest` and its samples by number."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._shown = shown_path(path)
        self._file: ByteRanges = open_ranges(path)
        num_samples, position, *lengths, crc = self._header()
        tail = self._file.read(position, sum(lengths))
        if zlib.crc32(tail) != crc:
            raise self._damaged("the checksum of its metadata and index is wrong")
        meta, rest = tail[: lengths[0]], tail[lengths[0] :]
        try:
            self.info, self.digest = _read_info(bytes(meta))
            self._index = np.frombuffer(rest[: lengths[1]], _ENTRY)
        except (ValueError, KeyError, TypeError) as error:
            raise self._damaged(f"its metadata or index is malformed: {error}") from error
        self._names = rest[lengths[1] :]
        if len(self._index) != num_samples:
            raise self._damaged(f"its index has {len(self._index)} of {num_samples} samples")
        # Checking a sample reads its whole payload, so it is done once per process and not in every epoch.
        self._checked = np.zeros(num_samples, np.bool_)

    def __reduce__(self) -> tuple[type[PackedShard], tuple[Path]]:
        """Another process opens the shard again."""
        return PackedShard, (self.path,)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def targets(self) -> I64:
        """The class index of each sample."""
        return self._index["target"].astype(np.int64)

    @property
    def index_bytes(self) -> int:
        """Bytes of index and names; shared through the page cache if the file is mapped."""
        return self._index.nbytes + len(self._names) + self._checked.nbytes

    def name(self, number: int) -> str:
        """The sample's name in the converted dataset."""
        return self._name(self._entry(number))

    def __getitem__(self, number: int) -> Sample:
        """The encoded image, or its pixels (not copied if the file is mapped)."""
        self._file.check_not_truncated()
        entry = self._entry(number)
        payload = self._file.read(entry.start, entry.length)
        where = f"{self._shown}:{self._name(entry)}"
        if not self._checked[number]:
            if zlib.crc32(payload) != entry.crc:
                raise self._damaged("the checksum of the sample is wrong", where)
            self._checked[number] = True
        data: bytes | U8
        if entry.height:
            if entry.channels not in (1, 3) or entry.height * entry.width * entry.channels != entry.length:
                raise self._damaged("the shape of the sample does not fit its length", where)
            data = np.frombuffer(payload, np.uint8).reshape(entry.height, entry.width, entry.channels)
        else:
            data = bytes(payload)
        return Sample(data, entry.target, where)

    def byte_range(self, number: int) -> ByteRange:
        """Byte range of a sample."""
        entry = self._entry(number)
        return str(self.path), entry.start, entry.length

    def _entry(self, number: int) -> _Entry:
        return _Entry(*self._index[number].item())

    def _name(self, entry: _Entry) -> str:
        name = bytes(self._names[entry.name_start : entry.name_start + entry.name_length])
        return name.decode("utf-8", "surrogateescape")

    def _header(self) -> tuple[int, ...]:
        """Number of samples, end of the payloads, lengths of meta, index and names, and the CRC of the three."""
        size = self._file.size_bytes
        header = bytes(self._file.read(0, min(_HEADER.size, size)))
        if not header.startswith(_MAGIC) or len(header) < _HEADER.size:
            raise self._damaged("it does not start with the header of a packed shard")
        _, version, crc, *numbers = _HEADER.unpack(header)
        if version != _VERSION:
            raise DataError(
                f"packed shard has format version {version}",
                where=str(self.path),
                why=f"this Reconv reads version {_VERSION}",
                hint="update Reconv, or convert the data again",
            )
        *counts, end = numbers
        if end != size or sum(counts[1:]) != end:
            raise self._damaged(f"it has {size:,} bytes instead of {end:,}")
        return (*counts, crc)

    def _damaged(self, why: str, where: str = "") -> DataError:
        hint = "copy it again, or convert the data again"
        return DataError("damaged packed shard", where=where or self._shown, why=why, hint=hint)
