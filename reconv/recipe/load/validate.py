"""A draft as a valid recipe, or all its problems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from reconv.recipe.load import document
from reconv.recipe.load.draft import Draft
from reconv.recipe.load.explain import explain
from reconv.recipe.parts.contradiction import ContradictionError
from reconv.recipe.schema import Recipe

_MAX_EXPLAINED = 100  # problems of a recipe


def validate_draft(draft: Draft) -> Recipe | None:
    """The recipe, or None with all problems added to the draft: invalid values are set aside to check the rest."""
    faulty: set[str] = set()
    tree = draft.tree
    while True:
        try:
            return Recipe.model_validate(tree)
        except ValidationError as error:
            details = error.errors(include_url=False)
        causes = [detail.get("ctx", {}).get("error") for detail in details]
        contradictory = [cause for cause in causes if isinstance(cause, ContradictionError)]
        for cause in contradictory:
            for item in (c for c in cause.found if not faulty.intersection(c.fields)):
                draft.problems.append((draft.latest(item.fields), f"{item.fields[0]}: {item.text}"))
                draft.cures += item.cures
        if contradictory:
            return None
        by_path: dict[document.Path, list[ErrorDetails]] = {}
        for detail in details:
            by_path.setdefault(_place(draft.tree, detail), []).append(detail)
        for number, (path, group) in enumerate(by_path.items()):
            if number < _MAX_EXPLAINED:  # each is compared with all fields
                draft.problems.append((draft.origin(path), explain(path, group)))
            faulty.add(".".join(path))
        tree = _without(tree, set(by_path))


def _place(tree: Any, detail: ErrorDetails) -> document.Path:
    """The keys an error is about: its location without union members and list indices."""
    path: list[str] = []
    for part in detail["loc"]:
        if isinstance(tree, dict) and part in tree:
            path.append(str(part))
            tree = tree[part]
        elif detail["type"] == "missing" and isinstance(tree, dict):
            path.append(str(part))
        else:
            break
    return tuple(path)


def _without(tree: Mapping[str, Any], faulty: set[document.Path], prefix: document.Path = ()) -> dict[str, Any]:
    """The tree without invalid values; a section that lacks a required value is removed."""
    kept: dict[str, Any] = {}
    for key, value in tree.items():
        path = (*prefix, key)
        lacking = isinstance(value, dict) and any(p[:-1] == path and p[-1] not in value for p in faulty)
        if path not in faulty and not lacking:
            kept[key] = _without(value, faulty, path) if isinstance(value, dict) else value
    return kept
