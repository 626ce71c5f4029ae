"""Law 1 for external models, with random layers."""

from __future__ import annotations

import os
import signal
import sys
import types
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import reconv
from reconv.checkpoint.store import CheckpointStore
from reconv.core.errors import PreemptedError
from reconv.logging.events import Event, TrainProgress
from reconv.logging.run_dir import RunDir

SETTINGS = {
    "model.name": "torchvision:tiny",
    "model.options": "{}",
    "length": "6step",
    "schedule.warmup": "1step",
    "save.every": "6step",
    "evaluate.every": "6step",
    "log.every": "1step",
}


class StochasticDepth(nn.Module):
    """As torchvision names and builds its own."""

    def __init__(self, p: float, mode: str) -> None:
        super().__init__()
        self.p, self.mode = p, mode

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.empty(len(x), 1, 1, 1).bernoulli_(1 - self.p) / (1 - self.p) if self.training else x


def get_model(name: str, num_classes: int, in_channels: int, weights: None) -> nn.Module:
    body = (nn.Conv2d(in_channels, 8, 3), nn.BatchNorm2d(8), StochasticDepth(0.5, "row"), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(*body, nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, num_classes))


def test_resumed_run_of_an_external_model_with_dropout_equals_uninterrupted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = types.ModuleType("torchvision")
    package.models = types.SimpleNamespace(get_model=get_model, list_models=lambda module=None: ["tiny"])
    monkeypatch.setitem(sys.modules, "torchvision", package)
    given = [(field, value, "--set") for field, value in SETTINGS.items()]

    def stop(event: Event) -> None:
        if isinstance(event, TrainProgress) and event.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    torch.manual_seed(1)
    reconv.train("quickstart", out=tmp_path / "whole", overrides=given)
    torch.manual_seed(2)
    with pytest.raises(PreemptedError):
        reconv.train("quickstart", out=tmp_path / "parts", overrides=given, on_event=stop)
    reconv.train("quickstart", out=tmp_path / "parts", overrides=given, resume=True)
    found = []
    for name in ("whole", "parts"):
        newest = CheckpointStore(RunDir(tmp_path / name).checkpoints).newest().path
        assert newest is not None
        found.append(safetensors.torch.load_file(newest / "model.safetensors"))
    whole, parts = found
    assert whole.keys() == parts.keys() and len(whole) == 9
    assert [name for name in whole if not torch.equal(whole[name], parts[name])] == []
