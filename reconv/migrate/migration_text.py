"""A migration as text and as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from reconv.migrate.migration import Migration, TargetMachine, takes_recipe
from reconv.migrate.new_command import command_text, command_words, needs_file, num_devices, to_fill_in
from reconv.migrate.translation import Row, show_setting, show_value

COLUMNS = ("from", "flag", "became", "here")


def headline(migration: Migration) -> str:
    """Headline: the program that was migrated."""
    if migration.program is None:
        if migration.is_fragment or migration.action.verb == "help":
            return "flags of " + ", ".join(dict.fromkeys(row.source for row in migration.rows))
        return "data preparation"
    launch = migration.launch
    processes = f", {launch.num_processes} processes" if launch.num_processes > 1 else ""
    hosts = f" on {launch.num_hosts} machines" if launch.num_hosts > 1 else ""
    kind = " (flags alone)" if migration.is_fragment else ""
    return f"{migration.program.title}{kind}{processes}{hosts}"


def recipe_lines(migration: Migration) -> Iterator[str]:
    """The preset and its changes, each with the flag it comes from."""
    match = migration.match
    if match is None:
        if migration.wanted is not None and takes_recipe(migration):
            yield "no preset can be changed into it: write it to a file with --write my.yaml"
        return
    if not match.changes:
        yield match.preset
        return
    count = len(match.changes)
    yield f"{match.preset}, with {count} change{'' if count == 1 else 's'}:"
    for name, value in match.changes.items():
        setting = migration.settings.get(name)
        origin = setting.origin if setting is not None else "their command does not have it"
        yield f"  {name}: {show_value(value)}   ({origin})"


def machine_notes(migration: Migration, machine: TargetMachine) -> Iterator[str]:
    """Notes on differences because of this machine."""
    recipe = migration.match.recipe if migration.match is not None else migration.wanted
    theirs = migration.launch.num_processes
    if recipe is None or not takes_recipe(migration) or migration.action.verb != "train":
        return
    here = num_devices(migration, machine)
    if theirs != here:
        group = recipe.batch.group
        norms = f", batch norm in groups of {group}" if isinstance(group, int) and group < recipe.batch.size else ""
        devices = "1 device" if here == 1 else f"{here} devices"
        yield (
            f"theirs: {theirs} process{'' if theirs == 1 else 'es'}; here: {devices} ({machine.kind}) "
            f"with the same global batch of {recipe.batch.size}{norms}"
        )
    if migration.launch.num_hosts > 1:
        yield "on several machines, start the command by torchrun, mpirun or srun: their variables are read"


def default_lines(migration: Migration) -> Iterator[str]:
    """The defaults of the program, which are part of the recipe."""
    for setting in migration.defaults:
        yield f"{show_setting(setting.field, setting.value)}   ({setting.origin})"


def as_data(migration: Migration, machine: TargetMachine, recipe_file: str | None = None) -> dict[str, Any]:
    """Everything as plain data, for --json."""
    match = migration.match
    words = command_words(migration, machine, recipe_file)
    return {
        "program": None if migration.program is None else migration.program.name,
        "title": headline(migration),
        "verb": migration.action.verb,
        "preset": None if match is None else match.preset,
        "changes": [] if match is None else [_change(migration, name, value) for name, value in match.changes.items()],
        "command": words,
        "command_text": command_text(words),
        "flags": [_row(row) for row in migration.rows],
        "configuration": [_row(row) for row in migration.configured],
        "settings": [
            {
                "field": setting.field,
                "value": setting.value,
                "origin": setting.origin,
                "typed": setting.is_typed,
            }
            for setting in migration.settings.values()
        ],
        "to_fill_in": [{"placeholder": part, "meaning": text} for part, text in to_fill_in(migration, words)],
        "notes": [*migration.notes, *machine_notes(migration, machine)],
        "recipe": None if match is None else match.recipe.model_dump(mode="json"),
    }


def _change(migration: Migration, name: str, value: Any) -> dict[str, Any]:
    setting = migration.settings.get(name)
    return {"field": name, "value": value, "origin": None if setting is None else setting.origin}


def _row(row: Row) -> dict[str, str]:
    return {"from": row.source, "flag": row.typed, "became": row.status, "here": row.text}


def suggests_file(migration: Migration) -> bool:
    """True if to propose --write."""
    if migration.is_fragment or not takes_recipe(migration):
        return False
    return migration.action.verb == "train" and needs_file(migration)


def table_rows(rows: Sequence[Row]) -> list[tuple[str, str, str, str]]:
    """The rows for a table."""
    return [(row.source, row.typed, row.status, row.text) for row in rows]
