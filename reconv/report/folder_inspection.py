"""`reconv inspect`: what a folder from elsewhere would do, read from its files as data."""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from reconv.checkpoint import manifest
from reconv.checkpoint.mirror.download import URL_FILE
from reconv.core.custom_code import anchor, describe_source
from reconv.core.errors import CheckpointError, ReconvError, UsageError
from reconv.logging.run_dir import is_run_file
from reconv.recipe.load import document as yaml_document
from reconv.recipe.load.extends import PATH_FIELDS, absolute_path
from reconv.recipe.parts.code import references_in
from reconv.storage import read_limits
from reconv.storage.bounded import open_file, parse_shallow_json, read_json_object
from reconv.storage.given_addresses import is_given
from reconv.storage.object_stores.store import is_address

MAX_ENTRIES = 100_000  # of a folder
_MAX_DEPTH = 32
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S*", re.ASCII)
_CODE_SUFFIXES = (".py", ".pyc", ".so", ".sh", ".sbatch", ".pkl", ".pt", ".pt2", ".pth", ".bin", ".dll", ".dylib")
_OTHER_RUN_FILES = frozenset({"lock", "alive", URL_FILE, "job.sbatch"})
_EXPORT_FILES = frozenset({"preprocess.json", "report.json", "files.txt", "outputs.npz", "classes.txt"})
_SENDING = ("wandb", "mlflow")  # loggers that send what they log to a server
_WEIGHTS_KEY = "reconv"
_CHECKPOINT_FILES = (manifest.NAME, "state.json")


@dataclass(frozen=True, slots=True)
class Named:
    """Something that a file names: where it is written, the field, and what it says."""

    file: str
    field: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class NamedCode:
    """Code that a recipe would import, and the sha256 of its files that are there."""

    file: str
    field: str
    path: str
    source: str  # empty if there is no such file
    digests: Mapping[str, str]


@dataclass(slots=True)
class Inspection:
    """Description of a folder or file from elsewhere."""

    path: str
    kind: str
    num_files: int = 0
    num_bytes: int = 0
    code: list[NamedCode] = field(default_factory=list)
    code_path: list[Named] = field(default_factory=list)
    addresses: list[Named] = field(default_factory=list)
    paths: list[Named] = field(default_factory=list)  # of data and weights
    links: list[Named] = field(default_factory=list)
    special_files: list[str] = field(default_factory=list)  # pipes, devices, sockets
    programs: list[str] = field(default_factory=list)  # files that could be run or unpickled; nothing of Reconv does
    unknown_files: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # what could not be read

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def inspect(path: str | Path) -> Inspection:
    """Read a run, a checkpoint, an export, a recipe or a weights file as data."""
    root = Path(path)
    if not os.path.lexists(root):
        raise UsageError(
            "no such file or folder", where=str(root), hint="give a run, a checkpoint, an export or a recipe"
        )
    found = Inspection(str(root), _kind(root))
    if root.is_dir():
        _read_folder(root, found)
    else:
        found.num_files, found.num_bytes = 1, root.stat().st_size
        _read_file(root, root.name, found)
    return found


def _kind(root: Path) -> str:
    if not root.is_dir():
        return "recipe" if root.suffix in (".yaml", ".yml") else "weights"
    if (root / manifest.NAME).is_file():
        return "checkpoint"
    if (root / "preprocess.json").is_file():
        return "export"
    return "run" if (root / "recipe.yaml").exists() or (root / "checkpoints").exists() else "folder"


def _read_folder(root: Path, found: Inspection) -> None:
    entries = list(islice(_walk(root, "", _MAX_DEPTH), MAX_ENTRIES + 1))
    if len(entries) > MAX_ENTRIES:
        found.problems.append(f"more than {MAX_ENTRIES:,} files: the rest was not looked at")
    listed = _listed_files(root, entries[:MAX_ENTRIES], found)
    for name, entry in entries[:MAX_ENTRIES]:
        status = entry.stat(follow_symlinks=False)
        if entry.is_symlink():
            found.links.append(_link(root, name))
        elif not stat.S_ISREG(status.st_mode):
            found.special_files.append(name)
        else:
            found.num_files += 1
            found.num_bytes += status.st_size
            if name.endswith(_CODE_SUFFIXES):
                found.programs.append(name)
            if not _is_known(name, found.kind, listed):
                found.unknown_files.append(name)
            _read_file(root / name, name, found)


