"""Laws 1, 2 and 9 for detection: resuming, splitting a batch and loading with workers change nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import reconv
from reconv.core.errors import PreemptedError
from reconv.logging.events import Event, TrainProgress

from .conftest import Outcome

TINY = {
    "model.options.width": 8,
    "model.options.extra_widths": [16, 16, 16],
    "data.preprocess.size": 64,
    "data.num_samples": 48,
    "augment.crop": "ssd",
    "augment.hflip": 0.5,
    "length": "6step",
    "schedule.warmup": "2step",
    "batch.size": 12,
    "batch.group": 4,
    "evaluate.every": "off",
    "save.every": "6step",
}

Train = Callable[..., Outcome]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Train the detection quickstart, made tiny, with overrides in a separate directory."""

    def run(
        name: str, *, resume: bool = False, on_event: Callable[[Event], None] | None = None, **given: object
    ) -> Outcome:
        values = TINY | {field.replace("__", "."): value for field, value in given.items()}
        overrides = [(field, value, "--set") for field, value in values.items()]
        out = tmp_path / name
        result = reconv.train("quickstart-detection", out=out, overrides=overrides, resume=resume, on_event=on_event)
        return Outcome(result.folder, result.summary)

    return run


def assert_same_bits(one: Outcome, other: Outcome) -> None:
    a, b = one.bits(), other.bits()
    assert a.keys() == b.keys() and len(a) > 60
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize("stop_at", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_resumed_detection_run_equals_uninterrupted_run(train: Train, stop_at: int) -> None:
    settings = {"ema__decay": 0.9, "evaluate__every": "3step", "batch__micro": 8}
    whole = train("whole", **settings)

    def stop(event: Event) -> None:
        if isinstance(event, TrainProgress) and event.step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(PreemptedError):
        train("parts", **settings, log__every="1step", on_event=stop)
    resumed = train("parts", **settings, log__every="1step", data__num_workers=2, resume=True)
    assert_same_bits(whole, resumed)
    assert whole.summary["value"] == resumed.summary["value"]
    assert whole.summary["metric"] == "voc10"


@pytest.mark.parametrize("micro", [4, 8])
def test_ordered_reduction_of_a_detector_is_bitwise_equal_for_every_split(train: Train, micro: int) -> None:
    one = train("one", parallel__reduce="ordered", batch__micro=12)
    assert_same_bits(one, train("split", parallel__reduce="ordered", batch__micro=micro))


@pytest.mark.parametrize("micro", [4, 8])
def test_fast_reduction_of_a_detector_agrees_to_1e_12_in_fp64(train: Train, micro: int) -> None:
    settings = {"precision__mode": "fp64", "length": "10step", "save__every": "10step"}
    one = train("one", **settings, batch__micro=12).bits()
    split = train("split", **settings, batch__micro=micro).bits()
    assert max((one[n].double() - split[n].double()).abs().max().item() for n in one) < 1e-12
