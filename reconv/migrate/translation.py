"""Translation of another program's command: recipe fields, options of the new command, and a row for each flag."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from reconv.migrate.flags import Flag, Typed
from reconv.recipe.load.identity import may_change
from reconv.recipe.shortcuts import SHORTCUTS

Status = Literal["same", "renamed", "derived", "no effect", "not supported"]
# Options of `reconv train` that set a field to their value, or to so many epochs.
SHORT_OPTIONS = {
    shortcut.field: shortcut.option
    for shortcut in SHORTCUTS.values()
    if shortcut.name == "epochs" or (shortcut.parse is None and shortcut.type is not bool)
}
OVERRULED = "other flags of the command decide"
_SPEED_AND_LOGS = ("engine.", "parallel.", "memory.", "evaluate.", "log.", "save.", "expect")
_NOT_THE_RESULT = {
    *("seed", "batch.micro", "augment.decoder", "optimizer.implementation", "derive"),
    *("name", "description", "expect", "published", "measured", "code_path", "data.path", "loggers", "profile"),
}


def determines_result(name: str) -> bool:
    """True if a field decides what is learned, as opposed to speed, logs, and which random numbers are drawn."""
    return not may_change(name) and not name.startswith(_SPEED_AND_LOGS) and name not in _NOT_THE_RESULT


@dataclass(frozen=True, slots=True)
class Row:
    """Translation of one flag, variable or word of the command."""

    source: str  # the program or launcher, or "environment"
    typed: str
    status: Status
    text: str
    changes_result: bool = True  # of one that is not supported


@dataclass(frozen=True, slots=True)
class Setting:
    """A recipe field that the command determines."""

    field: str
    value: Any
    flags: tuple[str, ...]  # keys of the flags that it follows from; empty: always so in that program
    is_typed: bool
    origin: str


@dataclass(slots=True)
class Action:
    """The command to run instead."""

    verb: str = "train"  # of reconv: train, eval, bench infer, ...; help; nothing
    arguments: list[str] = field(default_factory=list)  # positional ones, after the recipe if there is one
    options: list[tuple[str, str | None]] = field(default_factory=list)
    takes_recipe: bool = True


class Translation:
    """Collects what a command means. `values` has every flag: typed, from a configuration, or the program's default."""

    def __init__(self, program: str, flags: Sequence[Flag], typed: Sequence[Typed], num_processes: int = 1) -> None:
        self.program = program
        self.num_processes = num_processes
        self.values: dict[str, Any] = {item.key: item.default for item in flags}
        self.typed: dict[str, Typed] = {}
        self._flags = {item.key: item for item in flags}
        for found in sorted(typed, key=lambda item: not item.origin):  # the command line overrides a configuration
            self.values[found.flag.key] = found.value
            self.typed[found.flag.key] = found
        self._all_typed = tuple(typed)
        self._positional_rows: list[Row] = []
        self.settings: dict[str, Setting] = {}
        self.action = Action()
        self.hint = ""  # a name of theirs that decides among presets that are equal
        self.notes: list[str] = []
        self.environment: Mapping[str, str] = {}
        self.data_variable = ""  # the variable that the data's path was taken from
        self.to_fill: list[tuple[str, str]] = []
        self._outcomes: dict[str, tuple[Status, str]] = {}
        self._aside: set[str] = set()  # keys of flags that are not supported and leave the result alone

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def is_typed(self, *keys: str) -> bool:
        """True if the command or its configuration has one of the flags."""
        return any(key in self.typed for key in keys)

    def is_on_command_line(self, *keys: str) -> bool:
        """True if the command line itself has one of the flags."""
        return any(key in self.typed and not self.typed[key].origin for key in keys)

    def set(self, name: str, value: Any, *keys: str) -> None:
        """Set a recipe field that follows from these flags; what only changes speed or logs needs a typed flag."""
        typed = [self.typed[key] for key in keys if key in self.typed]
        if keys and not self.is_on_command_line(*keys) and not determines_result(name):
            for key in keys:
                self._outcomes.setdefault(key, ("no effect", f"does not change the result; here {name} decides"))
            return
        if typed:
            origin = ", ".join(f"{item.text} ({item.origin})" if item.origin else item.text for item in typed)
        elif keys:
            known = [key for key in keys if key in self._flags and self.values[key] is not None]
            shown = ", ".join(f"{self._flags[key].name} {show_value(self.values[key])}" for key in known)
            origin = f"default of {self.program}" + (f": {shown}" if shown else "")
        else:
            origin = f"{self.program} always does"
        before = self.settings.get(name)
        for key in () if before is None else before.flags:
            if key not in keys:
                decides = self._flags[keys[0]].name if keys and keys[0] in self._flags else "another flag"
                self._outcomes.setdefault(key, ("no effect", f"{decides} decides"))
        self.settings[name] = Setting(name, value, keys, bool(typed), origin)

    def always(self, name: str, value: Any, why: str) -> None:
        """Set a field to what the program does without any flag, although only speed or logs depend on it."""
        self.settings[name] = Setting(name, value, (), True, why)

    def option(self, name: str, value: str | None, *keys: str) -> None:
        """Give the new command an option."""
        self.action.options.append((name, value))
        for key in keys:
            self.explain(key, *_option_outcome(key, name, value))

    def explain(self, key: str, status: Status, text: str, *, changes_result: bool = True) -> None:
        """Say what becomes of a flag that sets no field; `changes_result`: whether leaving it out does."""
        self._outcomes[key] = (status, text)
        if not changes_result:
            self._aside.add(key)

    def data(self, path: str, *keys: str) -> None:
        """Read the data at this path; without flags it was a positional argument."""
        self.option("--data", path, *keys)
        if not keys:
            self._positional_rows.append(Row(self.program, path, "renamed", f"--data {path}"))

    def positional(self, text: str, status: Status, outcome: str) -> None:
        """Say what becomes of a positional argument."""
        self._positional_rows.append(Row(self.program, text, status, outcome))

    def apply_table(self) -> None:
        """Do what the table of flags says: fields, options, fields that `sets` names with a converter."""
        for key, item in self._flags.items():
            value = self.values[key]
            if item.sets and value is not None:
                self.set(item.sets, item.convert(value) if item.convert else value, key)
            elif item.run == "--out" and key in self.typed:
                self.run_folder(str(value), key)
            elif item.run and key in self.typed:
                self.option(item.run, None if item.arity == 0 else str(value), key)

    def run_folder(self, path: str, key: str) -> None:
        """Write the run to this folder; the current one stays as it is."""
        if path.rstrip("/") in ("", "."):
            self.explain(key, "no effect", "every run has a folder of its own, runs/RECIPE/N; --out DIR names it")
        else:
            self.option("--out", path, key)

    def rows(self) -> list[Row]:
        """One row for each flag that was typed; later ones of the same name count."""
        rows = []
        for found in self._all_typed:
            if found.origin:
                continue
            if found is not self.typed[found.flag.key]:
                text = "it is given again later, and the last one counts"
                rows.append(Row(self.program, found.text, "no effect", text))
            else:
                rows.append(self._row(self.program, found))
        return rows + self._positional_rows

    def configured_rows(self) -> list[Row]:
        """One row for each value of a configuration that the command names."""
        return [self._row(found.origin, found) for found in self.typed.values() if found.origin]

    def _row(self, source: str, found: Typed) -> Row:
        changes_result = found.flag.key not in self._aside and found.flag.changes_result
        return Row(source, found.text, *self.outcome(found), changes_result)

    def outcome(self, found: Typed) -> tuple[Status, str]:
        """Translation of a typed flag."""
        key, item = found.flag.key, found.flag
        settings = [setting for setting in self.settings.values() if key in setting.flags]
        if self.action.verb in ("eval", "predict", "export", "average", "resume", "bench infer") and settings:
            settings = [setting for setting in settings if is_of_network(setting.field)]
            if not settings and key not in self._outcomes:
                return "no effect", f"is for training; {self.action.verb} does not use it"
        if settings:
            text = ", ".join(show_setting(setting.field, setting.value) for setting in settings)
            extra = self._outcomes.get(key)
            note = f" ({extra[1]})" if extra else ""
            is_less = extra is not None and extra[0] == "not supported"  # the field is not what the flag asks for
            return "not supported" if is_less else _setting_status(found, settings), text + note
        if key in self._outcomes:
            return self._outcomes[key]
        if item.none:
            return "no effect", item.none
        if item.missing:
            if found.value == item.default:
                return "no effect", f"is its default, {show_value(item.default)}, and the same here"
            return "not supported", item.missing
        if found.unfilled:
            return "renamed", "to fill in"
        return "no effect", OVERRULED


