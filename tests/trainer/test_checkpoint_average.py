"""Averages of a run's last checkpoints, at its end and by `reconv average`."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

import reconv
from reconv.api import average
from reconv.cli import main
from reconv.core.errors import CheckpointError, PreemptedError, UsageError
from reconv.logging.event_log import read_events
from reconv.logging.events import EvalFinished, Event, TrainProgress
from reconv.logging.run_dir import RunDir

SETTINGS = {
    "length": "4ep",  # of 5 steps
    "data.subset_percent": "25",
    "batch.size": "64",
    "evaluate.every": "7step",  # an evaluation, and so perhaps a best checkpoint, between two regular ones
    "save.every": "1ep",
    "save.keep_last": "1",
    "checkpoint_average.last": "3ep",
}


def train(out: Path, *, resume: bool = False, **more: str) -> reconv.api.RunResult:
    given = [(name.replace("__", "."), value, "--set") for name, value in (SETTINGS | more).items()]
    return reconv.train("quickstart", out=out, overrides=given, resume=resume)


def weighted_by_hand(run: Path, shares: dict[int, float]) -> dict[str, Tensor]:
    files = {
        step: safetensors.torch.load_file(run / f"checkpoints/step-{step:09d}/model.safetensors") for step in shares
    }
    names = list(next(iter(files.values())))
    total = sum(shares.values())
    return {
        name: torch.stack([files[step][name].double() * (share / total) for step, share in shares.items()]).sum(0)
        for name in names
    }


def assert_is(averaged: Path, expected: dict[str, Tensor]) -> None:
    tensors = safetensors.torch.load_file(averaged)
    assert tensors.keys() == expected.keys()
    floats = [name for name in tensors if tensors[name].is_floating_point()]
    assert sum("running_var" in name for name in floats) > 5
    for name in floats:
        torch.testing.assert_close(tensors[name], expected[name].to(tensors[name].dtype), msg=name)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with averaged checkpoints; read only."""
    folder = tmp_path_factory.mktemp("average") / "run"
    train(folder)
    return folder


def test_run_keeps_averages_and_evaluates_its_last_checkpoints(run: Path) -> None:
    assert_is(run / "averaged.safetensors", weighted_by_hand(run, {10: 1, 15: 1, 20: 1}))
    assert not (run / "checkpoints/step-000000005").exists()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["averaged"]["steps"] == [10, 15, 20]
    [scored] = [e for e in read_events(run / "events.jsonl") if isinstance(e, EvalFinished) and e.weights == "averaged"]
    assert scored.num_samples == 360
    assert summary["averaged"]["metrics"] == dict(scored.metrics)
    assert (summary["weights"], summary["value"]) == ("averaged", scored.metrics["top1"])
    assert "average of the last checkpoints" in (run / "report.html").read_text()
    [again] = reconv.evaluate(run, weights="averaged")
    assert again.metrics == pytest.approx(dict(scored.metrics))
    [raw] = reconv.evaluate(run)
    assert raw.weights == "raw" and raw.metrics["loss"] != again.metrics["loss"]


def test_resumed_run_averages_the_same_checkpoints_bitwise(run: Path, tmp_path: Path) -> None:
    """The checkpoint saved by the signal, at step 13, is in the window and must not be averaged."""

    def stop(event: Event) -> None:
        if isinstance(event, TrainProgress) and event.step == 13:
            os.kill(os.getpid(), signal.SIGTERM)

    given = [(name, value, "--set") for name, value in (SETTINGS | {"log.every": "1step"}).items()]
    with pytest.raises(PreemptedError):
        reconv.train("quickstart", out=tmp_path / "run", overrides=given, on_event=stop)
    assert (tmp_path / "run/checkpoints/step-000000013").exists()
    result = reconv.train("quickstart", out=tmp_path / "run", overrides=given, resume=True)
    assert result.summary["averaged"]["steps"] == [10, 15, 20]
    assert (tmp_path / "run/averaged.safetensors").read_bytes() == (run / "averaged.safetensors").read_bytes()


