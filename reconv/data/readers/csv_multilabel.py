"""Images with any number of labels each, listed in a CSV file.

The labels of an image are in one column `label`, separated by ; or |, or there is one column of 0 and 1 for each class.
Classes are those of the training rows, sorted, or the columns in their order. An image may have no label.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from reconv.core.errors import DataError
from reconv.data.dataset import I64, Sample, SampleFiles, Split, multi_hot
from reconv.data.readers.csv_table import COLUMNS, CSVFiles, read_table, row_error, sorted_classes
from reconv.recipe.parts.data import DataConfig
from reconv.storage.local import read

_DEFAULTS = DataConfig()
_SEPARATORS = re.compile("[;|]")


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
