"""The files of a recipe: the requested one and those it extends, with absolute paths in their values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from reconv.core.custom_code import anchor
from reconv.core.errors import RecipeError
from reconv.recipe.load import document
from reconv.recipe.load.draft import Origin, recipe_error
from reconv.recipe.parts.code import map_import_paths
from reconv.recipe.presets import PRESETS, nearest, preset_names, preset_path
from reconv.recipe.units import split_rate
from reconv.storage import read_limits
from reconv.storage.files import system_error
from reconv.storage.object_stores.store import is_url
from reconv.storage.transient import is_machine_fault

PATH_FIELDS = (
    *(("data", "path"), ("data", "exclude"), ("data", "relabel")),
    *(("model", "init"), ("model", "resume_from"), ("distill", "teacher")),
)


@dataclass(frozen=True, slots=True)
class RecipeLayer:
    """One file of an `extends` chain."""

    path: Path
    shown: str
    text: str
    content: document.Document

    @property
    def is_preset(self) -> bool:
        return self.path.is_relative_to(PRESETS)

    @property
    def header(self) -> str:
        """The leading comment of the file, without the # signs."""
        lines = []
        for line in self.text.splitlines():
            if not line.startswith("#"):
                break
            lines.append(line.lstrip("#").removeprefix(" ").rstrip())
        return "\n".join(lines).strip()


def own_files(name_or_path: str) -> list[Path]:
    """The files of a recipe that are not presets: the requested one first, then those that it extends."""
    return [layer.path for layer in read_chain(name_or_path) if not layer.is_preset]


def read_chain(name_or_path: str) -> list[RecipeLayer]:
    """The requested file, then what it extends, and so on."""
    path, shown = _locate(name_or_path, Path(), "")
    layers: list[RecipeLayer] = []
    while True:
        if any(layer.path == path for layer in layers):
            chain = " -> ".join([*(layer.shown for layer in layers), shown])
            raise RecipeError("a recipe cannot extend itself", where=chain, hint="remove one of the `extends`")
        layer = _read_preset(path, shown) if path.is_relative_to(PRESETS) else _read_layer(path, shown)
        layers.append(layer)
        parent = layer.content.tree.get("extends")
        if ("extends",) not in layer.content.lines:
            return layers
        where = f"{shown}:{layer.content.lines[('extends',)]}"
        if not isinstance(parent, str) or not parent:
            raise RecipeError("extends must be one recipe: the name of a preset or a file", where=where)
        path, shown = _locate(parent, path.parent, where)


def _locate(name: str, folder: Path, where: str) -> tuple[Path, str]:
    """The file of a preset or of a path relative to `folder`, and how to show it."""
    presets = preset_names()
    if name in presets:
        return preset_path(name), f"{name}.yaml"
    path = folder / os.path.expanduser(name)
    why = ""
    try:
        if path.is_file():
            return Path(os.path.abspath(path)), min(os.path.relpath(path), str(path), key=len) if where else name
        why = "" if not path.exists() else "it is a folder" if path.is_dir() else "it is not a regular file"
        beside = Path(f"{path}.yaml").is_file()
    except OSError as error:
        if is_machine_fault(error):
            raise system_error(error) from error
        beside = False
    except ValueError:  # not a valid file name
        beside = False
    if beside:
        hint = f"did you mean the file {name}.yaml?"
    elif path.suffix in (".yaml", ".yml") or "/" in name:
        hint = "check the path; `reconv recipes` lists the presets"
    else:
        near = nearest(name, presets)
        hint = f"did you mean {near}?" if near else "`reconv recipes` lists the presets"
    raise RecipeError(f"recipe {name!r} not found", where=where, why=why, hint=hint)


@cache
def _read_preset(path: Path, shown: str) -> RecipeLayer:
    return _read_layer(path, shown)


def _read_layer(path: Path, shown: str) -> RecipeLayer:
    text = document.read_file(path)
    content = document.read(text)
    if content.broken:
        problems = [(Origin(0, p.line, f"{shown}:{p.line}"), p.text) for p in content.problems]
        raise recipe_error(shown, problems, hint="correct this line; the rest of the file was not read")
    if len(content.lines) > read_limits.RECIPE_KEYS:
        why = f"it has {len(content.lines):,} keys, and a recipe has at most {read_limits.RECIPE_KEYS:,}"
        raise RecipeError("this is not a recipe", where=str(path), why=why)
    if not content.tree and not content.problems:
        raise RecipeError("the recipe is empty", where=str(path), hint="start with, for example, extends: resnet50")
    _split_schedule(content)
    for section, name in PATH_FIELDS:
        part = content.tree.get(section)
        if isinstance(part, dict) and isinstance(part.get(name), str):
            part[name] = absolute_path(part[name], path.parent)
    content.tree = anchor_code(content.tree, path.parent)
    return RecipeLayer(path, shown, text, content)


def _split_schedule(content: document.Document) -> None:
    """Split `0.256 per 256` into lr and base_batch_size, so that it replaces both of the recipe it extends."""
    section = content.tree.get("schedule")
    if isinstance(section, dict):
        content.tree["schedule"] = split_rate(section)
        content.lines.setdefault(("schedule", "base_batch_size"), content.lines.get(("schedule", "lr"), 0))


def absolute_path(value: str, folder: Path) -> str:
    """An absolute path; URLs and names like torchvision:resnet50 stay."""
    if not value or is_url(value) or value.startswith(("torchvision:", "timm:", "hf:/")):
        return value
    return os.path.abspath(folder / os.path.expanduser(value))


def anchor_code(tree: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The tree with absolute paths of the files and folders of the user's own code."""
    anchored = map_import_paths(tree, lambda name, field: anchor(name, folder))
    folders = anchored.get("code_path")
    if isinstance(folders, list):
        anchored["code_path"] = [absolute_path(item, folder) if isinstance(item, str) else item for item in folders]
    return anchored
