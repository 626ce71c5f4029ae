"""What a pipeline of devices asks of the rest of a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from reconv.recipe.contradiction import Contradiction

if TYPE_CHECKING:
    from reconv.recipe.schema import Recipe

_FIELD = "parallel.pipeline_stages"
_NO_CHECKPOINTING = "a pipeline does not recompute activations"


def pipeline_contradictions(recipe: Recipe) -> Iterator[Contradiction]:
    """Every contradiction about a pipeline."""
    parallel = recipe.parallel
    if parallel.pipeline_stages == 1:
        if parallel.pipeline_splits:
            yield Contradiction(
                ("parallel.pipeline_splits", _FIELD),
                f"splits the network over the devices of a pipeline, but {_FIELD} is 1; to recompute activations "
                "segment by segment on one device use memory.checkpoint_segments",
            )
        return
    if len(parallel.pipeline_splits) >= parallel.pipeline_stages:
        yield Contradiction(
            ("parallel.pipeline_splits", _FIELD),
            f"names {len(parallel.pipeline_splits)} stages, but {parallel.pipeline_stages} devices need "
            f"{parallel.pipeline_stages - 1}; several parts per device are not supported",
        )
    refused = {
        "task": (recipe.task != "classification", "only classification goes through a pipeline so far"),
        "parallel.reduce": (parallel.reduce == "ordered", "ordered adds gradients group by group; use fast"),
        "parallel.gradient_compression": (
            parallel.gradient_compression != "off",
            "gradients of a pipeline are not compressed",
        ),
        "memory.activation_checkpointing": (recipe.memory.activation_checkpointing != "off", _NO_CHECKPOINTING),
        "memory.checkpoint_segments": (bool(recipe.memory.checkpoint_segments), _NO_CHECKPOINTING),
        "engine.compile": (recipe.engine.compile == "on", "parts of a network are not compiled"),
        "engine.fused_kernels": (recipe.engine.fused_kernels == "on", "kernels hand over more than one tensor"),
        "engine.cuda_graphs": (recipe.engine.cuda_graphs == "on", "a pipeline cannot be recorded"),
        "distill.teacher": (recipe.distill.teacher is not None, "a teacher does not go through a pipeline"),
        "model.freeze_backbone": (recipe.model.freeze_backbone, "a frozen part has no gradients to send"),
        "model.trainable": (bool(recipe.model.trainable), "a frozen part has no gradients to send"),
        "data.bad_images": (recipe.data.bad_images.limit > 0, "several processes would count the same file"),
        "batch.group": (recipe.batch.group == "micro", "a group is the recipe's, not a device's; give its size"),
    }
    for field, (is_given, why) in refused.items():
        if is_given:
            yield Contradiction((field, _FIELD), f"does not go with {_FIELD}: {why}")
