"""Hugging Face datasets saved with `save_to_disk`; images stay encoded.

The `datasets` package memory-maps the files itself, so they are not read through `storage`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from pathlib import Path
from typing import Any

from reconv.core.errors import DataError, UsageError
from reconv.data.dataset import Sample, Split
from reconv.storage import read_limits
from reconv.storage.bounded import parse_shallow_json
from reconv.storage.local import read, read_bounded_text

SPLITS_FILE = "dataset_dict.json"  # written by `DatasetDict.save_to_disk`
STATE = "state.json"
_SPLITS: dict[Split, tuple[str, ...]] = {"train": ("train",), "val": ("validation", "val", "test"), "test": ("test",)}


class HFDataset:
    """One split of a saved dataset."""

    kind = "hf"

    def __init__(self, root: Path, split: Split, why: str = "") -> None:
        datasets = _package()
        name = _split_name(root, split)
        try:
            table = datasets.load_from_disk(str(root / name))
        except Exception as error:  # the package may raise anything for damaged Arrow files
            raise _dataset_error(root / name, "cannot open the dataset", f"{type(error).__name__}: {error}") from error
        self._image = _column(root / name, table.features, datasets.Image, "image")
        self._label = _column(root / name, table.features, datasets.ClassLabel, "label")
        self._table = table.select_columns([self._image, self._label]).cast_column(
            self._image, datasets.Image(decode=False)
        )
        self._path = root / name
        self.class_names = tuple(table.features[self._label].names)
        _check_same_classes(root, split, self.class_names, self._label, datasets)
        self.origin = f"Hugging Face dataset at {root}, split {name}" + (f" ({why})" if why else "")
        state = hashlib.blake2b(read(root / name / STATE), digest_size=16).hexdigest()
        self._digest = f"{state}/{len(table)}/{len(self.class_names)}"

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Sample:
        """The encoded image and its class."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        row = self._table[index]
        image, label, name = row[self._image], row[self._label], f"{self._path}, row {index}"
        if image is None or label is None:
            raise _dataset_error(name, "row has no image or no label", "the cell is empty")
        data = image["bytes"] if image["bytes"] is not None else read(image["path"])
        return Sample(data, int(label), name)

    @property
    def targets(self) -> list[int]:
        """The class index of each sample."""
        labels = list(self._table[self._label])
        if None in labels:
            row = labels.index(None)
            raise _dataset_error(f"{self._path}, row {row}", "row has no image or no label", "the cell is empty")
        return [int(label) for label in labels]

    def fingerprint(self) -> str:
        """A digest of the split's state file, which holds the package's fingerprint of the data."""
        return self._digest


def _package() -> Any:
    if importlib.util.find_spec("datasets") is None:
        raise UsageError(
            "cannot read Hugging Face datasets",
            why="the package datasets is not installed",
            hint="pip install 'reconv[hf]'",
        )
    return importlib.import_module("datasets")


def _split_name(root: Path, split: Split) -> str:
    try:
        splits = parse_shallow_json(read_bounded_text(root / SPLITS_FILE, read_limits.NAMES_BYTES))["splits"]
        if not isinstance(splits, list) or not all(isinstance(name, str) for name in splits):
            raise TypeError("splits is not a list of names")
    except (ValueError, KeyError, TypeError) as error:
        raise _dataset_error(root / SPLITS_FILE, "the list of splits is damaged", str(error)) from error
    name = next((name for name in _SPLITS[split] if name in splits), None)
    if name is None:
        raise _dataset_error(
            root, f"no split {' or '.join(_SPLITS[split])}", f"its splits are {', '.join(splits) or 'none'}"
        )
    return name


def _column(path: Path, features: Any, feature_type: type, usual: str) -> str:
    """The only column of this type; of several, the one with the usual name."""
    names = [name for name, feature in features.items() if isinstance(feature, feature_type)]
    if len(names) != 1 and usual not in names:
        columns = f"its columns: {', '.join(features)}; of type {feature_type.__name__}: {', '.join(names) or 'none'}"
        raise _dataset_error(path, f"no single column of type {feature_type.__name__}", columns)
    return usual if usual in names else names[0]


def _check_same_classes(root: Path, split: Split, names: tuple[str, ...], label: str, datasets: Any) -> None:
    """Validation must have the same class names as training, in the same order."""
    if split != "train":
        train = datasets.load_from_disk(str(root / _split_name(root, "train")))
        if tuple(train.features[label].names) != names:
            raise _dataset_error(
                root, "validation has other classes than training", f"the names of column {label} differ"
            )


def _dataset_error(where: object, what: str, why: str) -> DataError:
    hint = "save it again with datasets.DatasetDict.save_to_disk"
    return DataError(what, where=str(where), why=why, hint=hint)
