"""The datasets of a run: where they are, opening them, and caching their samples in memory."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

from reconv.core.errors import DataError, ResourceError, UsageError
from reconv.data.boxes.annotations import DetectionDataset
from reconv.data.checked_rows import WrongImages
from reconv.data.dataset import Dataset, LabelError, Split, class_counts
from reconv.data.pipeline.bad_samples import BadSamples
from reconv.data.pipeline.buffers import with_transfer_dtype
from reconv.data.pipeline.detection import make_detection_pipeline
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.pipeline.row_reader import has_jpeg_files
from reconv.data.pipeline.sample_cache import CacheBudget, CachedDataset, cache_samples
from reconv.data.pipeline.samples import MakeSamplePipeline, can_fill_from_files, make_sample_pipeline
from reconv.data.pipeline.train_loader import TrainLoader, make_train_loader
from reconv.data.pipeline.workers.thread_pool import open_workers
from reconv.data.readers.arrays import ArrayDataset
from reconv.data.readers.class_name_files import display_names
from reconv.data.readers.dataset_factory import open_dataset, subsample
from reconv.data.readers.detect import detect
from reconv.data.readers.folder import FolderDataset
from reconv.data.stage_timing import StageTimes
from reconv.device import Device
from reconv.distributed.process_group import ProcessGroup
from reconv.logging.events import BadImageSkipped
from reconv.logging.run_logger import RunLogger
from reconv.recipe.parts.code import names_code
from reconv.recipe.parts.data import NEED_NO_PATH, effective_augment
from reconv.recipe.plan import CacheSize, Plan
from reconv.recipe.schema import Recipe
from reconv.recipe.workers import IN_MEMORY
from reconv.storage.object_stores.store import as_url, is_url
from reconv.storage.remote_tree import local_data_path

FEW_IMAGES = 10  # of a class in validation: fewer say little about it
_MAX_NAMED_CLASSES = 200


@dataclass(frozen=True, slots=True)
class Datasets:
    train: Dataset
    val: Dataset
    num_val_left_out: int = 0  # by evaluate.num_samples
    display_names: tuple[str, ...] = ()  # of the classes, for people; empty: their names
    notes: tuple[str, ...] = ()  # where these names come from
    wrong_images: WrongImages | None = None  # with engine.verify
    warnings: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The classes for people; `class_names` of the datasets is what they are matched by."""
        return self.display_names or tuple(self.train.class_names)

    def few_val_images(self) -> dict[str, int]:
        """The classes that validation says little about, and how many images they have."""
        return few_images(self.val, self.names)

    @property
    def origins(self) -> tuple[str, ...]:
        """Descriptions of the data for people: of training, then of validation."""
        return ("; ".join((self.train.origin, *self.notes)), "; ".join((self.val.origin, *self.notes)))

    def fingerprint(self) -> dict[str, str]:
        return {"train": self.train.fingerprint(), "val": self.val.fingerprint()}

    def hash_ahead(self) -> None:
        """Compute the fingerprint in a thread where it is a digest of all pixels; `fingerprint` waits for it.

        150 MB take 0.2 to 0.3 s, in which the device is opened and the network is built: hashing releases the GIL.
        """
        if isinstance(self.train, ArrayDataset):
            Thread(target=self.fingerprint, name="fingerprint", daemon=True).start()


def few_images(dataset: Dataset, names: Sequence[str]) -> dict[str, int]:
    """The classes with fewer than 10 images and how many they have; none for boxes and for many classes.

    One image of such a class changes its recall by more than 10 points.
    """
    if isinstance(dataset, DetectionDataset) or len(names) > _MAX_NAMED_CLASSES:
        return {}
    return {name: count for name, count in zip(names, class_counts(dataset), strict=True) if count < FEW_IMAGES}


def open_split(recipe: Recipe, path: Path | None, split: Split) -> Dataset:
    """One split of the dataset at a path."""
    is_detection = recipe.task == "detection"
    multilabel = recipe.task == "multilabel"
    dataset = open_dataset(recipe.data.source, path, split, recipe.data, boxes=is_detection, multilabel=multilabel)
    return as_detection_dataset(dataset) if is_detection else dataset


