"""The recipe's fields by dotted name: what there is, what kind each is, and what a mistyped one most likely meant.

Owns the walk over the schema. Refuses to know files and values' origins. Invariant: every leaf of a `Recipe` has
exactly one dotted name, and `flatten` lists them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, get_args, get_origin

from reconv.recipe.presets import nearest
from reconv.recipe.schema import Recipe
from reconv.recipe.section import Section

# What other programs call these fields, as people will type them from habit.
_OTHER_WORDS = {
    "epochs": "length",
    "steps": "length",
    "arch": "model.name",
    "batchsize": "batch.size",
    "bs": "batch.size",
    "learning_rate": "schedule.lr",
    "lr_schedule": "schedule.name",
    "scheduler": "schedule.name",
    "warmup_epochs": "schedule.warmup",
    "wd": "optimizer.weight_decay",
    "dtype": "precision.mode",
    "amp": "precision.mode",
    "accumulation": "batch.micro",
    "dataset": "data.source",
    "data_dir": "data.path",
    "classes": "data.num_classes",
}


@cache
def schema_fields() -> Mapping[str, Any]:
    """Every section and leaf by dotted name, with its annotation."""
    return _walk(Recipe, "")


def _walk(section: type[Section], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, info in section.model_fields.items():
        found[prefix + name] = info.annotation
        inner = _section_of(info.annotation)
        if inner is not None:
            found |= _walk(inner, f"{prefix}{name}.")
    return found


def _section_of(annotation: Any) -> type[Section] | None:
    if get_origin(annotation) is tuple:  # a list of sections is one leaf
        return None
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def holds_text(field: str) -> bool:
    """Whether a field takes text and nothing else (or null)."""
    annotation = schema_fields().get(field)
    return annotation is str or set(get_args(annotation)) == {str, type(None)}


def takes_null(field: str) -> bool:
    """Whether null is a value of the field."""
    return type(None) in get_args(schema_fields().get(field))


def suggest(field: str) -> str | None:
    """The existing field an unknown dotted name most likely meant."""
    names = schema_fields()
    parent, _, key = field.rpartition(".")
    spelled = field.replace("_", ".").replace("-", ".")
    if spelled in names:
        return spelled
    if key in _OTHER_WORDS:
        return _OTHER_WORDS[key]
    siblings = {n.rpartition(".")[2]: n for n in names if n.rpartition(".")[0] == parent}
    near = nearest(key, siblings)
    if near is not None:
        return siblings[near]
    same_ending = [n for n in names if n.rpartition(".")[2] == key]
    return same_ending[0] if same_ending else nearest(field, names)


def flatten(recipe: Recipe) -> dict[str, Any]:
    """Every leaf value of a recipe by dotted name; the model's options count one by one."""
    return _flatten(recipe, "")


def _flatten(section: Section, prefix: str) -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            leaves |= _flatten(value, f"{prefix}{name}.")
        elif isinstance(value, dict) and value:
            leaves |= {f"{prefix}{name}.{key}": item for key, item in value.items()}
        else:
            leaves[prefix + name] = value
    return leaves
