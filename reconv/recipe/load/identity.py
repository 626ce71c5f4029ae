"""Identity of recipes: the fields that a resumed run may change, differences and a digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from reconv.recipe.load import document as yaml_document
from reconv.recipe.schema import Recipe, flatten

_NUM_DIGITS = 32
_MAY_CHANGE = (
    *("name", "description", "expect", "published", "measured", "code_path", "callbacks"),
    *(
        "data.path",
        "data.num_workers",
        "data.prefetch",
        "data.cache",
        "data.backend",
        "data.transfer_dtype",
        "data.bad_images",
    ),
    "evaluate.coverage",
    *("engine.num_threads", "engine.cpu_affinity", "engine.verify", "loggers", "profile"),
    *("parallel.bucket_cap_mb", "parallel.heartbeat_timeout_s"),
)
_MAY_CHANGE_SECTIONS = ("log.", "save.", "expect.", "memory.", "engine.divergence.")


def differences(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """Leaves that differ, with old and new value (None where a recipe has no such leaf)."""
    before, after = flatten(old), flatten(new)
    names = [*before, *(name for name in after if name not in before)]
    return {n: (before.get(n), after.get(n)) for n in names if before.get(n) != after.get(n)}


def may_change(field: str) -> bool:
    """True if a run may resume with another value of this leaf (a fingerprint protects the data itself)."""
    return field in _MAY_CHANGE or field.startswith(_MAY_CHANGE_SECTIONS)


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
