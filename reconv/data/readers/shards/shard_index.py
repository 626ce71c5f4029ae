"""Where each sample of a set of shards lies: made once, kept in a file, mapped into memory.

Owns the file's form, its place and when it is stale. Refuses to know formats: a `scan` of one shard says what is in
it. Invariant: an index is used only for the very files (name, size, time of change) it was made from, its rows are
in the order of the shards and of their samples, and no file of the data itself is ever changed.

The file is hidden beside the shards or, where that cannot be written, in the cache folder. A row takes 20 bytes, and
all processes that map the file share its memory.
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

from reconv.data.readers.shards.map_shards import map_shards
from reconv.data.storage.local import unreadable
from reconv.errors import DataError
from reconv.io.atomic import write_atomic
from reconv.io.cache import cache_folder

Rows = npt.NDArray[np.void]

ROW = np.dtype([("offset", "<u8"), ("length", "<u4"), ("shard", "<u4"), ("label", "<i4")])
_MAGIC = b"reconv index 1\n"
_HEADER_SIZE_BYTES = 8
_SCANS_AT_ONCE = 16  # each waits for the disk or the network most of the time


@dataclass(frozen=True, slots=True)
class Scanned:
    """One shard: (offset, length, label) of each sample, a digest of what they are, and names of labels seen."""

    samples: Sequence[tuple[int, int, int]]
    digest: bytes
    names: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Index:
    """Rows of `ROW`, the digest of all samples, the names of labels, and where the index is kept."""

    rows: Rows
    digest: str
    names: Mapping[int, str]
    kept: str


def open_index(kind: str, split: str, folder: Path, names: Sequence[str], scan: Callable[[str], Scanned]) -> Index:
    """The index of these shards, from its file if that is of the same shards, else made now and kept."""
    key = _key(folder, names)
    places = _places(kind, split, folder)
    for place in places:
        if (index := _load(place, key)) is not None:
            return index
    rows, header = _make(folder, names, scan)
    header["key"] = key
    for place in places:
        if _keep(place, header, rows) and (index := _load(place, key)) is not None:
            return index
    return Index(rows, header["digest"], _numbered(header["names"]), "in memory: no folder to keep it in is writable")


def _key(folder: Path, names: Sequence[str]) -> str:
    digest = hashlib.blake2b(_MAGIC, digest_size=16)
    for name in names:
        try:
            status = os.stat(folder / name)
        except OSError as error:
            raise unreadable(folder / name, error) from error
        digest.update(json.dumps([name, status.st_size, status.st_mtime_ns]).encode())
    return digest.hexdigest()


def _places(kind: str, split: str, folder: Path) -> tuple[Path, Path]:
    """Beside the shards, and in the cache folder."""
    whole = hashlib.blake2b(os.fsencode(folder.resolve()), digest_size=8).hexdigest()
    return folder / f".reconv-{kind}-{split}.index", cache_folder() / "indexes" / f"{whole}-{kind}-{split}.index"


def _make(folder: Path, names: Sequence[str], scan: Callable[[str], Scanned]) -> tuple[Rows, dict[str, Any]]:
    def scanned(path: Path) -> tuple[Rows, Scanned]:
        found = scan(str(path))
        piece = np.zeros(len(found.samples), ROW)
        if len(found.samples):
            piece["offset"], piece["length"], piece["label"] = np.array(found.samples, np.int64).T
        return piece, replace(found, samples=())  # tuples are many times as large as their rows

    digest = hashlib.blake2b(digest_size=16)
    labels: dict[int, str] = {}
    pieces: list[Rows] = []
    for number, (piece, found) in enumerate(map_shards(scanned, [folder / name for name in names], _SCANS_AT_ONCE)):
        piece["shard"] = number
        pieces.append(piece)
        digest.update(found.digest)
        labels = {**found.names, **labels}  # the first name of a label stays
    rows = np.concatenate(pieces)
    if not len(rows):
        raise DataError("no samples in the shards", where=str(folder / names[0]), why=f"all {len(names)} are empty")
    return rows, {"digest": digest.hexdigest(), "names": labels, "rows": len(rows)}


def _keep(place: Path, header: Mapping[str, Any], rows: Rows) -> bool:
    """Write the index so that others see all of it or nothing; whether that was possible."""
    content = rows.tobytes()
    text = json.dumps({**header, "rows_digest": _digest(content)}).encode()
    text += b" " * (-(len(_MAGIC) + _HEADER_SIZE_BYTES + len(text)) % 64)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(place, _MAGIC + len(text).to_bytes(_HEADER_SIZE_BYTES, "little") + text + content)
    except OSError:  # read-only, full or not ours: the next place is tried, and the last resort is said
        return False
    return True


def _load(place: Path, key: str) -> Index | None:
    """The index at this place if it is whole and of these shards."""
    if not place.is_file():  # a named pipe would be waited for
        return None
    try:
        with open(place, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):  # absent, unreadable or empty: it is made again
        return None
    at = len(_MAGIC) + _HEADER_SIZE_BYTES
    size = int.from_bytes(mapped[len(_MAGIC) : at], "little")
    if mapped[: len(_MAGIC)] != _MAGIC or at + size > len(mapped):
        return None
    try:
        header = json.loads(mapped[at : at + size])
    except ValueError:
        return None
    content = memoryview(mapped)[at + size :]
    if header.get("key") != key or header.get("rows_digest") != _digest(content):
        return None
    rows = np.frombuffer(mapped, ROW, offset=at + size)
    return Index(rows, header["digest"], _numbered(header["names"]), str(place))


def _digest(content: bytes | memoryview) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _numbered(names: Mapping[str, str] | Mapping[int, str]) -> dict[int, str]:
    return {int(label): name for label, name in names.items()}
