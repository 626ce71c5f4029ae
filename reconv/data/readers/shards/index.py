"""An index of the samples in a set of shards: built once, stored in a file and memory-mapped.

The file is hidden beside the shards or, if that folder is not writable, in the cache. It is used only for the files
(name, size, modification time) it was built from. A row takes 20 bytes, shared by all processes that map the file.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reconv.core.errors import DataError
from reconv.data.readers.shards.memory_map import map_shards
from reconv.storage.bounded import open_file, parse_shallow_json, real_path
from reconv.storage.cache import cache_dir
from reconv.storage.data_errors import unreadable
from reconv.storage.files import write_atomic

IndexRows = npt.NDArray[np.void]

ROW = np.dtype([("offset", "<u8"), ("length", "<u4"), ("shard", "<u4"), ("label", "<i4")])
_MAGIC = b"reconv index 1\n"
_HEADER_SIZE_BYTES = 8
_SCAN_THREADS = 16  # they mostly wait for the disk or network


@dataclass(frozen=True, slots=True)
class ScannedShard:
    """One shard: (offset, length, label) of each sample, a digest of the samples, and names of labels."""

    samples: Sequence[tuple[int, int, int]]
    digest: bytes
    names: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """Rows of dtype `ROW`, the digest of all samples, the names of labels, and where the index is stored."""

    rows: IndexRows
    digest: str
    names: Mapping[int, str]
    stored: str


def open_index(
    kind: str, split: str, folder: Path, names: Sequence[str], scan: Callable[[str], ScannedShard]
) -> ShardIndex:
    """The index of these shards: loaded if it is up to date, else built and saved."""
    key = _shards_key(folder, names)
    places = _places(kind, split, folder)
    for place in places:
        if (index := _load(place, key, len(names))) is not None:
            return index
    rows, header = _build(folder, names, scan)
    header["key"] = key
    for place in places:
        if _save(place, header, rows) and (index := _load(place, key, len(names))) is not None:
            return index
    return ShardIndex(
        rows,
        header["digest"],
        header["names"],
        "in memory: neither the data folder nor the cache is writable",
    )


def _shards_key(folder: Path, names: Sequence[str]) -> str:
    digest = hashlib.blake2b(_MAGIC, digest_size=16)
    for name in names:
        try:
            status = os.stat(folder / name)
        except OSError as error:
            raise unreadable(folder / name, error) from error
        digest.update(json.dumps([name, status.st_size, status.st_mtime_ns]).encode())
    return digest.hexdigest()


def _places(kind: str, split: str, folder: Path) -> tuple[Path, Path]:
    """Candidates for the index file: beside the shards, and in the cache."""
    folder_digest = hashlib.blake2b(os.fsencode(real_path(folder)), digest_size=8).hexdigest()
    return folder / f".reconv-{kind}-{split}.index", cache_dir() / "indexes" / f"{folder_digest}-{kind}-{split}.index"


def _build(folder: Path, names: Sequence[str], scan: Callable[[str], ScannedShard]) -> tuple[IndexRows, dict[str, Any]]:
    def scan_to_rows(path: Path) -> tuple[IndexRows, ScannedShard]:
        scanned = scan(str(path))
        rows = np.zeros(len(scanned.samples), ROW)
        if len(scanned.samples):
            rows["offset"], rows["length"], rows["label"] = np.array(scanned.samples, np.int64).T
        return rows, replace(scanned, samples=())  # tuples take many times the memory of rows

    digest = hashlib.blake2b(digest_size=16)
    labels: dict[int, str] = {}
    parts: list[IndexRows] = []
    paths = [folder / name for name in names]
    for number, (part, scanned) in enumerate(map_shards(scan_to_rows, paths, _SCAN_THREADS)):
        part["shard"] = number
        parts.append(part)
        digest.update(scanned.digest)
        labels = {**scanned.names, **labels}  # the first name of a label wins
    rows = np.concatenate(parts)
    if not len(rows):
        raise DataError(
            "no samples in the shards", where=str(folder / names[0]), why=f"all {len(names)} shards are empty"
        )
    return rows, {"digest": digest.hexdigest(), "names": labels, "rows": len(rows)}


def _save(place: Path, header: Mapping[str, Any], rows: IndexRows) -> bool:
    """Write the index atomically; False if the place is not writable."""
    content = rows.tobytes()
    text = json.dumps({**header, "rows_digest": _digest(content)}).encode()
    text += b" " * (-(len(_MAGIC) + _HEADER_SIZE_BYTES + len(text)) % 64)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(place, _MAGIC + len(text).to_bytes(_HEADER_SIZE_BYTES, "little") + text + content)
    except OSError:  # read-only or full: the next place is tried
        return False
    return True


def _load(place: Path, key: str, num_shards: int) -> ShardIndex | None:
    """The index at this place; None if it is missing, damaged or out of date."""
    try:
        with open_file(place) as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):  # missing, unreadable or empty
        return None
    at = len(_MAGIC) + _HEADER_SIZE_BYTES
    size = int.from_bytes(mapped[len(_MAGIC) : at], "little")
    if mapped[: len(_MAGIC)] != _MAGIC or at + size > len(mapped):
        return None
    try:
        header = parse_shallow_json(mapped[at : at + size])
        content = memoryview(mapped)[at + size :]
        if header["key"] != key or header["rows_digest"] != _digest(content):
            return None
        rows = np.frombuffer(mapped, ROW, offset=at + size)
        digest, names = str(header["digest"]), {int(label): str(name) for label, name in header["names"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    # Digests are no signature: a person who can write the shards can write an index that leads elsewhere.
    if not len(rows) or int(rows["shard"].max()) >= num_shards or int(rows["label"].min()) < 0:
        return None
    return ShardIndex(rows, digest, names, str(place))


def _digest(content: bytes | memoryview) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
