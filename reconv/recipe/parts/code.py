"""The recipe's fields that name your own code by import path, and the objects in lists of such names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field

from reconv.core.code_folders import add_folders
from reconv.core.custom_code import EXAMPLE, is_import_path
from reconv.recipe.units import Section

if TYPE_CHECKING:
    from reconv.recipe.schema import Recipe

Option = bool | int | float | str | None | list[int] | list[float] | list[str]
Options = dict[Annotated[str, Field(pattern=r"^\w+$")], Option]
EXTERNAL_PACKAGES = ("timm", "torchvision")  # their networks are named like import paths: timm:NAME

_NAMES = (("model", "name"), ("data", "source"), ("loss", "name"))
_LISTS = (("augment", "extra"), ("metrics",), ("callbacks",))


def _check_import_path(text: str) -> str:
    if not is_import_path(text):
        raise ValueError(f"an import path as in {EXAMPLE}")
    return text


ImportPath = Annotated[str, AfterValidator(_check_import_path)]


class CodeConfig(Section):
    """An object of your own code; in a recipe the import path alone is enough."""

    name: ImportPath
    """Import path of a class or function, as in my_pkg.nets:make or ./nets.py:make."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments of the class or function."""


class TransformConfig(CodeConfig):
    """A transform of your own code, of training images."""

    on_device: bool = False
    """Whether it runs on the device, on normalized batches, instead of on PIL images where they are decoded."""


def parse_name(value: object) -> object:
    """A bare import path is an object without options."""
    return {"name": value} if isinstance(value, str) else value


def parse_list(value: object) -> object:
    """One object is a list of one; `off` is the empty list."""
    if value is False or value == "off":
        return []
    return [value] if isinstance(value, str | Mapping) else value


NamedCode = Annotated[CodeConfig, BeforeValidator(parse_name)]
NamedTransform = Annotated[TransformConfig, BeforeValidator(parse_name)]


class CodeReference(NamedTuple):
    """A recipe field and the import path it names."""

    field: str
    path: str


def code_references(recipe: Recipe) -> list[CodeReference]:
    """Everything in a recipe that is imported when the recipe runs."""
    return references_in(recipe.model_dump(mode="json"))


def add_code_path(recipe: Recipe) -> None:
    """Let imports find the code that a recipe names; one that names none has no say in what is imported."""
    if code_references(recipe):
        add_folders(recipe.code_path)


def references_in(tree: Mapping[str, Any]) -> list[CodeReference]:
    """The import paths in a recipe's tree."""
    found: list[CodeReference] = []

    def note(path: str, field: str) -> str:
        found.append(CodeReference(field, path))
        return path

    map_import_paths(tree, note)
    return found


def map_import_paths(tree: Mapping[str, Any], change: Callable[[str, str], str]) -> dict[str, Any]:
    """A recipe's tree with every import path in it replaced by `change(path, field)`."""
    tree = dict(tree)
    for fields in (*_NAMES, *_LISTS):
        *sections, last = fields
        parents = [tree]
        for section in sections:
            inner = parents[-1].get(section)
            if not isinstance(inner, Mapping):
                break
            parents[-1][section] = dict(inner)
            parents.append(parents[-1][section])
        if len(parents) == len(fields) and last in parents[-1]:
            parents[-1][last] = _map_value(parents[-1][last], change, ".".join(fields))
    return tree


def _map_value(value: Any, change: Callable[[str, str], str], field: str) -> Any:
    """A name, an object `{name: ...}` or a list of them, with import paths replaced."""
    if isinstance(value, str):
        return change(value, field) if names_code(value) else value
    if isinstance(value, list | tuple):
        return [_map_value(item, change, field) for item in value]
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        return {**value, "name": _map_value(value["name"], change, field)}
    return value


def names_code(name: str) -> bool:
    """True if a name is an import path of your own code."""
    return is_import_path(name) and name.partition(":")[0] not in EXTERNAL_PACKAGES
