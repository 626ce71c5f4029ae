"""`reconv tune` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import reconv
import reconv.cli as cli
from reconv.core.errors import UsageError

SMALL = ["--set", "data.subset_percent=20", "--epochs", "2", "--space", "schedule.lr=0.01:1:log"]


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(args)
    assert isinstance(end.value.code, int)
    return end.value.code


@pytest.mark.slow
def test_a_study_prints_its_table_and_the_command_that_trains_the_recipe_to_keep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--trials", "2", "--rungs", "1", "--confirm", "0", "--parallel", "2", "--out", "study"]
    assert run("tune", "quickstart", *SMALL, *options, "--json", "result.json") == 0
    out = capsys.readouterr()
    result = json.loads((tmp_path / "result.json").read_text())
    assert out.out.startswith("trial  state     top-1")
    assert result["verdict"] in out.out
    assert f"train it: reconv train {tmp_path}/study/best.yaml" in out.out
    assert "trial 0 at its end: top-1" in out.err
    assert run("tune", "quickstart", *SMALL, *options, "--quiet") == 0
    assert capsys.readouterr().out.splitlines()[0] == result["verdict"]
    assert run("train", "study/best.yaml", "--out", "kept", "--quiet") == 0
    kept = json.loads((tmp_path / "kept/summary.json").read_text())
    assert kept["value"] == result["trials"][result["kept"]]["value"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--space", "schedule.lrr=1:2"], "did you mean schedule.lr"),
        (["--space", "schedule.lr"], "names no field and its values"),
        (["--lr", "0.1", "--space", "schedule.lr=0.1:1"], "schedule.lr is both fixed and searched"),
        (["--nodes", "2"], "--nodes is for --to slurm or --to ray"),
        (["--chart", "a.html"], "--chart is for --lr-range"),
        (["--lr-range", "--trials", "3"], "--trials cannot be combined with --lr-range"),
        (["--confirm", "1"], "one seed says nothing"),
    ],
)
def test_mistakes_are_errors_before_anything_is_trained(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("tune", "quickstart", *words) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_without_optuna_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    assert run("tune", "quickstart") == 2
    assert "pip install 'reconv[tune]'" in capsys.readouterr().err


def test_a_range_test_prints_json_and_leaves_the_chart_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    words = ["--set", "data.subset_percent=20", "--steps", "40", "--chart", "lr.html"]
    assert run("tune", "quickstart", "--lr-range", *words, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["recipe_lr"] == 0.1
    assert result["lrs"][0] == pytest.approx(1e-4)
    assert len(result["lrs"]) == len(result["losses"]) <= 40
    assert result["lrs"][0] < result["suggestion"] < result["lowest"]
    assert [path.name for path in tmp_path.iterdir()] == ["lr.html"]
    assert "Loss by learning rate" in (tmp_path / "lr.html").read_text()


def test_python_takes_spaces_as_a_mapping_and_refuses_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = []
    monkeypatch.setattr("reconv.tuner.tune.run_study", lambda options, log: found.append(options))
    space = {"schedule.lr": "1e-3:1e-1:log", "optimizer.name": ["sgd", "lars"], "optimizer.nesterov": [True, False]}
    reconv.tune("quickstart", space=space, epochs=2, overrides={"batch.size": 32}, out="study")
    (options,) = found
    assert options.space == [  # type: ignore[attr-defined]
        "schedule.lr=1e-3:1e-1:log",
        "optimizer.name=sgd|lars",
        "optimizer.nesterov=true|false",
    ]
    assert options.overrides == [  # type: ignore[attr-defined]
        ("length", "2ep", "train(epochs=...)"),
        ("batch.size", 32, "overrides"),
    ]
    with pytest.raises(UsageError, match="takes a network by its name"):
        reconv.tune("quickstart", model=torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="needs a recipe or data"):
        reconv.tune()
