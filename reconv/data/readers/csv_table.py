"""Images listed in a CSV file with the columns `file`, `label` and optionally `split`.

Samples are in the order of the rows. Classes are those of the training rows, sorted (as numbers if all labels are
numbers). Without a column `split`, every fifth row is for validation.

In multi-label data the labels of an image are in one column `label`, separated by ; or |, or there is one column of 0
and 1 for each class. Classes are those of the training rows, sorted, or the columns in their order. An image may have
no label.
"""

from __future__ import annotations

import csv
import io
import os
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from reconv.core.errors import DataError
from reconv.data.dataset import I64, FileBacked, Sample, SampleFiles, Split, multi_hot
from reconv.data.file_list import FileList, digest_files
from reconv.data.readers.folder import SPLIT_FOLDERS
from reconv.data.readers.shards.memory_map import GroupedDataError
from reconv.data.readers.validation_split import ValidationSplit
from reconv.recipe.parts.data import DataConfig
from reconv.storage import read_limits
from reconv.storage.data_errors import unreadable
from reconv.storage.local import is_possible_path, listing, read, read_bounded_text, size_bytes

COLUMNS = ("file", "label", "split")
_HEADER_BYTES = 4096
_VAL_EVERY = 5

I32 = npt.NDArray[np.int32]
Row = tuple[int, dict[str, str], Split]  # line, cells by column, split
AddRow = Callable[[Path, int, dict[str, str], Split], None]  # table, line, cells by column, split
_DEFAULTS = DataConfig()
_SEPARATORS = re.compile("[;|]")


def find_tables(folder: Path) -> list[str]:
    """Names of the CSV files with the columns `file` and `label`, or `file` and a column of 0 and 1 per class."""
    names = [name for name in listing(folder)[0] if name.lower().endswith(".csv")]
    return [name for name in names if _is_table(*_first_lines(folder / name))]


def describe_table(path: Path) -> str:
    """Describe the columns that make a CSV file a table of images."""
    return f"{path.name} has the columns file and {'label' if 'label' in _first_lines(path)[0] else 'one per class'}"


class CSVFiles(FileBacked):
    """The files of one split of a table; what the other columns mean is up to `add_row`."""

    kind = "csv"
    is_multilabel = False
    class_names: tuple[str, ...]

    def __init__(self, root: Path, split: Split, why: str, data: DataConfig, add_row: AddRow) -> None:
        self._root = root
        self._table = _only_table(root)
        text = _read_table(self._table)
        self._header = _header(self._table, text)
        by_class = not self.is_multilabel
        _check_header(self._table, self._header, by_class)
        rows, note = _split_rows(self._table, text, "split" in self._header, ValidationSplit.of(data), by_class)
        self._names = FileList(_files(self._table, rows, split, add_row))
        self.origin = f"images listed in {self._table}" + (f" ({why})" if why else "") + (f"; {note}" if note else "")

    def __len__(self) -> int:
        return len(self._names)

    def path(self, index: int) -> str:
        """The path of a sample's file."""
        return os.path.join(self._root, self._names[index])

    def encoded_paths(self, indices: I64) -> list[bytes]:
        """The paths as bytes."""
        return [os.fsencode(self.path(int(index))) for index in indices]

    def target_digest_content(self) -> npt.NDArray[np.integer]:
        """The targets as an array, for a digest."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """A digest of all names and targets, and of the sizes of up to 4096 files."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return digest_files(self.class_names, self._names, self.target_digest_content(), self.path)


class CSVDataset(CSVFiles):
    """One split of a table with one class per row; the index takes 12 bytes per sample plus the file name."""

    def __init__(self, root: Path, split: Split, why: str = "", data: DataConfig = _DEFAULTS) -> None:
        labels = _Labels(split)
        super().__init__(root, split, why, data, labels.add)
        self.class_names, self.targets = labels.finish(self._table)
        if any(";" in name or "|" in name for name in self.class_names):
            self.origin += (
                "; labels with ; or | are one class each (for several per image: train with task: multilabel)"
            )

    @property
    def index_bytes(self) -> int:
        """Memory held by the index."""
        return self._names.num_bytes + self.targets.nbytes

    def __getitem__(self, index: int) -> Sample:
        """The encoded image and its class."""
        path = self.path(index)
        return Sample(read(path), int(self.targets[index]), path)

    def files(self, indices: I64) -> SampleFiles:
        """The paths as bytes, and the classes."""
        return self.encoded_paths(indices), self.targets[indices]

    def target_digest_content(self) -> npt.NDArray[np.integer]:
        return self.targets


