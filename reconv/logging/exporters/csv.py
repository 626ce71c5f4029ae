"""`training.csv`, `validation.csv` and, of callbacks, `scalars.csv`: each step once as the last attempt has it."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path

from reconv.logging.events import EvalFinished, Event, ScalarLogged, TrainProgress
from reconv.logging.exporters.base import ExportedRun
from reconv.storage.files import write_atomic

Row = Mapping[str, object]


class CsvExporter:
    """Writes CSV tables: rebuilds them at the start of an attempt, then appends rows."""

    def __init__(self, run: ExportedRun) -> None:
        self._batch = run.recipe.batch.size
        self._start_s = run.first_attempt.time_s or 0.0
        kept = run.kept()
        self._training = CsvTable(
            run.run_dir / "training.csv", [self._training_row(e) for e in kept if isinstance(e, TrainProgress)]
        )
        self._validation = CsvTable(
            run.run_dir / "validation.csv", [_validation_row(e) for e in kept if isinstance(e, EvalFinished)]
        )

        scalars = [_scalar_row(e) for e in kept if isinstance(e, ScalarLogged)]
        self._scalars_file = run.run_dir / "scalars.csv"
        self._scalars = CsvTable(self._scalars_file, scalars) if scalars or self._scalars_file.exists() else None

    def on_event(self, event: Event) -> None:
        if isinstance(event, TrainProgress):
            self._training.add(self._training_row(event))
        elif isinstance(event, EvalFinished):
            self._validation.add(_validation_row(event))
        elif isinstance(event, ScalarLogged):
            self._scalars = self._scalars or CsvTable(self._scalars_file, [])
            self._scalars.add(_scalar_row(event))

    def close(self) -> None:
        """Nothing to do: rows are written when they are added."""

    def _training_row(self, event: TrainProgress) -> Row:
        return {
            "step": event.step,
            "epoch": event.epoch,
            "lr": event.lr,
            "loss": event.loss,
            **event.metrics,
            "grad_norm": event.grad_norm,
            "loss_scale": event.loss_scale,
            "images_per_s": event.images_per_s,
            "compute_images_per_s": event.compute_images_per_s,
            "data_wait_fraction": event.data_wait_fraction,
            "step_s": self._batch / event.images_per_s if event.images_per_s else None,
            "total_s": None if event.time_s is None else round(event.time_s - self._start_s, 3),
            "memory_bytes": event.memory_bytes,
        }


def _scalar_row(event: ScalarLogged) -> Row:
    return {"step": event.step, "name": event.name, "value": event.value}


def _validation_row(event: EvalFinished) -> Row:
    return {
        "weights": event.weights,
        "step": event.step,
        "epoch": event.epoch,
        **event.metrics,
        "best": int(event.best),
        "num_samples": event.num_samples,
        "wall_s": event.wall_s,
        "images_per_s": event.num_samples / event.wall_s if event.wall_s > 0 else None,
    }


class CsvTable:
    """A CSV file that grows by rows, and by columns when a row has a metric that no row before it had."""

    def __init__(self, path: Path, rows: list[Row]) -> None:
        self._path = path
        self._columns: list[str] = []
        self._write(rows)

    def add(self, row: Row) -> None:
        """Append a row."""
        if set(row) - set(self._columns):
            with self._path.open(newline="", encoding="utf-8") as file:
                before: list[Row] = list(csv.DictReader(file))
            self._write([*before, row])
            return
        with self._path.open("a", newline="", encoding="utf-8") as file:
            file.write(self._text([row]))

    def _write(self, rows: list[Row]) -> None:
        # A new column gets the position it has in the newest row.
        self._columns = list(dict.fromkeys(name for row in reversed(rows) for name in row))
        header = self._text([{name: name for name in self._columns}]) if rows else ""
        write_atomic(self._path, header + self._text(rows))

    def _text(self, rows: list[Row]) -> str:
        text = io.StringIO(newline="")
        csv.DictWriter(text, self._columns, lineterminator="\n").writerows(rows)
        return text.getvalue()
