"""Data sets of Hugging Face `datasets`, as its `save_to_disk` leaves them.

Owns which column is the image and which the class. Refuses to know Arrow and to download: the package maps the
files, so it alone reads them, not the byte-range reader. Invariant: images come out encoded, as they were put in.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

from reconv.data.dataset import Sample, Split
from reconv.data.storage.local import read
from reconv.errors import DataError, UsageError

MARK = "dataset_dict.json"  # what `DatasetDict.save_to_disk` writes beside the splits' folders
STATE = "state.json"
_SPLITS: dict[Split, tuple[str, ...]] = {"train": ("train",), "val": ("validation", "val", "test")}


class HFDataset:
    """One split of a saved data set."""

    kind = "hf"

    def __init__(self, root: Path, split: Split, why: str = "") -> None:
        datasets = _package()
        name = _split_name(root, split)
        try:
            table = datasets.load_from_disk(str(root / name))
        except Exception as error:  # whatever a damaged Arrow file raises in the package
            raise _bad(root / name, "data set cannot be opened", f"{type(error).__name__}: {error}") from error
        self._image = _column(root / name, table.features, datasets.Image, "image")
        self._label = _column(root / name, table.features, datasets.ClassLabel, "label")
        self._table = table.select_columns([self._image, self._label]).cast_column(
            self._image, datasets.Image(decode=False)
        )
        self._path = root / name
        self.class_names = tuple(table.features[self._label].names)
        _refuse_other_classes(root, split, self.class_names, self._label, datasets)
        self.origin = f"Hugging Face data set at {root}, split {name}" + (f" ({why})" if why else "")
        state = hashlib.blake2b(read(root / name / STATE), digest_size=16).hexdigest()
        self._digest = f"{state}/{len(table)}/{len(self.class_names)}"

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Sample:
        """The encoded image and its class."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        row = self._table[index]
        picture, label, name = row[self._image], row[self._label], f"{self._path}, row {index}"
        if picture is None or label is None:
            raise _bad(name, "row without an image or a label", "the cell is empty")
        data = picture["bytes"] if picture["bytes"] is not None else read(picture["path"])
        return Sample(data, int(label), name)

    def fingerprint(self) -> str:
        """A digest of the split's own record of its state, which has the package's fingerprint of the data."""
        return self._digest


def _package() -> Any:
    if importlib.util.find_spec("datasets") is None:
        raise UsageError(
            "Hugging Face data sets cannot be read",
            why="not installed here: datasets",
            then="pip install 'reconv[hf]'",
        )
    return importlib.import_module("datasets")


def _split_name(root: Path, split: Split) -> str:
    try:
        splits = json.loads(read(root / MARK))["splits"]
    except (ValueError, KeyError, TypeError) as error:
        raise _bad(root / MARK, "list of splits is damaged", str(error)) from error
    name = next((name for name in _SPLITS[split] if name in splits), None)
    if name is None:
        raise _bad(root, f"no split {' or '.join(_SPLITS[split])}", f"it has {', '.join(splits) or 'none'}")
    return name


def _column(path: Path, features: Any, form: type, usual: str) -> str:
    """The one column of this type; of several, the one of the usual name."""
    names = [name for name, feature in features.items() if isinstance(feature, form)]
    if len(names) != 1 and usual not in names:
        held = f"its columns: {', '.join(features)}; of type {form.__name__}: {', '.join(names) or 'none'}"
        raise _bad(path, f"no single column of type {form.__name__}", held)
    return usual if usual in names else names[0]


def _refuse_other_classes(root: Path, split: Split, names: tuple[str, ...], label: str, datasets: Any) -> None:
    """Validation must number its classes as training does."""
    if split == "val":
        train = datasets.load_from_disk(str(root / _split_name(root, "train")))
        if tuple(train.features[label].names) != names:
            raise _bad(root, "validation has other classes than training", f"column {label} names them differently")


def _bad(where: object, what: str, why: str) -> DataError:
    then = "save it again with datasets.DatasetDict.save_to_disk"
    return DataError(what, where=str(where), why=why, then=then)
