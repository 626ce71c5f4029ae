"""Law 1 in half precision: a resumed run equals the uninterrupted run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import reconv
from reconv.core.errors import PreemptedError
from reconv.logging.event_log import read_events
from reconv.logging.events import EvalFinished, Event, TrainProgress

from .conftest import EVERYTHING, Train

STOP_AT = 2
# Few and small steps: float16 convolutions have no fast backward pass on CPUs.
SHORT = {"length": "4step", "batch.size": "16", "batch.group": "8", "batch.micro": "8", "data.subset_percent": "5"}
MODES = {
    "16.16": {"precision.mode": "16.16", "precision.loss_scale": "128.0"},
    "bf16-all": {"precision.mode": "bf16-all"},
}


@pytest.mark.parametrize("mode", list(MODES))
def test_stop_and_resume_equals_uninterrupted_run_in(mode: str, train: Train, tmp_path: Path) -> None:
    settings = {**EVERYTHING, **SHORT, **MODES[mode], "log.every": "1step", "evaluate.every": "4step"}
    whole = train("whole", settings)
    scales: list[float | None] = []

    def stop(event: Event) -> None:
        if isinstance(event, TrainProgress):
            scales.append(event.loss_scale)
            if event.step == STOP_AT:
                os.kill(os.getpid(), signal.SIGTERM)

    given = [(field, value, "--set") for field, value in settings.items()]
    with pytest.raises(PreemptedError):
        reconv.train("quickstart", out=tmp_path / "parts", overrides=given, on_event=stop)
    resumed = train("parts", settings, resume=True)
    a, b = whole.bits(), resumed.bits()
    assert scales == [128.0 if mode == "16.16" else None] * STOP_AT
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
    assert all(tensor.isfinite().all() for tensor in a.values() if tensor.is_floating_point())
    assert ("optimizer/rounding.step" in a) == (mode == "16.16")
    assert a["model/fc.weight"].dtype == (torch.float16 if mode == "16.16" else torch.float32)
    assert a["model/bn1.running_var"].dtype == a["ema/fc.weight"].dtype == torch.float32
    assert a["optimizer/momentum.fc.weight"].dtype == torch.float32


@pytest.mark.parametrize("mode", list(MODES))
def test_evaluate_reproduces_the_metrics_of_training_in(mode: str, train: Train) -> None:
    run = train("whole", {**EVERYTHING, **SHORT, **MODES[mode], "evaluate.every": "4step"})
    during = {e.weights: e.metrics for e in read_events(run.folder.events) if isinstance(e, EvalFinished)}
    assert set(during) == {"raw", "ema"}
    for weights, metrics in during.items():
        assert reconv.evaluate(run.folder.path, weights=weights, backend="eager")[0].metrics == metrics
