"""On a GPU, users' own code trains, resumes exactly, and as a CUDA graph does what plain steps do."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
from torch import Tensor

import reconv
from reconv.checkpoint.store import CheckpointStore
from reconv.logging.run_dir import RunDir

OWN = {
    "model.name": "own_code:Net",
    "data.source": "own_code:Squares",
    "loss.name": "own_code:focal",
    "augment.extra": "[own_code:Blur, {name: own_code:Brighten, on_device: true}]",
    "metrics": "own_code:MacroRecall",
    "callbacks": "own_code:Count",
    "length": "8step",
    "schedule.warmup": "1step",
    "batch.size": "24",
    "save.every": "8step",
    "evaluate.every": "8step",
    "data.num_workers": "0",
    "engine.compile": "auto",
    "engine.deterministic": "true",
}


def weights(folder: Path) -> dict[str, Tensor]:
    newest = CheckpointStore(RunDir(folder).checkpoints).newest().path
    assert newest is not None
    return safetensors.torch.load_file(newest / "model.safetensors")


def train(out: Path, **settings: str) -> dict[str, Tensor]:
    overrides = [(field, value, "test") for field, value in {**OWN, **settings}.items()]
    return weights(reconv.train("quickstart", out=out, overrides=overrides, device="cuda").folder)


def test_a_resumed_run_has_the_same_weights(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    overrides = [(field, value, "test") for field, value in OWN.items()]
    for resume, stop_after in ((False, "3step"), (True, None)):
        reconv.train(
            "quickstart",
            out=tmp_path / "parts",
            overrides=overrides,
            device="cuda",
            resume=resume,
            stop_after=stop_after,
        )
    parts = weights(tmp_path / "parts")
    assert whole.keys() == parts.keys() and [name for name in whole if not whole[name].equal(parts[name])] == []


def test_a_captured_step_trains_as_a_plain_one(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain")
    captured = train(tmp_path / "captured", **{"engine.cuda_graphs": "on"})
    for name, tensor in plain.items():
        assert captured[name].double().numpy() == pytest.approx(tensor.double().numpy(), rel=1e-3, abs=1e-4), name
