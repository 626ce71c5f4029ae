"""A contradiction in a recipe, for all who look for some.

Owns the two words. Refuses to know any rule. Invariant: the first field is the one a message begins with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Two or more fields (or one field and common sense) that cannot both be meant."""

    fields: tuple[str, ...]  # dotted; the first is named in the message
    text: str


class ContradictionError(ValueError):
    """All contradictions of one recipe."""

    def __init__(self, found: Sequence[Contradiction]) -> None:
        super().__init__("; ".join(f"{c.fields[0]}: {c.text}" for c in found))
        self.found = tuple(found)
