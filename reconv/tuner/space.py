"""The search space: recipe fields with ranges or choices, as `--space` writes them, checked by the recipe's own schema.

    schedule.lr=1e-3:1e-1:log        a range, uniform in the logarithm
    optimizer.weight_decay=0:1e-3    a range, uniform
    batch.size=16:128:16             whole numbers, because the field takes those; every 16th
    schedule.warmup=0ep:5ep          with the field's unit
    schedule.lr=2^-9:2^-5:log        numbers as a recipe has them
    schedule.name=cosine|linear      choices

Imports neither Optuna nor torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice, product
from typing import Any, get_args

from reconv.core.errors import RecipeError, UsageError
from reconv.recipe.load import document
from reconv.recipe.load.identity import may_change
from reconv.recipe.load.resolved import Resolved
from reconv.recipe.loader import Override, load
from reconv.recipe.schema import flatten, schema_fields
from reconv.recipe.units import Duration, parse_rate

ORIGIN = "--space"
_EXAMPLE = "for example --space schedule.lr=1e-3:1e-1:log or --space schedule.name='cosine|linear'"
_NUMBER = re.compile(
    r"\s*(?P<number>2\s*\^\s*[-+]?[0-9.]+|[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)"
    r"\s*(?P<unit>ep|step|%|min|per\s+(?:[0-9]+(?:\s+images?)?|image))?\s*"
)
_DIGITS = 4  # of the values that are tried: recipes are read by people
_MAX_COMBINATIONS = 64
_DURATIONS = ("ep", "step", "%", "min")
# Trials would be judged on other images, or by luck.
_NOT_SEARCHED = {
    "seed": "trials would be chosen by their luck; --confirm trains the best one with other seeds",
    **dict.fromkeys(
        ("data.fold", "data.split_seed", "data.validation_split", "evaluate.num_samples"),
        "trials would be judged on different images",
    ),
}

Param = float | int | str  # as Optuna knows it


@dataclass(frozen=True, slots=True)
class Dimension:
    """One field and the values that are tried: choices, or a range."""

    field: str
    text: str  # as typed, without the field
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    is_whole: bool = False
    step: int = 1  # of whole numbers
    unit: str = ""

    @classmethod
    def parse(cls, text: str) -> Dimension:
        """The dimension that `FIELD=LOW:HIGH[:log]` or `FIELD=A|B|C` describes."""
        field, equals, values = text.partition("=")
        field, values = field.strip(), values.strip()
        if not equals or not field or not values:
            raise UsageError(f"{ORIGIN} {text!r:.80} names no field and its values", hint=_EXAMPLE)
        parts = values.split(":")
        ends = [_NUMBER.fullmatch(part) for part in parts[:2]]
        if len(parts) in (2, 3) and all(ends):
            return cls._range(field, values, ends, parts[2].strip() if len(parts) == 3 else "")
        choices = tuple(choice.strip() for choice in values.split("|"))
        if len(choices) < 2 or "" in choices or len(set(choices)) < len(choices):
            raise UsageError(
                f"{ORIGIN} {text!r:.80} is neither a range nor a list of choices",
                why="a range is LOW:HIGH, LOW:HIGH:log or, of whole numbers, LOW:HIGH:STEP; choices are A|B|C",
                hint=_EXAMPLE,
            )
        return cls(field, values, choices)

    @classmethod
    def _range(cls, field: str, text: str, ends: Sequence[re.Match[str] | None], more: str) -> Dimension:
        low, high = (_number(end["number"]) for end in ends if end is not None)
        units = {" ".join((end["unit"] or "").split()) for end in ends if end is not None}
        shown = f"{ORIGIN} {field}={text}"
        if len(units) > 1:
            raise UsageError(f"{shown}: the ends of the range have different units", hint="write both with one unit")
        if not low < high:
            raise UsageError(f"{shown}: the lower end must come first, and be below the other", hint=_EXAMPLE)
        unit = units.pop()
        is_whole = unit == "step" or (unit == "ep" and low == int(low) and high == int(high))
        is_whole |= not unit and _takes_whole_numbers(field, text)
        if is_whole and (low != int(low) or high != int(high)):
            raise UsageError(f"{shown}: {field} takes whole numbers", hint="write both ends without a fraction")
        is_step = more.isdecimal() and int(more) > 0
        if more not in ("", "log") and not (is_step and is_whole):
            raise UsageError(
                f"{shown}: {more!r:.40} is not `log`" + (" or a step between whole numbers" if is_whole else ""),
                hint=_EXAMPLE,
            )
        if more == "log" and low <= 0:
            raise UsageError(f"{shown}: a logarithmic range begins above 0", hint="raise the lower end")
        step = int(more) if is_step else 1
        high = low + step * ((high - low) // step) if is_whole else high
        return cls(field, text, (), low, high, more == "log", bool(is_whole), step, unit)

    def distribution(self) -> Any:
        """Optuna's distribution of the values."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if self.choices:
            return CategoricalDistribution(self.choices)
        if self.is_whole:
            return IntDistribution(int(self.low), int(self.high), log=self.is_log, step=self.step)
        return FloatDistribution(self.low, self.high, log=self.is_log)

    def value(self, param: Param) -> object:
        """The field's value, as an override of the recipe, that a parameter stands for."""
        if self.choices:
            return str(param)
        if self.is_whole:
            return f"{int(param)}{self.unit}" if self.unit else int(param)
        rounded = min(max(float(f"{float(param):.{_DIGITS}g}"), self.low), self.high)
        if not self.unit:
            return rounded
        if self.unit in _DURATIONS:
            return f"{format(Decimal(repr(rounded)), 'f')}{self.unit}"
        return f"{rounded!r} {self.unit}"

    def ends(self) -> tuple[object, ...]:
        """Values that must be valid for the field: both ends of a range, or all choices."""
        return tuple(self.value(param) for param in (self.choices or (self.low, self.high)))

    def param_of(self, value: object) -> Param | None:
        """The parameter that stands for a recipe's value; None if the value is not in the space."""
        if self.choices:
            return next((c for c in self.choices if document.read_value(c) == value or c == str(value)), None)
        if isinstance(value, Duration):
            number, unit = value.value, value.unit
        elif isinstance(value, int | float) and not isinstance(value, bool):
            number, unit = float(value), ""
        else:
            return None
        if unit != self.unit or not self.low <= number <= self.high:
            return None
        if self.is_whole:
            return int(number) if (number - self.low) % self.step == 0 else None
        return number

    def contains(self, param: object) -> bool:
        """True if a parameter is one of the values that are tried."""
        if self.choices:
            return param in self.choices
        if isinstance(param, bool) or not isinstance(param, int if self.is_whole else int | float):
            return False
        return self.low <= param <= self.high and (not self.is_whole or (param - self.low) % self.step == 0)

    def position(self, param: Param) -> float:
        """Position of a parameter on an axis from 0 to 1."""
        if self.choices:
            return self.choices.index(str(param)) / (len(self.choices) - 1)
        scale = math.log if self.is_log else float
        low, high = scale(self.low), scale(self.high)
        return (scale(float(param)) - low) / (high - low)

    def __str__(self) -> str:
        return f"{self.field}={self.text}"


