"""The data of a run: where they lie, opened as a training and a validation set, kept in memory where told.

Owns their opening. Refuses to know how samples become batches. Invariant: training, evaluation, rehearsals and benches
open data by the same functions.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from reconv.data.dataset import Dataset, Split
from reconv.data.pipeline.sample_cache import CacheBudget, CachedDataset, cache_samples
from reconv.data.readers.factory import NEED_NO_PATH, open_dataset, subsample
from reconv.errors import DataError, ResourceError, UsageError
from reconv.recipe.plan import CacheSize
from reconv.recipe.schema import Recipe
from reconv.recipe.workers import IN_MEMORY
from reconv.trainer.build.task_builder import (
    refuse_nothing_to_find,
    with_boxes,
)


@dataclass(frozen=True, slots=True)
class Datasets:
    train: Dataset
    val: Dataset
    num_val_left_out: int = 0  # by evaluate.num_samples

    def fingerprint(self) -> dict[str, str]:
        return {"train": self.train.fingerprint(), "val": self.val.fingerprint()}


def open_split(recipe: Recipe, path: Path | None, split: Split) -> Dataset:
    """One split of the data at a path, of the kind and for the task the recipe names."""
    wants_boxes = recipe.task == "detection"
    source = open_dataset(recipe.data.source, path, split, recipe.data, boxes=wants_boxes)
    return with_boxes(source) if wants_boxes else source


def open_datasets(recipe: Recipe) -> Datasets:
    """The training and validation sets the recipe names, at its path or else at $DATA_DIR."""
    path = data_path(recipe)
    train, val = (open_split(recipe, path, split) for split in ("train", "val"))
    if len(train) == 0 or len(val) == 0:
        raise DataError(f"the {'training' if len(train) == 0 else 'validation'} set is empty", where=str(path))
    some = part_of(val, recipe.evaluate.num_samples)
    if recipe.task == "detection" and recipe.evaluate.every != "off":
        refuse_nothing_to_find(with_boxes(some))
    return Datasets(train, some, len(val) - len(some))


def part_of(source: Dataset, num_samples: int | None) -> Dataset:
    """So many samples of a source, evenly spread; all of it where there are no more."""
    if num_samples is None or num_samples >= len(source):
        return source
    return subsample(source, 100 * num_samples / len(source))


def with_cache(recipe: Recipe, sources: Datasets, available_bytes: int | None, num_ranks: int) -> Datasets:
    """The same sets, their samples kept in memory as far as this rank's share of half of what is free goes."""
    if recipe.data.cache == "off" or sources.train.kind in IN_MEMORY:
        return sources
    if available_bytes is None:
        raise ResourceError(
            "how much memory is free cannot be told here, so nothing limits a cache",
            where="data.cache",
            then="--set data.cache=off",
        )
    room = CacheBudget(available_bytes // 2 // num_ranks)
    return Datasets(cache_samples(sources.train, room), cache_samples(sources.val, room), sources.num_val_left_out)


def cache_size(sources: Datasets) -> CacheSize | None:
    """What a cache of these sets would hold and may hold; None where they have none."""
    kept = [source for source in (sources.train, sources.val) if isinstance(source, CachedDataset)]
    return CacheSize(sum(source.estimated_bytes for source in kept), kept[0].budget_bytes) if kept else None


def data_path(recipe: Recipe) -> Path | None:
    """Where the data lies: the recipe's path, else $DATA_DIR."""
    text = recipe.data.path or os.environ.get("DATA_DIR")
    return Path(text).expanduser() if text else None


def refuse_unread_path(recipe: Recipe, data: object, option: str = "--data") -> None:
    """Refuse a folder that a person names for a recipe that reads none: they would take its score for theirs."""
    if data is not None and recipe.data.source in NEED_NO_PATH:
        raise UsageError(
            f"{option} {data}: {recipe.name} makes its own data and would not read it",
            where="data.source",
            why=f"it is {recipe.data.source}",
            then=f"leave {option} out; to train on a folder: --set data.source=auto",
        )


def with_data_path(recipe: Recipe, known: str | None) -> Recipe:
    """The recipe with the place of its data filled in, so that the run's own copy of it says where that was."""
    if recipe.data.path is not None or recipe.data.source in NEED_NO_PATH:
        return recipe
    path = os.environ.get("DATA_DIR") or known
    if path is None:
        return recipe
    data = recipe.data.model_copy(update={"path": str(Path(path).expanduser().absolute())})
    return recipe.model_copy(update={"data": data})
