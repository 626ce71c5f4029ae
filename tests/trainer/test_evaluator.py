"""Partial evaluation: `evaluate.num_samples` and `--samples`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import reconv
from reconv.api import RunResult
from reconv.cli import main
from reconv.core.errors import UsageError
from reconv.logging import formatting as fmt
from reconv.logging.event_log import read_events
from reconv.logging.events import EvalFinished

SETTINGS = {"length": "1ep", "evaluate.num_samples": "50", "data.epoch_samples": "320", "expect.value": "0.01"}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    given = [(field, value, "--set") for field, value in SETTINGS.items()]
    return reconv.train("quickstart", out=tmp_path_factory.mktemp("runs") / "run", overrides=given)


def test_partial_evaluation_is_marked_and_not_compared_with_expect(result: RunResult) -> None:
    summary = result.summary
    assert summary["steps"] == 5  # an epoch of 320 samples
    assert (summary["partial"], summary["num_samples"]) == (True, 50)
    assert summary["expect"]["met"] is None
    assert "partial: 50 validation images" in fmt.result(summary)
    [evaluated] = [e for e in read_events(result.folder / "events.jsonl") if isinstance(e, EvalFinished)]
    assert (evaluated.partial, evaluated.num_samples) == (True, 50)
    assert "partial: 50 validation images" in (result.folder / "report.html").read_text()


def test_evaluate_uses_the_whole_set_by_default(result: RunResult) -> None:
    [whole] = reconv.evaluate(result.folder)
    assert (whole.partial, whole.num_samples) == (False, 360)
    [some] = reconv.evaluate(result.folder, samples=50)
    assert (some.partial, some.num_samples) == (True, 50)
    assert some.metrics["top1"] == result.summary["value"]  # the same 50
    [every] = reconv.evaluate(result.folder, samples=360)
    assert not every.partial
    with pytest.raises(UsageError, match="--samples"):
        reconv.evaluate(result.folder, samples=50, all=True)


def test_eval_command_marks_a_partial_evaluation(
    result: RunResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scores.json"
    for words_typed in ([], ["--json", str(out)]):
        with pytest.raises(SystemExit) as end:
            main(["eval", str(result.folder), "--samples", "50", *words_typed])
        assert end.value.code == 0
    assert "50 (partial)" in capsys.readouterr().out
    [score] = json.loads(out.read_text())
    assert (score["partial"], score["num_samples"]) == (True, 50)
