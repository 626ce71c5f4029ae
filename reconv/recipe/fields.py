"""The recipe's fields by dotted name: all of them, their values in a recipe, and suggestions for mistyped ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, get_args, get_origin

from reconv.recipe.presets import nearest
from reconv.recipe.schema import Recipe
from reconv.recipe.units import Section

# Other programs' names for these fields.
_SYNONYMS = {
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
    """The annotation of every section and leaf, by dotted name."""
    return _walk(Recipe, "")


def _walk(section: type[Section], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, info in section.model_fields.items():
        found[prefix + name] = info.annotation
        inner = section_type(info.annotation)
        if inner is not None:
            found |= _walk(inner, f"{prefix}{name}.")
    return found


def section_type(annotation: Any) -> type[Section] | None:
    """The section that a field holds; None for a leaf (a list of sections is a leaf)."""
    if get_origin(annotation) is tuple:
        return None
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def is_derived(field: str, derive: Collection[str]) -> bool:
    """True if a field, or the section it is in, is in a recipe's `derive`."""
    return any(field == name or field.startswith(f"{name}.") for name in derive)


def takes_only_text(field: str) -> bool:
    """True if a field takes text, or text and null, and nothing else."""
    annotation = schema_fields().get(field)
    return annotation is str or set(get_args(annotation)) == {str, type(None)}


def takes_null(field: str) -> bool:
    """True if the field accepts null."""
    return type(None) in get_args(schema_fields().get(field))


def suggest(field: str) -> str | None:
    """The field that an unknown dotted name most likely meant."""
    names = schema_fields()
    parent, _, key = field.rpartition(".")
    spelled = field.replace("_", ".").replace("-", ".")
    if spelled in names:
        return spelled
    if key in _SYNONYMS:
        return _SYNONYMS[key]
    siblings = {n.rpartition(".")[2]: n for n in names if n.rpartition(".")[0] == parent}
    near = nearest(key, siblings)
    if near is not None:
        return siblings[near]
    same_ending = [n for n in names if n.rpartition(".")[2] == key]
    if same_ending:
        return same_ending[0]
    # The name of a section alone would make the section and its other fields look close.
    return None if parent in names else nearest(field, names)


def fields_of(section: str) -> list[str]:
    """The names of the fields and sections in a section; empty if there is no such section."""
    return [name.rpartition(".")[2] for name in schema_fields() if name.rpartition(".")[0] == section != ""]


def flatten(recipe: Recipe) -> dict[str, Any]:
    """Every leaf value of a recipe by dotted name; each entry of model.options is a leaf."""
    leaves: dict[str, Any] = {}
    _add_leaves(recipe, "", leaves)
    return leaves


def _add_leaves(section: Section, prefix: str, leaves: dict[str, Any]) -> None:
    for name, value in section.__dict__.items():  # a model's fields, in their order; `model_fields` is slow
        if isinstance(value, Section):
            _add_leaves(value, f"{prefix}{name}.", leaves)
        elif isinstance(value, dict) and value:
            leaves.update((f"{prefix}{name}.{key}", item) for key, item in value.items())
        else:
            leaves[prefix + name] = value
