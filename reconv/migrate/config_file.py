"""Read a configuration file of another program: YAML with anchors and merge keys, within limits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from reconv.core.errors import UsageError
from reconv.migrate.command_line import MAX_CHARACTERS
from reconv.storage.bounded import read_text

_MAX_MERGED = 10_000  # entries of a mapping after its merge keys


class _BoundedLoader(yaml.SafeLoader):
    """Plain values only, with a limit on merge keys: `<<: [*a, *a]` doubles a mapping."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > _MAX_MERGED:
            raise yaml.constructor.ConstructorError(
                None, None, f"merge keys give a mapping more than {_MAX_MERGED:,} entries", node.start_mark
            )


def read_small_text(path: str) -> str:
    """The text of a file that the user named; raises UsageError where it cannot be read."""
    try:
        return read_text(path, MAX_CHARACTERS).decode("utf-8", "replace")
    except OSError as error:
        raise UsageError("this file cannot be read", where=path, why=str(error.strerror or error)) from error


def read_config(path: str) -> Mapping[str, Any] | None:
    """The content of a YAML file; None if there is no such file here."""
    file = Path(path)
    if not file.is_file():
        return None
    text = read_small_text(path)
    try:
        content = yaml.load(text, _BoundedLoader)
    except RecursionError as error:
        raise UsageError(
            "this YAML is nested too deeply", where=path, hint="write the values on fewer levels"
        ) from error
    except yaml.YAMLError as error:
        raise UsageError("this is not YAML", where=path, why=str(error).partition("\n")[0]) from error
    if not isinstance(content, Mapping):
        raise UsageError("this configuration has no values", where=path, why="it is not a mapping of names to values")
    return content


def command_in_file(path: str) -> str | None:
    """The command in a file: the text of a script, or the program with a configuration of YAML; None: not a file."""
    if len(path) > 4096 or "\n" in path:
        return None
    try:
        is_file = Path(path).is_file()
    except (OSError, ValueError):
        return None
    if not is_file:
        return None
    if path.endswith((".yaml", ".yml")):
        return _command_of_config(path)
    return read_small_text(path)


def _command_of_config(path: str) -> str:
    """The command that uses a configuration file: of timm where it has flags, of Graphcore or NVIDIA where named."""
    content = read_config(path) or {}
    if {"models", "precision", "platform"} <= set(content):
        raise UsageError(
            "this is the file of NVIDIA's launch.py; a command chooses what of it to use",
            where=path,
            hint=f"reconv migrate 'launch.py --cfg_file {path} --model NAME --precision AMP --mode convergence "
            "--platform NAME DIR'",
        )
    if content and all(isinstance(value, Mapping) for value in content.values()):
        names = ", ".join(list(content)[:20])
        if len(content) == 1:
            return f"train.py --config {next(iter(content))} --config-path {path}"
        raise UsageError(
            "this file has several configurations",
            where=path,
            why=names,
            hint=f"choose one: reconv migrate 'train.py --config NAME --config-path {path}'",
        )
    return f"train.py --config {path} DATA"
