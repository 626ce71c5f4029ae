"""The teacher of a distillation, loaded from what was saved with it.

The teacher runs in evaluation mode and in the student's precision. It must use the same classes and pixel values, and
a resumed run must have the teacher it started with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reconv.build.saved_model import SavedModel, build_saved_model, find_weights, read_saved_model
from reconv.core.errors import CheckpointError, RecipeError
from reconv.device import Device
from reconv.recipe.schema import Recipe
from reconv.tasks.distillation import Teacher

PIXEL_FIELDS = (
    "channels",
    "mean",
    "std",
    "per_image_standardization",
)  # of data.preprocess: they decide the values of a pixel


@dataclass(frozen=True, slots=True)
class LoadedTeacher:
    """The teacher for the loss, and the fingerprint of its weights."""

    teacher: Teacher
    fingerprint: str
    note: str


def open_teacher(
    recipe: Recipe, class_names: tuple[str, ...], device: Device, state: Mapping[str, Any], trust_code: bool = False
) -> LoadedTeacher | None:
    """The teacher of a recipe, or None; `state` is the checkpoint the run resumes from, or empty."""
    section = recipe.distill
    saved = read_teacher(recipe, class_names, trust_code)
    if saved is None:
        return None
    fingerprint = _fingerprint(saved.tensors)
    if state and state.get("teacher") != fingerprint:
        raise RecipeError(
            "the teacher has changed since this run was started",
            where=str(saved.path),
            why="its weights are not those of the first attempt",
            hint="put the teacher back, or start a new run without --resume",
        )
    teacher_recipe = saved.recipe.model_copy(update={"precision": recipe.precision, "engine": recipe.engine})
    network = build_saved_model(saved, teacher_recipe, device)
    network.model.eval().requires_grad_(False)

    def predict(images: Tensor) -> Tensor:
        with network.precision.autocast():
            logits: Tensor = network.forward(images)
        return logits

    note = (
        f"teacher {section.teacher}: {saved.recipe.model.name}, {saved.weights} weights, weight {section.alpha:g}, "
        f"temperature {section.temperature:g}"
    )
    return LoadedTeacher(Teacher(predict, section.alpha, section.temperature), fingerprint, note)


def read_teacher(
    recipe: Recipe, class_names: tuple[str, ...], trust_code: bool, log: Callable[[str], None] | None = None
) -> SavedModel | None:
    """Saved model of a recipe's teacher, if it has one; raises if the student cannot learn from it."""
    section = recipe.distill
    if section.teacher is None:
        return None
    located = find_weights(section.teacher, log=log).located
    saved = read_saved_model(located, weights="auto", recipe=section.teacher_recipe, trust_code=trust_code)
    _check_compatible(saved, recipe, class_names, section.teacher)
    return saved


def _check_compatible(saved: SavedModel, recipe: Recipe, class_names: tuple[str, ...], name: str) -> None:
    theirs = saved.class_names
    if len(theirs) != len(class_names) or (saved.has_class_names and theirs != class_names):
        differing = [f"{a} there, {b} here" for a, b in zip(theirs, class_names, strict=False) if a != b]
        raise CheckpointError(
            "the teacher has other classes than the dataset",
            where=name,
            why=f"{len(theirs)} classes there, {len(class_names)} here"
            + (f"; the first difference: {differing[0]}" if saved.has_class_names and differing else ""),
            hint="train the teacher on this dataset, or use --data with the teacher's dataset",
        )
    there, here = saved.recipe.data.preprocess, recipe.data.preprocess
    for field in PIXEL_FIELDS:
        if getattr(there, field) != getattr(here, field):
            raise RecipeError(
                "the teacher was trained with other preprocessing",
                where=f"data.preprocess.{field}",
                why=f"{getattr(there, field)} there, {getattr(here, field)} here, and both get the same images",
                hint=f"--set data.preprocess.{field}={_yaml(getattr(there, field))}",
            )


def _yaml(value: object) -> str:
    return str(list(value)).replace(" ", "") if isinstance(value, tuple) else str(value).lower()


def _fingerprint(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
