"""Small trained runs that the tests of inference share."""

from __future__ import annotations

from pathlib import Path

import pytest
from detector_example import write_recipe

import reconv

SETTINGS = {"length": "3ep", "ema.decay": "0.9", "save.keep_last": "3", "save.keep_best": "false"}


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a classifier with EMA weights and checkpoints at the steps 22, 44 and 66."""
    overrides = [(field, value, "--set") for field, value in SETTINGS.items()]
    return reconv.train("quickstart", out=tmp_path_factory.mktemp("runs") / "run", overrides=overrides).folder


@pytest.fixture(scope="session")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a small detector."""
    folder = tmp_path_factory.mktemp("detector")
    return reconv.train(write_recipe(folder), out=folder / "run").folder
