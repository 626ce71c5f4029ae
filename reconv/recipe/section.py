"""What every section of a recipe is made of: the frozen, strict model and the ranges its numbers take.

Owns strictness and the named ranges. Refuses to know any field. Invariant: a section that exists never changes, and
nothing was converted in silence on its way in.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[int, Field(gt=0, le=10**9)]
Pixels = Annotated[int, Field(gt=0, le=8192)]
Threads = Annotated[int, Field(gt=0, le=1024)]
BatchSize = Annotated[int, Field(gt=0, le=2**20)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Listed = Field(strict=False)  # a YAML list may fill a tuple; its items stay strict


def words_of_switches(value: object) -> object:
    """YAML reads a bare `off` as False and `on` as True; people mean the words."""
    return {False: "off", True: "on"}.get(value, value) if isinstance(value, bool) else value


Off = Annotated[Literal["off"], BeforeValidator(words_of_switches)]


class Section(BaseModel):
    """A frozen part of a recipe that refuses unknown keys and silent conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)