def is_of_network(name: str) -> bool:
    """True if a field is about the network and its input, which evaluation needs too."""
    sections = ("model.name", "model.options", "data.preprocess.", "precision.mode", "detection.", "data.background")
    return name.startswith(sections) or name == "task"


def show_value(value: Any) -> str:
    """A value as in YAML, on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, float):
        text = f"{value:.12g}"
        return text if float(text) == value else repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(show_value, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {show_value(item)}" for key, item in value.items()) + "}"
    return str(value)


def show_setting(name: str, value: Any) -> str:
    """A setting as it is typed: `--epochs 90` or `optimizer.momentum=0.9`."""
    option, text = SHORT_OPTIONS.get(name), show_value(value)
    if option == "--epochs":
        number = epochs_in(text)
        return f"{name}={text}" if number is None else f"{option} {number}"
    return f"{name}={text}" if option is None else f"{option} {text}"


def epochs_in(text: str) -> str | None:
    """The number of epochs in `90ep`; None for another duration, as in 500step."""
    return text.removesuffix("ep") if re.fullmatch(r"[0-9.]+ep", text) else None


def _setting_status(found: Typed, settings: Sequence[Setting]) -> Status:
    if len(settings) > 1 or len(settings[0].flags) > 1:
        return "derived"
    name, value = settings[0].field, settings[0].value
    if (epochs_in(show_value(value)) or show_value(value)) != show_value(found.value):
        return "derived"
    ours = {name.rpartition(".")[2], SHORT_OPTIONS.get(name, "").lstrip("-").replace("-", "_")}
    return "same" if {item.lstrip("-").replace("-", "_") for item in found.flag.names} & ours else "renamed"


def _option_outcome(key: str, name: str, value: str | None) -> tuple[Status, str]:
    same = name.lstrip("-").replace("-", "_") == key
    return "same" if same else "renamed", name if value is None else f"{name} {value}"
