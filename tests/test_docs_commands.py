"""What the documentation tells people to type exists: commands parse, recipes load, Python compiles, pages are run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import pytest
from code_blocks import ROOT, CodeBlock, code_blocks, inline_commands, pages, reconv_commands

from reconv.cli import reconv as command_line
from reconv.cli.options import parse_settings
from reconv.recipe.loader import load
from reconv.recipe.presets import preset_names

BLOCKS = [block for page in pages() for block in code_blocks(page)]
COMMANDS = [
    *((block.place, args) for block in BLOCKS for args in reconv_commands(block)),
    *((str(page.relative_to(ROOT)), args) for page in pages() for args in inline_commands(page)),
]
# Pages whose Python is run by a test of their own.
RUN_PYTHON = {
    "CONTRIBUTING.md",
    "README.md",
    "docs/coming-from/ultralytics.md",
    "docs/how-to/custom-code.md",
    "docs/how-to/fuse.md",
    "docs/how-to/parts.md",
    "docs/how-to/python.md",
    "docs/tutorials/onnxruntime.md",
}
PLACEHOLDER = re.compile(r"\$|^\[|\.\.\.$|^[A-Z][A-Z0-9_/]*$|[<>]")
FIELDS = {"epochs": "length", "batch_size": "batch.size", "lr": "schedule.lr", "seed": "seed", "model": "model.name"}


def parse(args: list[str]) -> click.Context | None:
    """The context that the command line makes of the arguments; None for `reconv COMMAND` and the like.

    Raises click.UsageError where a command, an option or its value does not exist. A placeholder takes the place of any
    value, and arguments may be missing, as in running text.
    """
    command: click.Command = command_line
    words = list(args)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        if PLACEHOLDER.search(words[0]):
            return None
        if words[0] not in command.commands:
            if command.invoke_without_command:
                break
            raise click.UsageError(f"no command {words[0]!r}")
        command = command.commands[words.pop(0)]
    try:
        return command.make_context(command.name, words)
    except click.exceptions.Exit:
        return None  # --help, --version
    except (click.MissingParameter, click.exceptions.NoArgsIsHelpError):
        return None
    except click.BadOptionUsage as error:
        if words[-1:] == [error.option_name]:  # the option itself is meant, as in `reconv train --data`
            return None
        raise
    except click.BadParameter as error:
        if "does not exist" in error.message or any(PLACEHOLDER.search(word) for word in words):
            return None
        raise


def test_every_command_of_the_docs_parses() -> None:
    wrong = []
    for place, args in COMMANDS:
        try:
            parse(args)
        except click.UsageError as error:
            wrong.append(f"{place}: reconv {' '.join(args)}: {error.message}")
    assert len(COMMANDS) > 300
    assert wrong == []


def recipe_of(context: click.Context) -> tuple[str, list[tuple[str, Any, str]]] | None:
    """The preset that a command trains or shows, and what the command sets; None where it names none."""
    name = context.params.get("recipe")
    if not isinstance(name, str) or name not in preset_names() or "finetune" in name:
        return None
    overrides = parse_settings(context.params.get("settings") or ())
    for option, field in FIELDS.items():
        value = context.params.get(option)
        if value is not None:
            overrides.append((field, f"{value:g}ep" if option == "epochs" else value, f"--{option}"))
    return None if any(PLACEHOLDER.search(str(value)) for _, value, _ in overrides) else (name, overrides)


def test_every_recipe_that_the_docs_train_loads_with_what_they_set() -> None:
    loaded = 0
    for place, args in COMMANDS:
        context = parse(args)
        found = recipe_of(context) if context else None
        if found:
            try:
                load(found[0], found[1])
            except Exception as error:
                raise AssertionError(f"{place}: reconv {' '.join(args)}") from error
            loaded += 1
    assert loaded > 80


def test_every_recipe_file_of_the_docs_loads(tmp_path: Path) -> None:
    recipes = [
        block for block in BLOCKS if block.language == "yaml" and re.search(r"^extends:", block.text, re.MULTILINE)
    ]
    assert len(recipes) >= 7
    for number, block in enumerate(recipes):
        file = tmp_path / f"recipe-{number}.yaml"
        file.write_text(block.text)
        try:
            load(str(file))
        except Exception as error:
            raise AssertionError(block.place) from error


def is_run(block: CodeBlock) -> bool:
    has_shell = any(other.language == "sh" for other in BLOCKS if other.page == block.page)
    return has_shell or block.page in RUN_PYTHON


def test_python_of_the_docs_is_run_or_says_why_not() -> None:
    python = [block for block in BLOCKS if block.language == "python"]
    assert len(python) > 40
    for block in python:
        if block.not_run:
            compile(block.text, block.place, "exec")
    assert [block.place for block in python if not is_run(block) and not block.not_run] == []


@pytest.mark.parametrize(
    "line", ["reconv trian x", "reconv train x --no-such", "srun -n 8 reconv train x --epochs many"]
)
def test_a_command_that_does_not_exist_is_found(line: str) -> None:
    block = CodeBlock("page.md", 1, "bash", f"{line}  # a comment\n", "")
    [args] = reconv_commands(block)
    with pytest.raises(click.UsageError):
        parse(args)