def _first_lines(path: Path) -> tuple[list[str], list[str]]:
    """The cells of a file's first two lines."""
    start = read(path, 0, min(_HEADER_BYTES, size_bytes(path))).decode("utf-8-sig", "replace")
    try:
        lines = [*csv.reader(start.splitlines()[:2]), [], []]
    except csv.Error:
        return [], []  # not a table of ours
    header, first = ([cell.strip() for cell in line] for line in lines[:2])
    return header, first


def _is_table(header: Sequence[str], first: Sequence[str]) -> bool:
    if "file" not in header or "label" in header:
        return "file" in header
    marks = [cell for name, cell in zip(header, first, strict=False) if name not in COLUMNS]
    return len(header) == len(first) and len(marks) > 0 and set(marks) <= {"0", "1"}


def read_table(root: Path) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the table in a folder, as they are."""
    path = _only_table(root)
    reader = csv.reader(io.StringIO(_read_table(path)))
    try:
        header, *rows = [*reader] or [[]]
    except csv.Error as error:
        raise row_error(path, reader.line_num, f"not valid CSV: {error}") from error
    return [cell.strip() for cell in header], rows


def _read_table(path: Path) -> str:
    return read_bounded_text(path, read_limits.TABLE_BYTES).decode("utf-8-sig", "surrogateescape")


def _header(path: Path, text: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader(io.StringIO(text)), [])]
    except csv.Error as error:
        raise row_error(path, 1, f"not valid CSV: {error}") from error


def _only_table(root: Path) -> Path:
    names = find_tables(root)
    if len(names) != 1:
        raise DataError(
            f"{len(names) or 'no'} CSV files with the columns file and label in {root}",
            where=str(root),
            why=", ".join(names) or "the first line must be file,label or file,label,split",
            hint="keep one, with a column split (train or val)"
            if names
            else "write one, or give its folder: --data DIR",
        )
    return root / names[0]


def _check_header(path: Path, cells: Sequence[str], by_class: bool) -> None:
    """Refuse repeated columns, of those that are read, and where each image has one class, a table without labels."""
    if by_class and "label" not in cells:
        raise DataError(
            "this table has a column per class, so that an image may have several",
            where=str(path),
            why="there is no column label, and the recipe's task is classification",
            hint="train with --set task=multilabel; or replace the columns by one, label",
        )
    counts = Counter(cells)
    repeated = sorted(cell for cell in (COLUMNS if "label" in cells else counts) if counts[cell] > 1)
    if repeated:
        raise row_error(path, 1, f"column {', '.join(repeated)} more than once in the header", "the table is ambiguous")


def _rows(path: Path, text: str, by_class: bool) -> Iterator[Row]:
    """Every row, validated; `by_class`: each needs a label."""
    reader = csv.reader(io.StringIO(text), strict=True)
    header = [cell.strip() for cell in next(reader)]
    try:
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise row_error(path, reader.line_num, f"row has {len(cells)} cells instead of {len(header)}")
            row = dict(zip(header, (cell.strip() for cell in cells), strict=True))
            if not row["file"]:
                raise row_error(path, reader.line_num, "row has no file")
            if not is_possible_path(row["file"]):
                raise row_error(path, reader.line_num, f"not a file name: {row['file']!r:.80}")
            if by_class and not row["label"]:
                why = "only with task: multilabel may an image have no label"
                hint = "correct or remove the line; if images have several labels, use a recipe with task: multilabel"
                raise row_error(path, reader.line_num, "row has no label", why, hint)
            yield reader.line_num, row, _split(path, reader.line_num, row)
    except csv.Error as error:
        raise row_error(path, reader.line_num, f"not valid CSV: {error}") from error


def _split_rows(
    path: Path, text: str, has_split: bool, rule: ValidationSplit, by_class: bool
) -> tuple[Iterable[Row], str]:
    """The rows with their splits, and how they were split; nothing if the table says it itself."""
    if has_split and {of for _, _, of in _rows(path, text, by_class)} != {"train"}:
        return _rows(path, text, by_class), ""
    if not has_split and rule == ValidationSplit.of(_DEFAULTS):
        note = f"no column split: every {_VAL_EVERY}th row is for validation"
        numbered = enumerate(_rows(path, text, by_class))
        return ((line, row, "train" if number % _VAL_EVERY else "val") for number, (line, row, _) in numbered), note
    rows = list(_rows(path, text, by_class))
    targets = None
    if by_class:
        labels = [row.get("label", "") for _, row, _ in rows]
        numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
        targets = np.array([numbers[label] for label in labels], np.int64)
    held_out, note = rule.select("val", (row["file"] for _, row, _ in rows), targets, str(path))
    pairs = zip(rows, held_out.tolist(), strict=True)
    return ((line, row, "val" if is_held_out else "train") for (line, row, _), is_held_out in pairs), note


def _split(path: Path, line: int, row: dict[str, str]) -> Split:
    """The split of a row; `train` without a column split."""
    if "split" not in row:
        return "train"
    for split, names in SPLIT_FOLDERS.items():
        if row["split"] in names:
            return split
    raise row_error(
        path, line, f"unknown split {row['split']!r}", "a split is train, val (or validation, valid) or test"
    )


class _Labels:
    """Collects the labels of all rows and turns them into class indices at the end."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self._first_line: dict[str, int] = {}  # of each label of this split
        self._numbers: dict[str, int] = {}
        self._in_train: set[str] = set()
        self._row_labels = array("i")

    def add(self, path: Path, line: int, row: dict[str, str], of: Split) -> None:
        """Add the label of a row in split `of`."""
        label = row["label"]
        if of == "train":
            self._in_train.add(label)
        if of == self._split:
            self._first_line.setdefault(label, line)
            self._row_labels.append(self._numbers.setdefault(label, len(self._numbers)))

    def finish(self, path: Path) -> tuple[tuple[str, ...], I32]:
        """The class names of training, and the class index of every row of this split."""
        is_alone = self._split != "train" and not self._in_train  # a validation set has its own classes then
        names = sorted_classes(set(self._first_line) if is_alone else self._in_train, path)
        classes = {name: number for number, name in enumerate(names)}
        for label, line in self._first_line.items():
            if label not in classes:
                raise row_error(
                    path,
                    line,
                    f"label {label!r} occurs in no training row",
                    "validation may only have classes of training",
                )
        class_of_label = np.array([classes[label] for label in self._numbers], np.int32)
        return names, class_of_label[np.array(self._row_labels, np.int32)]