def open_datasets(recipe: Recipe) -> Datasets:
    """The training and validation sets of a recipe, at its `data.path` or else at $DATA_DIR."""
    path = data_path(recipe)
    train, val = (open_split(recipe, path, split) for split in ("train", "val"))
    if len(train) == 0 or len(val) == 0:
        raise DataError(f"the {'training' if len(train) == 0 else 'validation'} set is empty", where=str(path))
    if train.kind == "folder" and len(train.class_names) == 1:
        raise DataError(
            f"there is only one class: {train.class_names[0]}",
            where=train.origin,
            why="a classifier needs two or more classes to tell apart",
            hint="add a folder with images of something else, or give the folder that holds all classes: --data DIR",
        )
    if train.class_names != val.class_names:
        raise DataError(
            "the training and the validation set have other classes",
            where=recipe.data.source,
            why=f"{len(train.class_names)} and {len(val.class_names)} classes, or in another order",
        )
    subset = limit_samples(val, recipe.evaluate.num_samples)
    if recipe.task == "detection" and recipe.evaluate.every != "off":
        check_has_objects(as_detection_dataset(subset))
    names, note = display_names(_data_folder(recipe, path), train.class_names)
    warnings = [
        *dict.fromkeys(w for dataset in (train, val) if isinstance(dataset, FolderDataset) for w in dataset.warnings)
    ]
    return Datasets(train, subset, len(val) - len(subset), names, (note,) if note else (), warnings=tuple(warnings))


def _data_folder(recipe: Recipe, path: Path | None) -> Path | None:
    """The folder that holds the data, which may be below the given path; None for other kinds of data."""
    if path is None or not path.is_dir() or recipe.data.source in NEED_NO_PATH or names_code(recipe.data.source):
        return None
    return detect(path, recipe.data.source).path


def limit_samples(dataset: Dataset, num_samples: int | None) -> Dataset:
    """At most `num_samples` samples, evenly spaced over the dataset; None: all of them."""
    if num_samples is None or num_samples >= len(dataset):
        return dataset
    return subsample(dataset, 100 * num_samples / len(dataset))


