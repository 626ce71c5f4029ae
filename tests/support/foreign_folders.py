"""Run folders as a stranger may send them: traps in fields and files that name code, addresses and places."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from checkpoint_examples import sign

import reconv
from reconv import cli
from reconv.checkpoint.run_identity import read_identity, write_identity
from reconv.core import code_folders
from reconv.logging.run_dir import RunDir
from reconv.recipe.load.document import read_file
from reconv.recipe.load.identity import recipe_digest

SETTINGS = {"length": "2step", "schedule.warmup": "1step", "save.every": "1step", "evaluate.every": "off"}
OWNED = "owned"  # beside the trap that was imported


def trap(text: str = "") -> str:
    """Python source that leaves a file beside itself when it is imported."""
    return f"import pathlib\npathlib.Path(__file__).resolve().parent.joinpath({OWNED!r}).touch()\n{text}"


def train_run(out: Path) -> Path:
    """A run of two steps with a checkpoint of each, on a CPU."""
    overrides = [(name, value, "test") for name, value in {**SETTINGS, "data.num_workers": 0}.items()]
    reconv.train("quickstart", out=out, overrides=overrides, device="cpu")
    return out


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted((run / "checkpoints").glob("step-*"))


def change_recipe(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the recipe in a checkpoint, whose manifest is that of the changed one."""
    file = checkpoint / "state.json"
    state = json.loads(file.read_text())
    change(state["recipe"])
    file.write_text(json.dumps(state))
    sign(checkpoint)


def change_run(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the recipe of a run and of its checkpoints."""
    for checkpoint in checkpoints(run):
        change_recipe(checkpoint, change)
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    change(recipe)
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    place = RunDir(run)
    write_identity(place, read_identity(place).with_recipe(recipe_digest(read_file(place.recipe))))


def set_field(recipe: dict[str, Any], field: str, value: object) -> None:
    """Set a dotted field of a recipe's tree."""
    *sections, last = field.split(".")
    for section in sections:
        recipe = recipe[section]
    recipe[last] = value


def write_files(folder: Path, files: Mapping[str, str]) -> Path:
    """Write text files below a folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def missing_packages() -> list[str]:
    """The packages that Reconv looks for and that are not installed here."""
    return sorted(name for name in code_folders.PACKAGES if code_folders.find_module(name) is None)


def copy_of(run: Path, to: Path) -> Path:
    return Path(shutil.copytree(run, to, symlinks=True))


def run_command(*args: object) -> int:
    """The exit code of a command in this process."""
    try:
        cli.main([str(arg) for arg in args])
    except SystemExit as end:
        return int(end.code or 0)
    raise AssertionError("main returned")


@contextmanager
def unchanged_imports(folder: Path) -> Iterator[None]:
    """Modules of this folder and search folders of the block are not those of what comes after it."""
    path, named = list(sys.path), set(code_folders._named)
    try:
        yield
    finally:
        sys.path[:] = path
        code_folders._named.intersection_update(named)
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", "")).startswith(str(folder)):
                del sys.modules[name]
