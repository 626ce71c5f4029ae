"""What several verbs share: the `--json [FILE]` and `--debug` options, tables, and files written for the user.

Owns how options are spelled and how results are laid out. Refuses to know what a result means. Invariant: nothing
here imports more than click until something is printed.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from reconv.errors import ResourceError, UsageError

F = TypeVar("F", bound=Callable[..., Any])

Override = tuple[str, object, str]  # a recipe field, its value and the option that says so

STDOUT = "-"
DEVICE_HELP = "auto, cpu, cuda, cuda:1, mps or hpu."
_MIN_LAST_COLUMN = 24

json_option = click.option(
    "--json",
    "json_file",
    metavar="[FILE.json]",
    is_flag=False,
    flag_value=STDOUT,
    help="The result as JSON, on stdout or into FILE.json (other names: --json=FILE).",
)


class Verb(click.Command):
    """A command with `--debug`, whose `--json` never swallows the argument after it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(
                ["--debug"], is_flag=True, expose_value=False, help="Show the traceback when something goes wrong."
            )
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, settle_json(args))


def settle_json(args: Sequence[str]) -> list[str]:
    """Bind a bare `--json` to stdout unless the next word is plainly its file.

    click would take any next word for the optional value: `reconv train --json quickstart` would lose its recipe.
    """
    settled: list[str] = []
    for position, word in enumerate(args):
        follower = args[position + 1] if position + 1 < len(args) else ""
        is_file = follower.endswith(".json") or follower == STDOUT
        settled.append(f"--json={STDOUT}" if word == "--json" and not is_file else word)
    return settled


class NearestGroup(click.Group):
    """A group that names the nearest verb when it is given one it does not have."""

    command_class = Verb

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from reconv.recipe.presets import nearest

            close = nearest(args[0], self.list_commands(ctx)) if args else None
            if close is None or "Did you mean" in error.message:
                raise
            raise click.UsageError(f"{error.message} Did you mean {close!r}?", ctx) from error


def complete_recipes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The preset names that fit what was typed so far, and files for a recipe of one's own."""
    from reconv.recipe.presets import preset_names

    names = [CompletionItem(name) for name in preset_names() if name.startswith(incomplete)]
    return names or [CompletionItem(incomplete, type="file")]


def parse_settings(settings: Sequence[str]) -> list[Override]:
    """Each `a.b=v` as an override of a recipe field."""
    overrides: list[Override] = []
    for setting in settings:
        field, equals, value = setting.partition("=")
        if not equals or not field.strip():
            raise UsageError(
                f"--set takes field=value, not {setting!r}",
                then="for example --set optimizer.momentum=0.875; `reconv recipes show NAME` lists the fields",
            )
        overrides.append((field.strip(), value, "--set"))
    return overrides


def batch_override(size: int | None, per_device: int | None, devices: int) -> Override:
    """The global batch, however it was given; without a value where it was not."""
    if size is not None and per_device is not None:
        raise UsageError(
            "--batch-size and --batch-per-device both say how large the batch is",
            why=f"{per_device} per device x {devices} = {per_device * devices}, against {size}",
            then="give one of them",
        )
    if per_device is not None:
        return "batch.size", per_device * devices, "--batch-per-device"
    return "batch.size", size, "--batch-size"


def begin_compiler(device: str, devices: int | None) -> None:
    """Let the compiler of kernels prepare itself while torch is imported, unless this process only starts others."""
    from reconv.kernels.jit import compile_process as compiler

    if devices is None:
        compiler.begin(device)


def emit_json(result: object, json_file: str) -> None:
    """Write a result as JSON to stdout or to a file."""
    if json_file == STDOUT:  # which may take ASCII alone
        click.echo(json.dumps(result, indent=2, allow_nan=False))
    else:
        write_text(Path(json_file), json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file the user named, or say why it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="backslashreplace")  # file names may be any bytes
    except OSError as error:
        raise ResourceError(
            f"Cannot write {path}", where=str(path.parent), why=str(error.strerror), then="name another file"
        ) from error


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns; on a terminal the last one is wrapped, elsewhere nothing is."""
    widths = [max(len(line[index]) for line in (columns, *rows)) for index in range(len(columns) - 1)]
    indent = sum(widths) + 2 * len(widths)
    room = sys.maxsize
    if sys.stdout.isatty():
        room = max(_MIN_LAST_COLUMN, shutil.get_terminal_size().columns - indent)
    for number, line in enumerate((columns, *rows)):
        cells = "".join(f"{cell:<{width + 2}}" for cell, width in zip(line, widths, strict=False))
        first, *more = textwrap.wrap(line[-1], room) or [""]
        click.secho((cells + first).rstrip(), bold=number == 0)
        for text in more:
            click.echo(" " * indent + text)


def percent(fraction: float) -> str:
    """A fraction as people read it."""
    return f"{100 * fraction:.2f} %"