def with_cache(recipe: Recipe, datasets: Datasets, available_bytes: int | None, num_ranks: int) -> Datasets:
    """The datasets with their samples cached in memory, up to this rank's share of half of what is available."""
    if recipe.data.cache == "off" or datasets.train.kind in IN_MEMORY:
        return datasets
    if available_bytes is None:
        raise ResourceError(
            "the available memory is unknown on this system, so the size of a cache cannot be limited",
            where="data.cache",
            hint="--set data.cache=off",
        )
    budget = CacheBudget(available_bytes // 2 // num_ranks)
    return replace(datasets, train=cache_samples(datasets.train, budget), val=cache_samples(datasets.val, budget))


def with_checked_images(recipe: Recipe, datasets: Datasets) -> Datasets:
    """With `engine.verify`, the datasets with digests of the images that they keep in memory."""
    if recipe.engine.verify == "off":
        return datasets
    wrong = WrongImages()
    for dataset in (datasets.train, datasets.val):
        if isinstance(dataset, ArrayDataset | CachedDataset):
            dataset.check_images(wrong)
    return replace(datasets, wrong_images=wrong)


def cache_size(datasets: Datasets) -> CacheSize | None:
    """Bytes that a cache of these datasets needs and may use; None if they are not cached."""
    caches = [dataset for dataset in (datasets.train, datasets.val) if isinstance(dataset, CachedDataset)]
    return CacheSize(sum(cache.estimated_bytes for cache in caches), caches[0].budget_bytes) if caches else None


def data_path(recipe: Recipe) -> Path | None:
    """The recipe's `data.path`, else $DATA_DIR."""
    text = recipe.data.path or os.environ.get("DATA_DIR")
    return local_data_path(text if is_url(text) else Path(text).expanduser()) if text else None


def check_data_is_read(recipe: Recipe, data: object, option: str = "--data") -> None:
    """Refuse a folder given to a recipe that generates its own data, which would ignore it."""
    if data is not None and recipe.data.source in NEED_NO_PATH:
        raise UsageError(
            f"{option} {data}: {recipe.name} generates its own data and would ignore it",
            where="data.source",
            why=f"it is {recipe.data.source}",
            hint=f"leave {option} out, or train on the folder with --set data.source=auto",
        )


def with_data_path(recipe: Recipe, default: str | None) -> Recipe:
    """The recipe with an absolute data path, for the copy in the run directory; `default` is used without $DATA_DIR."""
    if recipe.data.path is not None or recipe.data.source in NEED_NO_PATH:
        return recipe
    path = os.environ.get("DATA_DIR") or default
    if path is None:
        return recipe
    path = as_url(path) if is_url(path) else str(Path(path).expanduser().absolute())
    data = recipe.data.model_copy(update={"path": path})
    return recipe.model_copy(update={"data": data})


def as_detection_dataset(dataset: Dataset) -> DetectionDataset:
    """The dataset as one with boxes; raises an error if it has none."""
    if not isinstance(dataset, DetectionDataset):
        raise DataError(
            "this dataset has no boxes",
            where=dataset.origin,
            why="it has one class per image, and the task is detection",
            hint="choose a classification recipe: reconv recipes",
        )
    return dataset


def check_has_objects(dataset: DetectionDataset) -> None:
    """Refuse a validation set without an object that counts in the metrics."""
    unreadable: DataError | None = None
    for index in range(len(dataset)):
        try:
            annotation = dataset.annotation(index)
        except LabelError:
            raise
        except DataError as error:  # whether the run tolerates it is decided when the image is evaluated
            unreadable = unreadable or error
            continue
        if (~annotation.is_crowd & ~annotation.difficult).any():
            return
    raise unreadable or DataError(
        "the validation set has no objects to find",
        where=dataset.origin,
        why="its images have no boxes, or only crowds and difficult objects",
        hint="see what is in the data: reconv data check PATH; or raise evaluate.num_samples if it is set",
    )


def describe_dropped_boxes(dataset: Dataset, max_boxes: int) -> str:
    """Note on boxes that do not fit into a batch; empty if all do."""
    counts = dataset.box_counts() if isinstance(dataset, DetectionDataset) else np.zeros(0, np.int64)
    dropped = np.maximum(counts - max_boxes, 0)
    if not dropped.any():
        return ""
    return (
        f"{int((dropped > 0).sum()):,} training images have more than {max_boxes:,} boxes (detection.max_gt_boxes): "
        f"up to {int(dropped.sum()):,} of {int(counts.sum()):,} boxes are dropped, the last of each image"
    )


def build_bad_samples(
    recipe: Recipe, state: Mapping[str, Any], logger: RunLogger, process_group: ProcessGroup
) -> BadSamples:
    """The unreadable images a run tolerates; `state` is the checkpoint it resumes from, or empty."""
    bad_samples = BadSamples(
        recipe.data.bad_images.limit,
        lambda f: logger.log(BadImageSkipped(f.step, f.split, f.index, f.path, f.why)),
        all_gather=process_group.all_gather if process_group.world_size > 1 else None,
    )
    if bad_samples.tolerated:  # otherwise those of the checkpoint must be readable by now
        bad_samples.restore(state.get("bad_images", ()))
    return bad_samples


def sample_pipeline_maker(recipe: Recipe) -> MakeSamplePipeline:
    """Factory of the sample pipelines of the recipe's task."""
    return make_detection_pipeline(recipe) if recipe.task == "detection" else make_sample_pipeline


def fills_from_files(recipe: Recipe, dataset: Dataset) -> bool:
    """True if the native decoder can crop many training images in one call."""
    augment = effective_augment(recipe.augment).model_copy(update={"decoder": "native"})
    is_plain = recipe.task == "classification" and can_fill_from_files(recipe.data.preprocess, augment)
    return is_plain and has_jpeg_files(dataset)


def build_train_loader(
    recipe: Recipe,
    plan: Plan,
    dataset: Dataset,
    context: DataContext,
    bad_samples: BadSamples | None = None,
    rank: int = 0,
) -> TrainLoader:
    return make_train_loader(dataset, recipe, plan, context, rank, bad_samples, sample_pipeline_maker(recipe))


def build_eval_loader(
    recipe: Recipe,
    dataset: Dataset,
    device: Device,
    batch_size: int,
    num_workers: int = 0,
    bad_samples: BadSamples | None = None,
    process_group: ProcessGroup | None = None,
    context: DataContext | None = None,
    finished: Collection[int] = (),
    keeps_decoded: bool = False,
) -> EvalLoader:
    """The loader of a validation set; it shares the workers of training if given its `context`.

    The ranks share the batches that are not `finished`. `keeps_decoded`: it is used more than once.
    """
    process_group = process_group or ProcessGroup.single()
    eval_context = DataContext(with_transfer_dtype(device, recipe.data.transfer_dtype))
    if context is not None:
        eval_context = replace(eval_context, workers=context.eval_workers or context.workers)
    return EvalLoader(
        dataset,
        recipe.data.preprocess,
        batch_size,
        eval_context,
        num_workers,
        process_group.rank,
        process_group.world_size,
        bad_samples,
        sample_pipeline_maker(recipe),
        finished,
        keeps_decoded,
    )


@contextmanager
def open_data_context(recipe: Recipe, plan: Plan, device: Device, stage_times: StageTimes) -> Iterator[DataContext]:
    """The workers and the transfer to the device of one run; closed at the end."""
    with ExitStack() as stack:
        workers = stack.enter_context(closing(open_workers(plan.backend, plan.workers)))
        eval_workers = workers
        if plan.eval_backend != plan.backend:
            eval_workers = stack.enter_context(closing(open_workers(plan.eval_backend, plan.workers)))
        to_device = with_transfer_dtype(device, recipe.data.transfer_dtype)
        yield DataContext(to_device, workers, stage_times, eval_workers)
