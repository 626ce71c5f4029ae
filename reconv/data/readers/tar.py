"""Tar shards in the WebDataset layout: members `KEY.jpg` and `KEY.cls` next to each other, labels from 0.

Members are read in place. An image without a label, or a label without an image, is an error.
"""

from __future__ import annotations

import hashlib
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from reconv.core.errors import DataError
from reconv.data.dataset import Split
from reconv.data.file_list import EXTENSIONS, is_image_name
from reconv.data.readers.shards.dataset import ShardDataset, ShardFormat, check_label
from reconv.data.readers.shards.index import ScannedShard
from reconv.storage import read_limits
from reconv.storage.local import ReadStream, read, read_bounded_text, size_bytes

CLASS_LIST = "classes.txt"  # beside the shards, one name per line
_LABEL = "cls"
_MAX_LABEL_BYTES = 64
_BLOCK_BYTES = 512
_MAX_MEMBER_BYTES = (1 << 32) - 1  # that a row of the index can hold
# ImageNet's original archives are tars of tars or of one class each, not shards.
_NOT_IMAGENET = r"(?!ILSVRC\d|n\d{8}\.tar)"
_IN_FOLDER = re.compile(_NOT_IMAGENET + r".+\.tar")
_FLAT = re.compile(_NOT_IMAGENET + r"(?:.*[-_.])?(?P<split>train|validation|val|test)(?:[-_.]?\d.*|[-_.].*)?\.tar")


@dataclass(slots=True)
class _Pair:
    """The image and label of one key."""

    key: str
    offset: int
    image: tuple[int, int] | None = None  # offset, length
    label: int | None = None


def open_tar(root: Path, split: Split, why: str = "") -> ShardDataset:
    """One split of tar shards, with the class names of classes.txt if there is one."""
    path = root / CLASS_LIST
    if not path.is_file():
        return ShardDataset(TAR, root, split, why)
    text = read_bounded_text(path, read_limits.NAMES_BYTES).decode("utf-8", "replace")
    names = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not names or len(set(names)) < len(names):
        raise DataError(
            f"{CLASS_LIST} is empty or repeats a class",
            where=str(path),
            why="it must have one name per line, the first for label 0",
            hint="correct or remove it",
        )
    return ShardDataset(TAR, root, split, why, names)


def _members(path: str) -> Iterator[tarfile.TarInfo]:
    """Every regular file in a tar; checks the end-of-archive marker."""
    at = 0
    try:
        with tarfile.open(fileobj=ReadStream(path), mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # tarfile keeps all members otherwise
                at = tar.offset
                if member.isfile() and not member.issparse():
                    yield member
                elif not member.isdir():
                    raise _tar_error(
                        path,
                        member.offset,
                        f"member {member.name} is not a regular file",
                        "links, devices and sparse files are not read",
                    )
            at = tar.offset
    except (tarfile.TarError, EOFError, UnicodeError, ValueError, OverflowError, RecursionError) as error:
        raise _tar_error(path, at, "tar is truncated or damaged", str(error)) from error
    # tarfile takes a damaged header for the end of the archive.
    if size_bytes(path) < at + _BLOCK_BYTES or any(read(path, at, _BLOCK_BYTES)):
        raise _tar_error(
            path, at, "tar is truncated or damaged", "there is no end-of-archive marker after the last complete member"
        )


def _scan_shard(path: str) -> ScannedShard:
    """Offset, length and label of every sample, in the order of the archive."""
    samples: list[tuple[int, int, int]] = []
    digest = hashlib.blake2b(digest_size=16)
    for pair in _pairs(path):
        if (sample := _sample_of(path, pair)) is not None:
            samples.append(sample)
            digest.update(f"{pair.key}\0{sample[1]}\0{sample[2]}\0".encode("utf-8", "surrogateescape"))
    return ScannedShard(samples, digest.digest(), {})


def _pairs(path: str) -> Iterator[_Pair]:
    """Consecutive members with the same key, grouped."""
    pair: _Pair | None = None
    for member in _members(path):
        folder, slash, name = member.name.rpartition("/")
        stem, _, ending = name.partition(".")
        if not stem:
            continue  # a hidden file, as macOS adds
        key = folder + slash + stem
        if pair is None or pair.key != key:
            if pair is not None:
                yield pair
            pair = _Pair(key, member.offset)
        _add_member(path, pair, member, ending.lower())
    if pair is not None:
        yield pair


def _add_member(path: str, pair: _Pair, member: tarfile.TarInfo, ending: str) -> None:
    """Add an image or a label to its pair; other members, such as captions, are ignored."""
    if "." not in ending and is_image_name(f"image.{ending}"):
        if pair.image is not None:
            raise _tar_error(path, member.offset, f"two images for {pair.key}", "a key may have one image")
        if member.size > _MAX_MEMBER_BYTES:
            raise _tar_error(
                path, member.offset, f"{member.name} has {member.size} bytes", "the index supports images below 4 GiB"
            )
        pair.image = member.offset_data, member.size
    elif ending == _LABEL:
        text = read(path, member.offset_data, member.size) if member.size <= _MAX_LABEL_BYTES else b""
        if pair.label is not None or not re.fullmatch(rb"\s*-?\d+\s*", text):
            raise _tar_error(path, member.offset, f"label of {pair.key} is not a number", f"{text[:40]!r}")
        pair.label = check_label(0, int(text), f"{path}, byte {member.offset}")


def _sample_of(path: str, pair: _Pair) -> tuple[int, int, int] | None:
    """Offset, length and label of a sample; None if the key has neither image nor label."""
    if pair.image is None and pair.label is None:
        return None
    if pair.image is None or pair.label is None:
        found = "a label but no image" if pair.image is None else "an image but no label"
        why = f"a sample is KEY.{_LABEL} with the class index next to KEY.jpg (or {', '.join(EXTENSIONS[1:])})"
        raise _tar_error(path, pair.offset, f"{pair.key} has {found}", why)
    return *pair.image, pair.label


def _tar_error(path: str, at: int, what: str, why: str) -> DataError:
    hint = "copy, download or convert this file again"
    return DataError(what, where=f"{path}, byte {at}", why=why, hint=hint)


TAR = ShardFormat("tar", "tar shards", _IN_FOLDER, _FLAT, 0, _scan_shard, read)
