"""`bench data` counts the loader's images, and compares it with an ordinary pipeline that makes the same ones."""

from __future__ import annotations

import io
import json
import shutil
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from reconv.bench.bench_data import BATCH, _cpu_s, _mean_difference, _ordinary, _ours, bench_data
from reconv.bench.bench_target import BenchTarget, open_subject
from reconv.bench.data_paths import open_ways
from reconv.cli import main
from reconv.data.decode.native import choose_decoder
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.pipeline.workers.process_pool import ProcessPool
from reconv.data.pipeline.workers.thread_pool import InlineWorker
from reconv.errors import UsageError

SMALL = ["--set", "data.preprocess.size=32", "--set", "data.preprocess.resize=36"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Nine photographs of noise in two classes, of different sizes, one of them grey."""
    rng = np.random.default_rng(0)
    for number in range(9):
        folder = tmp_path / "tree" / "train" / ("ant", "bee")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        encoded = io.BytesIO()
        image = Image.fromarray(rng.integers(0, 256, (50 + number, 70, 3), dtype=np.uint8))
        image.convert("RGB" if number else "L").save(encoded, "JPEG")
        (folder / f"{number}.jpg").write_bytes(encoded.getvalue())
    return tmp_path / "tree"


def _subject(tree: Path) -> BenchTarget:
    wanted = {
        "data.preprocess.size": 32,
        "data.preprocess.resize": 36,
        "data.drop_last": False,
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
    ours, theirs = _ours(subject, 0), _ordinary(subject)
    for _ in range(2):
        mine, other = next(ours), next(theirs)
        assert mine.shape == other.shape == (BATCH, 3, 32, 32)
        assert (mine.float() - other.float()).abs().mean() <= 0.5
    assert _mean_difference(subject) <= 0.5


def test_flips_are_part_of_what_is_compared(tree: Path) -> None:
    subject = _subject(tree)
    augment = subject.recipe.augment.model_copy(update={"hflip": 0.0})
    unflipped = replace(subject, recipe=subject.recipe.model_copy(update={"augment": augment}))
    assert (next(_ordinary(subject)) != next(_ordinary(unflipped))).any()
    assert (next(_ours(subject, 0)) != next(_ours(unflipped, 0))).any()


def test_the_json_file_has_the_ratio_of_ours_to_the_ordinary_pipeline(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    words = ["--workers", "2", "--images", str(BATCH), "--compare", "--json", "result.json"]
    _run(["bench", "data", "--data", str(tree), *SMALL, *words])
    result = json.loads(Path("result.json").read_text())
    assert list(result["paths"]) == ["as-given", "fast", "packed-320", "raw-400"]
    for way in result["paths"].values():
        assert len(way["ratio_windows"]) == len(way["ratio_cpu_windows"]) == 5
        assert way["ratio"] == pytest.approx(statistics.median(way["ratio_windows"]))
    assert result["ratio"] == result["paths"]["as-given"]["ratio"]
    assert result["mean_difference"] == result["paths"]["as-given"]["mean_difference"] <= 0.5
    assert result["paths"]["fast"]["mean_difference"] > 1  # of noise, sampled instead of averaged
    assert result["paths"]["raw-400"]["mean_difference"] <= 0.5
    assert result["jpeg_decoder"] == ("simplejpeg" if choose_decoder("auto") == "pillow" else "native")
    assert result["workers"] == 2
    assert result["scaling"] == pytest.approx(statistics.median(result["scaling_windows"]))
    assert result["num_pictures"] == 9
    assert not list(tmp_path.glob("reconv-bench-*"))


def test_packed_data_are_compared_with_the_ordinary_pipeline_on_them(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tree / "train", tree / "val")
    _run(["data", "convert", str(tree), "packed", "--to", "packed", "--raw", "--quiet"])
    _run(["bench", "data", "--data", "packed", *SMALL, "--images", "32", "--compare", "--json", "result.json"])
    assert list(json.loads(Path("result.json").read_text())["paths"]) == ["as-given", "fast"]
    capsys.readouterr()
    _run(["bench", "data", "--data", str(tree), *SMALL, "--images", "32", "--compare", "--quiet"])
    out = capsys.readouterr().out
    assert "the ordinary pipeline" in out
    assert "packed, short side 320" in out


def test_every_way_makes_pictures_of_the_same_samples(tree: Path) -> None:
    with open_ways(_subject(tree), 6, lambda text: None) as ways:
        assert len(ways) == 4
        targets = {way.name: [way.subject.source[i].target for i in range(6)] for way in ways}
        assert len({tuple(of_way) for of_way in targets.values()}) == 1
        assert {len(way.subject.source) for way in ways} == {6}


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


def test_the_time_of_a_picture_is_told_by_stage(tree: Path) -> None:
    given = [("data.preprocess.size", 32, "--set"), ("data.preprocess.resize", 36, "--set")]
    result = bench_data(str(tree), overrides=given, images=32, windows=1)
    assert set(result["stage_ms"]) == {"disk", "decode", "augment", "copy"}
    assert result["stage_ms"]["disk"] > 0 and result["stage_ms"]["decode"] > 0


def test_the_processor_time_of_worker_processes_is_counted(tree: Path) -> None:
    subject, workers = _subject(tree), ProcessPool(1)
    try:
        assert len(next(_ours(subject, 1, 1, DataContext(subject.device, workers)))) == BATCH
        before_s = time.process_time()
        assert _cpu_s(workers) > before_s + 0.1  # a worker that has answered has imported torch
        assert before_s <= _cpu_s(InlineWorker()) <= time.process_time()
    finally:
        workers.close()


def test_the_gpus_back_end_is_sent_to_the_bench_that_has_a_gpu(tree: Path) -> None:
    with pytest.raises(UsageError, match="measures the host's loader") as caught:
        bench_data(str(tree), overrides=[("data.backend", "gpu", "test")])
    assert caught.value.then is not None and "bench train resnet50 --input real" in caught.value.then
