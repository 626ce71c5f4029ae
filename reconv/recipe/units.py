"""Quantities people type with a unit: durations, rates per batch, and how many bad images are borne.

Owns parsing and printing of `90ep`, `5000step`, `10%`, `15min` and `skip up to 20`, and parsing of `2^-11 per image`.
Refuses to know how long an epoch is: the plan converts. Invariant: `Duration.parse(str(d)) == d`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ep|step|%|min)\s*")
_LONGEST = 1e12
_NUMBER = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)"
_RATE = re.compile(
    rf"\s*(?:2\s*\^\s*(?P<exponent>{_NUMBER})|(?P<plain>{_NUMBER}(?:[eE][-+]?[0-9]+)?))"
    r"(?:\s+per\s+(?:(?P<per>[0-9]{1,9})(?:\s+images?)?|(?P<image>image)))?\s*"
)
_SKIP = re.compile(r"\s*skip\s+up\s+to\s+([0-9]{1,9})\s*")
_STEEPEST = 1000  # of 2^N: beyond it there is no such number


def parse_rate(text: str) -> tuple[float, int | None] | None:
    """`2^-11 per image`, `0.256 per 256 images` or `2^-3` as (rate, reference batch or None); None: not a rate."""
    match = _RATE.fullmatch(text)
    if match is None or (match["exponent"] and abs(float(match["exponent"])) > _STEEPEST):
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
class Duration:
    """A length of training: epochs, optimizer steps, a share of the run, or minutes of wall clock."""

    value: float
    unit: str

    def __str__(self) -> str:
        whole = self.value == math.floor(self.value)
        return f"{int(self.value) if whole else format(Decimal(repr(self.value)), 'f')}{self.unit}"

    @property
    def exact(self) -> Fraction:
        """The number as typed: 0.1 is one tenth, so that rounding to steps does not depend on binary fractions."""
        return Fraction(repr(self.value))

    @classmethod
    def parse(cls, text: object) -> Duration:
        """`90ep`, `5000step`, `10%` or `15min` as a Duration."""
        if isinstance(text, Duration):
            return text
        match = _PATTERN.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError("a duration with its unit, as in 90ep, 5000step, 10% or 15min")
        value = float(match[1])
        if value > _LONGEST:
            raise ValueError("a duration shorter than that")
        if match[2] == "step" and value != int(value):
            raise ValueError("whole steps")
        if match[2] == "%" and value > 100:
            raise ValueError("a share of at most 100%")
        return cls(value, match[2])

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )


@dataclass(frozen=True, slots=True)
class BadImages:
    """How many files a run may leave out because they cannot be read or decoded; 0: it stops at the first."""

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
            raise ValueError("stop, or how many files of the whole run may be left out, as in: skip up to 20")
        return cls(int(match[1]))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )
