"""From a recipe's data section to an open source.

Owns the choice of source. Refuses to know how any of them works. Invariant: the returned source has at least one
sample, and the training split alone is subsample by `data.subset_percent`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from reconv.data.boxes.annotations import DetectionDataset, DetectionSubset
from reconv.data.dataset import BACKGROUND, I64, Dataset, Split, Subset, WithBackground, evenly_spaced
from reconv.data.readers.arrays import ArrayDataset
from reconv.data.readers.cifar import open_cifar
from reconv.data.readers.csv_table import CSVDataset
from reconv.data.readers.detect import Found, detect
from reconv.data.readers.detection.box_tfrecord import BoxTFRecordDataset
from reconv.data.readers.detection.coco import open_coco
from reconv.data.readers.detection.scattered_digits import NUM_SAMPLES as NUM_SCATTERED
from reconv.data.readers.detection.scattered_digits import ScatteredDigits
from reconv.data.readers.detection.synthetic_boxes import SyntheticBoxes
from reconv.data.readers.detection.voc import open_voc
from reconv.data.readers.detection.yolo import open_yolo
from reconv.data.readers.digits import open_digits
from reconv.data.readers.folder import FolderDataset
from reconv.data.readers.hf import HFDataset
from reconv.data.readers.packed import PackedDataset
from reconv.data.readers.shards.shard_dataset import ShardDataset
from reconv.data.readers.synthetic import NUM_CLASSES, NUM_SAMPLES, Synthetic, SyntheticOnDevice
from reconv.data.readers.tar import open_tar
from reconv.data.readers.tfrecord import TFRECORD
from reconv.errors import DataError
from reconv.recipe.data_fields import DataConfig

NEED_NO_PATH = ("digits", "scattered-digits", "synthetic", "synthetic-device")

_OPENERS: Mapping[str, Callable[[Path, Split, str], Dataset]] = {
    "folder": FolderDataset,
    "packed": PackedDataset,
    "tfrecord": partial(ShardDataset, TFRECORD),
    "tar": open_tar,
    "csv": CSVDataset,
    "hf": HFDataset,
}


_BOX_OPENERS: Mapping[str, Callable[[Path, Split, DataConfig, str], DetectionDataset]] = {
    "coco": open_coco,
    "voc": open_voc,
    "yolo": open_yolo,
    "tfrecord": BoxTFRecordDataset,
}


def open_dataset(kind: str, path: Path | None, split: Split, data: DataConfig, boxes: bool = False) -> Dataset:
    """One split of the data of this kind, with `boxes` or with classes; `auto` finds out what is at `path`."""
    source = _open(kind, path, split, data, boxes)
    if data.background_class:
        source = with_background(source)
    return source if split == "val" or data.subset_percent == 100 else subsample(source, data.subset_percent)


def with_background(source: Dataset) -> Dataset:
    """The same samples, with a background as class 0."""
    if not isinstance(source, ArrayDataset):
        return WithBackground(source)
    names, origin = (BACKGROUND, *source.class_names), f"{source.origin}; class 0 is the background"
    return ArrayDataset(source.kind, source.images, source.targets + 1, names, origin)


def subsample(source: Dataset, percent: float) -> Dataset:
    """A share of a source's samples, evenly spread."""
    return select(source, evenly_spaced(len(source), percent))


def select(source: Dataset, indices: I64) -> Dataset:
    """Some samples of a source, in the given order."""
    if isinstance(source, DetectionDataset):
        return DetectionSubset(source, indices)
    return source.take(indices) if isinstance(source, ArrayDataset) else Subset(source, indices)


def _open(kind: str, path: Path | None, split: Split, data: DataConfig, boxes: bool) -> Dataset:
    if kind == "digits":
        return open_digits(split)
    if kind in ("synthetic", "synthetic-device"):
        return _open_synthetic(kind, split, data, boxes)
    if kind == "scattered-digits":
        size, channels = data.preprocess.size, data.preprocess.channels
        return ScatteredDigits(split, data.num_samples or NUM_SCATTERED, size, channels)
    if path is None:
        wanted = kind if kind.startswith("cifar") else "coco2017" if boxes else "cifar10"
        raise DataError(
            "no data folder given" + ("" if kind == "auto" else f" for {kind}"),
            why="neither --data, data.path nor $DATA_DIR says where the data is",
            then=f"--data DIR; to download some: reconv data get {wanted} DIR",
        )
    found = detect(path, kind)
    if boxes and found.kind in _BOX_OPENERS:
        return _BOX_OPENERS[found.kind](found.path, split, data, found.why)
    if not boxes and found.layout is not None:
        return open_cifar(found.layout, found.path, split, found.why)
    if boxes or found.kind not in _OPENERS:
        raise _of_another_task(found, boxes)
    return _OPENERS[found.kind](found.path, split, found.why)


def _of_another_task(found: Found, boxes: bool) -> DataError:
    said, task = ("no boxes", "detection") if boxes else ("boxes", "classification")
    return DataError(
        f"{found.kind} data have {said}, and the recipe's task is {task}",
        where=str(found.path),
        why=found.why,
        then=f"reconv train {'resnet50' if boxes else 'ssd-resnet34'} --data {found.path}",
    )


def _open_synthetic(kind: str, split: Split, data: DataConfig, boxes: bool) -> Dataset:
    """Validation gets a fifth as many samples as training."""
    num_train = data.num_samples or NUM_SAMPLES
    num_samples = num_train if split == "train" else max(1, num_train // 5)
    shape = (num_samples, data.num_classes or NUM_CLASSES, data.preprocess.size, data.preprocess.channels)
    if boxes:
        return SyntheticBoxes(kind, split, *shape)
    return (SyntheticOnDevice if kind == "synthetic-device" else Synthetic)(split, *shape)
