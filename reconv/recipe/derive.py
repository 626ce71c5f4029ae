"""Fields that a recipe leaves to its data (`derive`): what the rules in `derive_rules` know, and what they return.

A derived value depends on the data, the initial weights and the values that are set, never on the machine, so that a
run can be resumed elsewhere.

Rank 0 derives them in `resolve_recipe`. Their origin is `derived: ...`; the run's `recipe.yaml` has plain values and
an empty `derive`, from which a resumed run takes them (tests/build/test_derived_recipe.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from reconv.recipe.load.adapt import show
from reconv.recipe.schema import Recipe, flatten
from reconv.recipe.units import Duration


@dataclass(frozen=True, slots=True)
class AnchorFacts:
    """Anchors proposed for the boxes of a training set."""

    scales: tuple[float, ...]
    aspect_ratios: tuple[tuple[float, ...], ...]
    mean_iou: float  # of each box with its best anchor at the same place
    default_iou: float  # the same for SSD's own anchors
    num_boxes: int


@dataclass(frozen=True, slots=True)
class DataFacts:
    """Facts about the training set, for the rules."""

    num_train: int
    class_counts: tuple[int, ...] = ()  # images of each class; empty for detection
    short_side: int = 224  # median of the shorter side of the images, in pixels
    max_boxes: int = 0  # of one image, for detection
    anchors: AnchorFacts | None = None


@dataclass(frozen=True, slots=True)
class WeightFacts:
    """Facts about the initial weights."""

    name: str  # as given
    model: str | None = None  # None: unknown, or set by the user
    options: Mapping[str, Any] = field(default_factory=dict)  # of the network
    preprocess: Mapping[str, Any] = field(default_factory=dict)  # values below data.preprocess
    anchors: Mapping[str, Any] = field(default_factory=dict)  # of a detector: values below detection.anchors


@dataclass(frozen=True, slots=True)
class SecondMoment:
    """E[x x^T] of a layer's input x: its largest eigenvalue and its trace, the mean of |x|^2."""

    eigenvalue: float
    trace: float


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """Inputs of a pretrained network's last layer, measured on some training images."""

    layer: str  # its name
    num_images: int
    size: int  # of the images, in pixels
    running: SecondMoment  # with the running statistics of batch norms, as while they are frozen
    batch: SecondMoment  # with the statistics of the batch, as once they are trained


@dataclass(frozen=True, slots=True)
class Derivation:
    """The value of a field and where it comes from."""

    name: str  # dotted
    value: Any
    why: str

    def __str__(self) -> str:
        return f"{self.name} {show(self.value)}: {self.why}"


class Values:
    """The values of a recipe while its fields are derived: those set, and those derived so far."""

    def __init__(
        self,
        recipe: Recipe,
        fixed: Collection[str],
        data: DataFacts,
        weights: WeightFacts | None,
        measure_head: Callable[[], HeadFacts | None] = lambda: None,
    ) -> None:
        self.data = data
        self.weights = weights
        self.measure_head = measure_head  # None: it cannot be measured
        self.is_detection = recipe.task == "detection"
        self._values = flatten(recipe)
        self._fixed = fixed
        self._derived: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def get(self, name: str) -> Any:
        """The value of a field that a recipe need not have, such as an option of the network; else None."""
        return self._values.get(name)

    def is_fixed(self, name: str) -> bool:
        """True if the field, or one below it, is set."""
        return any(other == name or other.startswith(f"{name}.") for other in self._fixed)

    def is_derived(self, name: str) -> bool:
        """True if a rule gave the field its value."""
        return name in self._derived

    def add(self, derivation: Derivation) -> None:
        self._derived.add(derivation.name)
        self._values[derivation.name] = derivation.value

    @property
    def steps_per_epoch(self) -> int:
        samples, batch = int(self["data.epoch_samples"] or self.data.num_train), int(self["batch.size"])
        return max(1, samples // batch if self["data.drop_last"] else math.ceil(samples / batch))

    @property
    def total_steps(self) -> int:
        length: Duration = self["length"]
        return max(1, round(length.value * (self.steps_per_epoch if length.unit == "ep" else 1)))
