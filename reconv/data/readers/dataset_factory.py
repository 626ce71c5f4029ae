"""Open the dataset that a recipe's data section describes.

The dataset has at least one sample. `data.subset_percent` applies to the training split only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from reconv.core.errors import DataError
from reconv.data.boxes.annotations import DetectionDataset, DetectionSubset, RelabeledDetection
from reconv.data.corrections import correct, take_fold
from reconv.data.dataset import (
    BACKGROUND,
    I64,
    Dataset,
    Relabeled,
    Split,
    Subset,
    WithBackground,
    check_class_names,
    evenly_spaced,
)
from reconv.data.readers.arrays import ArrayDataset
from reconv.data.readers.cifar import open_cifar
from reconv.data.readers.csv_table import CSVDataset, MultilabelCSVDataset, wrong_data
from reconv.data.readers.custom import open_custom
from reconv.data.readers.detect import FORMATS, DetectedDataset, detect
from reconv.data.readers.detection.box_tfrecord import BoxTFRecordDataset
from reconv.data.readers.detection.coco import open_coco
from reconv.data.readers.detection.scattered_digits import NUM_SAMPLES as NUM_SCATTERED
from reconv.data.readers.detection.scattered_digits import ScatteredDigitsDataset
from reconv.data.readers.detection.synthetic_boxes import SyntheticBoxDataset
from reconv.data.readers.detection.voc import open_voc
from reconv.data.readers.detection.yolo import open_yolo
from reconv.data.readers.digits import open_digits
from reconv.data.readers.folder import FolderDataset
from reconv.data.readers.hf import HFDataset
from reconv.data.readers.shards.dataset import ShardDataset
from reconv.data.readers.shards.tfrecord import TFRECORD
from reconv.data.readers.synthetic import (
    NUM_CLASSES,
    NUM_SAMPLES,
    MultilabelSyntheticDataset,
    SyntheticDataset,
    SyntheticDeviceDataset,
)
from reconv.data.readers.tar import open_tar
from reconv.recipe.parts.code import names_code
from reconv.recipe.parts.data import NEED_NO_PATH, DataConfig

_OPENERS: Mapping[str, Callable[[Path, Split, str], Dataset]] = {
    **{format.kind: format.open for format in FORMATS},
    "tfrecord": partial(ShardDataset, TFRECORD),
    "tar": open_tar,
    "hf": HFDataset,
}


# Readers that hold out a share of the images for validation where the data has no validation split.
_SPLITTING_OPENERS: Mapping[str, Callable[[Path, Split, str, DataConfig], Dataset]] = {
    "folder": FolderDataset,
    "csv": CSVDataset,
}
_BOX_OPENERS: Mapping[str, Callable[[Path, Split, DataConfig, str], DetectionDataset]] = {
    "coco": open_coco,
    "voc": open_voc,
    "yolo": open_yolo,
    "tfrecord": BoxTFRecordDataset,
}


def open_dataset(
    kind: str, path: Path | None, split: Split, data: DataConfig, boxes: bool = False, multilabel: bool = False
) -> Dataset:
    """One split of a dataset; `auto` detects the kind of data at `path`.

    `boxes` asks for detection data, `multilabel` for images with several labels.
    """
    if data.fold is not None and split != "test":
        whole = _open_corrected(kind, path, "train", data, boxes, multilabel)
        dataset = take_fold(whole, data.fold, data.split_seed, split)
    else:
        dataset = _open_corrected(kind, path, split, data, boxes, multilabel)
    if data.background_class:
        dataset = with_background(dataset)
    return dataset if split != "train" or data.subset_percent == 100 else subsample(dataset, data.subset_percent)


def _open_corrected(
    kind: str, path: Path | None, split: Split, data: DataConfig, boxes: bool, multilabel: bool
) -> Dataset:
    """A split with what a review has changed."""
    dataset = _open_multilabel(kind, path, split, data) if multilabel else _open(kind, path, split, data, boxes)
    check_class_names(dataset.class_names, "" if path is None else str(path))
    return dataset if data.exclude is None and data.relabel is None else correct(dataset, data, path, split)


def with_background(dataset: Dataset) -> Dataset:
    """The same samples with a background class 0 in front."""
    if not isinstance(dataset, ArrayDataset):
        return WithBackground(dataset)
    names, origin = (BACKGROUND, *dataset.class_names), f"{dataset.origin}; class 0 is the background"
    return ArrayDataset(dataset.kind, dataset.images, dataset.targets + 1, names, origin)


def subsample(dataset: Dataset, percent: float) -> Dataset:
    """`percent` of the samples, evenly spaced."""
    return select(dataset, evenly_spaced(len(dataset), percent))


def select(dataset: Dataset, indices: I64) -> Dataset:
    """The samples at the given indices, in that order."""
    if isinstance(dataset, DetectionDataset):
        return DetectionSubset(dataset, indices)
    return dataset.select(indices) if isinstance(dataset, ArrayDataset) else Subset(dataset, indices)


def relabel(dataset: Dataset, class_names: tuple[str, ...], numbers: Sequence[int]) -> Dataset:
    """The dataset with other class names: its class i is class `numbers[i]` of `class_names`."""
    if isinstance(dataset, DetectionDataset):
        return RelabeledDetection(dataset, class_names, numbers)
    return Relabeled(dataset, class_names, numbers)


def _open_multilabel(kind: str, path: Path | None, split: Split, data: DataConfig) -> Dataset:
    if kind in ("synthetic", "synthetic-device"):
        synthetic = _open_synthetic(kind, split, data, boxes=False)
        assert isinstance(synthetic, SyntheticDataset)
        return MultilabelSyntheticDataset(synthetic)
    if path is None or kind in NEED_NO_PATH:
        if kind in NEED_NO_PATH:
            raise wrong_data(kind, None)
        return _open(kind, path, split, data, boxes=False)  # raises the error of a missing path
    detected = detect(path, kind)
    if detected.kind != "csv":
        raise wrong_data(detected.kind, detected.path)
    return MultilabelCSVDataset(detected.path, split, detected.why, data)


def _open(kind: str, path: Path | None, split: Split, data: DataConfig, boxes: bool) -> Dataset:
    if split == "test" and kind in NEED_NO_PATH:
        raise DataError(f"{kind} has no test split", where="--split test", hint="--split val")
    if kind == "digits":
        return open_digits(split)
    if names_code(kind):
        return open_custom(kind, path, split, data.options)
    if kind in ("synthetic", "synthetic-device"):
        return _open_synthetic(kind, split, data, boxes)
    if kind == "scattered-digits":
        size, channels = data.preprocess.size, data.preprocess.channels
        return ScatteredDigitsDataset(split, data.num_samples or NUM_SCATTERED, size, channels)
    if path is None:
        suggestion = kind if kind.startswith("cifar") else "coco2017" if boxes else "cifar10"
        raise DataError(
            "no data folder given" + ("" if kind == "auto" else f" for {kind}"),
            why="none of --data, data.path and $DATA_DIR is set",
            hint=f"--data DIR; to download data: reconv data get {suggestion} DIR",
        )
    detected = detect(path, kind)
    if boxes and detected.kind in _BOX_OPENERS:
        return _BOX_OPENERS[detected.kind](detected.path, split, data, detected.why)
    if not boxes and detected.layout is not None:
        return open_cifar(detected.layout, detected.path, split, detected.why)
    if not boxes and detected.kind in _SPLITTING_OPENERS:
        return _SPLITTING_OPENERS[detected.kind](detected.path, split, detected.why, data)
    if boxes or detected.kind not in _OPENERS:
        raise _wrong_task(detected, boxes)
    return _OPENERS[detected.kind](detected.path, split, detected.why)


def _wrong_task(detected: DetectedDataset, boxes: bool) -> DataError:
    content, task = ("no boxes", "detection") if boxes else ("boxes", "classification")
    return DataError(
        f"{detected.kind} data has {content}, but the recipe's task is {task}",
        where=str(detected.path),
        why=detected.why,
        hint=f"reconv train {'finetune' if boxes else 'finetune-detection'} --data {detected.path}",
    )


def _open_synthetic(kind: str, split: Split, data: DataConfig, boxes: bool) -> Dataset:
    """Generated data; validation has a fifth as many samples as training."""
    num_train = data.num_samples or NUM_SAMPLES
    num_samples = num_train if split == "train" else max(1, num_train // 5)
    shape = (num_samples, data.num_classes or NUM_CLASSES, data.preprocess.size, data.preprocess.channels)
    if boxes:
        return SyntheticBoxDataset(kind, split, *shape)
    return (SyntheticDeviceDataset if kind == "synthetic-device" else SyntheticDataset)(split, *shape)
