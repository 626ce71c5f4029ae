"""Corrections of a dataset by a review, whose files stay as they are: images left out, other labels, and folds.

A list is a CSV file with a header: `path`, and if it has them `split`, `action` (exclude or relabel) and `label`. Paths
are relative to the folder of the data, or absolute; of data that is not files they are names, as in cifar10[17].
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from reconv.core.errors import DataError
from reconv.core.random import hash_array, key
from reconv.data.boxes.annotations import DetectionDataset, DetectionSubset
from reconv.data.dataset import (
    I64,
    ByteRange,
    Dataset,
    FileBacked,
    Sample,
    SampleFiles,
    Split,
    Subset,
    all_targets,
    is_multilabel,
    sample_files,
    sample_paths,
    sample_ranges,
)
from reconv.data.readers.arrays import ArrayDataset
from reconv.recipe.parts.data import DataConfig
from reconv.storage import read_limits
from reconv.storage.local import read_bounded_text

EXCLUDE, RELABEL = "exclude", "relabel"


@dataclass(frozen=True, slots=True)
class ListedImage:
    """One row of a list."""

    path: str
    split: str  # empty: any
    label: str


def read_list(file: Path, action: str) -> list[ListedImage]:
    """The rows of a list that have this action, or no action where the list has none."""
    text = read_bounded_text(file, read_limits.REVIEW_LIST_BYTES).decode("utf-8-sig", "surrogateescape")
    first_line = text.partition("\n")[0]
    is_semicolon = ";" in first_line and "," not in first_line  # as spreadsheets write where 1.5 is 1,5
    reader = csv.DictReader(io.StringIO(text, newline=""), restval="", delimiter=";" if is_semicolon else ",")
    try:
        rows, names = list(reader), set(reader.fieldnames or ())
    except csv.Error as error:
        raise DataError(f"the list of data.{action} is not CSV", where=str(file), why=str(error)) from error
    needed = {"path"} | ({"label"} if action == RELABEL else set())
    if not needed <= names:
        missing = " and ".join(sorted(needed - names))
        raise DataError(f"the list of data.{action} has no column {missing}", where=str(file), hint="add a header line")
    chosen = [row for row in rows if (row.get("action", action) or "").strip() == action]
    if not all(row["path"] for row in chosen):
        raise DataError(f"the list of data.{action} has a row without a path", where=str(file))
    return [ListedImage(row["path"], row.get("split") or "", row.get("label") or "") for row in chosen]


def correct(dataset: Dataset, data: DataConfig, root: Path | None, split: Split) -> Dataset:
    """The dataset without the images of `data.exclude`, and with the labels of `data.relabel`."""
    names = _names(dataset, root)
    kept = np.ones(len(dataset), bool)
    kept[list(_listed(data.exclude, EXCLUDE, names, root, split))] = False
    labels: dict[int, int] = {}
    for index, listed in _listed(data.relabel, RELABEL, names, root, split).items():
        if listed.label not in dataset.class_names:
            raise DataError(
                f"data.relabel gives {listed.path} the label {listed.label!r}, which is no class of the data",
                where=str(data.relabel),
                why=f"classes: {', '.join(dataset.class_names[:8])}{', ...' * (len(dataset.class_names) > 8)}",
            )
        labels[index] = dataset.class_names.index(listed.label)
    return _corrected(dataset, np.flatnonzero(kept), labels)


def take_fold(train: Dataset, fold: str, seed: int, split: Split) -> Dataset:
    """Fold i of k of a training set for validation, or the other folds for training."""
    number, folds = map(int, fold.split("/"))
    part = fold_numbers(train, folds, seed) == number - 1
    indices = np.flatnonzero(part if split == "val" else ~part)
    chosen = _corrected(train, indices, {})
    role = "validation" if split == "val" else "training"
    chosen.origin = f"{train.origin}; {role} part of fold {fold}: {len(chosen):,} images"  # type: ignore[misc]
    return chosen


def fold_numbers(dataset: Dataset, folds: int, seed: int) -> I64:
    """The fold of each sample [n], of equal size in every class."""
    draws = hash_array(key(seed, "fold"), np.arange(len(dataset), dtype=np.int64))
    has_classes = not (isinstance(dataset, DetectionDataset) or is_multilabel(dataset))
    classes = all_targets(dataset) if has_classes else np.zeros(len(dataset), np.int64)
    numbers = np.empty(len(dataset), np.int64)
    numbers[np.lexsort((draws, classes))] = np.arange(len(dataset)) % folds
    return numbers


def _names(dataset: Dataset, root: Path | None) -> dict[str, int]:
    """The index of each sample by its absolute path, or by its name."""
    names = sample_paths(dataset)
    is_file = isinstance(dataset, FileBacked) and root is not None
    return {os.path.abspath(name) if is_file else name: index for index, name in enumerate(names)}


def _listed(
    file: str | None, action: str, names: Mapping[str, int], root: Path | None, split: Split
) -> dict[int, ListedImage]:
    """The listed samples of this split by index."""
    if file is None:
        return {}
    rows = read_list(Path(file), action)
    found: dict[int, ListedImage] = {}
    for row in rows:
        index = next((names[name] for name in _spellings(row.path, root) if name in names), None)
        if index is not None and row.split in ("", split):
            found[index] = row
    if rows and not found and all(row.split in ("", split) for row in rows) and not _exist(rows, root):
        raise DataError(
            f"none of the {len(rows):,} images of data.{action} is in the data",
            where=file,
            why=f"the first is {rows[0].path}",
            hint="paths are relative to the folder given as --data",
        )
    return found


def _exist(rows: list[ListedImage], root: Path | None) -> bool:
    """True if one of the first listed images is a file, of another split then."""
    return any(os.path.exists(name) for row in rows[:100] for name in _spellings(row.path, root))


def _spellings(path: str, root: Path | None) -> Iterator[str]:
    if root is not None:
        yield os.path.abspath(root / path)
    yield path


def _corrected(dataset: Dataset, indices: I64, labels: Mapping[int, int]) -> Dataset:
    if isinstance(dataset, ArrayDataset):
        targets = dataset.targets.copy()
        targets[list(labels)] = list(labels.values())
        return dataset.with_targets(targets).select(indices)
    if isinstance(dataset, DetectionDataset) or is_multilabel(dataset):
        if labels:
            raise DataError(
                "data.relabel is for data with one class per image",
                where=dataset.origin,
                hint="correct the labels in their files; data.exclude leaves images out",
            )
        if isinstance(dataset, DetectionDataset):
            return DetectionSubset(dataset, indices)
    return CorrectedDataset(dataset, indices, labels)


class CorrectedDataset(Subset):
    """Some samples of a dataset, a few of them with another class."""

    def __init__(self, dataset: Dataset, indices: I64, labels: Mapping[int, int]) -> None:
        super().__init__(dataset, indices)
        self._labels = dict(labels)
        left_out, num_labels = len(dataset) - len(indices), len(labels)
        self.origin = f"{dataset.origin}; {left_out:,} left out, {num_labels:,} relabeled"

    def __getitem__(self, index: int) -> Sample:
        sample, at = super().__getitem__(index), int(self._indices[index])
        return sample if at not in self._labels else Sample(sample.data, self._labels[at], sample.name)

    @property
    def targets(self) -> I64:
        return self._relabeled(all_targets(self._dataset)[self._indices], self._indices)

    def files(self, indices: I64) -> SampleFiles | None:
        found = sample_files(self._dataset, self._indices[indices])
        return None if found is None else (found[0], self._relabeled(found[1], self._indices[indices]))

    def ranges(self, indices: I64) -> list[ByteRange]:
        return sample_ranges(self._dataset, self._indices[indices])

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(np.ascontiguousarray(self._indices).tobytes(), digest_size=8)
        digest.update(repr(sorted(self._labels.items())).encode())
        return f"{self._dataset.fingerprint()}/{digest.hexdigest()}"

    def _relabeled(self, targets: I64, at: I64) -> I64:
        if self._labels:
            targets = targets.copy()
            for row in np.flatnonzero(np.isin(at, list(self._labels))).tolist():
                targets[row] = self._labels[int(at[row])]
        return targets
