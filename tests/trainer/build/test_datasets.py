"""Data paths that a recipe would ignore, and checks that dry runs share with training."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

import reconv
from reconv.api import evaluate
from reconv.errors import DataError, RecipeError, UsageError
from reconv.inference.show_batch import show_batch
from reconv.trainer.dry_run import dry_run


@pytest.mark.parametrize("recipe", ["quickstart", "quickstart-detection"])
def test_data_path_for_a_recipe_with_generated_data_is_an_error(tmp_path: Path, recipe: str) -> None:
    with pytest.raises(UsageError, match="generates its own data and would ignore it") as caught:
        reconv.train(recipe, data=tmp_path, out=tmp_path / "run")
    assert "data.source=auto" in caught.value.then and not (tmp_path / "run").exists()
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
