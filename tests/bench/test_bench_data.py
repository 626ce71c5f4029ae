"""`bench data` counts the loader's pictures, and compares it with an ordinary pipeline that makes the same ones."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from reconv.bench.data import BATCH, _mean_difference, _ordinary, _ours, bench_data
from reconv.bench.subject import Subject, open_subject
from reconv.cli import main

SMALL = ["--set", "data.preprocess.size=32", "--set", "data.preprocess.resize=36"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Nine photographs of noise in two classes, of different sizes."""
    rng = np.random.default_rng(0)
    for number in range(9):
        folder = tmp_path / "tree" / "train" / ("ant", "bee")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        encoded = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (50 + number, 70, 3), dtype=np.uint8)).save(encoded, "JPEG")
        (folder / f"{number}.jpg").write_bytes(encoded.getvalue())
    return tmp_path / "tree"


def _subject(tree: Path) -> Subject:
    wanted = {
        "data.preprocess.size": 32,
        "data.preprocess.resize": 36,
        "data.tail": "wrap",
        "batch.size": BATCH,
        "batch.group": "all",
    }
    given = [(field, value, "--set") for field, value in wanted.items()]
    return open_subject("resnet50", input="real", data=str(tree), overrides=given, device="cpu")


def _run(words: list[str], code: int = 0) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == code


def test_both_pipelines_make_the_same_pictures(tree: Path) -> None:
    subject = _subject(tree)
    ours, theirs = _ours(subject, replace(subject.plan, workers=0)), _ordinary(subject)
    for _ in range(2):
        mine, other = next(ours), next(theirs)
        assert mine.shape == other.shape == (BATCH, 3, 32, 32)
        assert (mine.float() - other.float()).abs().mean() <= 0.5
    assert _mean_difference(subject) <= 0.5


def test_flips_are_part_of_what_is_compared(tree: Path) -> None:
    subject = _subject(tree)
    augment = subject.recipe.augment.model_copy(update={"flip": 0.0})
    unflipped = replace(subject, recipe=subject.recipe.model_copy(update={"augment": augment}))
    assert (next(_ordinary(subject)) != next(_ordinary(unflipped))).any()
    plan = replace(subject.plan, workers=0)
    assert (next(_ours(subject, plan)) != next(_ours(unflipped, plan))).any()


def test_the_json_file_has_the_ratio_of_ours_to_the_ordinary_pipeline(tree: Path) -> None:
    words = ["--workers", "2", "--images", str(BATCH), "--compare", "--json", "result.json"]
    _run(["bench", "data", "--data", str(tree), *SMALL, *words])
    result = json.loads(Path("result.json").read_text())
    assert result["ratio"] == pytest.approx(result["images_per_s_per_core"] / result["ordinary"]["images_per_s"])
    by_processor = result["one_core"]["images_per_cpu_s"] / result["ordinary"]["images_per_cpu_s"]
    assert result["ratio_cpu"] == pytest.approx(by_processor)
    assert len(result["ratio_windows"]) == 5
    assert result["workers"] == 2
    assert result["scaling"] == pytest.approx(result["images_per_s"] / result["images_per_s_per_core"])
    assert result["num_pictures"] == 9
    assert result["mean_difference"] <= 0.5


def test_without_comparing_there_is_no_ratio(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(["bench", "data", "--data", str(tree), *SMALL, "--images", "32", "--quiet"])
    out = capsys.readouterr().out
    assert "images/s on one core" in out
    assert "ordinary" not in out


def test_a_pipeline_that_makes_other_pictures_is_not_compared(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(["bench", "data", "--data", str(tree), *SMALL, "--set", "augment.crop=none", "--compare"], code=2)
    assert "augment.crop" in capsys.readouterr().err


def test_data_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(["bench", "data"], code=2)
    assert "--data" in capsys.readouterr().err
    _run(["bench", "data", "--data", str(tmp_path / "nothing")], code=3)


def test_worker_threads_are_gone_after_the_benchmark(tree: Path) -> None:
    import threading

    given = [("data.preprocess.size", 32, "--set"), ("data.preprocess.resize", 36, "--set")]
    bench_data(str(tree), overrides=given, workers=2, images=BATCH)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reconv-data")]
