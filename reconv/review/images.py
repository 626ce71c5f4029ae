"""The images of a review: the splits of a dataset, or of a run's data, as one list."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from reconv.core.errors import DataError, UsageError
from reconv.data.boxes.annotations import NO_TARGET, DetectionDataset
from reconv.data.dataset import I64, Dataset, FileBacked, Sample, Split, all_targets, is_multilabel, sample_paths
from reconv.data.inspect.lenient_open import find_box_reader
from reconv.data.readers.dataset_factory import open_dataset
from reconv.data.readers.detect import detect
from reconv.recipe.parts.code import names_code
from reconv.recipe.parts.data import NEED_NO_PATH, DataConfig
from reconv.storage.object_stores.store import is_url
from reconv.storage.remote_tree import local_data_path

SPLITS: tuple[Split, ...] = ("train", "val")


@dataclass(frozen=True, slots=True, eq=False)
class ReviewedImages:
    """The n images of the training set, and then of the validation set."""

    datasets: Mapping[Split, Dataset]
    class_names: tuple[str, ...]
    paths: Sequence[str]  # as lists of corrections name them: relative to the data, or the names of samples
    files: Sequence[str]  # absolute; the names of samples that are no files
    labels: I64  # [n]; NO_TARGET of images with boxes

    @classmethod
    def of(cls, datasets: Mapping[Split, Dataset], root: Path | None) -> ReviewedImages:
        """The images of these splits; `root` is what --data named."""
        first = next(iter(datasets.values()))
        has_boxes = isinstance(first, DetectionDataset)
        labels = [np.full(len(d), NO_TARGET) if has_boxes else all_targets(d) for d in datasets.values()]
        is_file = root is not None and isinstance(first, FileBacked) and not is_url(str(root))
        names = [name for dataset in datasets.values() for name in sample_paths(dataset)]
        files = [os.path.abspath(name) for name in names] if is_file else names
        base = os.path.abspath(root) if root is not None else ""
        paths = [os.path.relpath(file, base) if is_file and file.startswith(base + os.sep) else file for file in files]
        return cls(datasets, first.class_names, paths, files, np.concatenate(labels).astype(np.int64))

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def has_boxes(self) -> bool:
        """True if images have boxes rather than a class."""
        return isinstance(next(iter(self.datasets.values())), DetectionDataset)

    def at(self, row: int) -> tuple[Split, Dataset, int]:
        """The split of an image, its dataset and its index there."""
        for split, dataset in self.datasets.items():
            if row < len(dataset):
                return split, dataset, row
            row -= len(dataset)
        raise IndexError(row)

    def split(self, row: int) -> Split:
        return self.at(row)[0]

    def sample(self, row: int) -> Sample:
        _, dataset, index = self.at(row)
        return dataset[index]

    def rows(self, split: Split) -> I64:
        """The numbers of the images of a split."""
        start = 0
        for name, dataset in self.datasets.items():
            if name == split:
                return np.arange(start, start + len(dataset))
            start += len(dataset)
        return np.zeros(0, np.int64)

    def fingerprint(self) -> str:
        return "/".join(dataset.fingerprint() for dataset in self.datasets.values())


def open_images(data: DataConfig, path: str | None, *, boxes: bool | None = None) -> ReviewedImages:
    """The training and validation images at a path; `boxes` None: of the kind that is there."""
    section = data.model_copy(update={"fold": None, "subset_percent": 100.0})
    kind, root = _place(section.source, path)
    if boxes is None:
        is_named = kind in NEED_NO_PATH or names_code(kind)
        boxes = not is_named and root is not None and find_box_reader(detect(root, kind)) is not None
    datasets: dict[Split, Dataset] = {split: open_dataset(kind, root, split, section, boxes=boxes) for split in SPLITS}
    train, val = datasets["train"], datasets["val"]
    if train.class_names != val.class_names:
        raise DataError("the training and the validation set have other classes", where=train.origin)
    if is_multilabel(train):
        raise UsageError(
            "images with several labels are not reviewed",
            where=train.origin,
            hint="`reconv data check PATH` checks their files",
        )
    return ReviewedImages.of({split: dataset for split, dataset in datasets.items() if len(dataset)}, root)


def _place(source: str, path: str | None) -> tuple[str, Path | None]:
    """The kind of the data, and its folder: a name such as digits needs none."""
    if path is None or source in NEED_NO_PATH:
        return source, None
    if source == "auto" and (path in NEED_NO_PATH or names_code(path)) and not Path(path).exists():
        return path, None
    return source, local_data_path(path if is_url(path) else Path(path).expanduser())
