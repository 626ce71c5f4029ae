"""The teacher of a distillation: a trained network, rebuilt from what was saved with it.

Owns the checks that student and teacher mean the same thing by an image and by a class. Refuses to know the loss.
Invariant: the teacher runs in the student's precision and at evaluation, so its answer to an image does not depend on
the images beside it, and a resumed run has the teacher it began with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reconv.device import Device
from reconv.errors import CheckpointError, RecipeError
from reconv.inference.load_model import SavedModel, build_saved_model, find_weights, read_saved_model
from reconv.recipe.schema import Recipe
from reconv.tasks.distillation import Teacher

SEEN = ("channels", "mean", "std", "standardise")  # of the preprocessing: what decides the values of a pixel


@dataclass(frozen=True, slots=True)
class OpenedTeacher:
    """The teacher as the task knows it, and what identifies it in a checkpoint."""

    teacher: Teacher
    fingerprint: str
    note: str


def open_teacher(
    recipe: Recipe, class_names: tuple[str, ...], device: Device, state: Mapping[str, Any]
) -> OpenedTeacher | None:
    """The network a recipe distils from, if it names one; `state` is the checkpoint the run goes on from."""
    section = recipe.distill
    if section.teacher is None:
        return None
    saved = read_saved_model(find_weights(section.teacher).located, weights="auto", recipe=section.teacher_recipe)
    _check(saved, recipe, class_names, section.teacher)
    fingerprint = _fingerprint(saved.tensors)
    if state and state.get("teacher") != fingerprint:
        raise RecipeError(
            "the teacher has changed since this run was started",
            where=str(saved.path),
            why="its weights are others than the first attempt learned from",
            then="put the teacher back, or start a new run without --resume",
        )
    same_numbers = saved.recipe.model_copy(update={"precision": recipe.precision, "engine": recipe.engine})
    network = build_saved_model(saved, same_numbers, device)
    network.model.eval().requires_grad_(False)

    def forward(images: Tensor) -> Tensor:
        with network.precision.autocast():
            logits: Tensor = network.forward(images)
        return logits

    note = (
        f"teacher {section.teacher}: {saved.recipe.model.name}, {saved.weights} weights, share {section.alpha:g} "
        f"at temperature {section.temperature:g}"
    )
    return OpenedTeacher(Teacher(forward, section.alpha, section.temperature), fingerprint, note)


def _check(saved: SavedModel, recipe: Recipe, class_names: tuple[str, ...], name: str) -> None:
    theirs = saved.class_names
    if len(theirs) != len(class_names) or (saved.has_class_names and theirs != class_names):
        differing = [f"{a} there, {b} here" for a, b in zip(theirs, class_names, strict=False) if a != b]
        raise CheckpointError(
            "the teacher has other classes than this data",
            where=name,
            why=f"{len(theirs)} there, {len(class_names)} here"
            + (f"; the first that differs: {differing[0]}" if saved.has_class_names and differing else ""),
            then="train the teacher on this data, or point --data at the teacher's",
        )
    there, here = saved.recipe.data.preprocess, recipe.data.preprocess
    for field in SEEN:
        if getattr(there, field) != getattr(here, field):
            raise RecipeError(
                "the teacher was trained on images prepared otherwise",
                where=f"data.preprocess.{field}",
                why=f"{getattr(there, field)} there, {getattr(here, field)} here, and both see the same images",
                then=f"--set data.preprocess.{field}={_yaml(getattr(there, field))}",
            )


def _yaml(value: object) -> str:
    return str(list(value)).replace(" ", "") if isinstance(value, tuple) else str(value).lower()


def _fingerprint(tensors: Mapping[str, Tensor]) -> str:
    sums = hashlib.sha256()
    for name in sorted(tensors):
        sums.update(name.encode())
        sums.update(tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sums.hexdigest()
