"""`bench infer` answers in every batch size with the weights of a recipe or a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import reconv
from reconv.bench.infer import BATCHES, bench_infer
from reconv.cli import main


def _run(words: list[str], code: int = 0) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == code


def test_the_json_has_a_row_for_each_batch_size(capsys: pytest.CaptureFixture[str]) -> None:
    _run(["bench", "infer", "quickstart", "--batches", "1,3,8", "--answers", "5", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert [row["batch"] for row in result["batches"]] == [1, 3, 8]
    for row in result["batches"]:
        assert 0 < row["latency_ms"]["p50"] <= row["latency_ms"]["p95"] <= row["latency_ms"]["p99"]
        assert row["answers"] == 5
    assert result["latency_ms"] == result["batches"][0]["latency_ms"]
    assert result["images_per_s"] == max(row["images_per_s"] for row in result["batches"])
    assert result["norms_folded"] == 7
    assert result["flops_per_image"] == 2 * 747136
    assert result["versions"]["reconv"] == reconv.__version__


def test_batch_sizes_go_from_1_to_256() -> None:
    assert (BATCHES[0], BATCHES[-1], len(BATCHES)) == (1, 256, 9)


def test_a_run_is_measured_with_its_own_network(capsys: pytest.CaptureFixture[str]) -> None:
    given = [("data.percent", "20", "--set"), ("length", "2step", "--set"), ("schedule.warmup", "1step", "--set")]
    run = reconv.train("quickstart", overrides=given).folder
    before = sorted(path for path in Path().rglob("*"))
    result = bench_infer(str(run), batches=(2,), answers=2)
    assert result["recipe"]["length"] == "2step"
    changed = bench_infer(str(run), batches=(2,), answers=2, overrides=[("precision.mode", "fp64", "--set")])
    assert (result["precision"], changed["precision"]) == ("fp32", "fp64")
    _run(["bench", "infer", str(run), "--batches", "2", "--answers", "2"])
    assert "7 norms folded" in capsys.readouterr().out
    assert sorted(path for path in Path().rglob("*")) == before


@pytest.mark.parametrize("text", ["", "0", "1,a", "-1"])
def test_sizes_that_are_none_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    _run(["bench", "infer", "quickstart", "--batches", text], code=2)
    assert "--batches" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["fp64", "32.32", "bf16", "bf16-all", "16.32"])
def test_every_precision_answers_in_one_type(mode: str) -> None:
    result = bench_infer("quickstart", batches=(2,), answers=1, overrides=[("precision.mode", mode, "--set")])
    assert result["precision"] == mode


def test_types_of_single_operations_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--set", "precision.mode=bf16", "--set", "precision.ops.float32=[linear]"]
    _run(["bench", "infer", "quickstart", *settings], code=2)
    assert "precision.ops" in capsys.readouterr().err
