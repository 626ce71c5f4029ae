"""Scores of a run's checkpoints, evaluated after the fact, in `evaluations.csv`.

Owns that file. Refuses to know how a score is made. Invariant: one row for a checkpoint, its weights and the data
it was scored on, in order of steps; the file is replaced whole.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reconv.io.atomic import write_atomic

FILE_NAME = "evaluations.csv"
_OWN_COLUMNS = ("step", "weights", "checkpoint", "data", "num_samples")


@dataclass(frozen=True, slots=True)
class CheckpointScore:
    """The metrics of one checkpoint over the whole validation set."""

    step: int
    weights: str
    checkpoint: str  # digest of its manifest: a step trained again is another checkpoint
    data: str  # fingerprint of the validation set
    num_samples: int
    metrics: dict[str, float]


def read_scores(run_dir: Path) -> list[CheckpointScore]:
    """The scores on file, if any."""
    file = run_dir / FILE_NAME
    if not file.exists():
        return []
    with file.open(newline="", encoding="utf-8") as lines:
        return [
            CheckpointScore(
                int(row["step"]),
                row["weights"],
                row["checkpoint"],
                row["data"],
                int(row["num_samples"]),
                {name: float(value) for name, value in row.items() if name not in _OWN_COLUMNS and value},
            )
            for row in csv.DictReader(lines)
        ]


def write_scores(run_dir: Path, scores: Sequence[CheckpointScore]) -> None:
    """Replace the file by these scores, in order of their steps."""
    names = list(dict.fromkeys(name for score in scores for name in score.metrics))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_OWN_COLUMNS, *names])
    for score in sorted(scores, key=lambda score: (score.step, score.weights, score.data)):
        own = (score.step, score.weights, score.checkpoint, score.data, score.num_samples)
        writer.writerow([*own, *(score.metrics.get(name, "") for name in names)])
    write_atomic(run_dir / FILE_NAME, text.getvalue())
