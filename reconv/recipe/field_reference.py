"""Reference of the recipe's fields, from the schema: description, type, choices and default."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from reconv.core.errors import UsageError
from reconv.recipe.schema import Recipe, section_type, suggest
from reconv.recipe.units import BadImages, Duration, Section

_TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
_UNITS = {
    Duration: "a duration, as in 90ep, 5000step, 10% or 15min",
    BadImages: "stop, or skip up to N",
}
_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
_PLURALS = {"a whole number": "whole numbers", "a number": "numbers", "a duration": "durations", "a list": "lists"}
_MAX_SHOWN = 1e5  # larger upper bounds only keep nonsense out


@dataclass(frozen=True, slots=True)
class FieldReference:
    """One field or section of the recipe."""

    name: str  # dotted
    description: str
    kind: str  # what values it takes, in words; `section` for a section
    choices: tuple[str, ...]
    default: str  # as in YAML; empty for a section
    is_section: bool


@cache
def field_references() -> dict[str, FieldReference]:
    """Every section and field, by dotted name, in the order of the schema."""
    return _walk(Recipe, "")


def field_names() -> list[str]:
    """The dotted names of all fields that take a value."""
    return [name for name, field in field_references().items() if not field.is_section]


def field_choices(name: str) -> tuple[str, ...]:
    """The fixed words that a field takes; empty if it has none or does not exist."""
    field = field_references().get(name)
    return field.choices if field else ()


def explain_field(name: str) -> list[FieldReference]:
    """The field, or for a section the section and its fields; raises UsageError for an unknown name."""
    references = field_references()
    if name in references:
        inner = [field for other, field in references.items() if other.startswith(f"{name}.")]
        return [references[name], *inner]
    close = suggest(name)
    raise UsageError(
        f"a recipe has no field {name!r}",
        why=f"did you mean {close}?" if close else "",
        hint=f"reconv recipes explain {close}" if close else "reconv recipes explain lists the sections",
    )


def matching_fields(pattern: str = "", more: Sequence[FieldReference] = ()) -> list[FieldReference]:
    """The fields whose name contains `pattern`, or fits it as in `augment.*`; all of them for an empty one.

    `more` are further fields to choose from: the options of a network.
    """
    wanted = pattern if any(sign in pattern for sign in "*?[") else f"*{pattern}*"
    fields = (*field_references().values(), *more)
    found = [field for field in fields if fnmatchcase(field.name, wanted) and not field.is_section]
    if not found:
        close = suggest(pattern)
        raise UsageError(
            f"no recipe field has {pattern!r} in its name",
            why=f"did you mean {close}?" if close else "",
            hint="reconv recipes fields lists all of them",
        )
    return found


def _walk(section: type[Section], prefix: str) -> dict[str, FieldReference]:
    found: dict[str, FieldReference] = {}
    for name, info in section.model_fields.items():
        inner = section_type(info.annotation)
        found[prefix + name] = _reference(prefix + name, info, inner)
        if inner is not None:
            found |= _walk(inner, f"{prefix}{name}.")
    return found


def _reference(name: str, info: FieldInfo, inner: type[Section] | None) -> FieldReference:
    description = " ".join((info.description or (inner.__doc__ if inner else "") or "").split())
    if inner is not None:
        return FieldReference(name, description, "section", (), "", True)
    default = "" if info.is_required() else value_text(info.get_default(call_default_factory=True))
    return value_reference(name, description, info.annotation, default, _bounds(info.metadata))


def value_reference(name: str, description: str, annotation: Any, default: str, bounds: str = "") -> FieldReference:
    """The reference of a field that takes values of this annotation."""
    choices = tuple(dict.fromkeys(_choices(annotation)))
    return FieldReference(
        name, description, ", or ".join(dict.fromkeys(_kinds(annotation, bounds))), choices, default, False
    )


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    if get_origin(annotation) is tuple:
        return []
    return [choice for part in get_args(annotation) for choice in _choices(part)]


def _kinds(annotation: Any, bounds: str) -> list[str]:
    """The alternatives of a field's type in words."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        limits = [limit for item in args[1:] for limit in (item.metadata if isinstance(item, FieldInfo) else [item])]
        return _kinds(args[0], _bounds(limits) or bounds)
    if origin in (Union, types.UnionType):
        return [kind for part in args for kind in _kinds(part, bounds)]
    if origin is Literal:
        return ["one of " + ", ".join(str(value) for value in args) if len(args) > 1 else str(args[0])]
    if origin in (tuple, list):
        inner = [part for part in args if part is not Ellipsis]
        return [
            "a list of " + " and ".join(dict.fromkeys(_plural(kind) for part in inner for kind in _kinds(part, bounds)))
        ]
    if origin is dict:
        return ["a mapping"]
    if annotation in _UNITS:
        return [_UNITS[annotation]]
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return ["entries with " + ", ".join(annotation.model_fields)]
    plain = _TYPES.get(annotation, "a value")
    return [f"{plain}, {bounds}" if bounds and annotation in (int, float) else plain]


def _bounds(limits: Sequence[Any]) -> str:
    """The range of a number in words, as in `above 0 and at most 1`."""
    found = {key: getattr(limit, key) for key in _BOUNDS for limit in limits if getattr(limit, key, None) is not None}
    return " and ".join(f"{_BOUNDS[key]} {value:g}" for key, value in found.items() if abs(value) <= _MAX_SHOWN)


def _plural(kind: str) -> str:
    return next((kind.replace(one, many, 1) for one, many in _PLURALS.items() if kind.startswith(one)), kind)


def value_text(value: object) -> str:
    """A default as in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(value_text(item) for item in value) + "]"
    return str(value) if str(value) else '""'
