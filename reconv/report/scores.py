"""Scores of a run's checkpoints, evaluated after the fact, in `evaluations.csv`.

Owns that file. Refuses to know how a score is made. Invariant: one row a checkpoint, in order; the file is replaced
whole.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reconv.report.whole import write_whole

FILE_NAME = "evaluations.csv"
_OWN_COLUMNS = ("step", "weights", "num_samples")


@dataclass(frozen=True, slots=True)
class CheckpointScore:
    """The metrics of one checkpoint over the whole validation set."""

    step: int
    weights: str
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
                int(row["num_samples"]),
                {name: float(value) for name, value in row.items() if name not in _OWN_COLUMNS},
            )
            for row in csv.DictReader(lines)
        ]


def write_scores(run_dir: Path, scores: Sequence[CheckpointScore]) -> None:
    """Replace the file by these scores, in order of their steps."""
    names = list(dict.fromkeys(name for score in scores for name in score.metrics))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_OWN_COLUMNS, *names])
    for score in sorted(scores, key=lambda score: score.step):
        writer.writerow([score.step, score.weights, score.num_samples, *(score.metrics[name] for name in names)])
    write_whole(run_dir / FILE_NAME, text.getvalue())
