"""`reconv.train` from Python: keywords, results that display themselves, and interrupts in a notebook."""

from __future__ import annotations

import csv
import os
import signal
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from own_code import Net, Squares
from torch import nn

import reconv
from reconv.api import RunResult
from reconv.api.run_result import History
from reconv.core.compat import ranges_of, untested_note
from reconv.core.custom_code import require_trust
from reconv.core.errors import ExitCode, PreemptedError, ReconvError, UsageError
from reconv.logging.event_log import read_events
from reconv.logging.events import Event, LogMessage, TrainProgress
from reconv.recipe.loader import load
from reconv.recipe.parts.code import CodeReference

SHORT = {"length": "4step", "schedule.warmup": "1step", "log.every": "1step", "evaluate.every": "4step"}


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend to run in IPython."""
    module = types.ModuleType("IPython")
    module.get_ipython = lambda: object()
    monkeypatch.setitem(sys.modules, "IPython", module)


def stop_at_step_2(event: Event) -> None:
    if isinstance(event, TrainProgress) and event.step == 2:
        os.kill(os.getpid(), signal.SIGINT)


def test_keywords_are_the_options_of_the_command_and_overrides_any_field(tmp_path: Path) -> None:
    result = reconv.train(
        "quickstart",
        epochs=0.25,
        batch_size=32,
        lr=0.02,
        model="resnet14_cifar",
        seed=5,
        workers=0,
        overrides={"schedule.warmup": "0step", "augment.hflip": 0.25},
        out=tmp_path / "run",
    )
    recipe = load(str(tmp_path / "run/recipe.yaml")).recipe
    assert (str(recipe.length), recipe.batch.size, recipe.schedule.lr) == ("0.25ep", 32, 0.02)
    assert (recipe.model.name, recipe.seed, recipe.data.num_workers) == ("resnet14_cifar", 5, 0)
    assert recipe.augment.hflip == 0.25
    assert result.exit_code == 0 and result.report.is_file() and result.metric == "top1"
    model = result.load()
    assert model.recipe.model.name == "resnet14_cifar"
    assert model(np.zeros((8, 8), np.uint8)).label in model.classes
    html = result._repr_html_()
    assert "top-1" in html and str(tmp_path / "run") in html and 'report.html">' in html
    assert f"{tmp_path / 'run'}: finished at step" in str(result) and "top-1" in repr(result)


def test_objects_alone_are_trained_without_a_recipe_and_passed_again_to_resume(tmp_path: Path) -> None:
    model = Net(4, 1)

    def train(**given: Any) -> RunResult:
        return reconv.train(
            train_data=Squares("train", 64),
            val_data=Squares("val", 64),
            model=model,
            loss=nn.CrossEntropyLoss(),
            epochs=2,
            overrides={"log.every": "4step"},
            **given,
        )

    whole, parts = train(out=tmp_path / "whole"), train(out=tmp_path / "parts", stop_after="1ep")
    recipe = load(str(parts.folder / "recipe.yaml")).recipe
    assert (recipe.data.preprocess.size, recipe.data.preprocess.channels, recipe.loss.label_smoothing) == (10, 1, 0)
    assert "reconv.train(..., out=" in parts.summary["resume_command"]
    notes = [event.text for event in read_events(parts.folder / "events.jsonl") if isinstance(event, LogMessage)]
    assert any("model.name, data.source, loss.name: objects from Python" in text for text in notes)
    with pytest.raises(UsageError, match="were passed from Python"):
        require_trust(LOST, (), False, "run")
    resumed = train(out=tmp_path / "parts", resume=True)
    assert resumed.history[-1] == whole.history[-1]
    assert [row["split"] for row in whole.history].count("val") == 2
    assert {row["step"] for row in resumed.history} == {row["step"] for row in whole.history}


LOST = [CodeReference("model.name", "python:Lost"), CodeReference("loss.name", "python:Gone")]


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"model": Net}, "needs a recipe or data"),
        ({"train_data": Squares("train")}, "val_data"),
        ({"train_data": "photos/train", "val_data": "photos/val"}, "data='photos/train'"),
        ({"data": "photos", "train_data": [], "val_data": []}, "cannot be combined"),
    ],
)
def test_objects_that_are_missing_are_named(keywords: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        reconv.train(**keywords)
    assert text in str(caught.value)


def test_a_history_without_pandas_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="pip install pandas"):
        History([{"step": 1}]).to_pandas()


def test_runs_have_tables_of_their_losses_and_metrics(tmp_path: Path) -> None:
    result = reconv.train("quickstart", out=tmp_path / "run", overrides=SHORT)
    with (result.folder / "training.csv").open(newline="") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    assert losses == [row["loss"] for row in result.history if row["split"] == "train"] and len(losses) == 4


def test_dir_lists_the_api_alone() -> None:
    assert dir(reconv) == sorted(reconv.__all__)


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"epoch": 3}, "did you mean epochs"),
        ({"momentum": 0.9}, "overrides={'optimizer.momentum': ...}"),
        ({"quiet": True}, "console='quiet'"),
        ({"zzz": 1}, "its keywords are"),
        ({"batch_size": 8, "batch_per_device": 4}, "use one of them"),
        ({"overrides": ["schedule.lr=0.1"]}, "pass a dict"),
        ({"overrides": {"schedule.lrr": 0.1}}, "schedule.lr"),
        ({"lr": -1}, "train(lr=...)"),
    ],
)
def test_a_wrong_keyword_says_what_to_write(keywords: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ReconvError) as caught:
        reconv.train("quickstart", out=tmp_path / "run", **keywords)
    assert caught.value.code == ExitCode.USAGE
    assert text in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_an_interrupted_notebook_gets_the_result_and_continues_with_resume(notebook: None, tmp_path: Path) -> None:
    out = tmp_path / "run"
    stopped = reconv.train("quickstart", overrides=SHORT, out=out, on_event=stop_at_step_2, console="quiet")
    assert stopped.exit_code == ExitCode.PREEMPTED and stopped.summary["steps"] in (2, 3)
    assert "stopped at step" in str(stopped) and "resume=True" in stopped._repr_html_()
    assert stopped.load().step == stopped.summary["steps"]
    resumed = reconv.train("quickstart", overrides=SHORT, out=out, resume=True, console="quiet")
    assert resumed.summary["steps"] == 4 and resumed.exit_code == 0


def test_an_interrupted_script_gets_an_error_after_the_save(tmp_path: Path) -> None:
    with pytest.raises(PreemptedError, match="checkpoint saved"):
        reconv.train("quickstart", overrides=SHORT, out=tmp_path / "run", on_event=stop_at_step_2)


def test_a_notebook_prints_progress_and_a_script_nothing(
    notebook: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reconv.train("quickstart", overrides=SHORT, out=tmp_path / "a")
    printed = capsys.readouterr().out
    assert "step 4" in printed.replace(",", "") and "report.html" in printed
    assert "\r" not in printed and "\x1b" not in printed
    monkeypatch.delitem(sys.modules, "IPython")
    reconv.train("quickstart", overrides=SHORT, out=tmp_path / "b")
    assert capsys.readouterr().out == ""


def test_a_notebook_shows_an_error_without_a_traceback() -> None:
    error = UsageError("what", why="reason", hint="this")
    assert error._render_traceback_() == ["UsageError: what\n  why:   reason\n  hint:  this"]


def test_html_of_a_result_is_escaped() -> None:
    summary = {"metric": None, "steps": 1, "total_steps": 2, "exit_code": 0, "expect": None, "report": "report.html"}
    html = RunResult(Path('<b>"x'), summary, 0)._repr_html_()
    assert "<b>" not in html and '"x' not in html


def test_a_torch_that_is_not_tested_is_named_when_training_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert untested_note() == ""
    package = tmp_path / "torch-9.9.9.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.9\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = reconv.train("quickstart", overrides=SHORT, out=tmp_path / "run").folder
    warnings = [
        e.text for e in read_events(folder / "events.jsonl") if isinstance(e, LogMessage) and e.level == "warning"
    ]
    (torch_range,) = ranges_of("torch")
    assert [text for text in warnings if "not tested" in text] == [
        f"Reconv {reconv.__version__} is not tested with torch 9.9.9 (tested: {torch_range})"
    ]
