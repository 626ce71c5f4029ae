"""What a pipeline of devices asks of the rest of a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from reconv.recipe.contradiction import Contradiction

if TYPE_CHECKING:
    from reconv.recipe.schema import Recipe

_FIELD = "parallel.pipeline"


def pipeline_contradictions(recipe: Recipe) -> Iterator[Contradiction]:
    """Every contradiction about a pipeline."""
    parallel = recipe.parallel
    if parallel.pipeline == 1:
        for field, is_given in (
            ("memory.recompute", recipe.memory.recompute != "off"),
            ("engine.compile", recipe.engine.compile == "on"),
        ):
            if parallel.splits and is_given:
                yield Contradiction(
                    (field, "parallel.splits"),
                    "does not go with parallel.splits, which cut the network already",
                )
        return
    if len(parallel.splits) >= parallel.pipeline:
        yield Contradiction(
            ("parallel.splits", _FIELD),
            f"has {len(parallel.splits)}, but a pipeline of {parallel.pipeline} devices has {parallel.pipeline - 1}; "
            "several parts on one device of many are not built",
        )
    refused = {
        "task": (recipe.task != "classification", "only classification goes through a pipeline so far"),
        "parallel.reduce": (parallel.reduce == "ordered", "ordered adds gradients group by group; use fast"),
        "parallel.compress": (parallel.compress != "off", "gradients of a pipeline are not compressed"),
        "memory.recompute": (recipe.memory.recompute != "off", "what a pipeline keeps is not computed again"),
        "engine.compile": (recipe.engine.compile == "on", "parts of a network are not compiled"),
        "engine.kernels": (recipe.engine.kernels == "on", "kernels hand over more than one tensor"),
        "engine.graph": (recipe.engine.graph == "on", "a pipeline cannot be recorded"),
        "distill.teacher": (recipe.distill.teacher is not None, "a teacher does not go through a pipeline"),
        "model.freeze": (recipe.model.freeze, "a frozen part has no gradients to send"),
        "model.train": (bool(recipe.model.train), "a frozen part has no gradients to send"),
        "data.bad_images": (recipe.data.bad_images.limit > 0, "several processes would count the same file"),
        "batch.group": (recipe.batch.group == "micro", "a group is the recipe's, not a device's; give its size"),
    }
    for field, (is_given, why) in refused.items():
        if is_given:
            yield Contradiction((field, _FIELD), f"does not go with {_FIELD}: {why}")
