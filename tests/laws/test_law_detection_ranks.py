"""Laws 3 and 10 for detection: the number of ranks changes neither training nor evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import in_ranks

import reconv
from reconv.logging.event_log import read_events
from reconv.logging.events import EvalFinished, TrainProgress

from .conftest import Outcome
from .test_law_detection import TINY, assert_same_bits

NUM_SCORED = 22
SHORT = {
    **TINY,
    "batch.size": 14,  # groups of 4, 4, 4, 2, dealt 2 + 2, 2 + 1 + 1 and 1 + 1 + 1 + 1
    "batch.micro": 4,
    "log.every": "1step",
    "length": "4step",
    "save.every": "4step",
    "evaluate.every": "4step",
    "data.num_samples": 110,
    "evaluate.batch_size": 5,  # 5 batches, dealt whole: 3 + 2, 2 + 2 + 1, 2 + 1 + 1 + 1; the last is not full
    "detection.score_threshold": 0.01,  # low enough that an untrained model has detections
    "ema.decay": 0.9,  # a second evaluation, of the averaged weights
}


def train_here(out: str, settings: dict[str, object]) -> int:
    overrides = [(field, value, "--set") for field, value in settings.items()]
    return reconv.train("quickstart-detection", out=out, overrides=overrides).exit_code


def trained(size: int, settings: dict[str, object]) -> Outcome:
    """Train on `size` ranks, in a separate directory."""
    folder = Path.cwd() / f"of-{size}"
    assert in_ranks(size, train_here, str(folder), settings) == [0] * size
    return Outcome(folder, {})


def losses(outcome: Outcome) -> list[tuple[float, float]]:
    events = read_events(outcome.folder.events)
    return [(e.loss, e.metrics["box_loss"]) for e in events if isinstance(e, TrainProgress)]


def evaluations(outcome: Outcome) -> list[EvalFinished]:
    return [event for event in read_events(outcome.folder.events) if isinstance(event, EvalFinished)]


@pytest.mark.slow
def test_detector_trains_and_evaluates_the_same_on_1_2_3_and_4_ranks() -> None:
    settings = {**SHORT, "parallel.reduce": "ordered"}
    one = trained(1, settings)
    alone = evaluations(one)
    assert len(losses(one)) == 4 and [event.num_samples for event in alone] == [NUM_SCORED] * 2
    assert all(event.metrics["ar100"] > 0 for event in alone)
    for size in (2, 3, 4):
        several = trained(size, settings)
        assert_same_bits(one, several)
        assert losses(several) == losses(one)
        together = evaluations(several)
        assert [event.num_samples for event in together] == [NUM_SCORED] * 2
        assert [event.metrics for event in together] == [event.metrics for event in alone]
