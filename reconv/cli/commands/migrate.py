"""`reconv migrate`: what a command of another program is here."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from reconv.cli.options import Command, emit_json, json_option, print_line, print_note, print_table, write_text

if TYPE_CHECKING:
    from reconv.migrate.migration import Migration, TargetMachine


@click.command(cls=Command)
@click.argument("command")
@click.option("--program", metavar="NAME", help="The program, if several have the same name, as in graphcore.")
@click.option("--write", "recipe_file", metavar="FILE.yaml", type=click.Path(), help="Write the recipe to a file.")
@click.option("--run", is_flag=True, help="Run the new command.")
@click.option("--allow-differences", is_flag=True, help="With --run: also with flags that are not supported.")
@json_option
def migrate(
    command: str,
    program: str | None,
    recipe_file: str | None,
    run: bool,
    allow_differences: bool,
    json_file: str | None,
) -> int:
    """Translate COMMAND, a command line of another program, to a recipe and a command of Reconv.

    COMMAND is the command line as you typed it, in single quotes, with `export`, `mpirun`, `docker run` and all; the
    file of a shell script or of a vendor's configuration; or - for standard input. It starts a program of NVIDIA
    (main.py, launch.py, the training scripts, SSD300), Habana (train.py, main.py, imagenet_main.py, ssd.py), Graphcore
    (train.py), torchvision (classification and SSD), timm (train.py) or PyTorch's examples (main.py). Nothing of it is
    executed. The printed table has a row for every flag; an unknown flag is an error.

    \b
    Examples:
      reconv migrate 'python ./main.py --arch resnet50 -c fanin --label-smoothing 0.1 /imagenet'
      reconv migrate 'torchrun --nproc_per_node=8 train.py --model resnext50_32x4d --epochs 100'
      reconv migrate ./resnet50v1.5/training/AMP/DGX1_RN50_AMP_90E.sh
      reconv migrate 'python train.py --config mk2_resnet50_mlperf_pod16_bs20' --write mine.yaml
    """
    from reconv.migrate.migration import finish, migrate_command
    from reconv.migrate.migration_text import as_data
    from reconv.migrate.new_command import command_text, command_words

    text = _read(command)
    migration = migrate_command(text, program)
    finish(migration)
    machine = _this_machine()
    words = command_words(migration, machine, recipe_file)
    if recipe_file is not None:
        from reconv.migrate.recipe_file import recipe_text

        write_text(Path(recipe_file), recipe_text(migration, command_text(words)))
    if json_file is not None:
        emit_json(as_data(migration, machine, recipe_file), json_file)
    else:
        _print(migration, machine, recipe_file)
    if run and not allow_differences:
        _check_differences(migration)
    return _run(migration, words) if run else 0


def _read(command: str) -> str:
    """The command's text: itself, a file, or standard input."""
    from reconv.migrate.config_file import command_in_file

    if command == "-":
        return sys.stdin.read()
    return command_in_file(command) or command


def _this_machine() -> TargetMachine:
    """The devices of this machine."""
    from reconv.device import count_devices, device_kind
    from reconv.migrate.migration import TargetMachine

    kind = device_kind("auto")
    return TargetMachine(kind, 1 if kind == "cpu" else count_devices(kind) or 1)


def _print(migration: Migration, machine: TargetMachine, recipe_file: str | None) -> None:
    from reconv.migrate.migration_text import (
        COLUMNS,
        default_lines,
        headline,
        machine_notes,
        recipe_lines,
        suggests_file,
        table_rows,
    )
    from reconv.migrate.new_command import WRITTEN_RECIPE, command_text, command_words, to_fill_in

    print_line(f"program: {headline(migration)}", bold=True)
    _print_section("recipe", list(recipe_lines(migration)))
    words = command_words(migration, machine, recipe_file)
    _print_section("command", [command_text(words)] if words else ["nothing to do"])
    if suggests_file(migration) and recipe_file is None:
        file_words = command_words(migration, machine, WRITTEN_RECIPE)
        print_line(f"  or, with --write {WRITTEN_RECIPE}: {command_text(file_words)}")
    missing = [] if recipe_file == WRITTEN_RECIPE else to_fill_in(migration, words)
    _print_section("to fill in", [f"{part}: {text}" for part, text in missing])
    _print_section("notes", [*migration.notes, *machine_notes(migration, machine)])
    print_line()
    print_table(COLUMNS, table_rows(migration.rows))
    if migration.configured:
        print_line()
        print_table(("configuration", "value", "became", "here"), table_rows(migration.configured))
    if not migration.is_fragment:
        _print_section("not typed, and therefore as in their program", list(default_lines(migration)))
    if recipe_file is not None:
        print_note(f"wrote {recipe_file}")


def _print_section(title: str, lines: list[str]) -> None:
    if lines:
        print_line()
        print_line(f"{title}:", bold=True)
        for line in lines:
            print_line(f"  {line}")


def _check_differences(migration: Migration) -> None:
    """Refuse to run a command that computes something else than the one that was typed."""
    from reconv.core.errors import UsageError

    rows = [row for row in (*migration.rows, *migration.configured) if row.status == "not supported"]
    different = [f"{row.typed} ({row.text})" for row in rows if row.changes_result]
    if different:
        raise UsageError(
            "the new command would compute something else: " + "; ".join(different),
            hint="leave these flags out, or run it all the same with --allow-differences",
        )


def _run(migration: Migration, words: list[str]) -> int:
    """Run the new command, unless something has to be filled in first."""
    from reconv.cli import main
    from reconv.core.errors import UsageError
    from reconv.migrate.new_command import to_fill_in

    missing = list(
        dict.fromkeys(part for part, _ in to_fill_in(migration, words) if any(part in word for word in words))
    )
    if missing:
        raise UsageError(
            f"{', '.join(missing)} must be filled in before the command can run",
            hint="put the value into the command that you migrate",
        )
    if not words:
        raise UsageError("there is nothing to run", hint="leave out --run")
    main([os.path.expanduser(word) for word in words[1:]])
    return 0
