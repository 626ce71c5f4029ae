"""The calibrated confidence of a classifier: the temperature of its logits and the threshold of its prediction sets.

Both are fitted on validation images (`metrics/confidence.py`), stored with the weights and used by everything that
predicts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-3, 1e3


@dataclass(frozen=True, slots=True)
class ConfidenceCalibration:
    """Probabilities are softmax(logits / temperature), and a prediction set has the classes with at least `threshold`.

    The set has the right class of a `coverage` of all images that come from where the validation images come from
    (split conformal prediction with LAC scores). It has no class where none is probable enough.
    """

    temperature: float
    num_temperature: int  # images it was fitted on
    coverage: float | None = None  # None: there were too few images for prediction sets
    threshold: float = 0.0
    num_conformal: int = 0  # other images, which the threshold was fitted on

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: object) -> ConfidenceCalibration:
        """The inverse of `to_dict`; raises ValueError if something is missing or impossible."""
        if not isinstance(values, Mapping):
            raise ValueError("the calibrated confidence is not an object")
        numbers = {name: values.get(name) for name in ("temperature", "threshold", "coverage")}
        for name, value in numbers.items():
            if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
                raise ValueError(f"{name} is not a number")
        temperature, threshold, coverage = (None if v is None else float(v) for v in numbers.values())
        counts = [values.get(name, 0) for name in ("num_temperature", "num_conformal")]
        if temperature is None or not _MIN_TEMPERATURE <= temperature <= _MAX_TEMPERATURE:
            raise ValueError(f"temperature is not between {_MIN_TEMPERATURE:g} and {_MAX_TEMPERATURE:g}")
        if threshold is None or not 0 <= threshold <= 1 or (coverage is not None and not 0 < coverage < 1):
            raise ValueError("threshold and coverage are fractions")
        if not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError("the numbers of images are not integers")
        return cls(temperature, counts[0], coverage, threshold, counts[1])

    def most_classes(self, num_classes: int) -> int:
        """The most classes that a prediction set can have: probabilities add up to 1."""
        if self.coverage is None:
            return 0
        return num_classes if self.threshold <= 0 else min(num_classes, int(1 / self.threshold))