def _number(text: str) -> float:
    rate = parse_rate(text)
    return float(text) if rate is None else rate[0]


def _takes_whole_numbers(field: str, text: str) -> bool:
    """True if a field takes whole numbers and no others; options of networks are as their range is written."""
    annotation = schema_fields().get(field)
    if annotation is None:
        return re.fullmatch(r"[-+0-9: ]+(log)?", text) is not None
    kinds = _leaf_types(annotation)
    return int in kinds and float not in kinds


def _leaf_types(annotation: Any) -> set[Any]:
    inner = get_args(annotation)
    return {annotation} if not inner else set().union(*(_leaf_types(item) for item in inner))


def parse_space(texts: Sequence[str]) -> tuple[Dimension, ...]:
    """The dimensions of a space; each field once, and only fields that determine the result."""
    space = tuple(Dimension.parse(text) for text in texts)
    for number, dimension in enumerate(space):
        field = dimension.field
        if any(field == other.field for other in space[:number]):
            raise UsageError(f"{ORIGIN} names {field} twice", hint="leave one of them out")
        if field in _NOT_SEARCHED:
            raise UsageError(f"{field} cannot be searched", why=_NOT_SEARCHED[field], hint="leave it out")
        if field in schema_fields() and may_change(field):
            raise UsageError(
                f"{field} cannot be searched", why="it does not determine the result of a run", hint="leave it out"
            )
    return space


