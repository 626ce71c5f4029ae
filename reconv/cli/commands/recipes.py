"""`reconv recipes`: list the presets, or show every field of one recipe with its value and origin."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from reconv.cli.options import (
    Command,
    CommandGroup,
    Override,
    bind_bare_json,
    complete_field_names,
    complete_recipes,
    emit_json,
    json_option,
    parse_settings,
    percent,
    print_line,
    print_table,
    set_option,
)

if TYPE_CHECKING:
    from reconv.recipe.field_reference import FieldReference
    from reconv.recipe.load.resolved import Resolved
    from reconv.recipe.schema import Recipe


_COLUMNS = ("recipe", "network", "length", "batch", "published", "measured by us", "published by")
_DROPPED_FIRST = ("published by", "network", "length", "batch")  # on a narrow terminal
_MIN_LAST_WIDTH = 14  # characters of a shortened last column


class RecipesGroup(CommandGroup):
    """A group that lists the presets without a subcommand; its `--json` does not take the subcommand as a file."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, bind_bare_json(args))


@click.group(cls=RecipesGroup, invoke_without_command=True)
@click.option("--all", "every", is_flag=True, help="List all presets, not only the recommended ones.")
@click.option(
    "--vendor", metavar="NAME", help="List the presets of one vendor: nvidia, habana, graphcore, torchvision, ..."
)
@click.option("--model", metavar="TEXT", help="List the presets whose model has this in its name, as in resnet50.")
@json_option
@click.pass_context
def recipes(ctx: click.Context, every: bool, vendor: str | None, model: str | None, json_file: str | None) -> None:
    """List the recommended presets: network, length, batch, published results and results measured with Reconv.

    \b
    Examples:
      reconv recipes
      reconv recipes --all
      reconv recipes --vendor nvidia --model resnext
      reconv recipes show resnet50
      reconv recipes explain batch.group
      reconv recipes fields
    """
    if ctx.invoked_subcommand is not None:
        return
    from reconv.recipe.presets import preset_names, recommended_presets

    is_filtered = vendor is not None or model is not None
    names = preset_names() if every or is_filtered else recommended_presets()
    found = _select(names, vendor, model)
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
    hidden = "" if len(table[0]) == len(_COLUMNS) else " A wider terminal or --json shows more columns."
    left_out = len(preset_names()) - len(names)
    if left_out:
        click.echo(f"{left_out} more presets: reconv recipes --all, --vendor NAME or --model NAME.")
    click.echo(
        "* may not carry over, or is not exact. reconv recipes show NAME explains why and prints every field; "
        f"reconv train NAME trains it.{hidden}"
    )


def _select(names: Sequence[str], vendor: str | None, model: str | None) -> list[tuple[str, Recipe]]:
    """The presets of a vendor whose network's name contains `model`; raises UsageError if there are none."""
    from reconv.core.errors import UsageError
    from reconv.recipe.loader import load
    from reconv.recipe.presets import preset_vendor

    vendors = sorted({preset_vendor(name) for name in names})
    if vendor is not None and vendor not in vendors:
        raise UsageError(f"there are no presets of {vendor!r}", hint="the vendors are: " + ", ".join(vendors))
    found = [(name, load(name).recipe) for name in names if vendor is None or preset_vendor(name) == vendor]
    if model is not None:
        wanted = model.lower()
        networks = sorted({recipe.model.name for _, recipe in found})
        found = [(name, recipe) for name, recipe in found if wanted in recipe.model.name.lower()]
        if not found:
            raise UsageError(f"no preset trains a model like {model!r}", hint="they train: " + ", ".join(networks))
    return found


def fit(table: list[list[str]], width: int) -> list[list[str]]:
    """Fit a table to a terminal: drop the least important columns and shorten the last one."""
    for name in ("", *_DROPPED_FIRST):
        kept = [column for column in zip(*table, strict=True) if column[0] != name]
        table = [list(line) for line in zip(*kept, strict=True)]
        room = width - sum(max(map(len, column)) + 2 for column in kept[:-1])
        if room >= min(_MIN_LAST_WIDTH, max(map(len, kept[-1]))):
            break
    return [[*line[:-1], _shortened(line[-1], max(room, _MIN_LAST_WIDTH))] for line in table]


