"""Tar shards in the WebDataset layout: members `KEY.jpg` and `KEY.cls` side by side, labels counted from 0.

Owns pairing members and reading them in place. Refuses to unpack. Invariant: every image has its label and every
label its image, or the shard is refused with the byte where one of them stands alone.
"""

from __future__ import annotations

import hashlib
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from reconv.data.dataset import Split
from reconv.data.readers.folder import EXTENSIONS
from reconv.data.readers.shards.shard_dataset import ShardDataset, ShardFormat, check_label
from reconv.data.readers.shards.shard_index import Scanned
from reconv.data.storage.local import Stream, read, size_bytes
from reconv.errors import DataError

CLASS_LIST = "classes.txt"  # one name a line, beside the shards
_LABEL = "cls"
_MAX_LABEL_BYTES = 64
_BLOCK_BYTES = 512
_MAX_MEMBER_BYTES = (1 << 32) - 1  # what a row of the index can hold
# The original archives of ImageNet are tars too, of tars or of one class each, and no shards.
_NO_SHARD = r"(?!ILSVRC\d|n\d{8}\.tar)"
_IN_FOLDER = re.compile(_NO_SHARD + r".+\.tar")
_FLAT = re.compile(_NO_SHARD + r"(?:.*[-_.])?(?P<split>train|validation|val)(?:[-_.]?\d.*|[-_.].*)?\.tar")


@dataclass(slots=True)
class _Pair:
    """What was seen of one key: where its image lies and its label."""

    key: str
    at: int
    picture: tuple[int, int] | None = None
    label: int | None = None


def open_tar(root: Path, split: Split, why: str = "") -> ShardDataset:
    """One split of tar shards, with the names in classes.txt where that is there."""
    path = root / CLASS_LIST
    if not path.is_file():
        return ShardDataset(TAR, root, split, why)
    names = tuple(line.strip() for line in read(path).decode("utf-8", "replace").splitlines() if line.strip())
    if not names or len(set(names)) < len(names):
        raise DataError(
            f"{CLASS_LIST} is empty or names a class twice",
            where=str(path),
            why="it has one name a line, the first for label 0",
            then="correct it or remove it",
        )
    return ShardDataset(TAR, root, split, why, names)


def _members(path: str) -> Iterator[tarfile.TarInfo]:
    """Every plain file in a tar that ends as a tar does."""
    at = 0
    try:
        with tarfile.open(fileobj=Stream(path), mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # it keeps them all otherwise
                at = tar.offset
                if member.isfile() and not member.issparse():
                    yield member
                elif not member.isdir():
                    raise _broken(
                        path, member.offset, f"member {member.name} is no plain file", "links, devices and sparse files"
                    )
            at = tar.offset
    except (tarfile.TarError, EOFError, UnicodeError, ValueError) as error:
        raise _broken(path, at, "tar cut short or damaged", str(error)) from error
    # The standard library takes a damaged header for the end of the archive.
    if size_bytes(path) < at + _BLOCK_BYTES or any(read(path, at, _BLOCK_BYTES)):
        raise _broken(path, at, "tar cut short or damaged", "there is no end mark after its last whole member")


def _scan(path: str) -> Scanned:
    """Every sample's image and label, in the order of the archive."""
    samples: list[tuple[int, int, int]] = []
    digest = hashlib.blake2b(digest_size=16)
    for pair in _pairs(path):
        if (sample := _finished(path, pair)) is not None:
            samples.append(sample)
            digest.update(f"{pair.key}\0{sample[1]}\0{sample[2]}\0".encode("utf-8", "surrogateescape"))
    return Scanned(samples, digest.digest(), {})


def _pairs(path: str) -> Iterator[_Pair]:
    """Members gathered while their key stays the same."""
    pair: _Pair | None = None
    for member in _members(path):
        folder, slash, name = member.name.rpartition("/")
        stem, _, ending = name.partition(".")
        if not stem:
            continue  # a hidden file, such as macOS adds
        key = folder + slash + stem
        if pair is None or pair.key != key:
            if pair is not None:
                yield pair
            pair = _Pair(key, member.offset)
        _add(path, pair, member, ending.lower())
    if pair is not None:
        yield pair


def _add(path: str, pair: _Pair, member: tarfile.TarInfo, ending: str) -> None:
    """Note an image or a label; captions, sizes and so on are not needed."""
    if ending in EXTENSIONS:
        if pair.picture is not None:
            raise _broken(path, member.offset, f"two images for {pair.key}", "a key stands for one sample")
        if member.size > _MAX_MEMBER_BYTES:
            raise _broken(path, member.offset, f"{member.name} has {member.size} bytes", "no image is that large")
        pair.picture = member.offset_data, member.size
    elif ending == _LABEL:
        text = read(path, member.offset_data, member.size) if member.size <= _MAX_LABEL_BYTES else b""
        if pair.label is not None or not re.fullmatch(rb"\s*-?\d+\s*", text):
            raise _broken(path, member.offset, f"label of {pair.key} is not one number", f"{text[:40]!r}")
        pair.label = check_label(0, int(text), f"{path}, byte {member.offset}")


def _finished(path: str, pair: _Pair) -> tuple[int, int, int] | None:
    """Offset, length and label of a complete sample; None for what is no sample; half of one is refused."""
    if pair.picture is None and pair.label is None:
        return None
    if pair.picture is None or pair.label is None:
        has = "a label but no image" if pair.picture is None else "an image but no label"
        why = f"a sample is KEY.{_LABEL} with its number and KEY.jpg (or {', '.join(EXTENSIONS[1:])}), side by side"
        raise _broken(path, pair.at, f"{pair.key} has {has}", why)
    return *pair.picture, pair.label


def _broken(path: str, at: int, what: str, why: str) -> DataError:
    then = "copy, download or convert this file again"
    return DataError(what, where=f"{path}, byte {at}", why=why, then=then)


TAR = ShardFormat("tar", "tar shards", _IN_FOLDER, _FLAT, 0, _scan, read)