def test_average_command_with_exponential_weights(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "two.safetensors"
    before = (run / "averaged.safetensors").read_bytes()
    words = ["--last", "2ep", "--mode", "exponential", "--decay", "0.25", "--out", str(target)]
    with pytest.raises(SystemExit) as end:
        main(["average", str(run), *words, "--json", str(tmp_path / "result.json")])
    assert end.value.code == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result == {"path": str(target), "steps": [15, 20], "mode": "exponential", "num_deleted": 0}
    assert_is(target, weighted_by_hand(run, {15: 0.25, 20: 0.75}))
    assert (run / "averaged.safetensors").read_bytes() == before
    [scored] = reconv.evaluate(target, recipe=str(run / "recipe.yaml"))
    assert scored.num_samples == 360


def test_the_newest_checkpoints_can_be_left_out(run: Path, tmp_path: Path) -> None:
    result = average(run, discard_last=1, last="2ep", out=tmp_path / "a")
    assert result.steps == (10, 15)  # the two epochs before the newest that is left
    assert_is(result.path, weighted_by_hand(run, {10: 1, 15: 1}))
    assert average(run, discard_last=2, out=tmp_path / "b").steps[-1] == 10
    with pytest.raises(UsageError, match="leaving out the newest 9 checkpoints leaves none"):
        average(run, discard_last=9, out=tmp_path / "c")


def test_average_command_equals_the_average_of_the_run(run: Path, tmp_path: Path) -> None:
    result = average(run, last="3ep", out=tmp_path / "again.safetensors")
    assert result.steps == (10, 15, 20)
    assert result.path.read_bytes() == (run / "averaged.safetensors").read_bytes()


def test_exponential_average_is_the_ema_recursion_over_checkpoints(tmp_path: Path) -> None:
    train(tmp_path / "run", checkpoint_average__mode="exponential", checkpoint_average__decay="0.75")
    first, second, third = (weighted_by_hand(tmp_path / "run", {step: 1.0}) for step in (10, 15, 20))
    value = {n: 0.75 * (0.75 * first[n] + 0.25 * second[n]) + 0.25 * third[n] for n in first}
    assert_is(tmp_path / "run/averaged.safetensors", value)


def test_ema_weights_can_be_averaged(tmp_path: Path) -> None:
    train(tmp_path / "run", length="2ep", ema__decay="0.9", checkpoint_average__last="off")
    raw = average(tmp_path / "run", out=tmp_path / "raw.safetensors").path.read_bytes()
    ema = average(tmp_path / "run", weights="ema", out=tmp_path / "ema.safetensors").path.read_bytes()
    assert raw != ema
    with pytest.raises(CheckpointError, match="no averaged checkpoint"):
        reconv.evaluate(tmp_path / "run", weights="averaged")


def test_damaged_checkpoint_is_not_averaged(tmp_path: Path) -> None:
    train(tmp_path / "run", length="2ep")
    file = tmp_path / "run/checkpoints/step-000000005/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    before = RunDir(tmp_path / "run").averaged.read_bytes()
    with pytest.raises(CheckpointError, match=r"damaged|checksum|sha256"):
        average(tmp_path / "run")
    assert RunDir(tmp_path / "run").averaged.read_bytes() == before


@pytest.mark.parametrize("last", ["3min", "0ep", "five", "5"])
def test_invalid_averaging_window_is_an_error(run: Path, last: str) -> None:
    with pytest.raises(UsageError, match="--last"):
        average(run, last=last)


def test_deleted_checkpoints_are_missed_with_a_warning(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = average(run, last="100%", out="mean.safetensors")
    assert (result.steps, result.num_deleted) == ((10, 15, 20), 1)
    assert str(result) == "mean of 3 of 4 checkpoints (step 10, 15, 20) in mean.safetensors"
    assert "only 3 of the 4 checkpoints that save.every wrote in the last 100%" in result.warning
    assert "save.keep_last is 1" in result.warning and "--set save.keep_last=4" in result.warning
    assert average(run, last="3ep", out="mean.safetensors").warning == ""
    with pytest.raises(SystemExit) as end:
        main(["average", str(run), "--out", "mean.safetensors"])
    assert end.value.code == 0
    assert capsys.readouterr().err.startswith("warning: the average has only 3 of the 4 checkpoints")
