"""Sets of numbered files that hold many samples each, and the source over them.

Owns finding a split's shards (in its sub-folder or flat), noticing that one is missing, and random access by index.
Refuses to know formats: each says how its files are called, scanned and read. Invariant: samples are in the order of
the shards' names and of their place in the shard; a set with a hole is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from reconv.data.dataset import Sample, Split
from reconv.data.readers.folder import SPLIT_FOLDERS
from reconv.data.readers.shards.shard_index import Index, Scanned, open_index
from reconv.data.storage.local import listing
from reconv.errors import DataError

_MAX_LABEL = 1 << 20
_NUMBER = re.compile(r"(?P<stem>.*?)(?P<number>\d+)(?:-of-(?P<count>\d+))?(?P<ending>\D*)")


@dataclass(frozen=True, slots=True)
class Naming:
    """What the files of a format of shards are called."""

    kind: str
    title: str
    in_folder: re.Pattern[str]
    flat: re.Pattern[str]  # with a group `split`


@dataclass(frozen=True, slots=True)
class ShardFormat(Naming):
    """A format of shards: besides its names, the first label, and how a file and a sample are read."""

    first_label: int
    scan: Callable[[str], Scanned]
    read: Callable[[str, int, int], bytes]


@dataclass(frozen=True, slots=True)
class ShardFiles:
    """The files of one split."""

    folder: Path
    names: tuple[str, ...]


def why_shards(form: Naming, folder: Path) -> str | None:
    """The reason to take a folder for shards of this form; None: it is not."""
    first = first_shard(form, folder)
    return None if first is None else f"it has {first.relative_to(folder.parent)}"


def first_shard(form: Naming, folder: Path) -> Path | None:
    """One file of a set; None where there is none."""
    shards = _names(form, folder, "train") or _names(form, folder, "val")
    return None if shards is None else shards.folder / shards.names[0]


def find_shards(form: Naming, root: Path, split: Split) -> ShardFiles:
    """The complete set of a split's shards."""
    shards = _names(form, root, split)
    if shards is None:
        names = " or ".join(f"{name}/" for name in SPLIT_FOLDERS[split])
        raise DataError(
            f"no {form.title} for {'training' if split == 'train' else 'validation'} in {root}",
            where=str(root),
            why=f"looked for them in {names} and by their names in the folder itself",
            then=f"name the folder that holds both splits: --data DIR --set data.source={form.kind}",
        )
    _refuse_holes(shards)
    return shards


def _names(form: Naming, root: Path, split: Split) -> ShardFiles | None:
    files, folders = listing(root)
    found = []
    for name in SPLIT_FOLDERS[split]:
        inside = listing(root / name)[0] if name in folders else []
        found.append(ShardFiles(root / name, tuple(file for file in inside if form.in_folder.fullmatch(file))))
    matches = [(file, form.flat.fullmatch(file)) for file in files]
    flat = tuple(file for file, match in matches if match and match["split"] in SPLIT_FOLDERS[split])
    found = [shards for shards in (*found, ShardFiles(root, flat)) if shards.names]
    if len(found) > 1:
        raise DataError(
            f"{form.title} for {split} in more than one place under {root}",
            where=str(root),
            why=", ".join(str(shards.folder / shards.names[0]) for shards in found),
            then="keep one of the sets there",
        )
    return found[0] if found else None


def _refuse_holes(shards: ShardFiles) -> None:
    """A set says how many there are (-of-01024), or its numbers run without a gap from 0 or 1."""
    sets: dict[tuple[str, str, str], dict[int, str]] = {}
    for name in shards.names:
        if match := _NUMBER.fullmatch(name):
            numbers = sets.setdefault((match["stem"], match["count"] or "", match["ending"]), {})
            numbers[int(match["number"])] = match["number"]
    counts = sorted({count for _, count, _ in sets if count})
    if len(counts) > 1:
        raise DataError(
            f"shards of more than one set: of {' and of '.join(counts)}",
            where=str(shards.folder),
            why="two conversions wrote into one folder",
            then="keep one of the sets there",
        )
    for (stem, count, ending), numbers in sets.items():
        wanted = range(int(count)) if count else range(min(1, *numbers), max(numbers) + 1)
        missing = [number for number in wanted if number not in numbers]
        if missing:
            of, width = f"-of-{count}" if count else "", len(next(iter(numbers.values())))
            first = f"{stem}{missing[0]:0{width}}{of}{ending}"
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise DataError(
                f"missing shard: {first}{more}",
                where=str(shards.folder / first),
                why=f"{len(numbers)} of {len(wanted)} shards are there; training on a part is never silent",
                then="copy or download what is missing",
            )


class ShardDataset:
    """One split of a set of shards: 20 bytes a sample in a file that is mapped into memory."""

    def __init__(
        self, form: ShardFormat, root: Path, split: Split, why: str = "", class_names: tuple[str, ...] | None = None
    ) -> None:
        self.kind = form.kind
        self._form = form
        self._shards = find_shards(form, root, split)
        self._index = _open_index(form, split, self._shards)
        if class_names is None:
            train = self._index if split == "train" else _open_index(form, "train", find_shards(form, root, "train"))
            class_names = _class_names(train, form.first_label)
        self.class_names = class_names
        self._refuse_labels_beyond()
        self.origin = f"{form.title} at {root}" + (f" ({why})" if why else "") + f"; index {self._index.kept}"

    def _refuse_labels_beyond(self) -> None:
        labels = self._index.rows["label"]
        last = self._form.first_label + len(self.class_names) - 1
        if int(labels.max()) > last:
            row = self._index.rows[int((labels > last).argmax())]
            raise DataError(
                f"label {row['label']} out of range",
                where=f"{self._shards.folder / self._shards.names[row['shard']]}, byte {row['offset']}",
                why=f"there are {len(self.class_names)} classes, {self._form.first_label} to {last}",
                then="correct the label, or convert this split with the classes of the training set",
            )

    def __len__(self) -> int:
        return len(self._index.rows)

    @property
    def index_bytes(self) -> int:
        """Size of the index."""
        return self._index.rows.nbytes

    def __getitem__(self, index: int) -> Sample:
        """The encoded image and its class, counted from 0."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        offset, length, shard, label = self._index.rows[index].item()
        path = str(self._shards.folder / self._shards.names[shard])
        return Sample(self._form.read(path, offset, length), label - self._form.first_label, f"{path}, byte {offset}")

    def fingerprint(self) -> str:
        """The digest of all samples, taken when they were indexed, with the number of classes."""
        return f"{self._index.digest}/{len(self.class_names)}"


def _open_index(form: ShardFormat, split: Split, shards: ShardFiles) -> Index:
    return open_index(form.kind, split, shards.folder, shards.names, form.scan)


def check_label(first_label: int, label: int, where: str) -> int:
    """A label that can be a class."""
    if not first_label <= label <= _MAX_LABEL:
        raise DataError(
            f"label {label} out of range",
            where=where,
            why=f"labels of this format are counted from {first_label}",
            then="write the labels again, counted from there",
        )
    return label


def _class_names(train: Index, first_label: int) -> tuple[str, ...]:
    """A name for each label up to the highest of training; one that several labels share gets its number."""
    num_classes = int(train.rows["label"].max()) - first_label + 1
    names = [train.names.get(first_label + number, f"class{number}") for number in range(num_classes)]
    shared = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    return tuple(f"{name} ({number})" if name in shared else name for number, name in enumerate(names))
