"""Shortcuts of recipe fields: options of `reconv train`, keywords of `reconv.train`, and what `reconv migrate` prints.

Each stands in `SHORTCUTS` once. Commands take their options from there (`cli.options.shortcut_options`); the keywords
of `reconv.train` are written out for editors, and tests/api/test_signatures.py compares them with this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal

from reconv.core.errors import UsageError

if TYPE_CHECKING:
    from reconv.recipe.loader import Override

Style = Literal["option", "keyword"]


@dataclass(frozen=True, slots=True)
class Shortcut:
    """A short way to set a recipe field."""

    name: str  # of the keyword; the option has dashes
    field: str
    help: str
    type: type = str  # bool: a flag
    metavar: str | None = None
    least: int | None = None
    choices: tuple[str, ...] = ()
    parse: Callable[[Any, int], Any] | None = None  # from a value and the number of devices to the field's

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")

    def origin(self, style: Style) -> str:
        """Origin of a value, for messages."""
        return self.option if style == "option" else f"train({self.name}=...)"


def epochs_text(number: float) -> str:
    """A number of epochs as a duration, which has no exponent."""
    return f"{Decimal(repr(number)).normalize():f}ep"


def step_range(steps: Any) -> list[int]:
    """`50,53` or (50, 53) as the first and last step; a single number is both."""
    if not isinstance(steps, str):
        return list(steps)
    words = steps.split(",")
    if len(words) > 2 or not all(word.strip().isdecimal() for word in words):
        raise UsageError(f"--profile takes a range of steps, not {steps!r}", hint="for example --profile 50,53")
    return [int(words[0]), int(words[-1])]


def _per_device(size: int, num_devices: int) -> Any:
    from reconv.recipe.units import BatchPerDevice  # imports pydantic, which the command line does not need yet

    return BatchPerDevice(size, num_devices)


_TABLE = (
    Shortcut("epochs", "length", "Number of epochs.", float, "N", 0, parse=lambda number, devices: epochs_text(number)),
    Shortcut("batch_size", "batch.size", "Global batch size: all devices, one step.", int, "N", 1),
    Shortcut("batch_per_device", "batch.size", "Batch size of one device.", int, "N", 1, parse=_per_device),
    Shortcut("lr", "schedule.lr", "Learning rate as in 0.1, 2^-11 or '0.1 per 256' (schedule.lr).", str, "X"),
    Shortcut("workers", "data.num_workers", "Number of data loading workers.", int, "N", 0),
    Shortcut("seed", "seed", "Random seed.", int, "N", 0),
    Shortcut("model", "model.name", "Another model, by name.", str, "NAME"),
    Shortcut(
        *(
            "init",
            "model.init",
            "Initial weights: a file, a run, torchvision:NAME, timm:NAME, hf://OWNER/MODEL or a URL.",
        ),
        metavar="WEIGHTS",
    ),
    Shortcut(
        *("resume_from", "model.resume_from", "Continue a checkpoint of torchvision's, NVIDIA's or timm's program."),
        metavar="FILE",
    ),
    Shortcut("freeze", "model.freeze_backbone", "Train only the head; needs --init.", bool),
    Shortcut(
        *("profile", "profile", "Profile steps A to B, counted from 1, both included."),
        metavar="A,B",
        parse=lambda steps, devices: step_range(steps),
    ),
    Shortcut(
        *("on_divergence", "engine.divergence.policy"),
        "When the loss rises above its start or a metric collapses; rewind: back to the best, with a smaller rate.",
        choices=("warn", "stop", "rewind", "ignore"),
    ),
)
SHORTCUTS: Mapping[str, Shortcut] = {shortcut.name: shortcut for shortcut in _TABLE}


def shortcut_overrides(values: Mapping[str, Any], num_devices: int = 1, style: Style = "option") -> list[Override]:
    """The recipe fields that the shortcuts among `values` set; None and False set nothing."""
    given = {name: values[name] for name in SHORTCUTS if values.get(name) is not None and values[name] is not False}
    if {"batch_size", "batch_per_device"} <= given.keys():
        size, each = given["batch_size"], given["batch_per_device"]
        names = ("batch_size", "batch_per_device")
        first, second = names if style == "keyword" else (SHORTCUTS[name].option for name in names)
        raise UsageError(
            f"{first} and {second} cannot be combined",
            why=f"{each} per device x {num_devices} = {each * num_devices}, against {size}",
            hint="use one of them",
        )
    overrides: list[Override] = []
    for name, value in given.items():
        shortcut = SHORTCUTS[name]
        parsed = value if shortcut.parse is None else shortcut.parse(value, num_devices)
        overrides.append((shortcut.field, parsed, shortcut.origin(style)))
    return overrides
