"""Small trained runs that the tests of inference share."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from detector_example import write_recipe
from interpreted_kernels import use_torch_instead

import reconv
from reconv.inference.backends import winograd

SETTINGS = {"length": "3ep", "ema.decay": "0.9", "save.keep_last": "3", "save.keep_best": "false"}


@pytest.fixture(autouse=True)
def kernels_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    use_torch_instead(monkeypatch)


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


@pytest.fixture(scope="session")
def winograd_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Winograd convolutions, compiled from this source tree whatever is installed."""
    library = tmp_path_factory.mktemp("native") / "_winograd.so"
    build = runpy.run_path(str(Path(__file__).resolve().parents[2] / "hatch_build.py"))
    problem = build["compile_library"](build["WINOGRAD"], library)
    assert not problem, problem
    return library


@pytest.fixture(scope="module")
def compiled_winograd(winograd_file: Path) -> Iterator[None]:
    """Reconv with the library of `winograd_file`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(winograd, "LIBRARY", winograd_file)
        winograd.problem.cache_clear()
        assert not winograd.problem()
        yield
    winograd.problem.cache_clear()
