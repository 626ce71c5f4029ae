"""Objects that Python passes to `train` instead of names: a model, datasets, a loss, transforms, metrics, callbacks.

The recipe of the run gets their import paths, so that `reconv eval` and `reconv resume` find classes and functions of
modules and files again. Other objects stand as `python:NAME` in it and must be passed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reconv.core.custom_code import name_object
from reconv.core.errors import UsageError
from reconv.data.readers.custom import CustomDataset, SplitDatasets
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


def pair_of(data: Any, train_data: Any, val_data: Any) -> Any:
    """Pair of datasets from `data`, or from `train_data` and `val_data`."""
    if train_data is None and val_data is None:
        return data
    if data is not None:
        raise UsageError("data and train_data cannot be combined", hint="use data, or train_data with val_data")
    for name, value, other in (("train_data", train_data, "val_data"), ("val_data", val_data, "train_data")):
        if value is None:
            raise UsageError(
                f"{other} was given without {name}",
                hint="pass both; torch.utils.data.random_split divides one dataset",
            )
        if isinstance(value, str | Path):
            raise UsageError(f"{name} is a path", hint=f"pass data={str(value)!r}, a folder with both splits")
    return train_data, val_data


def fit_to_objects(objects: PythonObjects, loss: Any, data: Any) -> list[Override]:
    """Overrides that follow from the objects if no recipe is given: the size of the images, and targets for a custom
    loss.
    """
    fitted: list[Override] = []
    if loss is not None:
        why = "train(loss=...): a custom loss gets class indices"
        fitted += [("loss.label_smoothing", 0.0, why), ("loss.class_weights", "none", why)]
    if isinstance(data, tuple):
        image = CustomDataset(data[0], "train_data", "train")[0].data
        if not isinstance(image, bytes):
            fitted += _fit_to_image(*image.shape)
    return fitted


def _fit_to_image(height: int, width: int, channels: int) -> list[Override]:
    """The preprocessing that keeps the size of square images, and gray ones gray."""
    fields: dict[str, Any] = {}
    if height == width:
        fields |= {"data.preprocess.size": height, "data.preprocess.resize": None}
    if channels == 1:
        colors = {"channels": 1, "mean": [0.5], "std": [0.5]}
        fields |= {f"data.preprocess.{name}": value for name, value in colors.items()}
        fields["augment.color_jitter.saturation"] = 0.0
    return [(name, value, "the first training image") for name, value in fields.items()]


def name_datasets(objects: PythonObjects, data: str | Path | DatasetPair | None) -> str | Path | None:
    """The path of the data; datasets from Python become `data.source` instead."""
    if data is None or isinstance(data, str | Path):
        return data
    if not isinstance(data, tuple) or len(data) != 2:
        raise UsageError(
            f"data is a {type(data).__name__}", hint="pass a path, or a pair of datasets: data=(train_set, val_set)"
        )
    train_set, val_set = data
    name = f"python:{type(train_set).__name__}"
    objects.objects[name] = SplitDatasets(train_set, val_set)
    objects.overrides.append(("data.source", name, "train(data=...)"))
    return None
