"""One row for each evaluated image: path, target, prediction, its score, loss and split, as CSV or Parquet."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from reconv.core.errors import DataError, UsageError
from reconv.data.dataset import Dataset, sample_paths
from reconv.metrics.topk import PredictionTable
from reconv.storage.files import disk_errors, write_atomic

COLUMNS = ("path", "target", "predicted", "score", "loss", "split")


@dataclass(frozen=True, slots=True)
class PredictionRows:
    """The columns of n images, each a sequence [n], in the order of the dataset."""

    path: Sequence[str]
    target: Sequence[str]  # class names
    predicted: Sequence[str]
    score: Sequence[float]  # the probability of the predicted class
    loss: Sequence[float]  # the cross-entropy with the target
    split: Sequence[str]

    @classmethod
    def of_table(cls, table: PredictionTable, dataset: Dataset, split: str) -> PredictionRows:
        """The rows of an evaluation of a dataset."""
        paths, names = sample_paths(dataset), dataset.class_names
        return cls(
            [paths[index] for index in table.index.tolist()],
            [names[target] for target in table.target.tolist()],
            [names[label] for label in table.predicted.tolist()],
            table.confidence.tolist(),
            table.loss.tolist(),
            [split] * len(table),
        )

    def __len__(self) -> int:
        return len(self.path)

    def columns(self) -> dict[str, Sequence[Any]]:
        return {name: getattr(self, name) for name in COLUMNS}

    def write(self, file: Path) -> None:
        """Write a .csv or .parquet file, all of it or nothing."""
        check_rows_file(file)
        with disk_errors(file):
            write_atomic(file, _csv(self) if file.suffix == ".csv" else _parquet(self))


def check_rows_file(file: Path) -> None:
    """Raise if rows cannot be written to a file of this name, before anything is computed."""
    if file.suffix not in (".csv", ".parquet"):
        raise UsageError(f"{file} is neither .csv nor .parquet", hint="for example --predictions predictions.csv")
    if not file.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {file.parent}", hint=f"mkdir -p {file.parent}")
    if file.suffix == ".parquet":
        _parquet_writer()


def read_rows(file: Path) -> PredictionRows:
    """The rows of a .csv or .parquet file that `write` made."""
    with disk_errors(file):
        columns = _read_parquet(file) if file.suffix == ".parquet" else _read_csv(file)
    missing = [name for name in COLUMNS if name not in columns]
    if missing:
        raise DataError(f"a table of predictions needs the columns {', '.join(missing)}", where=str(file))
    try:
        numbers = {name: [float(value) for value in columns[name]] for name in ("score", "loss")}
    except (TypeError, ValueError) as error:
        raise DataError("score and loss are numbers", where=str(file), why=str(error)) from error
    if not all(0 <= score <= 1 for score in numbers["score"]) or not all(
        0 <= loss < math.inf for loss in numbers["loss"]
    ):
        raise DataError("scores are from 0 to 1 and losses from 0 on", where=str(file), why="one is not, or is NaN")
    if any(value is None for name in COLUMNS for value in columns[name]):
        raise DataError("a row has fewer cells than the header", where=str(file))
    return PredictionRows(**{**{name: columns[name] for name in COLUMNS}, **numbers})


def _read_csv(file: Path) -> dict[str, Sequence[Any]]:
    with file.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as lines:
        reader = csv.DictReader(lines)
        try:
            rows = list(reader)
        except csv.Error as error:
            raise DataError("this is not CSV", where=str(file), why=str(error)) from error
        return {name: [row[name] for row in rows] for name in reader.fieldnames or ()}


def _read_parquet(file: Path) -> dict[str, Sequence[Any]]:
    pyarrow, parquet = _parquet_writer()
    try:
        columns: dict[str, Sequence[Any]] = parquet.read_table(file).to_pydict()
    except pyarrow.ArrowInvalid as error:
        raise DataError("this is no Parquet file", where=str(file), why=str(error)) from error
    return columns


def _csv(rows: PredictionRows) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for *words, score, loss, split in zip(*rows.columns().values(), strict=True):
        writer.writerow([*words, f"{score:.6g}", f"{loss:.6g}", split])
    return text.getvalue().encode("utf-8", "surrogateescape")


def _parquet(rows: PredictionRows) -> bytes:
    pyarrow, parquet = _parquet_writer()
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table({name: list(column) for name, column in rows.columns().items()}), buffer)
    return buffer.getvalue()


def _parquet_writer() -> tuple[Any, Any]:
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise UsageError(
            "Parquet files need pyarrow, which is not installed",
            why=str(error),
            hint="pip install pyarrow, or name a .csv file",
        ) from error
