"""Quantities people type with a unit: durations.

Owns parsing and printing of `90ep`, `5000step`, `10%`, `15min`. Refuses to know how long an epoch is: the plan
converts. Invariant: `parse(str(d)) == d`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ep|step|%|min)\s*")
_LONGEST = 1e12


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
