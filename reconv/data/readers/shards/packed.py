"""A folder of packed shards, such as train-00000-of-00012.packed.

All shards of a split must be present and belong to the same conversion; every shard but the last has the same length.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from reconv.core.errors import DataError
from reconv.data.dataset import I64, ByteRange, RangeBacked, Sample, Split
from reconv.data.readers.shards.memory_map import map_shards
from reconv.data.readers.shards.packed_format import EXTENSION, PackedShard
from reconv.storage.local import listing
from reconv.storage.remote_tree import is_remote, shown_path

_OPEN_THREADS = 16  # they wait for the store


def shard_name(split: str, number: int, num_shards: int) -> str:
    """The file name of one shard."""
    return f"{split}-{number:05}-of-{num_shards:05}{EXTENSION}"


def packed_reason(folder: Path) -> str | None:
    """Reason why the folder is taken for packed data; None if it has no training shards."""
    return "it has train-*.packed" if _shard_files(folder, "train") else None


def _shard_files(root: Path, split: str) -> list[Path]:
    """The shards of a split by name, whatever they are; `Path.glob` raises for a link to itself."""
    return [root / name for name in listing(root)[0] if fnmatchcase(name, f"{split}-*-of-*{EXTENSION}")]


class PackedDataset(RangeBacked):
    """One split of a packed dataset."""

    kind = "packed"

    def __init__(self, root: Path, split: Split, why: str = "") -> None:
        self._shards = _open_shards(root, split)
        first = self._shards[0].info
        self._num_samples = first.num_samples
        self._per_shard = first.per_shard
        self.class_names = first.class_names
        form = f", {first.form}" if first.form else ""
        self.origin = f"{len(self._shards)} packed shards at {shown_path(root)}{form}" + (f" ({why})" if why else "")

    def __len__(self) -> int:
        return self._num_samples

    @property
    def targets(self) -> I64:
        """The class index of each sample."""
        return np.concatenate([shard.targets for shard in self._shards])

    @property
    def index_bytes(self) -> int:
        """Bytes of all indices."""
        return sum(shard.index_bytes for shard in self._shards)

    def name(self, index: int) -> str:
        """The sample's name in the converted dataset."""
        shard, number = self._locate(index)
        return shard.name(number)

    def __getitem__(self, index: int) -> Sample:
        """The sample from its shard."""
        shard, number = self._locate(index)
        return shard[number]

    def ranges(self, indices: I64) -> list[ByteRange]:
        """Byte ranges of the samples."""
        located = [self._locate(int(index)) for index in indices]
        return [shard.byte_range(number) for shard, number in located]

    def fingerprint(self) -> str:
        """A digest of the class names and of the digests the shards carry."""
        digest = hashlib.blake2b("\0".join(self.class_names).encode("utf-8", "surrogateescape"), digest_size=16)
        for shard in self._shards:
            digest.update(shard.digest.encode())
        return digest.hexdigest()

    def _locate(self, index: int) -> tuple[PackedShard, int]:
        if not 0 <= index < self._num_samples:
            raise IndexError(index)
        shard, number = divmod(index, self._per_shard)
        return self._shards[shard], number


def _open_shards(root: Path, split: Split) -> list[PackedShard]:
    found = _shard_files(root, split)
    if not found:
        raise DataError(
            f"no {split} shards under {root}",
            where=str(root),
            why=f"there is no file like {shard_name(split, 0, 1)}",
            hint="give the folder written by `reconv data convert`: --data DIR",
        )
    shards = map_shards(PackedShard, found, _OPEN_THREADS if is_remote(str(root)) else 1)
    first = shards[0].info
    # Not more names than there can be files: the number of shards comes from a file.
    names = [shard_name(split, number, first.num_shards) for number in range(min(first.num_shards, len(found) + 1))]
    if [path.name for path in found] != names:
        difference = sorted(set(names).symmetric_difference(path.name for path in found))
        raise _mismatch(
            root, f"{len(found)} of {first.num_shards:,} shards are present; the first difference is {difference[0]}"
        )
    for number, shard in enumerate(shards):
        if shard.info != replace(first, split=split, shard=number):
            raise _mismatch(shard.path, "it belongs to another conversion than the first shard")
        before = number * first.per_shard
        if len(shard) != min(first.per_shard, first.num_samples - before):
            raise _mismatch(shard.path, f"it has {len(shard)} samples")
    return shards


def _mismatch(where: Path, why: str) -> DataError:
    return DataError(
        "packed shards do not belong together", where=str(where), why=why, hint="copy or convert them again"
    )
