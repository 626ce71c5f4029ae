"""The run beside what vendors have published for its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from reconv.core.errors import RecipeError
from reconv.recipe.published import Figure, comparison, figures_for, network_of, newest
from reconv.recipe.schema import Recipe
from reconv.report import page
from reconv.report.markup import Html
from reconv.report.run_record import RunRecord

IMAGENET_CLASSES = 1000
_NOTE = (
    "Figures that vendors have published for this model, in this precision: the newest for each device. Their runs "
    "read ImageNet from disk; the last column counts images/s of one device."
)


def published_figures(record: RunRecord, summary: Mapping[str, Any]) -> Html:
    """The section; empty if nothing is published for the model, image size and number of classes."""
    try:
        recipe = Recipe.model_validate(record.recipe)
    except (ValidationError, RecipeError):  # written by another version
        return Html("")
    if record.plan is None or (record.plan.num_classes < IMAGENET_CLASSES and recipe.task != "detection"):
        return Html("")
    theirs = newest(figures_for(recipe, "training", "accuracy"))
    if not theirs:
        return Html("")
    table = page.table(*comparison([_ours(record, recipe, summary)], theirs), caption="Published figures")
    return page.section("Beside published figures", table, intro=_NOTE)


def _ours(record: RunRecord, recipe: Recipe, summary: Mapping[str, Any]) -> Figure:
    devices = summary["num_devices"]
    environment = record.attempts[-1].start.environment if record.attempts else {}
    is_top1 = summary["metric"] == "top1" and summary["value"] is not None and not summary["partial"]
    is_complete = recipe.length.unit == "ep" and summary["steps"] == summary["total_steps"]
    return Figure(
        kind="training",
        network=network_of(recipe),
        hardware=str(environment.get("device", "unknown")),
        precision=recipe.precision.family,
        source="this run",
        devices=devices,
        batch=max(1, record.plan.global_batch_size // devices) if record.plan else None,
        epochs=round(recipe.length.value) if is_complete else None,
        images_per_s=summary["images_per_s"],
        hours=summary["wall_s"] / 3600 if is_complete else None,
        top1=100 * summary["value"] if is_top1 else None,
    )
