"""The best checkpoint is a function of the checkpoints; best.json repeats it and may be out of date."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from checkpoint_examples import save, start_run

from reconv.checkpoint.best import BestCheckpoint, best_evaluation, read_best, write_best
from reconv.checkpoint.locate import locate
from reconv.core.errors import CheckpointError
from reconv.logging.run_dir import RunDir


def test_best_is_read_back_and_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert read_best(run) is None
    for best in (BestCheckpoint(10, "top1", 0.1 + 0.2, "raw"), BestCheckpoint(20, "top1", 0.5, "ema")):
        write_best(run, best)
        assert read_best(run) == best
    assert os.listdir(tmp_path) == ["best.json"]
    run.best.write_text('{"step": 3')
    with pytest.raises(CheckpointError, match=r"best\.json is damaged"):
        read_best(run)
    write_best(run, None)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "content",
    [None, "{", '{"step": 10, "metric": "top1", "value": 0.9, "weights": "raw"}', '{"step": 999}'],
    ids=["missing", "damaged", "out of date", "incomplete"],
)
def test_the_best_checkpoint_is_found_whatever_best_json_says(tmp_path: Path, content: str | None) -> None:
    run = start_run(tmp_path)
    save(run, 10, {10: 0.5})
    save(run, 20, {10: 0.5, 20: 0.9})
    save(run, 30, {10: 0.5, 20: 0.9, 30: 0.8})
    if content is not None:
        run.best.write_text(content)
    found = locate(run.path, which="best")
    assert found.checkpoint == run.checkpoints / "step-000000020"
    [note] = found.notes
    assert "best.json" in note and "step-000000030 say step 20" in note


def test_the_earliest_of_equals_is_best_and_nan_never_is() -> None:
    def history(*values: float) -> list[dict[str, object]]:
        return [{"step": at, "weights": "raw", "metrics": {"top1": value}} for at, value in enumerate(values, 1)]

    def best_step(*values: float) -> int | None:
        best = best_evaluation(history(*values), "top1", "raw")
        return None if best is None else best.step

    assert best_step(0.1, 0.3, 0.3, 0.2) == 2
    assert best_step(math.nan, 0.3, math.nan) == 2
    assert best_step(math.nan) is None
    assert best_step() is None
    assert best_evaluation(history(0.5), "top1", "ema") is None
