"""The records a recipe names, told every event, each on its own: one that fails is given up and the others go on.

Owns which name stands for which exporter and which package it needs. Refuses to know any output format. Invariant:
no exception of an exporter reaches the run, and none is lost: the first becomes a warning in the run's own record.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from reconv.errors import UsageError
from reconv.logging.events import AttemptStarted, Event, read_events
from reconv.logging.exporters.csv_exporter import CsvExporter
from reconv.logging.exporters.exporter import ExportedRun, Exporter
from reconv.logging.exporters.mlflow_exporter import MlflowExporter
from reconv.logging.exporters.mlperf_exporter import MlperfExporter
from reconv.logging.exporters.tensorboard_exporter import TensorBoardExporter
from reconv.logging.exporters.wandb_exporter import WandbExporter
from reconv.recipe.schema import Recipe

_EXPORTERS: dict[str, Callable[[ExportedRun], Exporter]] = {
    "csv": CsvExporter,
    "tensorboard": TensorBoardExporter,
    "wandb": WandbExporter,
    "mlflow": MlflowExporter,
    "mlperf": MlperfExporter,
}
_PACKAGES = ("tensorboard", "wandb", "mlflow")  # records named after the package, and the extra, that they need


def require_packages(names: Sequence[str]) -> None:
    """Refuse a record whose package is not installed, before anything is made."""
    missing = [name for name in names if name in _PACKAGES and importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"loggers: {', '.join(missing)} cannot be written",
            why=f"not installed here: {', '.join(missing)}",
            then=f"pip install 'reconv[{','.join(missing)}]', or leave it out of loggers",
        )


class ExporterSet:
    """All records of a run; they are opened by its attempt."""

    def __init__(self, recipe: Recipe, run_dir: Path, warn: Callable[[str], None]) -> None:
        events = run_dir / "events.jsonl"
        self._recipe = recipe
        self._run_dir = run_dir
        self._past = tuple(read_events(events)) if recipe.loggers and events.exists() else ()
        self._warn = warn
        self._open: dict[str, Exporter] = {}

    def on_event(self, event: Event) -> None:
        """Pass the event to every open exporter."""
        if isinstance(event, AttemptStarted):
            run = ExportedRun(self._run_dir, self._recipe, self._past, event)
            for name in self._recipe.loggers:
                self._try(name, partial(self._start, name, run))
        for opened, exporter in list(self._open.items()):
            self._try(opened, partial(exporter.on_event, event))

    def close(self) -> None:
        """Close every record that is open; harmless when called twice."""
        for name, exporter in list(self._open.items()):
            self._try(name, exporter.close)
        self._open.clear()

    def _start(self, name: str, run: ExportedRun) -> None:
        self._open[name] = _EXPORTERS[name](run)

    def _try(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # whatever a record's package raises, the training is worth more
            self._open.pop(name, None)
            self._warn(f"the record {name} is given up, the run goes on: {type(error).__name__}: {error}")
