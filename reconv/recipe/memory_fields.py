"""The section of a recipe about memory: what is computed again instead of kept, and where optimizer state lies.

Owns the fields. Refuses to know which stages a network has: they are checked when it is built. Invariant: none of them
changes a run's mathematics.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from reconv.recipe.section import Listed, Section, words_of_switches


def _names(value: object) -> object:
    """A bare name is a list of one, `off` and `on` are words."""
    value = words_of_switches(value)
    if isinstance(value, str) and value not in ("off", "auto", "all"):
        return [name.strip() for name in value.split(",")]
    return value


Stages = Annotated[tuple[str, ...], Listed] | Literal["off", "auto", "all"]


class MemoryConfig(Section):
    """How a run saves memory of its device."""

    # Stages whose activations are computed again in the backward pass: names as in [stem, layer1], all, or auto: those
    # that keep most, until half of what all keep is saved.
    activation_checkpointing: Annotated[Stages, BeforeValidator(_names)] = "off"
    # The stages at which the next checkpointed segment begins; all but the last are computed again.
    checkpoint_segments: Annotated[tuple[str, ...], Listed] = ()
    # Each process keeps the optimizer state of its share of the parameters, updates those and tells the others.
    shard_optimizer: bool = False
    offload_optimizer: bool = False  # optimizer state lies in the host's memory and travels for each update
