"""Law 1 with progressive resizing: a run resumed around a change of size equals the uninterrupted run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import reconv
from reconv.core.errors import PreemptedError
from reconv.logging.event_log import read_events
from reconv.logging.events import Event, RunPlanned, TrainProgress

from .conftest import EVERYTHING, Train
from .test_law_resume import assert_same_bits

GROWING = {
    **EVERYTHING,
    "augment.progressive_resizing": "[[0ep, 4], [3step, 6], [7step, 8]]",
    "augment.cutmix.mode": "random",
    "augment.cutmix.lam": "0.8",
    "augment.cutmix.roll": "2",
    "augment.combine": "both",
    "augment.auto_augment": "randaugment",
    "augment.random_erasing.probability": "0.3",
    "augment.color_jitter.brightness": "0.2",
    "log.every": "1step",
}


@pytest.mark.slow
def test_resume_around_a_change_of_size_equals_uninterrupted_run(train: Train, tmp_path: Path) -> None:
    """One run is stopped before a change, at a change and at the next one."""
    whole = train("whole", GROWING)

    def stop(event: Event) -> None:
        if isinstance(event, TrainProgress) and event.step in (2, 3, 7):
            os.kill(os.getpid(), signal.SIGTERM)

    given = [(field, value, "--set") for field, value in GROWING.items()]
    for is_resumed in (False, True, True):
        with pytest.raises(PreemptedError):
            reconv.train("quickstart", out=tmp_path / "parts", overrides=given, on_event=stop, resume=is_resumed)
    resumed = train("parts", {**GROWING, "data.num_workers": "2"}, resume=True)
    assert_same_bits(whole, resumed)
    (plan, *_) = [event for event in read_events(whole.folder.events) if isinstance(event, RunPlanned)]
    assert any("4 px, 6 px from step 3, 8 px from step 7" in line for line in plan.lines)


def test_progressive_sizes_change_the_result(train: Train) -> None:
    grown = train("grown", GROWING)
    fixed = train("fixed", {name: value for name, value in GROWING.items() if name != "augment.progressive_resizing"})
    assert any(not tensor.equal(fixed.bits()[name]) for name, tensor in grown.bits().items())