def check_space(recipe: str, overrides: Sequence[Override], space: Sequence[Dimension]) -> Resolved:
    """Load the recipe with each end and choice of the space, or raise the recipe's error; returns it without them."""
    written = {name: origin for name, _, origin in overrides}
    for dimension in space:
        if dimension.field in written:
            raise UsageError(
                f"{dimension.field} is both fixed and searched",
                why=f"{written[dimension.field]} sets it, and {ORIGIN} {dimension} searches it",
                hint="leave one of them out",
            )
        others = [_overrides_of(other) for other in space if other is not dimension]
        for override in _overrides_of(dimension):
            _check_end(recipe, [*overrides, override], others)
    return load(recipe, overrides)


def _overrides_of(dimension: Dimension) -> list[Override]:
    return [(dimension.field, value, f"{ORIGIN} {dimension}") for value in dimension.ends()]


def _check_end(recipe: str, overrides: Sequence[Override], others: Sequence[Sequence[Override]]) -> None:
    """Raise the recipe's error unless it takes a value with its own values of the other fields, or with some of theirs.

    Nesterov's momentum needs momentum: a space of both is searched, and the combination is a trial that fails.
    """
    try:
        load(recipe, overrides)
    except RecipeError:
        for combination in islice(product(*others) if others else (), _MAX_COMBINATIONS):
            with suppress(RecipeError):
                load(recipe, [*overrides, *combination])
                return
        raise


def default_params(resolved: Resolved, space: Sequence[Dimension]) -> dict[str, Param]:
    """The parameters of the recipe as it is, where its values are known and in the space."""
    values = flatten(resolved.recipe)
    known = {d.field: values[d.field] for d in space if d.field in values and not resolved.is_open(d.field)}
    found = {d.field: d.param_of(known[d.field]) for d in space if d.field in known}
    return {field: param for field, param in found.items() if param is not None}


def default_space(recipe: str, overrides: Sequence[Override]) -> tuple[str, ...]:
    """The space if none is given: rate and decay within a factor of 10, or those of fine-tuning in any use."""
    resolved = load(recipe, overrides)
    fixed = {name for name, *_ in overrides}
    if resolved.is_open("schedule.lr"):  # derived from the data, from 0.003 to 0.03 for photographs
        texts: Mapping[str, str] = {
            "schedule.lr": "3e-4:1e-1:log",
            "optimizer.weight_decay": "1e-5:1e-2:log",
            **({"optimizer.backbone_lr_scale": "0.03:1:log"} if resolved.recipe.model.init is not None else {}),
        }
    else:
        values = flatten(resolved.recipe)
        names = ("schedule.lr", "optimizer.weight_decay")
        texts = {name: f"{values[name] / 10:.4g}:{values[name] * 10:.4g}:log" for name in names if values[name]}
    found = tuple(f"{name}={text}" for name, text in texts.items() if name not in fixed)
    if not found:
        raise UsageError("there is nothing to search", why="rate and decay are fixed by options", hint=_EXAMPLE)
    return found


def trial_overrides(space: Sequence[Dimension], params: Mapping[str, Param]) -> dict[str, object]:
    """The recipe fields that a trial sets, by the parameters of Optuna."""
    return {d.field: d.value(params[d.field]) for d in space if d.field in params}


def value_text(value: object) -> str:
    """A value as a recipe has it, for people."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def check_trial(recipe: str, overrides: Sequence[Override], values: Mapping[str, object]) -> str:
    """The problem of a combination of values; empty if there is none."""
    try:
        load(recipe, [*overrides, *((name, value, ORIGIN) for name, value in values.items())])
    except RecipeError as error:
        return " ".join(error.what.split())
    return ""