def _walk(folder: Path, inside: str, depth: int) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Everything below a folder but folders themselves, by name; no link is followed."""
    with os.scandir(folder) as scanned:
        entries = sorted(scanned, key=lambda entry: entry.name)
    for entry in entries:
        name = f"{inside}{entry.name}"
        if not entry.is_dir(follow_symlinks=False):
            yield name, entry
        elif depth > 1:
            yield from _walk(folder / entry.name, f"{name}/", depth - 1)


def _link(root: Path, name: str) -> Named:
    target, top = os.path.realpath(root / name), os.path.realpath(root)
    leads_out = target != top and not target.startswith(f"{top}{os.sep}")
    return Named(name, "link", os.readlink(root / name), "leads out of the folder" if leads_out else "")


def _listed_files(root: Path, entries: list[tuple[str, os.DirEntry[str]]], found: Inspection) -> set[str]:
    """The files that the manifests of checkpoints list, and the manifests."""
    listed: set[str] = set()
    for name, entry in entries:
        folder = name.rpartition("/")[0]
        if entry.name != manifest.NAME or entry.is_symlink():
            continue
        listed.add(name)
        try:
            listed.update(f"{folder}/{file}".lstrip("/") for file in manifest.read(root / folder).files)
        except CheckpointError as error:
            found.problems.append(f"{name}: {error.what}")
    return listed


def _is_known(name: str, kind: str, listed: set[str]) -> bool:
    if kind == "export":
        return name in _EXPORT_FILES or name == "run.py" or name.startswith(("model.", "model-", "weights."))
    return name in listed or is_run_file(name) or name in _OTHER_RUN_FILES


def _read_file(path: Path, name: str, found: Inspection) -> None:
    """Note what one file names."""
    try:
        if path.suffix in (".yaml", ".yml"):
            document = yaml_document.read(yaml_document.read_file(path))
            found.problems += [f"{name}:{problem.line}: {problem.text}" for problem in document.problems]
            _read_recipe(document.tree, path.parent, name, found)
        elif path.name == "state.json":
            _read_recipe(read_json_object(path, read_limits.STATE_BYTES).get("recipe"), Path(), name, found)
        elif path.name == URL_FILE:
            url = str(read_json_object(path, read_limits.RUN_JSON_BYTES).get("url"))
            found.addresses.append(Named(name, "copy of the run", url, _address_note(url)))
        elif path.suffix == ".safetensors":
            _read_recipe(_recipe_of_weights(path), Path(), name, found)
    except (OSError, ValueError, ReconvError) as error:
        found.problems.append(f"{name}: {getattr(error, 'what', None) or error}")


def _recipe_of_weights(path: Path) -> object:
    """The recipe in the header of a weights file."""
    with open_file(path) as file:
        start = file.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < size <= read_limits.STATE_BYTES:
            return None
        header = parse_shallow_json(file.read(size))
    text = header.get("__metadata__", {}).get(_WEIGHTS_KEY) if isinstance(header, dict) else None
    content = parse_shallow_json(text) if isinstance(text, str) else None
    return content.get("recipe") if isinstance(content, dict) else None


def _read_recipe(tree: object, folder: Path, file: str, found: Inspection) -> None:
    """Note the code, folders of code, addresses and paths that a recipe names."""
    if not isinstance(tree, dict):
        return
    listed = tree.get("code_path")
    folders = (
        [absolute_path(item, folder) for item in listed if isinstance(item, str)] if isinstance(listed, list) else []
    )
    references = references_in(tree)
    note = "" if references else "ignored: the recipe names no code"
    found.code_path += [Named(file, "code_path", item, note) for item in folders]
    for name, reference in references:
        source = describe_source(name, anchor(reference, folder), folders)
        found.code.append(NamedCode(file, name, source.path, str(source.file or ""), source.digests))
    for name, text in _texts(tree):
        if _ADDRESS.fullmatch(text) or is_address(text):
            note = _address_note(text) if tuple(name.split(".")) in PATH_FIELDS else ""
            found.addresses.append(Named(file, name, text, note))
        elif tuple(name.split(".")) in PATH_FIELDS or name == "extends":
            found.paths.append(Named(file, name, text))
        elif name.partition(".")[0] == "loggers" and text in _SENDING:
            found.addresses.append(Named(file, "loggers", text, "sends what is logged to its server"))


def _address_note(url: str) -> str:
    return "you have given it" if is_given(url) else "asked about before it is used"


def _texts(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Every text in a tree, with its dotted field; items of lists have that of the list."""
    left: list[tuple[str, object]] = [("", tree)]
    while left:
        name, value = left.pop()
        if isinstance(value, str):
            yield name, value
        elif isinstance(value, dict):
            left += [(f"{name}.{key}".lstrip("."), item) for key, item in reversed(value.items())]
        elif isinstance(value, list | tuple):
            left += [(name, item) for item in reversed(value)]
