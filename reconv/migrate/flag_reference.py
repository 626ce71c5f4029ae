"""Translation of each flag of a program: found by migrating a command that has it, for the documentation and tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from reconv.core.errors import UsageError
from reconv.migrate.flag_tables import step_range
from reconv.migrate.flags import Flag, any_text_is_true, text_bool, yes_no
from reconv.migrate.migration import migrate_command
from reconv.migrate.programs.base import Program
from reconv.migrate.translation import Status

_EXAMPLES: dict[Callable[[str], Any], str] = {
    int: "4",
    float: "0.5",
    text_bool: "True",
    yes_no: "true",
    any_text_is_true: "True",
    step_range: "5,8",
}
# What a program always needs.
REQUIRED = {
    "nvidia-launch": ["--model=resnet50", "--precision=AMP", "--mode=convergence", "--platform=DGX1V"],
    "torchvision-detection": ["--model=ssd300_vgg16"],
}


@dataclass(frozen=True, slots=True)
class FlagOutcome:
    """A flag as it may be typed, and what becomes of it."""

    flag: Flag
    typed: str
    status: Status
    text: str
    fields: tuple[str, ...] = ()  # of the recipe


def example_words(program: Program, flag: Flag) -> list[str]:
    """A flag with values, as in a command of its program."""
    if flag.arity == 0:
        return [flag.name]
    text = str(flag.choices[-1]) if flag.choices else _EXAMPLES.get(flag.type, "text")
    count = flag.arity if isinstance(flag.arity, int) else 2 if flag.arity in ("+", "*") else 1
    values = list(flag.example) or [text] * count
    return [f"{flag.name}={','.join(values)}"] if program.dialect == "absl" else [flag.name, *values]


def documented_flags(program: Program) -> list[Flag]:
    """The flags of a program, but help and those it always needs."""
    needed = {word.partition("=")[0] for word in REQUIRED.get(program.name, [])}
    return [flag for flag in program.flags if flag.key not in ("help", "h") and flag.name not in needed]


def outcome(program: Program, flag: Flag) -> FlagOutcome:
    """Translation of a flag that is typed alone."""
    words = example_words(program, flag)
    return _outcome(program, flag, words, [*REQUIRED.get(program.name, []), *flag.beside, *words])


def _outcome(program: Program, flag: Flag, words: Sequence[str], arguments: Sequence[str]) -> FlagOutcome:
    typed = " ".join(words)
    try:
        migration = migrate_command(" ".join([program.script, *arguments]), program.name)
    except UsageError as error:
        return FlagOutcome(flag, typed, "not supported", str(error).partition("\n")[0])
    row = next(row for row in migration.rows if row.typed == typed)
    fields = tuple(setting.field for setting in migration.settings.values() if flag.key in setting.flags)
    return FlagOutcome(flag, typed, row.status, row.text, fields)
