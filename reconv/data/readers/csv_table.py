"""Images in a folder and a CSV file that says what they are: columns `file`, `label` and, if there is one, `split`.

Owns the table: finding it, its rows and their errors. Refuses to know decoding. Invariant: samples are in the order of
the rows, every row has a file that was there, and classes are those of the training rows, sorted: as numbers where all
labels are numbers. Without a column `split` every fifth row is for validation, as the data's one-line origin says.
"""

from __future__ import annotations

import csv
import io
import os
from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from reconv.data.dataset import I64, FileBacked, Sample, SampleFiles, Split
from reconv.data.readers.folder import SPLIT_FOLDERS
from reconv.data.readers.shards.map_shards import GroupedDataError
from reconv.data.storage.file_list import FileList, digest_files
from reconv.data.storage.local import listing, read, size_bytes, unreadable
from reconv.errors import DataError

_HEAD_BYTES = 4096
_ONE_IN_VAL = 5
_COLUMNS = ("file", "label", "split")

I32 = npt.NDArray[np.int32]
Row = tuple[int, str, str, Split]  # line, file, label, split


def find_tables(folder: Path) -> list[str]:
    """Names of the CSV files whose header has `file` and `label`."""
    names = [name for name in listing(folder)[0] if name.lower().endswith(".csv")]
    return [name for name in names if {"file", "label"} <= set(_head(folder / name))]


class CSVDataset(FileBacked):
    """One split of a table: 12 bytes a sample plus its file name."""

    kind = "csv"

    def __init__(self, root: Path, split: Split, why: str = "") -> None:
        self._root = root
        self._table = _only_table(root)
        text = read(self._table).decode("utf-8-sig", "surrogateescape")
        has_split = _check_header(self._table, next(csv.reader(io.StringIO(text)), []))
        labels = _Labels(split)
        self._names = FileList(_files(self._table, text, split, labels))
        self.class_names, self._targets = labels.numbered(self._table)
        said = "" if has_split else f"; no column split: every {_ONE_IN_VAL}th row is for validation"
        self.origin = f"images listed in {self._table}" + (f" ({why})" if why else "") + said

    def __len__(self) -> int:
        return len(self._targets)

    @property
    def index_bytes(self) -> int:
        """Memory held by the index."""
        return self._names.num_bytes + self._targets.nbytes

    def path(self, index: int) -> str:
        """The file of a sample."""
        return os.path.join(self._root, self._names[index])

    def __getitem__(self, index: int) -> Sample:
        """The encoded file and its class."""
        path = self.path(index)
        return Sample(read(path), int(self._targets[index]), path)

    def files(self, indices: I64) -> SampleFiles:
        """The paths, as the disk spells them, and the classes."""
        return [os.fsencode(self.path(int(index))) for index in indices], self._targets[indices]

    def fingerprint(self) -> str:
        """A digest of all names and targets and of the sizes of up to 4096 files spread over the set."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return digest_files(self.class_names, self._names, self._targets, self.path)


def _head(path: Path) -> list[str]:
    """The cells of a file's first line."""
    start = read(path, 0, min(_HEAD_BYTES, size_bytes(path))).decode("utf-8-sig", "replace")
    return [cell.strip() for cell in next(csv.reader(start.splitlines()[:1]), [])]


def _only_table(root: Path) -> Path:
    names = find_tables(root)
    if len(names) != 1:
        raise DataError(
            f"{len(names) or 'no'} CSV files with the columns file and label in {root}",
            where=str(root),
            why=", ".join(names) or "the first line of the table names its columns: file,label or file,label,split",
            then="keep one, with a column split (train or val)"
            if names
            else "write one, or name its folder: --data DIR",
        )
    return root / names[0]


def _check_header(path: Path, cells: Sequence[str]) -> bool:
    """Refuse a header that can be read in two ways; whether there is a split."""
    cells = [cell.strip() for cell in cells]
    twice = sorted({cell for cell in cells if cell in _COLUMNS and cells.count(cell) > 1})
    if twice:
        raise _bad(path, 1, f"column {', '.join(twice)} more than once in the header", "which of them counts?")
    return "split" in cells


def _rows(path: Path, text: str) -> Iterator[Row]:
    """Every row, checked."""
    reader = csv.reader(io.StringIO(text), strict=True)
    header = [cell.strip() for cell in next(reader)]
    number = 0
    try:
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise _bad(path, reader.line_num, f"{len(cells)} cells, the header has {len(header)}")
            row = dict(zip(header, (cell.strip() for cell in cells), strict=True))
            if not row["file"] or not row["label"]:
                raise _bad(path, reader.line_num, "a row without a file or a label")
            yield reader.line_num, row["file"], row["label"], _split(path, reader.line_num, row, number)
            number += 1
    except csv.Error as error:
        raise _bad(path, reader.line_num, f"this is not CSV: {error}") from error


def _split(path: Path, line: int, row: dict[str, str], number: int) -> Split:
    if "split" not in row:
        return "val" if number % _ONE_IN_VAL == 0 else "train"
    for split, names in SPLIT_FOLDERS.items():
        if row["split"] in names:
            return split
    raise _bad(path, line, f"split {row['split']!r}", "a split is train, val or validation")


class _Labels:
    """Labels in the order they are met, numbered when all are known."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self._first_line: dict[str, int] = {}  # of each label of this split
        self._numbers: dict[str, int] = {}
        self._in_train: set[str] = set()
        self._taken = array("i")

    def add(self, line: int, label: str, of: Split) -> None:
        """Note the label of a row."""
        if of == "train":
            self._in_train.add(label)
        if of == self._split:
            self._first_line.setdefault(label, line)
            self._taken.append(self._numbers.setdefault(label, len(self._numbers)))

    def numbered(self, path: Path) -> tuple[tuple[str, ...], I32]:
        """The classes of training, and the class of every row of this split."""
        names = _sorted_classes(self._in_train, path)
        classes = {name: number for number, name in enumerate(names)}
        for label, line in self._first_line.items():
            if label not in classes:
                raise _bad(
                    path, line, f"label {label!r} that no training row has", "validation has no classes of its own"
                )
        final = np.array([classes[label] for label in self._numbers], np.int32)
        return names, final[np.array(self._taken, np.int32)]


def _sorted_classes(labels: set[str], path: Path) -> tuple[str, ...]:
    if not labels:
        raise _bad(path, 1, "no rows for training", "every row is for validation, or there are none")
    if all(label.isascii() and label.isdigit() for label in labels):
        return tuple(sorted(labels, key=lambda label: (int(label), label)))
    return tuple(sorted(labels))


def _files(path: Path, text: str, split: Split, labels: _Labels) -> Iterator[str]:
    """The files of one split; those of both must be there. Folders are listed once instead of asking for each file."""
    there: dict[str, frozenset[str]] = {}
    missing: list[DataError] = []
    for line, file, label, of in _rows(path, text):
        labels.add(line, label, of)
        folder, name = os.path.split(os.path.join(path.parent, file))
        if folder not in there:
            there[folder] = _names_in(folder)
        if name not in there[folder]:
            missing.append(_bad(path, line, f"missing file: {file}", f"there is no {os.path.join(folder, name)}"))
        elif of == split:
            yield file
    if missing:
        raise GroupedDataError(missing)


def _names_in(folder: str) -> frozenset[str]:
    try:
        return frozenset(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return frozenset()
    except OSError as error:
        raise unreadable(folder, error) from error


def _bad(path: Path, line: int, what: str, why: str = "") -> DataError:
    return DataError(
        what, where=f"{path}, line {line}", why=why or "the table is damaged", then="correct the line or remove it"
    )
