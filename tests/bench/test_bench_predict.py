"""`bench infer --data` measures from image files to predictions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from data_examples import encode, noise

from reconv.bench.predict import open_images
from reconv.bench.timing import TimingConfig
from reconv.bench.train import bench_train
from reconv.cli import main
from reconv.inference.image_input import ImageFile

COMMAND = ["bench", "infer", "quickstart", "--batches", "1,3", "--iterations", "4", "--json"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Validation images that are easily told from training images."""
    for split, count in (("train", 3), ("val", 4)):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(count):
                (tmp_path / split / name / f"{number}.png").write_bytes(encode(noise(9, 11, 3, number)))
    return tmp_path


def run(words: list[str], code: int = 0) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == code


def test_the_json_has_rates_and_latencies_and_the_fields_of_bench_train(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run([*COMMAND, "--data", str(tree)])
    result = json.loads(capsys.readouterr().out)
    assert [row["batch"] for row in result["batches"]] == [1, 3]
    for row in result["batches"]:
        latency = row["latency_ms"]
        assert 0 < latency["p50"] <= latency["p90"] <= latency["p95"] <= latency["p99"] <= latency["max"]
        assert row["iterations"] == 4 and len(row["window_images_per_s"]) == row["windows"] == 5
        assert min(row["window_images_per_s"]) <= row["images_per_s"] <= max(row["window_images_per_s"])
        assert row["images_per_window"] % row["batch"] == 0
    assert (result["input"], result["num_images"], result["read_from"]) == ("real", 8, "files")
    assert str(tree) in result["data"] and result["decoder"] == "pillow"
    # Triton's interpreter, which other tests of this process may have started, makes folding fail; then it says why.
    assert result["backend"] == "folded" or any("backend: eager" in note for note in result["notes"])
    training = bench_train("quickstart", config=TimingConfig(1, 1, 0))
    only_training = {"step_ms", "steps_per_window", "batch", "batch_per_device", "micro_batch", "startup_s"}
    only_training |= {"devices", "images_per_s_per_device", "scaling"}
    assert set(training) - set(result) == only_training


def test_clients_at_once_predict_from_files(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["bench", "infer", "quickstart", "--data", str(tree), "--concurrency", "1,3", "--iterations", "2", "--json"])
    result = json.loads(capsys.readouterr().out)
    rows = [(row["concurrency"], row["batch"], row["iterations"]) for row in result["concurrent"]]
    assert rows == [(1, 1, 2), (3, 1, 6)]
    assert [row["batch"] for row in result["batches"]] == [1]


def test_validation_images_of_a_dataset_or_all_of_a_folder_are_measured(tree: Path, tmp_path: Path) -> None:
    images = [image.path for image in open_images(str(tree)).images if isinstance(image, ImageFile)]
    assert sorted(images) == sorted((tree / "val").rglob("*.png")) and len(images) == 8
    assert open_images(str(tree / "val" / "cat")).images == [
        ImageFile(tree / "val" / "cat" / f"{number}.png", is_named=False) for number in range(4)
    ]
    spaced = [image.path.name for image in open_images(str(tree), limit=4).images if isinstance(image, ImageFile)]
    assert spaced == ["0.png", "2.png", "0.png", "2.png"]


def test_images_in_shards_are_taken_out_before(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["data", "convert", str(tree), str(tree / "packed"), "--to", "packed", "--quiet"])
    real = open_images(str(tree / "packed"))
    assert real.read_from == "memory" and len(real.images) == 8 and isinstance(real.images[0], bytes)
    run(["bench", "infer", "quickstart", "--batches", "16", "--iterations", "1", "--data", str(tree / "packed")])
    printed = capsys.readouterr().out
    assert "reading is not" in printed and "8 images are fewer than a batch of 16" in printed


def test_files_are_decoded_and_a_damaged_one_is_an_error(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "val" / "cat" / "0.png").write_bytes(b"not an image")
    run([*COMMAND, "--data", str(tree)], code=3)
    assert "0.png" in capsys.readouterr().err


@pytest.mark.parametrize("more, code, text", [(["--compare"], 2, "--compare"), ([], 3, "no data at")])
def test_options_that_do_not_fit_are_errors(
    more: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run([*COMMAND, "--data", "nowhere", *more], code)
    assert text in capsys.readouterr().err
