"""Prediction loads a small part of the package, and nothing of training or export."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import reconv

MAX_IMPORTED = 190  # modules of Reconv by importing the predictor
MAX_PREDICTED = 230  # and after a prediction on a CPU
NEVER = ("reconv.optim", "reconv.trainer", "reconv.exporters")

COUNT = """
import json, sys
import reconv.inference.predictor
def loaded():
    return sorted(name for name in sys.modules if name.split(".")[0] == "reconv")
imported = loaded()
if len(sys.argv) > 1:
    import numpy as np
    model = reconv.inference.predictor.Predictor.load(sys.argv[1], device="cpu")
    model(np.zeros((8, 8), np.uint8))
print(json.dumps([imported, loaded()]))
"""


def count(*arguments: str) -> tuple[list[str], list[str]]:
    """The modules that a fresh process loads by importing the predictor, and after it has predicted an image."""
    out = subprocess.run([sys.executable, "-c", COUNT, *arguments], capture_output=True, text=True, check=True).stdout
    imported, predicted = json.loads(out.splitlines()[-1])
    return imported, predicted


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    reconv.train("quickstart", overrides={"length": "1step", "evaluate.every": "off"}, out=out, console=None)
    return out


def test_importing_the_predictor_loads_few_modules_and_none_of_training() -> None:
    imported, _ = count()
    assert 50 < len(imported) < MAX_IMPORTED
    assert [name for name in imported if name.startswith(NEVER)] == []


def test_a_prediction_loads_few_modules_and_none_of_training(run: Path) -> None:
    _, predicted = count(str(run))
    assert 50 < len(predicted) < MAX_PREDICTED
    assert [name for name in predicted if name.startswith(NEVER)] == []
