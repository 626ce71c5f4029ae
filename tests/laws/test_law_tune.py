"""Law 1 for rungs: a run that is stopped at points of its length and continued equals the uninterrupted run."""

from __future__ import annotations

from pathlib import Path

import pytest

import reconv
from reconv.core.errors import UsageError
from reconv.logging.event_log import read_events
from reconv.logging.events import EvalFinished

from .conftest import EVERYTHING, Outcome
from .test_law_resume import assert_same_bits

OVERRIDES = [(name, value, "--set") for name, value in EVERYTHING.items()]


def evaluations(outcome: Outcome) -> dict[tuple[int, str], dict[str, float]]:
    events = read_events(outcome.folder.events)
    return {(e.step, e.weights): dict(e.metrics) for e in events if isinstance(e, EvalFinished)}


def test_rungs_that_are_continued_have_the_bits_of_uninterrupted_training(tmp_path: Path) -> None:
    whole = reconv.train("quickstart", out=tmp_path / "whole", overrides=OVERRIDES)
    steps = []
    for point in ("10%", "50%", "51%", None):
        rung = reconv.train(
            "quickstart",
            out=tmp_path / "rungs",
            overrides=OVERRIDES,
            resume=(tmp_path / "rungs").exists(),
            stop_at=point,
        )
        steps.append(rung.summary["steps"])
    total = whole.summary["total_steps"]
    assert steps == [total // 2, total // 2 + 1, total, total]  # the evaluation there or later; a step at the least
    one, other = (Outcome(tmp_path / name, {}) for name in ("whole", "rungs"))
    assert_same_bits(one, other)
    assert evaluations(one) == evaluations(other)


def test_a_point_that_is_no_point_of_the_run_is_refused(tmp_path: Path) -> None:
    for text in ("0%", "101%", "3h", "1.5step", "soon"):
        with pytest.raises(UsageError, match="--stop-at takes a point of the run"):
            reconv.train("quickstart", out=tmp_path / "run", overrides=OVERRIDES, stop_at=text)
    with pytest.raises(UsageError, match="--stop-after and --stop-at cannot be combined"):
        reconv.train("quickstart", out=tmp_path / "run", overrides=OVERRIDES, stop_at="1ep", stop_after="1step")
    assert not (tmp_path / "run").exists()
