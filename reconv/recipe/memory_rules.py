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
    if memory.recompute == ():
        yield Contradiction(("memory.recompute",), "names no stage; to switch it off: off")
    if memory.recompute != "off" and recipe.engine.compile == "on":
        yield Contradiction(
            ("memory.recompute", "engine.compile"),
            "chooses what is kept, but engine.compile: on leaves that to the compiler",
        )
    if memory.shard_optimizer and recipe.precision.mode == "16.16":
        yield Contradiction(
            ("memory.shard_optimizer", "precision.mode"),
            "is not built for 16.16",
        )
    if recipe.optimizer.momentum == 0 and not recipe.optimizer.kind.startswith("rmsprop"):
        for name in ("shard_optimizer", "offload_optimizer"):
            if getattr(memory, name):
                yield Contradiction(
                    (f"memory.{name}", "optimizer.momentum"), "has no state to place: optimizer.momentum is 0"
                )
    if recipe.engine.graph == "on" and memory.offload_optimizer:
        yield Contradiction(
            ("memory.offload_optimizer", "engine.graph"), "copies from the host, which engine.graph: on cannot record"
        )