def _shortened(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 1].rstrip() + "\N{HORIZONTAL ELLIPSIS}"


def _entry(name: str, recipe: Recipe) -> dict[str, Any]:
    """One preset of the list as plain data."""
    return {
        "name": name,
        "description": recipe.description,
        "task": recipe.task,
        "model": recipe.model.name,
        "data": recipe.data.source,
        "length": str(recipe.length),
        "batch": recipe.batch.size,
        "derive": list(recipe.derive),
        "expect": None if recipe.expect is None else recipe.expect.model_dump(mode="json"),
        "published": [claim.model_dump(mode="json") for claim in recipe.published],
        "measured": [found.model_dump(mode="json") for found in recipe.measured],
    }


def _row(recipe: Recipe) -> tuple[str, ...]:
    """The columns of one preset after its name."""
    claim = next(iter(recipe.published), None)
    published = "-" if claim is None else _figure(claim.metric, claim.value, claim.spread)
    mark = "*" if claim is not None and claim.value is not None and claim.caveat else ""
    measured = [f"{_figure(m.metric, m.value, m.spread)} (n={m.n}, {m.date})" for m in recipe.measured]
    source = "-" if claim is None else f"{claim.source}; {claim.hardware}" if claim.hardware else claim.source
    fields = {"model.name": recipe.model.name, "length": str(recipe.length), "batch.size": str(recipe.batch.size)}
    return (
        *("by the data" if field in recipe.derive else value for field, value in fields.items()),
        published + mark,
        ", ".join(measured) or "not yet",
        source,
    )


def _figure(metric: str, value: float | None, spread: float | None) -> str:
    """A result as text: top1 77.23 % ± 0.04."""
    if value is None:
        return "no result"
    return f"{metric} {percent(value)}" + (f" ± {100 * spread:.2g}" if spread is not None else "")


@recipes.command("show", cls=Command)
@click.argument("name", shell_complete=complete_recipes)
@set_option
@click.option("--data", metavar="DIR", type=click.Path(), help="Derive from this dataset what the recipe leaves to it.")
@click.option("--init", metavar="WEIGHTS", help="Initial weights; derived values depend on them, too.")
@json_option
def show(name: str, settings: tuple[str, ...], data: str | None, init: str | None, json_file: str | None) -> None:
    """Print every field of recipe NAME (a preset or a file) with its value and origin.

    \b
    Examples:
      reconv recipes show quickstart
      reconv recipes show my.yaml --set batch.size=512
      reconv recipes show finetune --data flowers/
      reconv recipes show resnet50 --json resnet50.json
    """
    options = [("data.path", data, "--data"), ("model.init", init, "--init")]
    resolved = _resolve(name, [*(o for o in options if o[1] is not None), *parse_settings(settings)], data)
    values = dict(flatten(resolved.recipe.model_dump(mode="json")))
    origins = {field: resolved.origins.get(field, "default") for field in values}
    origins |= {field: "derived from the data (--data DIR)" for field in values if resolved.is_open(field)}
    if json_file is not None:
        emit_json({field: {"value": values[field], "origin": origins[field]} for field in values}, json_file)
        return
    if resolved.header.strip():
        for line in (*resolved.header.strip().split("\n"), ""):
            print_line(line, dim=True)
    for line in layout(values, origins):
        print_line(line)
    _print_published(resolved.recipe)


@recipes.command("explain", cls=Command)
@click.argument("field", required=False, shell_complete=complete_field_names)
@json_option
def explain(field: str | None, json_file: str | None) -> None:
    """Explain a recipe FIELD or section: what it does, the values it takes and its default.

    \b
    Examples:
      reconv recipes explain                 list the sections
      reconv recipes explain batch.group
      reconv recipes explain augment
    """
    from dataclasses import asdict

    from reconv.recipe.field_reference import explain_field, field_references

    if field is None:
        found = [entry for name, entry in field_references().items() if "." not in name]
    else:
        found = explain_field(field)
    if json_file is not None:
        emit_json([asdict(entry) for entry in found], json_file)
        return
    for number, entry in enumerate(found):
        if number and field is not None:
            click.echo()
        default = "" if entry.is_section else f"  (default: {entry.default or 'none, it must be given'})"
        click.echo(click.style(entry.name, bold=True) + default)
        click.echo(textwrap.indent(textwrap.fill(entry.description, 96), "    "))
        if not entry.is_section and field is not None:
            click.echo(textwrap.indent(textwrap.fill(f"takes {entry.kind}", 96), "    "))


