"""What a wheel of 0.2.0 made is read by this version, as docs/reference/compatibility.md promises.

tests/fixtures/make_run.py made the folder. A test that fails here breaks the promise: read the old files too, and do
not make them anew.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

import reconv
from reconv.cli import main
from reconv.data.readers.dataset_factory import open_dataset
from reconv.logging.event_log import read_events
from reconv.logging.events import AttemptStarted, TrainProgress
from reconv.recipe.parts.data import DataConfig

RELEASE = Path(__file__).parent / "fixtures" / "release-0.2.0"
EXPECTED = json.loads((RELEASE / "expected.json").read_text())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RELEASE / "run", tmp_path / "run"))


def end_of(*words: str | Path) -> object:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    return end.value.code


def test_the_run_is_resumed_to_the_result_that_its_own_version_reached(run: Path) -> None:
    assert end_of("resume", run) == 0
    events = read_events(run / "events.jsonl")
    made_by = [event.environment["reconv"] for event in events if isinstance(event, AttemptStarted)]
    assert made_by == ["0.2.0", reconv.__version__]
    steps = [event.step for event in events if isinstance(event, TrainProgress)]
    assert steps == [10, 20, 30, 40, 44, 50, 60, 70, 80, 88]  # none twice
    summary = json.loads((run / "summary.json").read_text())
    assert summary["reason"] == "finished" and summary["steps"] == EXPECTED["finished"]["steps"]
    assert summary["value"] == pytest.approx(EXPECTED["finished"]["value"], abs=0.01)  # 3 of 360 images


def test_its_checkpoint_is_evaluated_to_the_same_metrics(run: Path) -> None:
    (evaluation,) = reconv.evaluate(run)
    assert evaluation.metrics == pytest.approx(EXPECTED["stopped"], rel=1e-4)


@pytest.mark.parametrize("name", ["run", "run/checkpoints/step-000000044", "weights.safetensors"])
def test_runs_checkpoints_and_exported_weights_are_loaded_without_a_recipe(name: str) -> None:
    model = reconv.load(RELEASE / name, device="cpu", backend="eager")
    digits = open_dataset("digits", None, "val", DataConfig())
    images = [np.asarray(digits[index].data) for index in range(len(digits))]
    is_right = [model(image).classes[0].index == digits[index].target for index, image in enumerate(images)]
    assert np.mean(is_right) == pytest.approx(EXPECTED["stopped"]["top1"], abs=0.01)


def test_its_recipe_is_trained_again(run: Path, tmp_path: Path) -> None:
    assert end_of("train", run / "recipe.yaml", "--out", tmp_path / "again", "--stop-after", "2step") == 0
    again = yaml.safe_load((tmp_path / "again" / "recipe.yaml").read_text())
    old = yaml.safe_load((RELEASE / "run" / "recipe.yaml").read_text())
    sections = ("optimizer", "schedule", "model", "ema", "length", "seed")
    for name in sections:  # later versions add fields
        values = {field: again[name][field] for field in old[name]} if isinstance(old[name], dict) else again[name]
        assert values == old[name]


def test_its_report_is_written_anew_and_its_events_are_undamaged(run: Path) -> None:
    assert end_of("report", run) == 0
    page = (run / "report.html").read_text()
    assert "quickstart" in page and "damaged" not in page


def test_packed_data_is_read() -> None:
    dataset = open_dataset("auto", RELEASE / "packed", "train", DataConfig())
    assert (dataset.kind, len(dataset), dataset.class_names) == ("packed", 6, ("class0", "class1"))
    assert sorted(dataset[index].target for index in range(6)) == [0, 0, 0, 1, 1, 1]
