"""The fast recipe, shrunk to digits on a CPU: it learns, resumes bit for bit, and is evaluated with its views."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

import reconv
from reconv.checkpoint.store import CheckpointStore
from reconv.core.errors import PreemptedError
from reconv.logging.events import Event, LogMessage, TrainProgress

SHRUNK = {
    "data.source": "digits",
    "data.preprocess.size": "8",
    "data.preprocess.channels": "1",
    "data.preprocess.mean": "[0.3053]",
    "data.preprocess.std": "[0.3760]",
    "precision.mode": "fp32",
    "precision.loss_scale": "dynamic",
    "augment.padding": "1",
    "model.options.widths": "[8, 8]",
    "batch.size": "200",
    "evaluate.batch_size": "360",
    "length": "10step",
    "log.every": "1step",
    "engine.num_threads": "1",
}


def given(**changes: str) -> list[tuple[str, object, str]]:
    settings = SHRUNK | {name.replace("__", "."): value for name, value in changes.items()}
    return [(field, value, "--set") for field, value in settings.items()]


def bits(folder: Path) -> dict[str, Tensor]:
    newest = CheckpointStore(folder / "checkpoints").newest().path
    assert newest is not None
    found = {file.stem: safetensors.torch.load_file(file) for file in newest.glob("*.safetensors")}
    return {f"{part}/{name}": tensor for part, tensors in found.items() for name, tensor in tensors.items()}


@pytest.mark.parametrize("stop_at", [3, 8])
def test_resumed_run_equals_uninterrupted_run(tmp_path: Path, stop_at: int) -> None:
    reconv.train("cifar10-fast", out=tmp_path / "whole", overrides=given(), device="cpu")

    def stop(event: Event) -> None:
        if isinstance(event, TrainProgress) and event.step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(PreemptedError):
        reconv.train("cifar10-fast", out=tmp_path / "parts", overrides=given(), device="cpu", on_event=stop)
    reconv.train("cifar10-fast", out=tmp_path / "parts", overrides=given(), device="cpu", resume=True)
    whole, parts = bits(tmp_path / "whole"), bits(tmp_path / "parts")
    assert whole.keys() == parts.keys() and len(whole) > 30
    assert [name for name in whole if not torch.equal(whole[name], parts[name])] == []


def test_images_on_device_and_host_train_the_same_weights(tmp_path: Path) -> None:
    for where in ("off", "device"):
        overrides = given(data__preload=where, length="4step")
        reconv.train("cifar10-fast", out=tmp_path / where, overrides=overrides, device="cpu")
    host, device = bits(tmp_path / "off"), bits(tmp_path / "device")
    assert host.keys() == device.keys() and len(host) > 30
    assert [name for name in host if not torch.equal(host[name], device[name])] == []


def test_whitening_is_logged_saved_and_not_trained(tmp_path: Path) -> None:
    notes: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, LogMessage):
            notes.append(event.text)

    for name, length in (("short", "1step"), ("long", "4step")):
        reconv.train("cifar10-fast", out=tmp_path / name, overrides=given(length=length), device="cpu", on_event=listen)
    assert sum("fitted to 1,437 training images" in text for text in notes) == 2
    short, long = bits(tmp_path / "short"), bits(tmp_path / "long")
    filters = long["model/whitening.weight"]
    assert torch.equal(filters, short["model/whitening.weight"])
    assert torch.equal(filters[:4], -filters[4:]) and filters.norm() > 1
    assert not torch.equal(long["model/whitening.bias"], short["model/whitening.bias"])
    assert "optimizer/momentum.whitening.weight" not in long


def test_evaluate_and_training_use_the_same_tta_views(tmp_path: Path) -> None:
    results = {}
    for tta in ("none", "flip-translate"):
        run = reconv.train("cifar10-fast", out=tmp_path / tta, overrides=given(evaluate__tta=tta), device="cpu")
        [again] = reconv.evaluate(run.folder, device="cpu", backend="eager")
        history = CheckpointStore(run.folder / "checkpoints").load(again.path).state["history"]
        assert again.metrics == history[-1]["metrics"]
        results[tta] = again.metrics["loss"]
    assert results["none"] != results["flip-translate"]


TRAIN_ONE_STEP = """
import sys
import reconv
reconv.train("quickstart", out=sys.argv[1], device="cpu", overrides=[("length", "2ep", "--set")])
print([name for name in ("torch._inductor", "torch._dynamo", "sympy") if name in sys.modules])
"""


def test_a_run_that_compiles_nothing_does_not_import_the_compiler(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TRAIN_ONE_STEP, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"
