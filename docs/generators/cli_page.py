"""The reference of the command line, from click."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click
from page_parts import code, escaped, table

from reconv.cli import reconv

INTRODUCTION = """\
# Command line

`reconv COMMAND --help` prints what is on this page. `--json` is machine-readable output, and `--debug` shows the
traceback of an error. For scripts: [exit codes](exit-codes.md).
"""


def render() -> str:
    """The page: a section per command with usage, text, arguments and options."""
    return "\n".join([INTRODUCTION, *(_section(path, command) for path, command in commands(reconv, ("reconv",)))])


def commands(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command with its path, groups before their commands; not the top-level group."""
    if len(path) > 1:
        yield path, command
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from commands(inner, (*path, name))


def _section(path: tuple[str, ...], command: click.Command) -> str:
    context = click.Context(command, info_name=" ".join(path))
    usage = command.get_usage(context).removeprefix("Usage: ")
    usage = re.sub(r"\s+", " ", usage)
    rows = [_row(param, context) for param in command.get_params(context) if isinstance(param, click.Option)]
    heading = "##" if len(path) == 2 else "###"
    return f"{heading} {' '.join(path)}\n\n```text\n{usage}\n```\n\n{help_text(command)}\n\n" + table(
        ("option", "what it does", "default"), [row for row in rows if row]
    )


def help_text(command: click.Command) -> str:
    """The help of a command as Markdown; what click does not rewrap is a block of code."""
    parts = []
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        if paragraph.startswith("\b"):
            head, _, body = paragraph.removeprefix("\b").strip("\n").partition("\n")
            block = inspect.cleandoc(body)
            parts.append(f"{head}\n\n```bash\n{block}\n```" if block else head)
        else:
            parts.append(escaped(" ".join(paragraph.split())))
    return "\n\n".join(parts)


def _row(param: click.Option, context: click.Context) -> tuple[str, str, str] | None:
    record = param.get_help_record(context)
    if record is None:
        return None
    names, text = record
    default = re.search(r"\[default: (.*?)\]$", text)
    default = default or re.search(r"\[default: (.*?); ", text)
    text = re.sub(r"\s*\[default: .*?\]$", "", text)
    return code(" ".join(names.split())), escaped(" ".join(text.split())), code(default[1]) if default else ""