def sorted_classes(labels: set[str], path: Path) -> tuple[str, ...]:
    if not labels:
        raise row_error(path, 1, "no training rows", "every row is for validation, or the table is empty")
    if all(label.isascii() and label.isdigit() for label in labels):
        # As numbers, without converting them: a file may have one of thousands of digits.
        return tuple(sorted(labels, key=lambda label: (len(label.lstrip("0")), label.lstrip("0"), label)))
    return tuple(sorted(labels))


def _files(path: Path, rows: Iterable[Row], split: Split, add_row: AddRow) -> Iterator[str]:
    """The files of one split; those of all must exist. Lists each folder once instead of checking every file."""
    listings: dict[str, frozenset[str]] = {}
    missing: list[DataError] = []
    has_rows = False
    for line, row, of in rows:
        add_row(path, line, row, of)
        has_rows = has_rows or of == split
        file = row["file"]
        folder, name = os.path.split(os.path.join(path.parent, file))
        if folder not in listings:
            listings[folder] = _names_in(folder)
        if name not in listings[folder]:
            missing.append(
                row_error(path, line, f"missing file: {file}", f"{os.path.join(folder, name)} does not exist")
            )
        elif of == split:
            yield file
    if missing:
        raise GroupedDataError(missing)
    if split == "test" and not has_rows:
        raise row_error(path, 1, "no test rows", "no row has test in the column split")


