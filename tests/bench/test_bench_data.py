"""`bench data` counts the loader's images, and compares it with a baseline pipeline that makes the same ones."""

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

from reconv.bench.data import BATCH, _baseline_batches, _cpu_s, _mean_difference, _our_batches, bench_data
from reconv.bench.data_paths import open_data_paths
from reconv.bench.run import bench_args, open_bench_run
from reconv.cli import main
from reconv.data.decode.native import choose_decoder
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.pipeline.workers.process_pool import ProcessPool
from reconv.data.pipeline.workers.thread_pool import InlineWorker
from reconv.trainer.prepare import PreparedRun

SMALL = ["--set", "data.preprocess.size=32", "--set", "data.preprocess.resize=36"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Nine photographs of noise in two classes, of different sizes, one of them gray."""
    rng = np.random.default_rng(0)
    for number in range(9):
        folder = tmp_path / "tree" / "train" / ("ant", "bee")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        encoded = io.BytesIO()
        image = Image.fromarray(rng.integers(0, 256, (50 + number, 70, 3), dtype=np.uint8))
        image.convert("RGB" if number else "L").save(encoded, "JPEG")
        (folder / f"{number}.jpg").write_bytes(encoded.getvalue())
    return tmp_path / "tree"


def _open_run(tree: Path) -> PreparedRun:
    wanted = {
        "data.preprocess.size": 32,
        "data.preprocess.resize": 36,
        "data.drop_last": False,
        "batch.size": BATCH,
        "batch.group": "all",
    }
    given = [(field, value, "--set") for field, value in wanted.items()]
    args = bench_args("resnet50", input="real", data=str(tree), overrides=given, device="cpu")
    with open_bench_run(args) as run:
        return run


def _run(words: list[str], code: int = 0) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == code


def test_both_pipelines_make_the_same_images(tree: Path) -> None:
    run = _open_run(tree)
    ours, theirs = _our_batches(run, 0), _baseline_batches(run)
    for _ in range(2):
        mine, other = next(ours), next(theirs)
        assert mine.shape == other.shape == (BATCH, 3, 32, 32)
        assert (mine.float() - other.float()).abs().mean() <= 0.5
    assert _mean_difference(run) <= 0.5


def test_both_pipelines_flip_images(tree: Path) -> None:
    run = _open_run(tree)
    augment = run.recipe.augment.model_copy(update={"hflip": 0.0})
    unflipped = replace(run, recipe=run.recipe.model_copy(update={"augment": augment}))
    assert (next(_baseline_batches(run)) != next(_baseline_batches(unflipped))).any()
    assert (next(_our_batches(run, 0)) != next(_our_batches(unflipped, 0))).any()


def test_json_file_has_the_ratio_to_the_baseline(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert result["num_images"] == 7  # of nine, two are held out for validation
    assert not list(tmp_path.glob("reconv-bench-*"))


def test_packed_dataset_is_compared_with_the_baseline_on_it(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(tree / "train", tree / "val")
    _run(["data", "convert", str(tree), "packed", "--to", "packed", "--raw", "--quiet"])
    _run(["bench", "data", "--data", "packed", *SMALL, "--images", "32", "--compare", "--json", "result.json"])
    assert list(json.loads(Path("result.json").read_text())["paths"]) == ["as-given", "fast"]
    capsys.readouterr()
    _run(["bench", "data", "--data", str(tree), *SMALL, "--images", "32", "--compare", "--quiet"])
    out = capsys.readouterr().out
    assert "baseline" in out
    assert "packed, short side 320" in out


def test_all_data_paths_load_the_same_samples(tree: Path) -> None:
    with open_data_paths(_open_run(tree), 6, lambda text: None) as paths:
        assert len(paths) == 4
        targets = {path.name: [path.run.datasets.train[i].target for i in range(6)] for path in paths}
        assert len({tuple(of_way) for of_way in targets.values()}) == 1
        assert {len(path.run.datasets.train) for path in paths} == {6}


def test_without_compare_there_is_no_ratio(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(["bench", "data", "--data", str(tree), *SMALL, "--images", "32", "--quiet"])
    out = capsys.readouterr().out
    assert "images/s on one core" in out
    assert "baseline" not in out


def test_pipeline_with_different_images_is_an_error(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(["bench", "data", "--data", str(tree), *SMALL, "--set", "augment.crop=none", "--compare"], code=2)
    assert "augment.crop" in capsys.readouterr().err


def test_missing_data_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(["bench", "data"], code=2)
    assert "--data" in capsys.readouterr().err
    _run(["bench", "data", "--data", str(tmp_path / "nothing")], code=3)


def test_benchmark_leaves_no_worker_threads(tree: Path) -> None:
    import threading

    given = [("data.preprocess.size", 32, "--set"), ("data.preprocess.resize", 36, "--set")]
    bench_data(str(tree), overrides=given, workers=2, images=BATCH)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reconv-data")]


def test_time_per_image_is_reported_by_stage(tree: Path) -> None:
    given = [("data.preprocess.size", 32, "--set"), ("data.preprocess.resize", 36, "--set")]
    result = bench_data(str(tree), overrides=given, images=32, windows=1)
    assert set(result["stage_ms"]) == {"disk", "decode", "augment", "copy"}
    assert result["stage_ms"]["disk"] > 0 and result["stage_ms"]["decode"] > 0


def test_cpu_time_of_worker_processes_is_counted(tree: Path) -> None:
    run, workers = _open_run(tree), ProcessPool(1)
    try:
        assert len(next(_our_batches(run, 1, 1, DataContext(run.device, workers)))) == BATCH
        before_s = time.process_time()
        assert _cpu_s(workers) > before_s + 0.1  # a worker that has answered has imported torch
        assert before_s <= _cpu_s(InlineWorker()) <= time.process_time()
    finally:
        workers.close()
