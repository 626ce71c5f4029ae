"""`reconv inspect`: what a run, checkpoint, export or recipe from elsewhere would do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from reconv.cli.options import Command, emit_json, json_option, print_line

if TYPE_CHECKING:
    from reconv.report.folder_inspection import Inspection, Named

_MAX_LINES = 40  # of a section


@click.command("inspect", cls=Command)
@click.argument("path", type=click.Path())
@json_option
def inspect_command(path: str, json_file: str | None) -> int:
    """Say what PATH would do, a run, a checkpoint, an export, a recipe or a weights file, without doing any of it.

    Lists the code it names with the digests of its files, folders of code, addresses, links, and files that such a
    folder does not have. The files are read as data: nothing is imported, no link is followed, no address contacted.

    \b
    Examples:
      reconv inspect downloads/run
      reconv inspect downloads/run/checkpoints/step-000001000 --json
      reconv inspect theirs.yaml
    """
    from reconv.report.folder_inspection import inspect

    found = inspect(path)
    if json_file is not None:
        emit_json(found.to_dict(), json_file)
    if json_file != "-":
        _print(found)
    return 0


def _print(found: Inspection) -> None:
    files = f"{found.num_files:,} file{'s' * (found.num_files != 1)}, {found.num_bytes:,} bytes"
    print_line(f"{found.path}: {found.kind}, {files}")
    code: list[str] = []
    for item in found.code:
        code.append(f"{item.file}: {item.field}: {item.path} ({item.source or 'no such file here'})")
        code += [f"    {digest}  {file}" for file, digest in item.digests.items()]
    _section("code that would be imported, after you agree", code)
    _section("folders of code", _lines(found.code_path))
    _section("addresses", _lines(found.addresses))
    _section("data and weights", _lines(found.paths))
    _section("links", _lines(found.links))
    _section("pipes, devices and sockets", found.special_files)
    _section("programs and pickles, which no command runs or opens", found.programs)
    _section(f"files that no {found.kind} has", found.unknown_files)
    _section("not readable", found.problems)
    if not (found.code or found.addresses or found.links):
        print_line("It names no code and no address, and has no links.")


def _lines(named: Sequence[Named]) -> list[str]:
    return [f"{each.file}: {each.field}: {each.value}{f' ({each.note})' if each.note else ''}" for each in named]


def _section(title: str, lines: Sequence[str]) -> None:
    if not lines:
        return
    print_line(f"\n{title}:".lstrip("\n"), bold=True)
    for line in lines[:_MAX_LINES]:
        print_line(f"  {line}")
    if len(lines) > _MAX_LINES:
        print_line(f"  and {len(lines) - _MAX_LINES:,} more; --json lists all")