def _names_in(folder: str) -> frozenset[str]:
    try:
        return frozenset(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return frozenset()
    except OSError as error:
        raise unreadable(folder, error) from error


def row_error(path: Path, line: int, what: str, why: str = "", hint: str = "correct or remove the line") -> DataError:
    return DataError(what, where=f"{path}, line {line}", why=why or "the table is damaged", hint=hint)


def has_several_labels(root: Path) -> bool:
    """True if the table in a folder has a column per class, or a row with no label or with several."""
    header, rows = read_table(root)
    if "label" not in header:
        return True
    cells = (row[header.index("label")] for row in rows if len(row) == len(header))
    return any(not cell.strip() or len(_split_cell(cell)) > 1 for cell in cells)


class MultilabelCSVDataset(CSVFiles):
    """One split of a table; the index takes 8 bytes per sample and 4 per label, plus the file name."""

    is_multilabel = True

    def __init__(self, root: Path, split: Split, why: str = "", data: DataConfig = _DEFAULTS) -> None:
        rows = _LabelLists(split)
        super().__init__(root, split, why, data, rows.add)
        self.class_names, self._labels, self._starts = rows.finish(self._table, self._header)

    def __getitem__(self, index: int) -> Sample:
        """The encoded image and its labels."""
        path = self.path(index)
        return Sample(read(path), -1, path, labels=self._labels_of(index))

    def files(self, indices: I64) -> SampleFiles:
        """The paths as bytes, and multi-hot rows [n, classes]."""
        return self.encoded_paths(indices), self._multi_hot(indices)

    @property
    def targets(self) -> npt.NDArray[np.float32]:
        """Multi-hot rows of all samples [n, classes]."""
        return self._multi_hot(np.arange(len(self), dtype=np.int64))

    def _labels_of(self, index: int) -> tuple[int, ...]:
        return tuple(self._labels[self._starts[index] : self._starts[index + 1]].tolist())

    def _multi_hot(self, indices: I64) -> npt.NDArray[np.float32]:
        num_classes = len(self.class_names)
        rows = [multi_hot(self._labels_of(int(index)), num_classes) for index in indices]
        return np.stack(rows) if rows else np.zeros((0, num_classes), np.float32)

    def target_digest_content(self) -> npt.NDArray[np.integer]:
        return np.concatenate([self._starts, self._labels.astype(np.int64)])


class _LabelLists:
    """Collects the labels of all rows and turns them into class indices at the end."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self._in_train: dict[str, None] = {}
        self._first_line: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._labels = array("i")
        self._starts = array("q", [0])

    def add(self, path: Path, line: int, row: dict[str, str], of: Split) -> None:
        """Add the labels of a row in split `of`."""
        names = _split_cell(row["label"]) if "label" in row else _marked(path, line, row)
        if of == "train":
            self._in_train.update(dict.fromkeys(names))
        if of == self._split:
            for name in names:
                self._first_line.setdefault(name, line)
                self._labels.append(self._numbers.setdefault(name, len(self._numbers)))
            self._starts.append(len(self._labels))

    def finish(self, path: Path, header: Sequence[str]) -> tuple[tuple[str, ...], npt.NDArray[np.int32], I64]:
        """The class names, the class indices of all labels in the order of the rows, and where each row's start."""
        # A validation set alone has its own classes.
        known = self._in_train or dict.fromkeys(self._first_line)
        if "label" in header:
            names = sorted_classes(set(known), path)
        else:
            names = tuple(column for column in header if column not in COLUMNS)
        classes = {name: number for number, name in enumerate(names)}
        for label, line in self._first_line.items():
            if label not in known:
                why = "validation may only have classes of training"
                raise row_error(path, line, f"label {label!r} occurs in no training row", why)
        class_of_label = np.array([classes[label] for label in self._numbers], np.int32)
        return names, class_of_label[np.array(self._labels, np.int32)], np.array(self._starts, np.int64)


def _split_cell(cell: str) -> list[str]:
    """The different labels in a cell."""
    return list(dict.fromkeys(name for part in _SEPARATORS.split(cell) if (name := part.strip())))


def _marked(path: Path, line: int, row: dict[str, str]) -> list[str]:
    """The columns that have a 1."""
    cells = {name: cell for name, cell in row.items() if name not in COLUMNS}
    wrong = next((name for name, cell in cells.items() if cell not in ("0", "1")), None)
    if wrong is not None:
        raise row_error(path, line, f"column {wrong} has {cells[wrong]!r}", "a column per class has 0 or 1")
    return [name for name, cell in cells.items() if cell == "1"]


def wrong_data(kind: str, where: Path | None) -> DataError:
    """The error for data with one label per image."""
    return DataError(
        f"{kind} data has one class per image, but the recipe's task is multilabel",
        where="" if where is None else str(where),
        why="several labels per image are read from a CSV file",
        hint="write a CSV file (file,label, as in a.jpg,cat;dog), or train with --set task=classification",
    )
