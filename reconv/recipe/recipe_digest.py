"""A digest of what determines the result of a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from reconv.recipe import yaml_document
from reconv.recipe.loader import may_change

_NUM_DIGITS = 32


def recipe_digest(text: str) -> str:
    """A hash of a recipe's YAML text, as `dump` writes it, without the fields that may change on resume.

    It is of the text and not of a `Recipe`, so that a later version with more fields finds the same digest.
    """
    leaves = {name: value for name, value in _leaves(yaml_document.read(text).tree, "") if not may_change(name)}
    return hashlib.sha256(json.dumps(leaves, sort_keys=True).encode()).hexdigest()[:_NUM_DIGITS]


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
