"""A folder of packed shards: train-00000-of-00012.packed and so on.

Owns which shards belong together. Refuses to know their bytes. Invariant: all shards of a split are there, agree on
what they are, and hold the samples in order, so that a sample's shard is one division away.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from reconv.data.dataset import Sample, Split
from reconv.data.readers.shards.map_shards import map_shards
from reconv.data.readers.shards.packed_format import ENDING, PackedShard
from reconv.data.storage.local import unreadable
from reconv.errors import DataError


def shard_name(split: str, number: int, num_shards: int) -> str:
    """The file name of one shard."""
    return f"{split}-{number:05}-of-{num_shards:05}{ENDING}"


def is_packed(folder: Path) -> bool:
    """Whether the folder holds packed training shards."""
    return any(folder.glob(f"train-*-of-*{ENDING}"))


class PackedDataset:
    """One split of a packed data set."""

    kind = "packed"

    def __init__(self, root: Path, split: Split, why: str = "") -> None:
        self._shards = _open_shards(root, split)
        first = self._shards[0].description
        self._num_samples = first.num_samples
        self._per_shard = first.per_shard
        self.class_names = first.class_names
        form = f", {first.form}" if first.form else ""
        self.origin = f"{len(self._shards)} packed shards at {root}{form}" + (f" ({why})" if why else "")

    def __len__(self) -> int:
        return self._num_samples

    @property
    def index_bytes(self) -> int:
        """Bytes of all indexes."""
        return sum(shard.index_bytes for shard in self._shards)

    def name(self, index: int) -> str:
        """What the sample was called where it came from."""
        shard, number = self._place(index)
        return shard.name(number)

    def __getitem__(self, index: int) -> Sample:
        """The sample from its shard."""
        shard, number = self._place(index)
        return shard[number]

    def fingerprint(self) -> str:
        """A digest of the class names and of the digests the shards carry."""
        digest = hashlib.blake2b("\0".join(self.class_names).encode("utf-8", "surrogateescape"), digest_size=16)
        for shard in self._shards:
            digest.update(shard.digest.encode())
        return digest.hexdigest()

    def _place(self, index: int) -> tuple[PackedShard, int]:
        if not 0 <= index < self._num_samples:
            raise IndexError(index)
        shard, number = divmod(index, self._per_shard)
        return self._shards[shard], number


def _open_shards(root: Path, split: Split) -> list[PackedShard]:
    try:
        found = sorted(root.glob(f"{split}-*-of-*{ENDING}"))
    except OSError as error:
        raise unreadable(root, error) from error
    if not found:
        raise DataError(
            f"no {split} shards under {root}",
            where=str(root),
            why=f"none is called {shard_name(split, 0, 1)} or alike",
            then="name the folder that reconv data convert has written: --data DIR",
        )
    shards = map_shards(PackedShard, found)
    first = shards[0].description
    names = [shard_name(split, number, first.num_shards) for number in range(first.num_shards)]
    if [path.name for path in found] != names:
        lost = sorted(set(names).symmetric_difference(path.name for path in found))
        raise _disagree(root, f"{len(found)} of {len(names)} shards are there; look for {lost[0]}")
    for number, shard in enumerate(shards):
        if shard.description != replace(first, split=split, shard=number):
            raise _disagree(shard.path, "it is of another conversion than the first shard")
        before = number * first.per_shard
        if len(shard) != min(first.per_shard, first.num_samples - before):
            raise _disagree(shard.path, f"it has {len(shard)} samples")
    return shards


def _disagree(where: Path, why: str) -> DataError:
    return DataError("packed shards do not fit together", where=str(where), why=why, then="copy or convert them again")
