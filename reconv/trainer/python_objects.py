"""Objects that Python passes to `train` instead of names: a network, datasets, a loss, transforms, metrics, callbacks.

The recipe of the run gets their import paths, so that `reconv eval` and `reconv resume` find classes and functions of
modules and files again. Other objects stand as `python:NAME` in it and must be passed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reconv.custom_code import name_object
from reconv.data.readers.custom import SplitDatasets
from reconv.errors import UsageError
from reconv.recipe.loader import Override

DatasetPair = tuple[Any, Any]  # of training and of validation


@dataclass(slots=True)
class PythonObjects:
    """Overrides of a recipe that name objects, and the objects by these names."""

    overrides: list[Override] = field(default_factory=list)
    objects: dict[str, Any] = field(default_factory=dict)

    def set(self, field: str, value: Any) -> None:
        """Set a field to an object, or to the name of something that is not one."""
        if value is not None:
            self.overrides.append((field, self._name(value), f"train({field.partition('.')[0]}=...)"))

    def set_list(self, field: str, values: Sequence[Any], **more: Any) -> None:
        """Add objects to a field that is a list; `more` are keys of each entry."""
        if values:
            entries = [{"name": self._name(value), **more} for value in values]
            known = next((override for override in self.overrides if override[0] == field), None)
            if known is not None:
                self.overrides.remove(known)
                entries = [*known[1], *entries]  # type: ignore[misc]
            self.overrides.append((field, entries, f"train({field.rpartition('.')[2]}=...)"))

    def _name(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        name = name_object(value, self.objects)
        self.objects[name] = value
        return name


def name_datasets(objects: PythonObjects, data: str | Path | DatasetPair | None) -> str | Path | None:
    """The path of the data; datasets from Python become `data.source` instead."""
    if data is None or isinstance(data, str | Path):
        return data
    if not isinstance(data, tuple) or len(data) != 2:
        raise UsageError(
            f"data is a {type(data).__name__}", then="pass a path, or a pair of datasets: data=(train_set, val_set)"
        )
    train_set, val_set = data
    name = f"python:{type(train_set).__name__}"
    objects.objects[name] = SplitDatasets(train_set, val_set)
    objects.overrides.append(("data.source", name, "train(data=...)"))
    return None
