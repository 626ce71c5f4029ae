"""Migrate a command line: from the text that was typed to a recipe, the new command and a row for each flag."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import product, zip_longest
from pathlib import PurePosixPath
from typing import Any

from pydantic import ValidationError

from reconv.core.errors import UsageError
from reconv.migrate.closest_preset import PresetMatch, closest_preset
from reconv.migrate.command_line import KEYWORDS, SimpleCommand, shorten, split_commands, unfilled
from reconv.migrate.containers import Container
from reconv.migrate.data_preparation import data_command, is_data_script, shell_row
from reconv.migrate.environment_variables import variable_row
from reconv.migrate.flags import ParsedWords
from reconv.migrate.launchers import LAUNCHERS, ProgramLaunch, launcher_rows, strip_launchers
from reconv.migrate.programs import UnknownProgramError, find_by_flags, find_program, program_named, related_program
from reconv.migrate.programs.base import Program
from reconv.migrate.programs.nvidia_launch import script_command
from reconv.migrate.translation import Action, Row, Setting, Translation, determines_result, is_of_network
from reconv.migrate.wrappers import unwrap
from reconv.recipe.parts.contradiction import ContradictionError
from reconv.recipe.schema import Recipe
from reconv.recipe.units import Duration

_BRACES = re.compile(r"\{([^{}]*)\}")
_MAX_SCRIPTS = 64
_INITIAL = ("conv_init", "linear_init", "zero_gamma")  # options of networks that trained weights do not need
_PATH_OPTIONS = ("--data", "--out", "--json")
_PATH_VERBS = ("eval", "resume", "predict", "export", "average", "data convert", "data get", "data show", "bench infer")
_PATH_FIELDS = ("model.init", "model.resume_from")
_RECIPE_VERBS = ("train", "bench train", "bench infer", "bench data", "data show")


@dataclass(frozen=True, slots=True)
class TargetMachine:
    """The devices of the machine that the new command is for."""

    kind: str = "cpu"
    num_devices: int = 1


@dataclass(slots=True)
class Migration:
    """Result of migrating a command line of another program."""

    text: str
    program: Program | None = None
    launch: ProgramLaunch = field(default_factory=ProgramLaunch)
    rows: list[Row] = field(default_factory=list)
    configured: list[Row] = field(default_factory=list)  # values of a configuration that the command names
    settings: dict[str, Setting] = field(default_factory=dict)
    action: Action = field(default_factory=Action)
    match: PresetMatch | None = None
    notes: list[str] = field(default_factory=list)
    to_fill: list[tuple[str, str]] = field(default_factory=list)  # placeholder, what it is
    is_fragment: bool = False  # flags alone, without a program
    wanted: Recipe | None = None
    hint: str = ""  # a name of theirs that decides among presets that are equal
    environment: dict[str, str] = field(default_factory=dict)  # variables with a value that is certain
    variables: dict[str, str] = field(default_factory=dict)  # the same, as the text is read
    container: Container = field(default_factory=Container)
    skipped: UsageError | None = None  # of the first command that starts nothing known

    @property
    def defaults(self) -> list[Setting]:
        """The defaults of the program: fields that no typed flag sets."""
        return [setting for setting in self.settings.values() if not setting.is_typed]


def migrate_command(text: str, program: str | None = None) -> Migration:
    """Migrate the text of a command; `program` names the program where the text is ambiguous.

    Raises UsageError for a flag that is not known, a value that its program refuses, or a program that is not known.
    """
    result = Migration(text)
    commands = split_commands(text, result.variables)
    if not commands:
        raise UsageError("there is no command", hint="for example: reconv migrate 'python main.py --arch resnet50 DIR'")
    started = _add_commands(result, commands, text, program)
    if not started and result.skipped is not None:
        raise result.skipped
    if not started and not any(row.source == "data" for row in result.rows):
        raise UsageError(
            "the text starts no program that can be migrated",
            why=" ".join(commands[0].words) or "it sets variables only",
            hint="give the whole command line, as in reconv migrate 'python main.py --arch resnet50 /imagenet'",
        )
    if not started:
        result.action = Action("nothing", takes_recipe=False)
        result.notes.append(
            "--data takes ImageNet as unpacked, as TFRecords, or packed; reconv data convert repacks it"
        )
    if result.container.is_used:
        _use_host_paths(result)
    return result


def _use_host_paths(result: Migration) -> None:
    """Replace paths inside a container by the paths of this machine that are mounted there."""

    moved: dict[str, str] = {}

    def on_host(path: str) -> str:
        is_placeholder = unfilled(path) is not None or path in ("DATA", "RUN", "WEIGHTS")
        is_name = ":" in path.partition("/")[0]  # torchvision:resnet50, s3://...
        if is_placeholder or is_name:
            return path
        moved[path] = result.container.on_host(path, ask)
        return moved[path]

    def ask(path: str, why: str) -> None:
        result.to_fill.append((path, why))

    action = result.action
    action.options = [
        (name, on_host(value) if name in _PATH_OPTIONS and value else value) for name, value in action.options
    ]
    if action.verb in _PATH_VERBS:
        action.arguments = [on_host(argument) for argument in action.arguments]
    for name in _PATH_FIELDS:
        setting = result.settings.get(name)
        if setting is not None and isinstance(setting.value, str):
            result.settings[name] = replace(setting, value=on_host(setting.value))
    result.rows = [
        replace(row, text=row.text.removesuffix(path) + moved[path])
        if (path := row.text.rpartition(" ")[2]) in moved
        else row
        for row in result.rows
    ]


def _add_commands(
    result: Migration, commands: Sequence[SimpleCommand], text: str, name: str | None, started: bool = False
) -> bool:
    """Add the commands of a text to the result; whether one of them started a program."""
    operator = ""
    for command in commands:
        if started and operator.startswith("|") and operator != "||":
            row = Row(
                "shell", f"{operator} {' '.join(command.words)}", "no effect", "pipe the new command in the same way"
            )
            result.rows.append(row)
        else:
            started = _add_or_skip(result, command, text, name, started, len(commands) > 1) or started
        operator = command.operator
    return started


def _add_or_skip(
    result: Migration, command: SimpleCommand, text: str, name: str | None, started: bool, may_skip: bool
) -> bool:
    """Add one simple command, or name it as one that is not read here; whether it started a program."""
    num_rows, num_to_fill = len(result.rows), len(result.to_fill)
    try:
        is_start = _add_command(result, command, text, name, started)
    except UnknownProgramError as error:
        if not may_skip:
            raise
        result.skipped = result.skipped or error
        del result.rows[num_rows:], result.to_fill[num_to_fill:]
        result.launch = ProgramLaunch()
        shown = shorten(" ".join(command.words))
        result.rows.append(Row("shell", shown, "no effect", "is no program that can be migrated: it is not read"))
        return False
    if is_start and command.is_conditional:
        result.notes.append("the command stands inside if, for or case: it is migrated once, with what is certain")
    return is_start


def _add_command(result: Migration, command: SimpleCommand, text: str, name: str | None, started: bool) -> bool:
    """Add one simple command to the result; whether it started a program."""
    for variable, value in command.assignments:
        if command.is_conditional:
            why = "may not be set, or change: it stands inside if, for or case"
            result.rows.append(Row("environment", f"{variable}={value}", "no effect", why))
        else:
            _is_assignment(result, f"{variable}={value}", text)
        if not command.is_conditional and unfilled(value) is None:
            result.environment[variable] = value
    result.rows += [
        Row("shell", redirection, "no effect", "redirect the new command in the same way")
        for redirection in command.redirections
    ]
    words = _without_keywords(result, command.words, text)
    if not words or words[0] in ("export", "declare", "local"):
        result.rows += [Row("environment", word, "no effect", "is exported") for word in words[1:]]
        return False
    wrapped = unwrap(words)
    if wrapped is not None:
        result.rows.append(Row("shell", " ".join(wrapped.prefix), "no effect", wrapped.why))
        for word in wrapped.prefix:
            _is_assignment(result, word, text)
        result.container.enter(wrapped.prefix)
        inner = (
            split_commands(wrapped.text, result.variables)
            if wrapped.text is not None
            else [SimpleCommand(words=[*wrapped.words])]
        )
        return _add_commands(result, inner, text, name, started)
    row = shell_row(words)
    if row is not None:
        result.rows.append(row)
        return False
    if started:
        shown = " ".join(words)
        result.rows.append(Row("shell", shown, "not supported", "is a second program: migrate it on its own", False))
        return False
    if words[0].startswith("-"):
        _add_fragment(result, words, name)
    else:
        _add_program(result, words, name)
    return True


def _without_keywords(result: Migration, words: list[str], text: str) -> list[str]:
    """The words after a keyword of the shell or a prompt, and after assignments that follow it."""
    if len(words) > 1 and words[0] in KEYWORDS:
        words = words[1:]
        while words and _is_assignment(result, words[0], text):
            words = words[1:]
    return [words[0].removeprefix("!") or words[0], *words[1:]] if words else []  # `!python` of a notebook


def _is_assignment(result: Migration, word: str, text: str) -> bool:
    """True if a word is `NAME=VALUE`, which is then added to the result."""
    name, equals, value = word.partition("=")
    if not equals or not name.isidentifier():
        return False
    is_used = re.search(rf"\$\{{?{name}\b", text) is not None
    result.rows.append(variable_row(name, value, is_used))
    return True


def _add_program(result: Migration, words: Sequence[str], name: str | None) -> None:
    rest = strip_launchers(words, result.launch)
    result.rows += result.launch.rows
    result.to_fill += result.launch.to_fill
    for mount in result.launch.mounts:
        result.container.is_used = True
        result.container.mount(mount)
    if not rest:
        raise UnknownProgramError(
            "the command starts no program", why=" ".join(words), hint="add the script and its flags"
        )
    script = rest[0]
    if _BRACES.search(script) and script.endswith(".sh"):
        _add_script_pattern(result, script, rest[1:], name)
        return
    inner = script_command(script, rest[1:])
    if inner is not None:
        file = PurePosixPath(script).name
        result.rows.append(Row("script", script, "derived", f"what it runs: {' '.join(inner)}"))
        result.rows += [Row(file, word, "derived", "--out, the folder of results") for word in rest[1:2]]
        result.rows += [Row(file, word, "derived", "a flag of the program it runs") for word in rest[2:]]
        inner_launch = ProgramLaunch()
        program_words = strip_launchers(inner, inner_launch)
        result.launch.num_processes = inner_launch.num_processes
        program, _ = find_program(program_words[0], program_words[1:])
        _translate(result, program, program_words[1:], typed_by_user=False)
        return
    if is_data_script(script):
        action, rows, to_fill = data_command(script, rest[1:])
        result.action, result.rows, result.to_fill = action, result.rows + rows, result.to_fill + to_fill
        return
    if script.startswith("-"):
        program = program_named(name) if name else find_by_flags(rest)
        result.notes.append(f"the command names no script; its flags are those of {program.script}")
        _translate(result, program, rest)
        return
    others: list[Program] = []
    if name:
        program = related_program(name, script, rest[1:])
    else:
        program, others = find_program(script, rest[1:], result.launch.names)
    if others:
        names = ", ".join(f"--program {other.name}" for other in others)
        result.notes.append(f"read as {program.title}; its flags would fit {names}, too")
    _translate(result, program, rest[1:])


def _add_script_pattern(result: Migration, pattern: str, arguments: Sequence[str], name: str | None) -> None:
    """A pattern as in DGX{1,2}_RN50_{FP16,FP32}_90E.sh: the first one, and a note for each of the others."""
    choices = [[part.strip() for part in group.split(",")] for group in _BRACES.findall(pattern)]
    fixed = _BRACES.split(pattern)[::2]  # the text around the groups
    if math.prod(map(len, choices)) > _MAX_SCRIPTS:
        raise UsageError(f"{shorten(pattern)} stands for more than {_MAX_SCRIPTS} scripts", hint="name one of them")
    paths = [
        "".join(part for pair in zip_longest(fixed, chosen, fillvalue="") for part in pair)
        for chosen in product(*choices)
    ]
    result.rows.append(Row("script", pattern, "derived", f"{len(paths)} scripts; the first one is migrated"))
    _add_program(result, [paths[0], *arguments], name)
    for path in paths[1:]:
        other = Migration(path)
        _add_program(other, [path, *arguments], name)
        finish(other)
        preset = "" if other.match is None else other.match.preset
        changes = 0 if other.match is None else len(other.match.changes)
        more = f", with {changes} changes" if changes else ""
        result.notes.append(f"{PurePosixPath(path).name}: {preset}{more}")


def _add_fragment(result: Migration, words: Sequence[str], name: str | None) -> None:
    """Flags without a program: of a known program, or of a launcher."""
    if list(words) in (["--help"], ["-h"]) and name is None:
        result.action = Action("help", ["train"], [], False)
        result.rows.append(Row("flags", words[0], "same", "reconv train --help"))
        return
    result.is_fragment = True
    if name is None:
        rows = next((found for key in LAUNCHERS if (found := launcher_rows(key, words)) is not None), None)
        try:
            program = find_by_flags(words)
        except UsageError:
            if rows is None:
                raise
            result.rows += rows
            result.action = Action("nothing", takes_recipe=False)
            return
    else:
        program = program_named(name)
    _translate(result, program, words)


def _translate(result: Migration, program: Program, words: Sequence[str], typed_by_user: bool = True) -> None:
    """Parse the flags of a program and let it say what they mean."""
    parsed: ParsedWords = program.parser.parse(words, may_lack_values=result.is_fragment)
    result.program = program
    helped = next((item for item in parsed.typed if item.flag.names[-1] in _HELP or item.flag.names[0] in _HELP), None)
    if helped is not None:
        result.action = Action("help", program.help_verb.split(), [], False)
        result.rows.append(Row(program.script, helped.text, "same", f"reconv {program.help_verb} --help"))
        result.rows += [
            Row(program.script, item.text, "no effect", "only help is printed")
            for item in parsed.typed
            if item is not helped
        ]
        return
    configured = [] if program.configure is None else program.configure(parsed)
    t = Translation(program.script, program.flags, [*configured, *parsed.typed], result.launch.num_processes)
    t.environment = result.environment
    program.translate(t, parsed.positional)
    if t.data_variable:
        result.rows = [_read_variable(row, t.data_variable) for row in result.rows]
    _cut_long_warmup(t)
    if typed_by_user:
        result.rows += t.rows()
    else:
        result.configured += t.rows()
    result.configured += t.configured_rows()
    result.settings, result.action, result.hint = t.settings, t.action, t.hint
    result.notes += t.notes
    result.to_fill += [] if result.is_fragment else t.to_fill
    for item in parsed.typed:
        part = item.unfilled
        if part is not None:
            used = (
                "" if isinstance(item.value, str) and part in item.value else f"; until then {item.value}, the default"
            )
            result.to_fill.append((part, f"{item.flag.name} of {program.script}{used}"))
    result.to_fill += [
        (part, f"an argument of {program.script}") for word in parsed.positional if (part := unfilled(word)) is not None
    ]


def _cut_long_warmup(t: Translation) -> None:
    """A run that ends during warm-up: a line to W steps, cut after L, is a line over L steps to L/W of the rate.

    A line that begins at a fraction f of the rate is cut at f + (1 - f) L / W; a constant warm-up only gets shorter.
    """
    warmup, length = t.settings.get("schedule.warmup"), t.settings.get("length")
    if warmup is None or length is None:
        return
    try:
        whole, planned = Duration.parse(warmup.value), Duration.parse(length.value)
    except ValueError:
        return  # `wanted_recipe` refuses the value
    if whole.unit != planned.unit or whole.value <= planned.value or planned.value <= 0:
        return
    first, shape = t.settings.get("schedule.warmup_from"), t.settings.get("schedule.warmup_shape")
    start = Fraction(first.value) if first is not None and isinstance(first.value, float) else Fraction(0)
    share = start + (1 - start) * planned.exact / whole.exact
    if shape is not None and shape.value == "constant":
        share = Fraction(1)
    elif first is not None and start:
        t.settings["schedule.warmup_from"] = replace(first, value=float(start / share), flags=_joined(first, warmup))
    for name in ("schedule.lr", "schedule.end_lr", "schedule.milestone_lrs"):
        if (setting := t.settings.get(name)) is not None:
            t.settings[name] = replace(setting, value=_scaled(setting.value, share), flags=_joined(setting, warmup))
    t.settings["schedule.warmup"] = replace(warmup, value=length.value, flags=_joined(warmup, length))
    rates = f"rises along the same line, to {float(share):.4g} of its peak" if share != 1 else "does not rise"
    t.notes.append(
        f"the run of {length.value} ends within the warm-up of {warmup.value}, as theirs does: the rate {rates}"
    )


def _read_variable(row: Row, name: str) -> Row:
    """The row of a variable whose value the new command has."""
    is_it = row.source == "environment" and row.typed.startswith(f"{name}=")
    return replace(row, status="renamed", text=f"--data {row.typed.partition('=')[2]}") if is_it else row


def _scaled(rate: Any, share: Fraction) -> Any:
    return [_scaled(item, share) for item in rate] if isinstance(rate, list) else float(Fraction(str(rate)) * share)


def _joined(first: Setting, second: Setting) -> tuple[str, ...]:
    """The flags that both settings follow from."""
    return tuple(dict.fromkeys((*first.flags, *second.flags)))


_HELP = ("--help", "-h", "--helpfull", "--helpshort", "-?")


def finish(result: Migration) -> None:
    """Find the preset that is closest to what the command means."""
    if result.is_fragment or not result.settings or result.program is None:
        return
    recipe = wanted_recipe(result)
    result.wanted = recipe
    explicit = {name for name, setting in result.settings.items() if setting.is_typed or determines_result(name)}
    only_network = result.action.verb not in ("train", "bench train")

    def matters(name: str) -> bool:
        if only_network:
            return is_of_network(name) and not name.endswith(_INITIAL)
        return name in explicit or determines_result(name)

    result.match = closest_preset(recipe, matters, result.program.vendor, result.hint)


def wanted_recipe(result: Migration) -> Recipe:
    """The recipe that the command means; raises UsageError where its flags contradict each other."""
    tree: dict[str, Any] = {}
    for setting in result.settings.values():
        node = tree
        *sections, name = setting.field.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = setting.value
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        details = error.errors(include_url=False)
        causes = [detail.get("ctx", {}).get("error") for detail in details]
        for cause in causes:
            if isinstance(cause, ContradictionError):
                first = cause.found[0]
                raise _refused(result, first.fields[0], first.text) from error
        place = ".".join(str(part) for part in details[0]["loc"])
        raise _refused(result, place, details[0]["msg"].removeprefix("Value error, ")) from error


def _refused(result: Migration, name: str, why: str) -> UsageError:
    setting = next((result.settings[key] for key in result.settings if name.startswith(key)), None)
    origin = setting.origin if setting is not None else name
    return UsageError(
        f"{name} cannot be {setting.value if setting else 'this'}",
        where=origin,
        why=why,
        hint="change this flag of the command",
    )


def takes_recipe(result: Migration) -> bool:
    """True if the new command names a recipe."""
    return result.action.takes_recipe and result.action.verb in _RECIPE_VERBS
