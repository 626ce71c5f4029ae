"""Datasets whose samples are spread over numbered files, and how the files of a split are found.

Samples are in the order of the shards' names and of their position in the shard. A set with a missing shard is refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from reconv.core.errors import DataError
from reconv.data.dataset import I64, ByteRange, RangeBacked, Sample, Split
from reconv.data.readers.folder import SPLIT_FOLDERS, SPLIT_TITLES
from reconv.data.readers.shards.index import ScannedShard, ShardIndex, open_index
from reconv.storage import read_limits
from reconv.storage.local import listing
from reconv.storage.remote_tree import shown_path

_NUMBER = re.compile(r"(?P<stem>.*?)(?P<number>\d+)(?:-of-(?P<count>\d+))?(?P<ending>\D*)")


@dataclass(frozen=True, slots=True)
class ShardNaming:
    """File name patterns of a shard format."""

    kind: str
    title: str
    in_folder: re.Pattern[str]  # in train/ or val/
    flat: re.Pattern[str]  # in one folder; with a group `split`


@dataclass(frozen=True, slots=True)
class ShardFormat(ShardNaming):
    """A shard format: its file names, its first label, and how to scan a file and read a sample."""

    first_label: int
    scan: Callable[[str], ScannedShard]
    read: Callable[[str, int, int], bytes]


@dataclass(frozen=True, slots=True)
class ShardFiles:
    """The shards of one split."""

    folder: Path
    names: tuple[str, ...]


def detect_shards(naming: ShardNaming, folder: Path) -> str | None:
    """Evidence of shards of this format in the folder, or None."""
    first = first_shard(naming, folder)
    return None if first is None else f"it has {first.relative_to(folder.parent)}"


def first_shard(naming: ShardNaming, folder: Path) -> Path | None:
    """The first shard in a folder; None if there is none."""
    shards = _list_shards(naming, folder, "train") or _list_shards(naming, folder, "val")
    return None if shards is None else shards.folder / shards.names[0]


def find_shards(naming: ShardNaming, root: Path, split: Split) -> ShardFiles:
    """All shards of a split; a missing one is an error."""
    shards = _list_shards(naming, root, split)
    if shards is None:
        names = " or ".join(f"{name}/" for name in SPLIT_FOLDERS[split])
        raise DataError(
            f"no {naming.title} for {SPLIT_TITLES[split]} in {root}",
            where=str(root),
            why=f"looked in {names} and in the folder itself",
            hint=f"give the folder that holds both splits: --data DIR --set data.source={naming.kind}",
        )
    _check_complete(shards)
    return shards


def _list_shards(naming: ShardNaming, root: Path, split: Split) -> ShardFiles | None:
    files, folders = listing(root)
    found = []
    for name in SPLIT_FOLDERS[split]:
        inside = listing(root / name)[0] if name in folders else []
        found.append(ShardFiles(root / name, tuple(file for file in inside if naming.in_folder.fullmatch(file))))
    matches = [(file, naming.flat.fullmatch(file)) for file in files]
    flat = tuple(file for file, match in matches if match and match["split"] in SPLIT_FOLDERS[split])
    found = [shards for shards in (*found, ShardFiles(root, flat)) if shards.names]
    if len(found) > 1:
        raise DataError(
            f"{naming.title} for {split} in more than one place under {root}",
            where=str(root),
            why=", ".join(str(shards.folder / shards.names[0]) for shards in found),
            hint="keep only one of them there",
        )
    return found[0] if found else None


def _check_complete(shards: ShardFiles) -> None:
    """Shard names state the count (-of-01024), or are numbered from 0 or 1 without gaps."""
    sets: dict[tuple[str, str, str], dict[int, str]] = {}
    for name in shards.names:
        if match := _NUMBER.fullmatch(name):
            numbers = sets.setdefault((match["stem"], match["count"] or "", match["ending"]), {})
            numbers[int(match["number"])] = match["number"]
    counts = sorted({count for _, count, _ in sets if count})
    if len(counts) > 1:
        raise DataError(
            f"shards of more than one dataset: of {' and of '.join(counts)}",
            where=str(shards.folder),
            why="two conversions wrote into the same folder",
            hint="keep only one of them there",
        )
    for (stem, count, ending), numbers in sets.items():
        wanted = range(int(count)) if count else range(min(1, *numbers), max(numbers) + 1)
        if wanted.stop > read_limits.SHARDS:
            raise DataError(
                f"shard number {wanted.stop:,} is too high",
                where=str(shards.folder),
                why=f"a dataset has at most {read_limits.SHARDS:,} shards",
                hint="number them from 0, as in train-00000-of-00012",
            )
        missing = [number for number in wanted if number not in numbers]
        if missing:
            of, width = f"-of-{count}" if count else "", len(next(iter(numbers.values())))
            first = f"{stem}{missing[0]:0{width}}{of}{ending}"
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise DataError(
                f"missing shard: {first}{more}",
                where=str(shards.folder / first),
                why=f"{len(numbers)} of {len(wanted)} shards are present",
                hint="copy or download the missing shards",
            )


class ShardDataset(RangeBacked):
    """One split of a set of shards: 20 bytes a sample in a file that is mapped into memory."""

    def __init__(
        self,
        shard_format: ShardFormat,
        root: Path,
        split: Split,
        why: str = "",
        class_names: tuple[str, ...] | None = None,
    ) -> None:
        self.kind = shard_format.kind
        self._format = shard_format
        self._shards = find_shards(shard_format, root, split)
        self._index = _open_index(shard_format, split, self._shards)
        if class_names is None:
            train = (
                self._index
                if split == "train"
                else _open_index(shard_format, "train", find_shards(shard_format, root, "train"))
            )
            class_names = _class_names(train, shard_format.first_label)
        self.class_names = class_names
        self._check_labels()
        self.origin = (
            f"{shard_format.title} at {shown_path(root)}"
            + (f" ({why})" if why else "")
            + f"; index {self._index.stored}"
        )

    def _check_labels(self) -> None:
        labels = self._index.rows["label"]
        last = self._format.first_label + len(self.class_names) - 1
        if int(labels.max()) > last:
            row = self._index.rows[int((labels > last).argmax())]
            raise DataError(
                f"label {row['label']} out of range",
                where=f"{self._shards.folder / self._shards.names[row['shard']]}, byte {row['offset']}",
                why=f"there are {len(self.class_names)} classes, {self._format.first_label} to {last}",
                hint="correct the label, or convert this split with the classes of training",
            )

    def __len__(self) -> int:
        return len(self._index.rows)

    @property
    def targets(self) -> I64:
        """The class index of each sample."""
        return self._index.rows["label"].astype(np.int64) - self._format.first_label

    @property
    def index_bytes(self) -> int:
        """Bytes of the index."""
        return self._index.rows.nbytes

    def __getitem__(self, index: int) -> Sample:
        """The encoded image and its class index."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        offset, length, shard, label = self._index.rows[index].item()
        path = str(self._shards.folder / self._shards.names[shard])
        return Sample(
            self._format.read(path, offset, length),
            label - self._format.first_label,
            f"{shown_path(path)}, byte {offset}",
        )

    def ranges(self, indices: I64) -> list[ByteRange]:
        """Byte ranges of the samples; a record's checksums lie around it."""
        rows = self._index.rows[indices]
        return [
            (str(self._shards.folder / self._shards.names[shard]), offset, length)
            for offset, length, shard, _ in rows.tolist()
        ]

    def fingerprint(self) -> str:
        """The digest of all samples from the index, and the number of classes."""
        return f"{self._index.digest}/{len(self.class_names)}"


def _open_index(shard_format: ShardFormat, split: Split, shards: ShardFiles) -> ShardIndex:
    return open_index(shard_format.kind, split, shards.folder, shards.names, shard_format.scan)


def check_label(first_label: int, label: int, where: str) -> int:
    """The label, if it is in the range of class labels."""
    last = first_label + read_limits.CLASSES - 1
    if not first_label <= label <= last:
        raise DataError(
            f"label {label} out of range",
            where=where,
            why=f"labels of this format are {first_label} to {last:,}",
            hint="write the labels again, starting there",
        )
    return label


def _class_names(train: ShardIndex, first_label: int) -> tuple[str, ...]:
    """A name for each label up to the highest one of training; repeated names get the label appended."""
    check_label(first_label, int(train.rows["label"].max()), train.stored)
    num_classes = int(train.rows["label"].max()) - first_label + 1
    names = [train.names.get(first_label + number, f"class{number}") for number in range(num_classes)]
    shared = {name for name, count in Counter(names).items() if count > 1}
    return tuple(f"{name} ({number})" if name in shared else name for number, name in enumerate(names))
