"""Open the data to convert: anything the trainer reads, or ImageNet's original archives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from reconv.core.errors import DataError, UsageError
from reconv.data.dataset import Dataset, Split
from reconv.data.inspect.lenient_open import find_box_reader
from reconv.data.readers.dataset_factory import open_dataset
from reconv.data.readers.detect import detect
from reconv.data.readers.folder import split_folder
from reconv.data.readers.imagenet.archives import (
    TRAIN_FILE,
    VAL_FILE,
    has_imagenet_archives,
    open_imagenet_archives,
)
from reconv.recipe.parts.data import DataConfig
from reconv.storage.remote_tree import local_data_path

SPLITS: tuple[Split, ...] = ("train", "val")
IN_PACKAGE = ("digits", "scattered-digits")
ARCHIVES = "archives"
_AS_PUBLISHED = DataConfig(bad_boxes="skip")  # as the published COCO converter does


def open_splits(
    source: str, kind: str, labels: Path | None, expected: Mapping[Split, int] | None, data: DataConfig = _AS_PUBLISHED
) -> tuple[dict[Split, Dataset], Path | None]:
    """Training and validation data at `source`, and the folder they lie in; `data` sets the policies for boxes."""
    path = local_data_path(source)
    if source in IN_PACKAGE and not path.exists():
        return _with_expected_counts(
            {split: open_dataset(source, None, split, data) for split in SPLITS}, expected
        ), None
    is_archive = path.name in (TRAIN_FILE, VAL_FILE)
    folder = path.parent if is_archive else path
    if (is_archive or kind in ("auto", ARCHIVES)) and has_imagenet_archives(folder):
        if kind == "auto" and not is_archive and split_folder(folder, "train") is not None:
            raise UsageError(
                f"{folder} holds the original archives and an image folder",
                where=str(folder),
                why="either could be meant",
                hint=f"--from folder or --from {ARCHIVES}",
            )
        return dict(open_imagenet_archives(folder, labels, expected)), folder
    if labels is not None:
        raise UsageError(
            "--labels is for the ImageNet archives", why=f"there is no {TRAIN_FILE} in {folder}", hint="leave it out"
        )
    detected = detect(path, kind)
    boxes = find_box_reader(detected) is not None
    datasets = {split: open_dataset(detected.kind, detected.path, split, data, boxes=boxes) for split in SPLITS}
    return _with_expected_counts(datasets, expected), detected.path


def _with_expected_counts(datasets: dict[Split, Dataset], expected: Mapping[Split, int] | None) -> dict[Split, Dataset]:
    for split, dataset in datasets.items():
        wanted = (expected or {}).get(split)
        if wanted is not None and wanted != len(dataset):
            raise DataError(
                f"{len(dataset):,} {split} samples instead of the expected {wanted:,}",
                where=dataset.origin,
                why="samples are missing, or --expect is wrong",
                hint="complete the data, or correct --expect TRAIN,VAL",
            )
    return datasets
