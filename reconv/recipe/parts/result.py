"""The recipe fields `expect`, `published` and `measured`: results of the recipe."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from reconv.recipe.units import Listed, NonNegative, Positive, PositiveFloat, Section


class ExpectedResult(Section):
    """The result to expect from the recipe."""

    metric: str = "top1"
    """Metric of the evaluation."""
    value: float
    """Expected value; accuracies are fractions."""
    tolerance: NonNegative = 0
    """How far below the value a run may end."""
    on: str = ""
    """Hardware and data of the expected result."""
    source: str = ""
    """Where the value was published, or when and how often it was measured."""


class PublishedResult(Section):
    """A result that others have published for this recipe."""

    source: Annotated[str, Field(min_length=1)]
    """Where it was published."""
    hardware: str = ""
    """Hardware of the published run."""
    batch: Annotated[tuple[Positive, ...], Listed] = ()
    """Batch arithmetic as published: samples x accumulation steps x devices."""
    metric: str = "top1"
    """Metric of the value."""
    value: float | None = None
    """Published value; accuracies are fractions."""
    spread: NonNegative | None = None
    """Published spread, in the metric's unit."""
    images_per_s: PositiveFloat | None = None
    """Training throughput of all devices together."""
    hours: PositiveFloat | None = None
    """Training time."""
    caveat: str = ""
    """Why the result may not carry over."""


class MeasuredResult(Section):
    """A result that was measured with Reconv."""

    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]
    """Date of the measurement."""
    hardware: Annotated[str, Field(min_length=1)]
    """Hardware of the runs."""
    n: Positive
    """Number of runs."""
    metric: str = "top1"
    """Metric of the value."""
    value: float
    """Mean of the runs."""
    spread: NonNegative | None = None
    """Standard deviation of the runs, in the metric's unit."""
    images_per_s: PositiveFloat | None = None
    """Training throughput."""
    hours: PositiveFloat | None = None
    """Training time."""
