"""Base of the exporters: their run, and the names of its series (`train/loss`, `val/top1`)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from reconv.logging.event_log import latest_by_step
from reconv.logging.events import AttemptStarted, EvalFinished, Event, ScalarLogged, TrainProgress
from reconv.recipe.schema import Recipe, flatten

_NO_SETTINGS = ("expect", "published", "measured", "description", "loggers", "profile")


class Exporter(Protocol):
    """The interface of an exporter: writes a run's events in another format."""

    def on_event(self, event: Event) -> None: ...
    def close(self) -> None:
        """Write what is buffered. Can be called twice."""
        ...


@dataclass(frozen=True, slots=True)
class ExportedRun:
    """The run to export, at the start of an attempt."""

    run_dir: Path
    recipe: Recipe
    past: tuple[Event, ...]  # events of earlier attempts, as written
    attempt: AttemptStarted

    @property
    def first_attempt(self) -> AttemptStarted:
        return next((event for event in self.past if isinstance(event, AttemptStarted)), self.attempt)

    @property
    def label(self) -> str:
        """The run's name among others: the last two parts of its path, as in quickstart/1."""
        return "/".join(self.run_dir.resolve().parts[-2:])

    @property
    def run_id(self) -> str:
        """An id that all attempts of the run share, even if its directory is moved."""
        first = self.first_attempt
        text = f"{first.time_s} {first.command} {sorted(first.environment.items())}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def metric(self) -> str:
        """The metric of the recipe's result."""
        if self.recipe.task == "detection":
            return self.recipe.detection.metric
        usual = "map" if self.recipe.task == "multilabel" else "top1"
        default = self.recipe.evaluate.best_metric or usual
        return self.recipe.expect.metric if self.recipe.expect is not None else default

    def kept(self) -> list[Event]:
        """The past events that this attempt does not discard."""
        return [e for e in latest_by_step([*self.past, self.attempt]) if e is not self.attempt]

    def settings(self) -> dict[str, bool | int | float | str]:
        """The recipe's fields that affect training, by dotted name; values that are no scalars as text."""
        return {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in flatten(self.recipe).items()
            if name.split(".")[0] not in _NO_SETTINGS
        }


def series(event: TrainProgress | EvalFinished | ScalarLogged) -> Mapping[str, float]:
    """The values of a training event, an evaluation or a callback by the name of their series."""
    if isinstance(event, ScalarLogged):
        return {event.name: event.value}
    if isinstance(event, EvalFinished):
        prefix = "val" if event.weights == "raw" else f"val_{event.weights}"
        return {f"{prefix}/{name}": value for name, value in event.metrics.items()}
    optional = {
        "train/loss_scale": event.loss_scale,
        "speed/images_per_s": event.images_per_s,
        "speed/compute_images_per_s": event.compute_images_per_s,
    }
    return {
        "train/loss": event.loss,
        "train/lr": event.lr,
        "train/epoch": event.epoch,
        "train/grad_norm": event.grad_norm,
        **{f"train/{name}": value for name, value in event.metrics.items()},
        "speed/data_wait_fraction": event.data_wait_fraction,
        "speed/memory_bytes": float(event.memory_bytes),
        **{name: value for name, value in optional.items() if value is not None},
    }
