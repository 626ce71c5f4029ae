"""A rank that slows the others down is named while the run goes on."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from PIL import Image
from ranks import in_ranks
from torch import Tensor

import reconv
from reconv.distributed import failure
from reconv.distributed.process_group import Pace, ProcessGroup
from reconv.logging import formatting
from reconv.logging.clock import RunClock
from reconv.logging.event_log import read_events
from reconv.logging.events import Event, SlowRank
from reconv.logging.run_logger import RunLogger
from reconv.report.html import write_report
from reconv.trainer.callbacks import slow_ranks as module

SETTINGS = {
    "length": "20step",
    "schedule.warmup": "0ep",
    "batch.size": 32,
    "evaluate.every": "off",
    "save.every": "off",
}


class SlowLoss:
    """Cross entropy that takes a while on rank 1."""

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        time.sleep(0.15 if os.environ.get("RANK") == "1" else 0.0)
        return F.cross_entropy(logits, targets, reduction="none")


class SlowRead:
    """A transform that takes a while on rank 1."""

    def __call__(self, image: Image.Image, rng: Any) -> Image.Image:
        time.sleep(0.008 if os.environ.get("RANK") == "1" else 0.0)
        return image


def train(out: str, slow: str) -> None:
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(module, "WINDOW_S", 0.25)
    monkeypatch.setattr(failure, "HEARTBEAT_S", 0.05)
    own: dict[str, Any] = {"loss": {"loss": SlowLoss()}, "data": {"host_transforms": [SlowRead()]}, "": {}}[slow]
    reconv.train("quickstart", out=out, overrides=SETTINGS, workers=0, device="cpu", console="quiet", **own)


def slow_events(out: Path) -> list[SlowRank]:
    return [event for event in read_events(out / "events.jsonl") if isinstance(event, SlowRank)]


@pytest.mark.parametrize("slow", ["loss", "data"])
def test_a_slow_rank_is_named_with_what_it_does(slow: str, tmp_path: Path) -> None:
    in_ranks(2, train, str(tmp_path / "run"), slow)
    events = slow_events(tmp_path / "run")
    assert {event.rank for event in events} == {1}, events
    assert events[0].step < 20  # while the run goes on
    text = formatting.slow_rank(events[0])
    assert ("slows all ranks down by computing" if slow == "loss" else "down by waiting for data") in text
    assert "rank 1 on" in write_report(tmp_path / "run").read_text()


def test_a_rank_is_slow_beside_the_median_and_beside_the_time_of_a_step() -> None:
    paces = {rank: Pace(0.0, 0.1) for rank in range(8)}
    assert module.slow_ranks(paces, 0.3) == []
    assert module.slow_ranks({**paces, 5: Pace(0.0, 0.129)}, 0.2) == []  # below 1.3 times
    assert module.slow_ranks({**paces, 5: Pace(0.0, 0.15)}, 0.3) == [5]
    assert module.slow_ranks({**paces, 5: Pace(0.0, 0.15)}, 0.6) == []  # less than a tenth of the step
    assert module.slow_ranks({0: Pace(0.0, 0.1), 1: Pace(0.1, 0.1)}, 0.3) == [
        1
    ]  # of two ranks the faster is the median


def test_a_rank_that_is_slow_once_is_not_named() -> None:
    events: list[Event] = []
    ranks = module.SlowRankLogger(
        ProcessGroup(), RunClock(), RunLogger(events.append), lambda: None, lambda name: nullcontext()
    )

    def compare(forward_s: float) -> None:
        paces = {0: ("a", Pace(0.0, 0.1)), 1: ("b", Pace(0.0, forward_s))}
        ranks._compare(paces, step_s=0.3, step=1)

    compare(0.25)
    compare(0.25)  # its next heartbeat is late: this is the same window
    compare(0.1)
    assert events == []
    compare(0.25)
    compare(0.26)
    compare(0.26)
    compare(0.27)
    assert [(event.rank, event.forward_s) for event in events if isinstance(event, SlowRank)] == [(1, 0.26)]
