"""The reference of recipe fields, from the schema: what a field does, its values, default and names elsewhere."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from make_coverage import split_uses
from page_parts import code, escaped, table

from reconv.migrate.programs import timm_train, torchvision_reference
from reconv.recipe.field_reference import FieldReference, field_references

INTRODUCTION = """\
# Recipe fields

Every field that a recipe can set. Write `optimizer: {name: adamw}` in a recipe, type `--set optimizer.name=adamw`, or
pass `overrides={"optimizer.name": "adamw"}` in Python. On the command line, `reconv recipes fields` prints this list,
`reconv recipes explain optimizer.name` one field, and `reconv recipes show resnet50` the values of a recipe.

A duration has a unit: `90ep` (epochs), `5000step`, `10%` of the run, and for saving `15min`. *was* names
the option of other programs: {systems}; torchvision's and timm's reference scripts.
"""
LIBRARIES = {"torchvision": torchvision_reference.FLAGS, "timm": timm_train.FLAGS}
UNITS = {"_s": "seconds", "_mb": "MB", "_bytes": "bytes", "_px": "pixels"}
SIZES = re.compile(r"\b(size|resize|padding)$")


class MissingDescriptionError(Exception):
    """A field without a docstring."""


def vendor_options(coverage: Mapping[str, Any]) -> dict[str, list[str]]:
    """For each recipe field, the options of other programs that it replaces, as in NV `--lr`."""
    found: dict[str, list[str]] = defaultdict(list)
    for option, field in _replacements(coverage):
        if option not in found[field]:
            found[field].append(option)
    return found


def _replacements(coverage: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Options of the replaced programs, then those of libraries that set a field as they are."""
    for row in (row for section in coverage["sections"].values() for row in section):
        for key, use in row.get("options", {}).items():
            if not isinstance(use, str):
                continue
            words = key.split()
            owners = " ".join(word for word in words if word in coverage["systems"])
            spellings = " ".join(code(word) for word in words if word not in coverage["systems"])
            for name in split_uses(use)[0]:
                yield f"{owners} {spellings}", name.partition("=")[0]
    for library, flags in LIBRARIES.items():
        for flag in flags:
            if flag.sets:
                yield f"{library} {' '.join(code(name) for name in flag.names)}", flag.sets


def render(coverage: Mapping[str, Any]) -> str:
    """The page; raises MissingDescriptionError for a field that has no sentence."""
    fields, options = field_references(), vendor_options(coverage)
    missing = [name for name, field in fields.items() if not field.description]
    if missing:
        raise MissingDescriptionError(f"fields without a docstring below them: {', '.join(missing)}")
    systems = ", ".join(f"{key} is {name}" for key, name in coverage["systems"].items())
    parts = [INTRODUCTION.replace("{systems}", systems)]
    top = [field for name, field in fields.items() if "." not in name and not field.is_section]
    parts += ["## Top level\n", _table(top, options)]
    for name, section in fields.items():
        if section.is_section:
            inner = [field for other, field in fields.items() if other.rpartition(".")[0] == name]
            parts += [
                f"{'##' if '.' not in name else '###'} {name}\n",
                escaped(section.description) + "\n",
                _table([field for field in inner if not field.is_section], options),
            ]
    return "\n".join(parts)


def _table(fields: list[FieldReference], options: Mapping[str, list[str]]) -> str:
    if not fields:
        return ""
    rows = [
        (
            f'<a id="{field.name}"></a>{code(field.name)}',
            escaped(field.description) + _origin(options.get(field.name, [])),
            escaped(field.kind) + _unit(field),
            code(field.default) if field.default else "must be given",
        )
        for field in fields
    ]
    return table(("field", "what it does", "values", "default"), rows)


def _origin(options: list[str]) -> str:
    return f"<br><small>was: {', '.join(options)}</small>" if options else ""


def _unit(field: FieldReference) -> str:
    """The unit of a number, where its name ends in one."""
    if "number" not in field.kind:
        return ""
    unit = next((unit for ending, unit in UNITS.items() if field.name.endswith(ending)), "")
    unit = unit or ("pixels" if SIZES.search(field.name) and "batch" not in field.name else "")
    return f" ({unit})" if unit else ""
