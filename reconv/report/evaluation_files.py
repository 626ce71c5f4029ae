"""Files of evaluations in a run directory, replaced atomically.

`evaluations.csv` has the metrics of every checkpoint that `reconv eval --all` evaluated, `classification.json` and
`detection.json` the analysis of the last evaluation.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reconv.core.confidence import ConfidenceCalibration
from reconv.logging.json_lines import CHECKSUM, add_checksum, verify_checksum
from reconv.storage import read_limits
from reconv.storage.bounded import (
    NotRegularFileError,
    NotTextError,
    TooLargeError,
    parse_shallow_json,
    read_json_object,
    read_text,
)
from reconv.storage.files import write_atomic
from reconv.storage.transient import is_machine_fault

EVALUATIONS_FILE = "evaluations.csv"
# The analyses of the last evaluation and their versions; a file of another version is ignored.
CLASSIFICATION_FILE, CLASSIFICATION_VERSION = "classification.json", 1
DETECTION_FILE, DETECTION_VERSION = "detection.json", 3
CONFIDENCE_FILE, CONFIDENCE_VERSION = "confidence.json", 1  # what `reconv eval --calibrate` has fitted
_KEY_COLUMNS = ("step", "weights", "checkpoint", "data", "num_samples")


@dataclass(frozen=True, slots=True)
class CheckpointScore:
    """The metrics of one checkpoint on the whole validation set."""

    step: int
    weights: str
    checkpoint: str  # digest of its manifest: a step that was trained again is another checkpoint
    data: str  # fingerprint of the validation set
    num_samples: int
    metrics: dict[str, float]


def read_scores(run_dir: Path, report: Callable[[str], None] = lambda problem: None) -> list[CheckpointScore]:
    """The rows of `evaluations.csv`; none if there is no such file, or if it is damaged, which is reported."""
    try:
        text = read_text(run_dir / EVALUATIONS_FILE, read_limits.EVALUATIONS_BYTES).decode()
        return [_score(row) for row in csv.DictReader(io.StringIO(text, newline=""))]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        if isinstance(error, OSError) and is_machine_fault(error):
            raise
        report(_left_out(EVALUATIONS_FILE, error))
        return []


def _score(row: Mapping[str, str]) -> CheckpointScore:
    metrics = {name: float(value) for name, value in row.items() if name not in _KEY_COLUMNS and value}
    return CheckpointScore(
        int(row["step"]), row["weights"], row["checkpoint"], row["data"], int(row["num_samples"]), metrics
    )


def _left_out(name: str, error: Exception) -> str:
    why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return f"{name} is damaged and was left out ({why})"


def write_scores(run_dir: Path, scores: Sequence[CheckpointScore]) -> None:
    """Replace `evaluations.csv` by these rows, sorted by step."""
    names = list(dict.fromkeys(name for score in scores for name in score.metrics))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_KEY_COLUMNS, *names])
    for score in sorted(scores, key=lambda score: (score.step, score.weights, score.data)):
        key = (score.step, score.weights, score.checkpoint, score.data, score.num_samples)
        writer.writerow([*key, *(score.metrics.get(name, "") for name in names)])
    write_atomic(run_dir / EVALUATIONS_FILE, text.getvalue())


def read_classification_analysis(
    run_dir: Path, report: Callable[[str], None] = lambda problem: None
) -> Mapping[str, Any] | None:
    """The content of `classification.json`; None if there is none, one of another version, or a damaged one."""
    return _read_analysis(run_dir / CLASSIFICATION_FILE, CLASSIFICATION_VERSION, report)


def write_classification_analysis(run_dir: Path, analysis: Mapping[str, Any]) -> None:
    """Replace `classification.json`."""
    _write_analysis(run_dir / CLASSIFICATION_FILE, CLASSIFICATION_VERSION, analysis)


def read_detection_analysis(
    run_dir: Path, report: Callable[[str], None] = lambda problem: None
) -> Mapping[str, Any] | None:
    """The content of `detection.json`; None if there is none, one of another version, or a damaged one."""
    return _read_analysis(run_dir / DETECTION_FILE, DETECTION_VERSION, report)


def write_detection_analysis(run_dir: Path, analysis: Mapping[str, Any]) -> None:
    """Replace `detection.json`."""
    _write_analysis(run_dir / DETECTION_FILE, DETECTION_VERSION, analysis)


def _read_analysis(file: Path, version: int, report: Callable[[str], None]) -> Mapping[str, Any] | None:
    """The content of a file; None if it is missing, damaged or of another version: the report does without it."""
    try:
        line = read_text(file, read_limits.ANALYSIS_BYTES).removesuffix(b"\n")
        analysis = parse_shallow_json(line)
        if not isinstance(analysis, dict) or verify_checksum(line) is False:
            raise ValueError("its checksum does not match")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and is_machine_fault(error):
            raise
        report(_left_out(file.name, error))
        return None
    if analysis.get("version") != version:
        return None
    return {name: value for name, value in analysis.items() if name != CHECKSUM}


def _write_analysis(file: Path, version: int, analysis: Mapping[str, Any]) -> None:
    content = {"version": version, **analysis}
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    write_atomic(file, add_checksum(text.encode("utf-8", "backslashreplace")) + b"\n")


def read_confidence(run_dir: Path, step: int, weights: str) -> ConfidenceCalibration | None:
    """Calibration that `reconv eval --calibrate` has fitted for the weights of a step; None without such a file."""
    try:
        content = read_json_object(run_dir / CONFIDENCE_FILE, read_limits.SUMMARY_BYTES)
        if content.get("version") != CONFIDENCE_VERSION:
            return None
        found = content["fitted"].get(f"{step} {weights}")
        return None if found is None else ConfidenceCalibration.from_dict(found)
    except (FileNotFoundError, NotRegularFileError, TooLargeError, NotTextError, ValueError, KeyError, AttributeError):
        return None  # a damaged file promises nothing


def write_confidence(run_dir: Path, step: int, weights: str, calibration: ConfidenceCalibration) -> None:
    """Add the calibrated confidence of the weights of a step to `confidence.json`."""
    try:
        content = read_json_object(run_dir / CONFIDENCE_FILE, read_limits.SUMMARY_BYTES)
        fitted = dict(content["fitted"]) if content.get("version") == CONFIDENCE_VERSION else {}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        fitted = {}
    fitted[f"{step} {weights}"] = calibration.to_dict()
    text = json.dumps({"version": CONFIDENCE_VERSION, "fitted": fitted}, indent=2)
    write_atomic(run_dir / CONFIDENCE_FILE, text + "\n")
