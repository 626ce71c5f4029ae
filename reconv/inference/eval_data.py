"""The dataset that a trained model is evaluated on: a split of the run's own data, or of any data with its classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from reconv.build.addresses import check_addresses
from reconv.build.data import (
    as_detection_dataset,
    check_data_is_read,
    check_has_objects,
    data_path,
    open_split,
)
from reconv.build.saved_model import ModelClasses
from reconv.core.errors import DataError
from reconv.data.dataset import Dataset, Split
from reconv.data.readers.dataset_factory import relabel
from reconv.recipe.schema import Recipe
from reconv.storage.bounded import real_path
from reconv.storage.given_addresses import remember_address
from reconv.storage.object_stores.store import is_address, is_url

_NUM_SHOWN = 5


def open_eval_set(recipe: Recipe, classes: ModelClasses, data: str | Path | None, split: Split | None) -> Dataset:
    """The whole split (by default validation) at `data`, else of the run's own data, with the classes of the model.

    Data without a validation split, other than the run's own, is evaluated as a whole.
    """
    check_data_is_read(recipe, data)
    if data is None:
        check_addresses(recipe, "the saved recipe", ["data.path"])
    elif is_address(data):
        remember_address(str(data))
    if data is None or split is not None or _is_same_place(recipe.data.path, data):
        dataset = _open(recipe, data, split or "val")
    else:
        dataset = _open_whole(recipe, data, classes.data_fingerprint.get("val"))
    if len(dataset) == 0:
        raise DataError(f"the {split or 'validation'} set is empty", where=dataset.origin)
    if recipe.task == "detection":
        check_has_objects(as_detection_dataset(dataset))
    return match_classes(dataset, classes)


def _open(recipe: Recipe, data: str | Path | None, split: Split) -> Dataset:
    """A split, all of it: `evaluate.num_samples` is for evaluations in training."""
    section = recipe.data.model_copy(update={"subset_percent": 100.0})
    if data is not None:
        section = section.model_copy(update={"path": str(data)})
    recipe = recipe.model_copy(update={"data": section})
    return open_split(recipe, data_path(recipe), split)


def _open_whole(recipe: Recipe, data: str | Path, known_fingerprint: str | None) -> Dataset:
    """The validation set at `data`; all of the data if it has none.

    If that is a copy of the data the model was trained on, then only what was held out from training.
    """
    whole = recipe.model_copy(update={"data": recipe.data.model_copy(update={"validation_split": 1.0})})
    dataset = _open(whole, data, "val")
    if known_fingerprint in (None, dataset.fingerprint()):
        return dataset
    try:
        held_out = _open(recipe, data, "val")
    except DataError:  # too few images to hold any out
        return dataset
    return held_out if held_out.fingerprint() == known_fingerprint else dataset


def _is_same_place(path: str | None, data: str | Path) -> bool:
    if path is None or is_url(path) or is_url(data):
        return path is not None and str(path).rstrip("/") == str(data).rstrip("/")
    return real_path(path) == real_path(data)


def match_classes(dataset: Dataset, classes: ModelClasses) -> Dataset:
    """The dataset with the class indices of the model, matched by name; it may have fewer classes."""
    theirs, ours = dataset.class_names, classes.names
    if theirs == ours:
        return dataset
    numbers = classes.indices()
    unknown = [name for name in theirs if name not in numbers]
    if not unknown:
        return relabel(dataset, ours, [numbers[name] for name in theirs])
    if not classes.are_known and len(theirs) == len(ours):
        return dataset  # in the same order, as nothing else is known
    raise _unknown_classes(dataset, unknown, classes)


def _unknown_classes(dataset: Dataset, unknown: Sequence[str], classes: ModelClasses) -> DataError:
    shown = ", ".join(unknown[:_NUM_SHOWN]) + (f" and {len(unknown) - _NUM_SHOWN:,} more" * (len(unknown) > _NUM_SHOWN))
    ours = ", ".join(classes.names[:_NUM_SHOWN]) + (", ..." * (len(classes.names) > _NUM_SHOWN))
    if not classes.are_known:
        return DataError(
            f"{len(dataset.class_names):,} classes in the dataset, {len(classes.names):,} in the model",
            where=dataset.origin,
            why="the weights have no class names to match by",
            hint="use data with all classes of the model, in the same order",
        )
    return DataError(
        "the classes of this dataset differ from those the model was trained on",
        where=dataset.origin,
        why=f"not a class of the model: {shown}; it has {len(classes.names):,} classes: {ours}",
        hint="rename the classes of the dataset as in training, or remove them",
    )
