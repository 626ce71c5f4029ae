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
