"""The result of a benchmark beside published figures of the same model."""

from __future__ import annotations

from typing import Any

from reconv.recipe.published import Figure, figures_for, network_of, newest
from reconv.recipe.schema import Recipe


def add_published(result: dict[str, Any]) -> None:
    """Add what vendors have published for the model to the result of `bench train` or `bench infer`."""
    recipe = Recipe.model_validate(result["recipe"])
    if result["bench"] == "train":
        theirs = newest(figures_for(recipe, "training"))
    else:
        theirs = newest(figures_for(recipe, "inference", "serving"))
        settings = {(own.batch, own.concurrency) for own in _ours(result, recipe)}
        theirs = [figure for figure in theirs if (figure.batch, figure.concurrency) in settings]
    result["published"] = [figure.as_json() for figure in theirs]
    if not theirs:
        size = result["image_size"]
        result["notes"].append(f"no figures of {network_of(recipe)} at {size} px and these settings are published")


def figures_of(result: dict[str, Any]) -> tuple[list[Figure], list[Figure]]:
    """Measured and published figures of a result that has been through `add_published`."""
    ours = _ours(result, Recipe.model_validate(result["recipe"]))
    return ours, [Figure(**row) for row in result["published"]]


def _ours(result: dict[str, Any], recipe: Recipe) -> list[Figure]:
    common: dict[str, Any] = {
        "network": network_of(recipe),
        "hardware": result["device"],
        "precision": recipe.precision.family,
        "source": "Reconv, measured now",
        "image_size": result["image_size"],
    }
    if result["bench"] == "train":
        speed = {"devices": result["devices"], "batch": result["batch_per_device"]}
        return [Figure(kind="training", images_per_s=result["images_per_s"], **speed, **common)]
    clients = [row for row in result["concurrent"] if row["batch"] == 1]  # requests of one image are published
    return [
        Figure(
            kind="inference",
            devices=1,
            batch=None if "concurrency" in row else row["batch"],
            concurrency=row.get("concurrency"),
            images_per_s=row["images_per_s"],
            latency_ms=row["latency_ms"]["mean"],
            p99_ms=row["latency_ms"]["p99"],
            **common,
        )
        for row in [*result["batches"], *clients]
    ]
