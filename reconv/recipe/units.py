"""Quantities people type with a unit: durations and learning rates per image.

Owns parsing and printing of `90ep`, `5000step`, `10%`, `15min`. Refuses to know how long an epoch is: the plan
converts. Invariant: `parse(str(d)) == d`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

UNITS = ("ep", "step", "%", "min")
_PATTERN = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(ep|step|%|min)\s*$")


@dataclass(frozen=True, slots=True)
class Duration:
    """A length of training: epochs, optimizer steps, a share of the run, or minutes of wall clock."""

    value: float
    unit: str

    def __str__(self) -> str:
        return f"{self.value:g}{self.unit}"

    @classmethod
    def parse(cls, text: object) -> Duration:
        """`90ep`, `5000step`, `10%` or `15min` as a Duration."""
        if isinstance(text, Duration):
            return text
        match = _PATTERN.match(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(f"a duration needs a unit, as in 90ep, 5000step, 10% or 15min; got {text!r}")
        value = float(match[1])
        if match[2] == "step" and value != int(value):
            raise ValueError(f"steps are whole: {text!r}")
        if match[2] == "%" and value > 100:
            raise ValueError(f"a share of the run is at most 100%: {text!r}")
        return cls(value, match[2])

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )
