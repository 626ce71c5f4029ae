"""The reference of recipe fields, from the schema: what a field does, its values, default and names elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping

from coverage_page import vendor_options
from page_parts import code, escaped, table

from reconv.recipe.field_reference import FieldReference, field_references

INTRODUCTION = """\
# Recipe fields

Every field that a recipe can set. Write `optimizer: {name: adamw}` in a recipe, type `--set optimizer.name=adamw`, or
pass `overrides={"optimizer.name": "adamw"}` in Python. On the command line, `reconv recipes fields` prints this list,
`reconv recipes explain optimizer.name` one field, and `reconv recipes show resnet50` the values of a recipe.

A duration has a unit: `90ep` (epochs), `5000step`, `10%` of the run, and for saving `15min`. *was* names
the option of other programs: PT is Habana's PyTorch reference, RNX its TensorFlow ResNeXt, SSD its TensorFlow SSD, GC
Graphcore's TensorFlow CNNs, NV NVIDIA's DeepLearningExamples; torchvision's and timm's reference scripts.
"""
UNITS = {"_s": "seconds", "_mb": "MB", "_bytes": "bytes", "_px": "pixels"}
SIZES = re.compile(r"\b(size|resize|padding)$")


class MissingDescriptionError(Exception):
    """A field without a docstring."""


def render() -> str:
    """The page; raises MissingDescriptionError for a field that has no sentence."""
    fields, options = field_references(), vendor_options()
    missing = [name for name, field in fields.items() if not field.description]
    if missing:
        raise MissingDescriptionError(f"fields without a docstring below them: {', '.join(missing)}")
    parts = [INTRODUCTION]
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
