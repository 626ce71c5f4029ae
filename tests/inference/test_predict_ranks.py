"""`predict` and `average` on several ranks, and `predict` after a kill: the output of one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rank_commands import command_in_ranks, run_command
from triton.runtime import interpreter

from reconv.core.compat import complete_interpreter
from reconv.inference.predictions import ClassScore, DetectedBox, Prediction

complete_interpreter(interpreter)  # kernels that an earlier test has built run in it


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """150 images: two batches and a part of a third."""
    random, folder = np.random.default_rng(0), tmp_path / "images"
    folder.mkdir()
    for number in range(150):
        Image.fromarray(random.integers(0, 255, (8, 8), dtype=np.uint8)).save(folder / f"{number:03}.png")
    return folder


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_predictions_are_those_of_one_process(classifier: Path, images: Path, tmp_path: Path, size: int) -> None:
    (images / "070.png").write_bytes(b"no image")
    one = run_command(["predict", str(classifier), str(images), "--json", str(tmp_path / "one.json")])
    results = command_in_ranks(size, "predict", classifier, images, "--json", tmp_path / "shared.json")
    assert [result.code for result in results] == [3] * size == [one.code] * size
    assert results[0].err == one.err
    assert not any(result.out + result.err for result in results[1:])
    assert (tmp_path / "shared.json").read_bytes() == (tmp_path / "one.json").read_bytes()
    assert len(json.loads((tmp_path / "one.json").read_text())) == 150
    assert not list(tmp_path.glob(".*predicting"))


@pytest.mark.slow
def test_predictions_that_were_killed_continue(classifier: Path, images: Path, tmp_path: Path) -> None:
    pipe, out, journal = tmp_path / "last.png", tmp_path / "out.json", tmp_path / ".out.json.predicting"
    os.mkfifo(pipe)  # in the last batch: reading it waits until it is written
    command = ["predict", str(classifier), str(images), str(pipe), "--json"]

    def run_fed(path: Path) -> int:
        content = (images / "149.png").read_bytes()
        threading.Thread(target=lambda: pipe.write_bytes(content), daemon=True).start()
        return run_command([*command, str(path)]).code

    assert run_fed(tmp_path / "whole.json") == 0
    killed = subprocess.Popen([sys.executable, "-m", "reconv", *command, str(out)], stderr=subprocess.DEVNULL)
    deadline_s = time.monotonic() + 60
    while len(list(journal.glob("*.part"))) < 2:
        assert killed.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not out.exists()
    first = images / "000.png"
    first.write_bytes(bytes(first.stat().st_size))  # no image: it must not be read again
    assert run_fed(out) == 0
    assert out.read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert not journal.exists()


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_an_average_is_that_of_one_process(classifier: Path, tmp_path: Path, size: int) -> None:
    assert run_command(["average", str(classifier), "--out", str(tmp_path / "one.safetensors")]).code == 0
    results = command_in_ranks(size, "average", classifier, "--out", tmp_path / "shared.safetensors")
    assert [result.code for result in results] == [0] * size
    assert "mean of 3 checkpoints" in results[0].out
    assert not any(result.out + result.err for result in results[1:])
    assert (tmp_path / "shared.safetensors").read_bytes() == (tmp_path / "one.safetensors").read_bytes()


def test_predictions_survive_their_encoding() -> None:
    box = DetectedBox("cat", 0.1 + 0.2, (1.5, 2.25, 1 / 3, 4.0), 2, class_id=7)
    for prediction in (
        Prediction(Path("a.jpg"), (ClassScore("cat", 1 / 3, 4), ClassScore("dog", 0.25, 1))),
        Prediction(Path("b.jpg"), boxes=(box,), saved_image=Path("c.png")),
        Prediction(Path("c.jpg"), boxes=()),
        Prediction(None, error="empty"),
    ):
        assert Prediction.from_dict(json.loads(json.dumps(prediction.to_dict()))) == prediction