@recipes.command("fields", cls=Command)
@click.argument("pattern", default="", shell_complete=complete_field_names)
@click.option("--model", metavar="NAME", help="List the options of this model too, as in model.options.norm.")
@json_option
def fields(pattern: str, model: str | None, json_file: str | None) -> None:
    """List every recipe field, or those whose name contains PATTERN: what it does, the values it takes, its default.

    \b
    Examples:
      reconv recipes fields
      reconv recipes fields warmup
      reconv recipes fields 'augment.*'
      reconv recipes fields model.options --model efficientnet_b4
    """
    from dataclasses import asdict

    from reconv.recipe.field_reference import matching_fields

    found = matching_fields(pattern, () if model is None else model_option_references(model))
    if json_file is not None:
        emit_json([asdict(entry) for entry in found], json_file)
        return
    print_table(("field", "what it does"), [(entry.name, _sentence(entry)) for entry in found])
    if model is None and not pattern:
        click.echo("Options of a model: reconv recipes fields --model NAME. Set a field: train --set FIELD=VALUE.")


def _sentence(entry: FieldReference) -> str:
    default = f"default: {entry.default}" if entry.default else "it must be given"
    return f"{entry.description} Takes {entry.kind}; {default}."


def model_option_references(network: str) -> list[FieldReference]:
    """The options of one of our networks as fields `model.options.NAME`, with the network's own defaults."""
    from reconv.models import model_options
    from reconv.recipe.field_reference import value_reference, value_text

    return [
        value_reference(f"model.options.{o.name}", o.description, o.annotation, value_text(o.default))
        for o in model_options(network)
    ]


def _print_published(recipe: Recipe) -> None:
    """A table of what vendors have published for the recipe's network, if anything, below what we measured."""
    from reconv.planner.step_time import measured_by_us
    from reconv.recipe.published import Figure, comparison, figures_for, network_of, newest

    theirs = newest(figures_for(recipe, "training", "accuracy"))
    if not theirs:
        return
    network, precision = network_of(recipe), recipe.precision.family
    speeds = measured_by_us(network, precision) if theirs[0].image_size == recipe.data.preprocess.size else []
    ours = [
        Figure(
            kind="training",
            network=network,
            hardware="NVIDIA H200",
            precision=precision,
            source="Reconv, measured",
            devices=1,
            batch=batch,
            images_per_s=images_per_s,
        )
        for batch, images_per_s in speeds
    ]
    ours += [
        Figure(
            kind="accuracy",
            network=network,
            hardware=result.hardware,
            precision=precision,
            source=f"Reconv, {result.date}, n={result.n}",
            top1=100 * result.value,
            spread=None if result.spread is None else 100 * result.spread,
        )
        for result in recipe.measured
        if result.metric == "top1"
    ]
    print_line()
    print_line("Published for this model, beside Reconv:", dim=True)
    print_table(*comparison(ours, theirs))


def _resolve(name: str, overrides: list[Override], data: str | None) -> Resolved:
    """The recipe, with its derived values if there is data."""
    from reconv.recipe.loader import load

    if data is None:
        return load(name, overrides)
    from reconv.build.derived_recipe import load_derived

    return load_derived(name, overrides).resolved


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested sections with their dotted names; an empty mapping is a leaf."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def layout(values: Mapping[str, Any], origins: Mapping[str, str]) -> list[str]:
    """Aligned lines of field, value and origin, with a blank line between sections."""
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
    """A value as in YAML."""
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


@recipes.command("schema", cls=Command)
def schema() -> None:
    """Print the JSON Schema of recipe files, with which editors complete and check them.

    \b
    Examples:
      reconv recipes schema > recipe.schema.json
    """
    import json

    from reconv.recipe.json_schema import recipe_json_schema

    click.echo(json.dumps(recipe_json_schema(), indent=2))
