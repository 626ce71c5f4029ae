"""Law 1 for every optimizer: weights and state of a resumed run equal those of the uninterrupted run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import reconv
from reconv.core.errors import PreemptedError
from reconv.logging.events import Event, TrainProgress

from .conftest import EVERYTHING, Train

STOP_AT = 4
KINDS = {
    "lars": {"optimizer.name": "lars", "schedule.lr": "2.0"},
    "rmsprop": {"optimizer.name": "rmsprop", "optimizer.nesterov": "false", "schedule.lr": "0.01"},
    "rmsprop-tf": {
        "optimizer.name": "rmsprop-tf",
        "optimizer.nesterov": "false",
        "optimizer.alpha_exponent": "-9",
        "schedule.lr": "0.01",
    },
    "adamw": {
        "optimizer.name": "adamw",
        "optimizer.nesterov": "false",
        "optimizer.layer_decay": "0.7",
        "schedule.lr": "0.01",
    },
    "agc": {"optimizer.clip_grad": "0.01", "optimizer.clip_mode": "agc"},
    "lamb": {"optimizer.name": "lamb", "optimizer.nesterov": "false", "schedule.lr": "0.01"},
}
STATE = {
    "lars": {"momentum"},
    "agc": {"momentum"},
    "adamw": {"exp_avg", "exp_avg_sq", "step"},
    "lamb": {"exp_avg", "exp_avg_sq", "step"},
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_stop_and_resume_equals_uninterrupted_run_with(kind: str, train: Train, tmp_path: Path) -> None:
    settings = {**EVERYTHING, **KINDS[kind], "loss.label_smoothing": "0.1", "loss.smooth_over": "other-classes"}
    settings |= {"log.every": "1step", "engine.channels_last": "on"}
    whole = train("whole", settings)

    def stop(event: Event) -> None:
        if isinstance(event, TrainProgress) and event.step == STOP_AT:
            os.kill(os.getpid(), signal.SIGTERM)

    given = [(field, value, "--set") for field, value in settings.items()]
    with pytest.raises(PreemptedError):
        reconv.train("quickstart", out=tmp_path / "parts", overrides=given, on_event=stop)
    resumed = train("parts", settings, resume=True)
    a, b = whole.bits(), resumed.bits()
    slots = {name.split("/")[1].split(".")[0] for name in a if name.startswith("optimizer/")}
    assert slots == STATE.get(kind, {"momentum", "square"})
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
    assert all(tensor.isfinite().all() for tensor in a.values())
