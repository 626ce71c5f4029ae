"""Scripts that make the tables of docs/results; each is run as `python -m benchmarks.FOLDER.NAME`."""

from __future__ import annotations

from collections.abc import Mapping

from reconv.recipe.loader import Override


def as_overrides(fields: Mapping[str, object], origin: str = "benchmark") -> list[Override]:
    """Recipe fields as overrides of a recipe."""
    return [(field, value, origin) for field, value in fields.items()]
