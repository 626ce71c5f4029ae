"""A program of another vendor: its flags, how it is recognized, and how its commands are translated."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from reconv.core.errors import UsageError
from reconv.migrate.command_line import unfilled
from reconv.migrate.flags import Dialect, Flag, FlagParser, ParsedWords, Typed
from reconv.migrate.programs.torchvision_names import TORCHVISION_CLASSIFIERS
from reconv.migrate.translation import Translation
from reconv.recipe.presets import nearest

Translate = Callable[[Translation, Sequence[str]], None]
Configure = Callable[[ParsedWords], list[Typed]]


@dataclass(frozen=True)
class Program:
    """One program; `scripts` are its file names, `path` a pattern of paths that only it has."""

    name: str
    title: str
    vendor: str  # folder of its presets
    scripts: tuple[str, ...]
    flags: tuple[Flag, ...]
    translate: Translate
    path: str = r"(?!)"
    dialect: Dialect = "argparse"
    configure: Configure | None = None  # values of the configuration that the command names
    usual: bool = False  # chosen among programs with the same flags and file name
    help_verb: str = "train"
    num_positional: int = 0  # arguments without a flag
    needs_data: bool = False
    required: str = ""  # key of a flag that it requires and programs of the same name do not have
    launchers: tuple[str, ...] = ()  # what its documentation starts it with
    parser: FlagParser = field(init=False, compare=False)

    def __post_init__(self) -> None:
        helped = any("--help" in item.names for item in self.flags)
        help_names = ("-h", "--help") if self.dialect != "absl" else ("-h", "--help", "--helpfull", "--helpshort", "-?")
        taken = {name for item in self.flags for name in item.names}
        extra = () if helped else (Flag(tuple(name for name in help_names if name not in taken), bool, False, 0),)
        object.__setattr__(self, "flags", (*self.flags, *extra))
        object.__setattr__(self, "parser", FlagParser(self.script, self.flags, self.dialect))

    @property
    def script(self) -> str:
        return self.scripts[0]

    def is_at(self, path: str) -> bool:
        """True if a script's path is that of this program."""
        return re.search(self.path, path) is not None

    def accepts(self, words: Sequence[str], may_lack_values: bool = False) -> bool:
        """True if all flags and arguments among the words are its own, with values that it takes."""
        try:
            parsed = self.parser.parse(words, may_lack_values=may_lack_values)
        except UsageError:
            return False
        if self.required and not may_lack_values and all(item.flag.key != self.required for item in parsed.typed):
            return False
        return len(parsed.positional) <= self.num_positional

    def is_complete(self, words: Sequence[str]) -> bool:
        """True if the words have the data, where the program does not run without."""
        parsed = self.parser.parse(words)
        keys = {item.flag.key for item in parsed.typed}
        return not self.needs_data or bool(parsed.positional or keys & {"data_dir", "config"})

    def is_certain(self, words: Sequence[str]) -> bool:
        """True if words name what few programs have: a value of a short list, or one of its configurations."""
        parsed = self.parser.parse(words)
        if any(item.flag.choices and not item.unfilled for item in parsed.typed):
            return True
        try:
            return self.configure is not None and bool(self.configure(parsed))
        except UsageError:
            return False


def refuse_positional(t: Translation, words: Sequence[str]) -> None:
    """An error for the first positional argument of a program that takes none."""
    for word in words:
        raise UsageError(
            f"{t.program} takes no argument {word!r}",
            why="it stands alone, without a flag",
            hint="check the quotes of the command",
        )


def nothing_to_do(t: Translation, keys: Sequence[str], why: str, note: str) -> None:
    """For a program that has no counterpart because none is needed: no flag of it has an effect."""
    t.action.verb, t.action.takes_recipe = "nothing", False
    for key in keys:
        t.explain(key, "no effect", why)
    t.notes.append(note)


def take_data(t: Translation, words: Sequence[str], default: str = "") -> None:
    """The only positional argument is the data."""
    refuse_positional(t, words[1:])
    if words:
        t.data(words[0])
    elif t.action.verb not in ("help",):
        missing_data(t, default)


def take_device(t: Translation) -> None:
    """`--device cpu` is an option here, too; any other device is found without one."""
    if t["device"] == "cpu":
        t.option("--device", "cpu", "device")
    else:
        t.explain("device", "no effect", "auto finds the device of this machine")


def resume_checkpoint(t: Translation) -> None:
    """`--resume FILE` of a PyTorch program: training continues where its checkpoint ends."""
    if not t["resume"]:
        return
    before = t.settings.pop("model.init", None)
    for key in () if before is None else before.flags:
        t.explain(key, "no effect", "the weights are those of --resume")
    t.set("model.resume_from", t["resume"], "resume")
    t.explain("resume", "renamed", "weights, momentum, loss scale and epoch of the file; what it lacks is logged")


def start_epoch(t: Translation) -> None:
    """`--start-epoch N`, which a checkpoint's own epoch replaces in the programs, too."""
    if not t.is_typed("start_epoch"):
        return
    if t["resume"]:
        t.explain("start_epoch", "no effect", "the epoch in the checkpoint decides, as in their program")
    elif t["start_epoch"]:
        t.explain("start_epoch", "not supported", "without a checkpoint a run begins at epoch 0")
    else:
        t.explain("start_epoch", "no effect", "0 is the beginning, as here")


def missing_data(t: Translation, default: str = "", variable: str = "") -> None:
    """The command names no data: take the program's variable, or say so, with the folder that it would read."""
    if variable in t.environment:
        t.data_variable = variable
        t.option("--data", t.environment[variable])
        return
    shown = f"; {t.program} would read {default}" if default else ""
    t.to_fill.append(("DATA", f"--data: the folder of the dataset{shown}"))
    t.option("--data", "DATA")


def needs_weights(t: Translation, key: str) -> None:
    """A part of the network is not trained, so it needs weights, which the command does not name."""
    t.set("model.init", "WEIGHTS", key)
    t.to_fill.append(("WEIGHTS", "--init: a weights file, a run or torchvision:NAME, for what is not trained"))


def own_model(name: str, own: Sequence[str], package: str) -> str:
    """The name of a network: our own, or PACKAGE:NAME; raises UsageError for a name that is probably mistyped."""
    if name in own:
        return name
    if package == "torchvision" and name not in TORCHVISION_CLASSIFIERS and unfilled(name) is None:
        near = nearest(name, TORCHVISION_CLASSIFIERS)
        if near is not None:
            raise UsageError(f"torchvision has no network {name!r}", hint=f"did you mean {near}?")
    return f"{package}:{name}"
