"""The types of recipe fields: sections, ranges, durations (`90ep`), rates (`0.256 per 256`), `skip up to 20`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction as ExactFraction
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from reconv.core.message import message

Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[int, Field(gt=0, le=10**9)]
Pixels = Annotated[int, Field(gt=0, le=8192)]
Threads = Annotated[int, Field(gt=0, le=1024)]
BatchSize = Annotated[int, Field(gt=0, le=2**20)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Listed = Field(strict=False)  # a YAML list may fill a tuple; its items stay strict


def parse_switch(value: object) -> object:
    """YAML may read a bare `off` as False and `on` as True; the words are meant."""
    return {False: "off", True: "on"}.get(value, value) if isinstance(value, bool) else value


Off = Annotated[Literal["off"], BeforeValidator(parse_switch)]
Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(parse_switch)]


class Section(BaseModel):
    """A frozen part of a recipe that rejects unknown keys and implicit conversions."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
    )

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        message(cls)


DURATION = "a duration with its unit, as in 90ep, 5000step, 10% or 15min"
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ep|step|%|min)\s*")
_LONGEST = 1e12
_NUMBER = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)"
_RATE = re.compile(
    rf"\s*(?:2\s*\^\s*(?P<exponent>{_NUMBER})|(?P<plain>{_NUMBER}(?:[eE][-+]?[0-9]+)?))"
    r"(?:\s+per\s+(?:(?P<per>[0-9]{1,9})(?:\s+images?)?|(?P<image>image)))?\s*"
)
_SKIP = re.compile(r"\s*skip\s+up\s+to\s+([0-9]{1,9})\s*")
_MAX_EXPONENT = 1000  # of 2^N; larger ones overflow


def parse_rate(text: str) -> tuple[float, int | None] | None:
    """`2^-11 per image`, `0.256 per 256 images` or `2^-3` as (rate, reference batch or None); None: not a rate."""
    match = _RATE.fullmatch(text)
    if match is None or (match["exponent"] and abs(float(match["exponent"])) > _MAX_EXPONENT):
        return None
    rate = float(match["plain"]) if match["plain"] else 2.0 ** float(match["exponent"])
    return rate, 1 if match["image"] else int(match["per"]) if match["per"] else None


def split_rate(given: Mapping[str, Any]) -> dict[str, Any]:
    """`lr: 2^-11 per image` as lr and base_batch_size; unchanged where base_batch_size is given and differs."""
    text = given.get("lr")
    rate, per = (parse_rate(text) if isinstance(text, str) else None) or (0.0, None)
    agree = per is not None and given.get("base_batch_size") in (None, per)
    return {**given, "lr": rate, "base_batch_size": per} if agree else dict(given)


@dataclass(frozen=True, slots=True)
class BatchPerDevice:
    """A batch size given per device: the value of an override of batch.size."""

    size: int
    num_devices: int


@message
@dataclass(frozen=True, slots=True)
class Duration:
    """A length of training in epochs, optimizer steps, percent of the run, or minutes of wall clock."""

    value: float
    unit: str

    def __str__(self) -> str:
        whole = self.value == math.floor(self.value)
        return f"{int(self.value) if whole else format(Decimal(repr(self.value)), 'f')}{self.unit}"

    @property
    def exact(self) -> ExactFraction:
        """The number as typed: 0.1 is exactly one tenth, so that rounding to steps is exact."""
        return ExactFraction(repr(self.value))

    @classmethod
    def parse(cls, text: object) -> Duration:
        """`90ep`, `5000step`, `10%` or `15min` as a Duration."""
        if isinstance(text, Duration):
            return text
        match = _PATTERN.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(DURATION)
        value = float(match[1])
        if value > _LONGEST:
            raise ValueError(f"a duration of at most {_LONGEST:g}")
        if match[2] == "step" and value != int(value):
            raise ValueError("a whole number of steps")
        if match[2] == "%" and value > 100:
            raise ValueError("at most 100%")
        return cls(value, match[2])

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )


def duration_steps(duration: Duration, steps_per_epoch: int, total: int) -> int:
    """A duration in whole steps, rounded to the nearest, halves up."""
    return math.floor(exact_steps(duration, steps_per_epoch, total) + ExactFraction(1, 2))


def exact_steps(duration: Duration, steps_per_epoch: int, total: int) -> ExactFraction:
    """A duration in steps of a run of `total` steps; minutes have none."""
    if duration.unit == "step":
        return duration.exact
    if duration.unit == "ep":
        return duration.exact * steps_per_epoch
    if duration.unit == "%":
        return duration.exact / 100 * total
    raise AssertionError(f"{duration} has no length in steps")


@message
@dataclass(frozen=True, slots=True)
class BadImages:
    """Number of unreadable files a run may skip; 0 stops at the first."""

    limit: int

    def __str__(self) -> str:
        return f"skip up to {self.limit}" if self.limit else "stop"

    @classmethod
    def parse(cls, text: object) -> BadImages:
        """`stop` or `skip up to 20` as BadImages."""
        if isinstance(text, BadImages):
            return text
        if isinstance(text, str) and text.strip() == "stop":
            return cls(0)
        match = _SKIP.fullmatch(text) if isinstance(text, str) else None
        if match is None or int(match[1]) == 0:
            raise ValueError("stop, or the number of files that the whole run may skip, as in: skip up to 20")
        return cls(int(match[1]))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )
