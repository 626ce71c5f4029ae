"""Contradictions between the values of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Fields whose values do not go together, or one whose value makes no sense."""

    fields: tuple[str, ...]  # dotted names; the message begins with the first
    text: str
    cures: tuple[str, ...] = ()  # options, each of which resolves it


class ContradictionError(ValueError):
    """All contradictions of one recipe."""

    def __init__(self, found: Sequence[Contradiction]) -> None:
        super().__init__("; ".join(f"{c.fields[0]}: {c.text}" for c in found))
        self.found = tuple(found)


def join_words(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
