"""What the fields about memory say of each other and of the rest of a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from reconv.recipe.contradiction import Contradiction

if TYPE_CHECKING:
    from reconv.recipe.schema import Recipe


def memory_contradictions(recipe: Recipe) -> Iterator[Contradiction]:
    """Every contradiction about memory."""
    memory = recipe.memory
    if memory.activation_checkpointing == ():
        yield Contradiction(("memory.activation_checkpointing",), "names no stage; to switch it off: off")
    if memory.activation_checkpointing != "off" and recipe.engine.compile == "on":
        yield Contradiction(
            ("memory.activation_checkpointing", "engine.compile"),
            "chooses what is kept, but engine.compile: on leaves that to the compiler",
        )
    for field, is_given in (
        ("memory.activation_checkpointing", memory.activation_checkpointing != "off"),
        ("engine.compile", recipe.engine.compile == "on"),
    ):
        if memory.checkpoint_segments and is_given:
            text = "cannot be combined with memory.checkpoint_segments, which chooses what is recomputed"
            yield Contradiction((field, "memory.checkpoint_segments"), text)
    if memory.shard_optimizer and recipe.precision.mode == "16.16":
        yield Contradiction(
            ("memory.shard_optimizer", "precision.mode"),
            "is not built for 16.16",
        )
    if recipe.optimizer.momentum == 0 and not recipe.optimizer.name.startswith("rmsprop"):
        for name in ("shard_optimizer", "offload_optimizer"):
            if getattr(memory, name):
                yield Contradiction(
                    (f"memory.{name}", "optimizer.momentum"), "has no state to place: optimizer.momentum is 0"
                )
    if recipe.engine.cuda_graphs == "on" and memory.offload_optimizer:
        yield Contradiction(
            ("memory.offload_optimizer", "engine.cuda_graphs"),
            "copies from the host, which engine.cuda_graphs: on cannot record",
        )
