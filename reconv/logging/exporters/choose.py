"""The exporters a recipe names. One that fails is closed with a warning; the run and the others continue.

Text logs are written again from `events.jsonl` at every start. A package that is missing is an error before the run
directory is made (tests/logging).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from reconv.core.errors import UsageError
from reconv.logging.event_log import read_events
from reconv.logging.events import AttemptStarted, Event
from reconv.logging.exporters.base import ExportedRun, Exporter
from reconv.logging.exporters.csv import CsvExporter
from reconv.logging.exporters.mlflow import MlflowExporter
from reconv.logging.exporters.mlperf import MlperfExporter
from reconv.logging.exporters.tensorboard import TensorBoardExporter
from reconv.logging.exporters.wandb import WandbExporter
from reconv.recipe.schema import Recipe

_EXPORTERS: dict[str, Callable[[ExportedRun], Exporter]] = {
    "csv": CsvExporter,
    "tensorboard": TensorBoardExporter,
    "wandb": WandbExporter,
    "mlflow": MlflowExporter,
    "mlperf": MlperfExporter,
}
_PACKAGES = ("tensorboard", "wandb", "mlflow")  # also the names of the packages and extras they need


def require_packages(names: Sequence[str]) -> None:
    """Raise `UsageError` if the package of a logger is not installed."""
    missing = [name for name in names if name in _PACKAGES and importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"loggers: {', '.join(missing)} is not installed",
            hint=f"pip install 'reconv[{','.join(missing)}]', or remove it from loggers",
        )


class ExporterSet:
    """All exporters of a run; `AttemptStarted` opens them."""

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
        """Close every open exporter. Can be called twice."""
        for name, exporter in list(self._open.items()):
            self._try(name, exporter.close)
        self._open.clear()

    def _start(self, name: str, run: ExportedRun) -> None:
        self._open[name] = _EXPORTERS[name](run)

    def _try(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # whatever a package raises must not stop the training
            self._open.pop(name, None)
            self._warn(f"logger {name} failed and is off for the rest of the run: {type(error).__name__}: {error}")
