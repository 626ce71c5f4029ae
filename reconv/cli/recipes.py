"""The verb `recipes`: what can be trained, what each recipe promises, where each value comes from.

Owns the two listings. Refuses to know how a recipe is read. Invariant: every field of a recipe is shown, with its
origin.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from reconv.cli.options import (
    Command,
    CommandGroup,
    bind_bare_json,
    complete_recipes,
    emit_json,
    json_option,
    parse_settings,
    percent,
    print_table,
)

if TYPE_CHECKING:
    from reconv.recipe.schema import Recipe


_COLUMNS = ("recipe", "network", "length", "batch", "published", "measured by us", "published by")
_LEAST_MISSED = ("published by", "network", "length", "batch")  # on a narrow terminal
_LEAST = 14  # characters of a last column that are worth showing


class RecipesGroup(CommandGroup):
    """`recipes` alone lists; its `--json` leaves the next word alone."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, bind_bare_json(args))


@click.group(cls=RecipesGroup, invoke_without_command=True)
@json_option
@click.pass_context
def recipes(ctx: click.Context, json_file: str | None) -> None:
    """List the recipes: network, data, what others have published and what we have measured.

    \b
    Examples:
      reconv recipes
      reconv recipes --json
      reconv recipes show resnet50
    """
    if ctx.invoked_subcommand is not None:
        return
    from reconv.recipe.loader import load
    from reconv.recipe.presets import preset_names

    found = [(name, load(name).recipe) for name in preset_names()]
    if json_file is not None:
        emit_json([_entry(name, recipe) for name, recipe in found], json_file)
        return
    table = [
        list(_COLUMNS),
        *([name, *_row(recipe)] for name, recipe in found),
    ]
    if sys.stdout.isatty():
        table = fit(table, shutil.get_terminal_size().columns)
    print_table(table[0], table[1:])
    hidden = "" if len(table[0]) == len(_COLUMNS) else " A wider terminal, or --json, has more columns."
    click.echo(
        "* may not carry over, or is no exact figure: reconv recipes show NAME says why, and prints every value; "
        f"reconv train NAME trains it.{hidden}"
    )


def fit(table: list[list[str]], width: int) -> list[list[str]]:
    """A table cut to a terminal's width, a line for each row: what is least missed left out, the last column cut."""
    for name in ("", *_LEAST_MISSED):
        kept = [column for column in zip(*table, strict=True) if column[0] != name]
        table = [list(line) for line in zip(*kept, strict=True)]
        room = width - sum(max(map(len, column)) + 2 for column in kept[:-1])
        if room >= min(_LEAST, max(map(len, kept[-1]))):
            break
    return [[*line[:-1], _shortened(line[-1], max(room, _LEAST))] for line in table]


def _shortened(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 1].rstrip() + "\N{HORIZONTAL ELLIPSIS}"


def _entry(name: str, recipe: Recipe) -> dict[str, Any]:
    """One recipe of the list as plain data."""
    return {
        "name": name,
        "description": recipe.description,
        "task": recipe.task,
        "model": recipe.model.name,
        "data": recipe.data.source,
        "length": str(recipe.length),
        "batch": recipe.batch.size,
        "expect": None if recipe.expect is None else recipe.expect.model_dump(mode="json"),
        "published": [claim.model_dump(mode="json") for claim in recipe.published],
        "measured": [found.model_dump(mode="json") for found in recipe.measured],
    }


def _row(recipe: Recipe) -> tuple[str, ...]:
    """What the table says about one recipe, after its name."""
    claim = next(iter(recipe.published), None)
    published = "-" if claim is None else _figure(claim.metric, claim.value, claim.spread)
    mark = "*" if claim is not None and claim.value is not None and claim.caveat else ""
    measured = [f"{_figure(m.metric, m.value, m.spread)} (n={m.n}, {m.date})" for m in recipe.measured]
    source = "-" if claim is None else f"{claim.source}; {claim.hardware}" if claim.hardware else claim.source
    return (
        recipe.model.name,
        str(recipe.length),
        str(recipe.batch.size),
        published + mark,
        ", ".join(measured) or "not yet",
        source,
    )


def _figure(metric: str, value: float | None, spread: float | None) -> str:
    """A result as people read it: top1 77.23 % ± 0.04."""
    if value is None:
        return "no figure"
    return f"{metric} {percent(value)}" + (f" ± {100 * spread:.2g}" if spread is not None else "")


@recipes.command("show", cls=Command)
@click.argument("name", shell_complete=complete_recipes)
@click.option("--set", "settings", metavar="A.B=V", multiple=True, help="Set any field; may be repeated.")
@json_option
def show(name: str, settings: tuple[str, ...], json_file: str | None) -> None:
    """Print every value of recipe NAME (a preset or a file) and where it comes from.

    \b
    Examples:
      reconv recipes show quickstart
      reconv recipes show my.yaml --set batch.size=512
      reconv recipes show resnet50 --json resnet50.json
    """
    from reconv.recipe.loader import load

    resolved = load(name, parse_settings(settings))
    values = dict(flatten(resolved.recipe.model_dump(mode="json")))
    origins = {field: resolved.origins.get(field, "default") for field in values}
    if json_file is not None:
        emit_json({field: {"value": values[field], "origin": origins[field]} for field in values}, json_file)
        return
    if resolved.header.strip():
        click.secho(resolved.header.strip() + "\n", dim=True)
    for line in layout(values, origins):
        click.echo(line)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested sections under their dotted names; an empty mapping is a leaf."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def layout(values: Mapping[str, Any], origins: Mapping[str, str]) -> list[str]:
    """Aligned lines of field, value and origin, a blank line between sections."""
    texts = {field: _text(value) for field, value in values.items()}
    name_width = max(len(field) for field in values)
    value_width = min(max(len(text) for text in texts.values()), 40)
    lines: list[str] = []
    section = ""
    for field, text in texts.items():
        head = field.partition(".")[0] if "." in field else ""
        if head != section and lines:
            lines.append("")
        section = head
        lines.append(f"{field:<{name_width}}  {text:<{value_width}}  {origins[field]}")
    return lines


def _text(value: object) -> str:
    """A value as one would type it in YAML."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case Mapping():
            return "{" + ", ".join(f"{key}: {_text(item)}" for key, item in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(_text(item) for item in value) + "]"
        case _:
            return str(value) if str(value) else '""'
