"""Data paths that a recipe would ignore, checks that dry runs share with training, and the fingerprint of the data."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

import reconv
from reconv.api import evaluate
from reconv.build.data import Datasets, open_datasets
from reconv.checkpoint.store import CheckpointStore
from reconv.core.errors import DataError, RecipeError, UsageError
from reconv.data.readers import arrays
from reconv.logging.events import DataFingerprint
from reconv.logging.events import Event as RunEvent
from reconv.recipe.loader import load
from reconv.trainer.callbacks.base import TrainerCallback
from reconv.trainer.dry_run import dry_run
from reconv.trainer.loop import Trainer
from reconv.trainer.options import RunOptions
from reconv.trainer.prepare import prepare_run
from reconv.trainer.run import TrainingRun
from reconv.trainer.show_batch import show_batch


@pytest.mark.parametrize("recipe", ["quickstart", "quickstart-detection"])
def test_data_path_for_a_recipe_with_generated_data_is_an_error(tmp_path: Path, recipe: str) -> None:
    with pytest.raises(UsageError, match="generates its own data and would ignore it") as caught:
        reconv.train(recipe, data=tmp_path, out=tmp_path / "run")
    assert "data.source=auto" in caught.value.hint and not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match="would ignore it"):
        dry_run(recipe, steps=1, data=tmp_path)


def test_evaluate_with_a_data_path_the_recipe_ignores_is_an_error(tmp_path: Path) -> None:
    short = [("length", "1step", "--set"), ("schedule.warmup", "0step", "--set"), ("evaluate.every", "off", "--set")]
    run = reconv.train("quickstart", out=tmp_path / "run", overrides=short).folder
    with pytest.raises(UsageError, match="would ignore it"):
        evaluate(run, data=tmp_path)


def test_show_batch_with_a_data_path_the_recipe_ignores_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "Annotations").mkdir()
    (tmp_path / "JPEGImages").mkdir()
    with pytest.raises(UsageError, match="would ignore it"):
        show_batch(str(tmp_path), "quickstart-detection")


@pytest.mark.parametrize(("recipe", "model"), [("quickstart", "ssd_resnet34"), ("quickstart-detection", "resnet18")])
def test_dry_run_rejects_a_model_of_the_other_task(recipe: str, model: str) -> None:
    with pytest.raises(RecipeError, match="and the task is"):
        dry_run(recipe, steps=1, overrides=[("model.name", model, "--set")])


def test_show_batch_skips_bad_images_if_the_recipe_tolerates_them(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for name in ("a", "b"):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            Image.new("RGB", (40, 30), "red").save(folder / "good.png")
            (folder / "bad.png").write_bytes(b"no image")
    with pytest.raises(DataError, match="does not decode"):
        show_batch(str(tmp_path))
    shown = show_batch(str(tmp_path), overrides=[("data.bad_images", "skip up to 4", "--set")])
    assert shown.png.startswith(b"\x89PNG")


def test_the_fingerprint_is_computed_ahead_once_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = open_datasets(load("quickstart", []).recipe)
    expected = open_datasets(load("quickstart", []).recipe).fingerprint()
    hashing, may_end, num_hashed = Event(), Event(), []

    def slow(*args: Any, **options: Any) -> Any:
        hashing.set()
        assert may_end.wait(10)
        num_hashed.append(1)
        return hashlib.blake2b(*args, **options)

    monkeypatch.setattr(arrays, "hashlib", SimpleNamespace(blake2b=slow))
    datasets.hash_ahead()
    assert hashing.wait(10), "a thread computes it"
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(datasets.fingerprint)
        assert not wait([found], timeout=0.05).done
        may_end.set()
        assert found.result() == expected
    assert len(num_hashed) == 2, "training and validation set"


def test_a_run_computes_the_fingerprint_ahead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    called: list[Datasets] = []
    monkeypatch.setattr(Datasets, "hash_ahead", lambda datasets: called.append(datasets))
    with prepare_run(RunOptions("quickstart", out=tmp_path / "run", device="cpu")) as run:
        assert called == [run.datasets]


class SetEvent(TrainerCallback):
    def __init__(self, event: Event) -> None:
        self.event = event

    def on_batch_fetch_end(self, trainer: Trainer, step: int) -> None:
        self.event.set()


def test_the_first_step_does_not_wait_for_the_fingerprint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    may_end, seen = Event(), list[RunEvent]()

    def slow(*args: Any, **options: Any) -> Any:
        assert may_end.wait(60)
        return hashlib.blake2b(*args, **options)

    monkeypatch.setattr(arrays, "hashlib", SimpleNamespace(blake2b=slow))
    overrides = [("length", "2step", "--set")]
    with TrainingRun.open("quickstart", overrides, out=tmp_path / "run", device="cpu", on_event=seen.append) as run:
        trainer = run.trainer()
        trainer.callbacks = [*trainer.callbacks, SetEvent(may_end)]
        trainer.fit()
        expected = run.datasets.fingerprint()
    assert [event for event in seen if isinstance(event, DataFingerprint)] == [DataFingerprint(**expected)]
    folder = tmp_path / "run" / "checkpoints"
    assert CheckpointStore(folder).load(folder / "step-000000002").state["data_fingerprint"] == expected
