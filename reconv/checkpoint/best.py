"""The best checkpoint of a run, as a function of the evaluations that its checkpoints record.

A checkpoint's `state.json` has the evaluations of all steps before it and which metric of which weights decides.
`best.json` repeats the result for people and other programs. Nothing here reads it as the truth: a run that is killed
between a save and the write of `best.json` leaves one that is out of date.

So `best.json` and retention are done again at every start and end, from the history in the newest checkpoint
(tests/checkpoint/test_best_checkpoint.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from reconv.checkpoint.manifest import damaged, unreadable
from reconv.storage import read_limits
from reconv.storage.bounded import read_json_object
from reconv.storage.files import FileSystem, disk_errors, write_atomic

if TYPE_CHECKING:
    from reconv.logging.run_dir import RunDir


@dataclass(frozen=True, slots=True)
class BestCheckpoint:
    """The best evaluation so far."""

    step: int
    metric: str
    value: float
    weights: str  # raw or ema


def best_evaluation(history: Sequence[Mapping[str, Any]], metric: str, weights: str) -> BestCheckpoint | None:
    """The evaluation with the highest value of a metric, the earliest one of equals; NaN is never the best."""
    values = [(h["step"], h["metrics"][metric]) for h in history if h["weights"] == weights]
    candidates = [(value, -step) for step, value in values if not math.isnan(value)]
    if not candidates:
        return None
    value, step = max(candidates)
    return BestCheckpoint(-step, metric, value, weights)


def best_in_state(state: Mapping[str, Any]) -> BestCheckpoint | None:
    """The best evaluation that the state of a checkpoint records."""
    monitored = state["monitored"]
    return best_evaluation(state["history"], monitored["metric"], monitored["weights"])


def read_best(run: RunDir) -> BestCheckpoint | None:
    """The content of `best.json`, if any."""
    try:
        content = read_json_object(run.best, read_limits.RUN_JSON_BYTES)
        return BestCheckpoint(
            int(content["step"]), str(content["metric"]), float(content["value"]), str(content["weights"])
        )
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(run.best, error) from error
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise damaged(run.best, f"is damaged: {type(error).__name__}: {error}") from error


def write_best(run: RunDir, best: BestCheckpoint | None, files: FileSystem | None = None) -> None:
    """Make `best.json` say this, atomically; without a best evaluation there is no such file."""
    files = files or FileSystem()
    with disk_errors(run.best, fs=files):
        if best is not None:
            write_atomic(run.best, json.dumps(asdict(best)), files)
        elif run.best.exists():
            files.remove(run.best)
