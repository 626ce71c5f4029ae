"""The commands that train and use a run, through the command line."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from reconv.cli import main

SHORT = ["train", "quickstart", "--set", "length=3step", "--set", "data.subset_percent=10"]


def _run(words: list[str], code: int = 0) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == code


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps; read only."""
    folder = tmp_path_factory.mktemp("shared") / "run"
    _run([*SHORT, "--out", str(folder), "--quiet"])
    return folder


def test_short_options_reach_the_recipe_and_the_run_directory(tmp_path: Path) -> None:
    options = ["--epochs", "1", "--batch-per-device", "32", "--lr", "0.05", "--workers", "0", "--seed", "7"]
    _run(
        ["train", "quickstart", "--set", "data.subset_percent=10", *options, "--out", "here", "--json", "summary.json"]
    )
    from reconv.recipe.loader import load

    recipe = load(str(tmp_path / "here" / "recipe.yaml")).recipe
    assert str(recipe.length) == "1ep"
    assert (recipe.batch.size, recipe.schedule.lr, recipe.data.num_workers, recipe.seed) == (32, 0.05, 0, 7)
    assert json.loads((tmp_path / "summary.json").read_text())["exit_code"] == 0
    assert (tmp_path / "here" / "report.html").is_file()


def test_json_on_stdout_is_one_object_per_line_with_the_summary_last(capsys: pytest.CaptureFixture[str]) -> None:
    _run([*SHORT, "--json"])
    kinds = [json.loads(line)["kind"] for line in capsys.readouterr().out.splitlines()]
    assert kinds[0] == "attempt"
    assert kinds[-1] == "summary"
    assert kinds.count("summary") == 1


def test_quiet_prints_the_result_and_the_report_path(capsys: pytest.CaptureFixture[str]) -> None:
    _run([*SHORT, "--quiet"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert "top-1" in lines[0]
    assert str(Path("runs/quickstart/1/report.html")) in lines[0]


def test_resuming_a_finished_run_prints_a_note_and_exits_0(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / "events.jsonl").read_bytes()
    _run([*SHORT, "--out", str(run), "--resume"])
    out = capsys.readouterr().out
    assert "nothing to do" in out
    assert "report.html" in out
    _run([*SHORT, "--out", str(run), "--resume", "--json"])
    assert json.loads(capsys.readouterr().out)["kind"] == "summary"
    assert (run / "events.jsonl").read_bytes() == before


def test_resuming_a_finished_run_with_other_settings_lists_them(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (run / "events.jsonl").read_bytes()
    _run([*SHORT, "--out", str(run), "--resume", "--workers", "1"])  # does not change the result
    assert "nothing to do" in capsys.readouterr().out
    changed = [*SHORT, "--out", str(run), "--resume", "--lr", "0.2", "--seed", "1"]
    monkeypatch.setattr(sys, "argv", ["reconv", *changed])
    _run(changed, code=2)
    error = capsys.readouterr().err
    assert "the run is finished with another recipe" in error
    assert "schedule.lr: 0.1 in the run, 0.2 in this command" in error
    assert "seed: 0 in the run, 1 in this command" in error
    assert f"--out {run}-2 --lr 0.2 --seed 1\n" in error
    assert (run / "events.jsonl").read_bytes() == before


def test_a_resumed_run_keeps_the_warm_up_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    from reconv.recipe.loader import load

    command = ["train", "quickstart", "--set", "data.subset_percent=20", "--out", "run", "--quiet"]
    _run([*command, "--epochs", "1"])
    warmup = load("run/recipe.yaml").recipe.schedule.warmup
    assert str(warmup) == "0.04ep"
    _run([*command, "--epochs", "2", "--resume"])  # extends the run
    recipe = load("run/recipe.yaml").recipe
    assert (str(recipe.length), recipe.schedule.warmup) == ("2ep", warmup)
    _run([*command, "--epochs", "2", "--resume"])
    assert "nothing to do" not in capsys.readouterr().err


@pytest.fixture
def flowers() -> Path:
    """Twelve images for training and six for validation, in three class folders."""
    for split, num_images in (("train", 4), ("val", 2)):
        for number, name in enumerate(("daisy", "rose", "tulip")):
            Path(f"flowers/{split}/{name}").mkdir(parents=True)
            for image in range(num_images):
                Image.new("RGB", (40, 36), (80 * number, 20 * image, 90)).save(f"flowers/{split}/{name}/{image}.jpg")
    return Path("flowers")


def test_fine_tuning_a_preset_on_a_small_folder_works(flowers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import safetensors.torch

    from reconv.models import build_model
    from reconv.recipe.loader import load

    safetensors.torch.save_file(build_model("resnet8_cifar", 1000).state_dict(), "weights.safetensors")
    small = ["--set", "data.preprocess.size=32", "--set", "data.preprocess.resize=32", "--set", "precision.mode=fp32"]
    options = ["--data", str(flowers), "--init", "weights.safetensors", "--freeze", "--epochs", "2"]
    _run(["train", "resnet50", "--model", "resnet8_cifar", *options, *small])
    out = capsys.readouterr().out
    assert "changed to fit: schedule.warmup 8ep -> 0.1778ep" in out
    assert "changed to fit: batch.size 2048 -> 2 (the dataset has 12 training samples)" in out
    assert "12 training samples = 6 steps per epoch" in out
    recipe = load("runs/resnet50/1/recipe.yaml").recipe
    assert (recipe.batch.size, recipe.batch.group, recipe.expect) == (2, 2, None)
    assert "<h1>resnet50, changed</h1>" in Path("runs/resnet50/1/report.html").read_text()


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--set", "precision.mode=tf32", "--device", "cpu"], 2),
        (["--init", "torchvision:nope"], 2),
        (["--init", "other.safetensors"], 4),
        (["--init", "other.safetensors", "--freeze"], 4),
        (["--set", "model.trainable=[nope.*]", "--init", "own.safetensors"], 2),
        (["--set", "distill.teacher=other.safetensors"], 2),
    ],
)
def test_what_cannot_be_built_leaves_no_run_directory(options: list[str], code: int) -> None:
    import safetensors.torch
    import torch

    from reconv.models import build_model

    safetensors.torch.save_file({"some.weight": torch.zeros(2)}, "other.safetensors")
    own = build_model("resnet8_cifar", 10, in_channels=1)
    safetensors.torch.save_file(own.state_dict(), "own.safetensors")
    _run([*SHORT, *options], code=code)
    assert not Path("runs").exists()


def test_eval_prints_the_final_metric_of_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = json.loads((run / "summary.json").read_text())
    _run(["eval", "--json", str(run)])
    (score,) = json.loads(capsys.readouterr().out)
    assert score["metrics"]["top1"] == summary["value"]
    assert (score["step"], score["num_samples"]) == (3, 360)
    _run(["eval", str(run)])
    heads, values = (line.split() for line in capsys.readouterr().out.splitlines())
    assert heads == ["step", "weights", "top1", "top5", "loss", "images", "images/s"]
    assert values[:3] == ["3", "raw", f"{100 * summary['value']:.2f}"]


def test_eval_per_class_prints_a_row_for_each_class_and_their_mean(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(["eval", str(run), "--per-class", "--json"])
    (score,) = json.loads(capsys.readouterr().out)
    analysis = score["analysis"]
    _run(["eval", str(run), "--per-class"])
    _, table, rest = capsys.readouterr().out.split("\n\n")
    head, *rows = table.splitlines()
    assert head.split() == ["class", "images", "predicted", "precision", "recall", "F1"]
    assert [row.split()[:3] for row in rows[:10]] == [
        [row["name"], str(row["num_images"]), str(row["num_predicted"])] for row in analysis["classes"]
    ]
    assert rows[10].endswith(f"{100 * analysis['metrics']['macro_f1']:.2f} %")
    worst = analysis["most_confused"][0]
    assert rest.startswith(f"most confused: {worst['target']} as {worst['predicted']} ({worst['num_images']}), ")


def test_eval_of_missing_ema_weights_exits_4(run: Path) -> None:
    before = sorted(run.rglob("*"))
    _run(["eval", str(run), "--ema"], code=4)
    assert sorted(run.rglob("*")) == before


def test_predict_prints_class_scores_that_sum_to_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("images").mkdir()
    for number in range(3):
        Image.new("L", (20, 30), color=80 * number).save(f"images/{number}.png")
    _run(["predict", "--json", str(run), "images", "--top", "10"])
    predictions = json.loads(capsys.readouterr().out)
    assert [prediction["path"] for prediction in predictions] == [f"images/{number}.png" for number in range(3)]
    for prediction in predictions:
        assert len(prediction["classes"]) == 10
        assert sum(found["score"] for found in prediction["classes"]) == pytest.approx(1)
    _run(["predict", str(run), "images/1.png", "--top", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[1].split()[:2] == ["images/1.png", predictions[1]["classes"][0]["name"]]


def test_report_command_writes_to_out_and_compares_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (run / "report.html").read_text()
    _run(["report", str(run), "--out", "deep/page.html"])
    assert Path("deep/page.html").read_text() == page
    _run(["report", str(run), str(run)])
    assert "<html" in Path("comparison.html").read_text()
    assert "comparison.html" in capsys.readouterr().out


@pytest.mark.parametrize("file", ["report.html", "images/first-batch.png"])
def test_report_is_written_though_a_file_of_the_run_is_a_pipe_or_a_link_to_itself(
    run: Path, file: str, tmp_path: Path
) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / file).unlink()
    if file == "report.html":
        os.mkfifo(copy / file)
    else:
        (copy / file).symlink_to(copy / file)
    _run(["report", str(copy)])
    assert "<html" in (copy / "report.html").read_text()


def test_report_that_cannot_be_written_exits_6(run: Path) -> None:
    Path("file").touch()
    _run(["report", str(run), "--out", "file/page.html"], code=6)


def test_second_run_in_the_same_directory_without_resume_is_an_error(run: Path) -> None:
    before = (run / "events.jsonl").read_bytes()
    _run([*SHORT, "--out", str(run)], code=2)
    assert (run / "events.jsonl").read_bytes() == before


@pytest.mark.parametrize("epochs", ["1000000", "0.0000125"])
def test_very_large_and_very_small_numbers_of_epochs(epochs: str, capsys: pytest.CaptureFixture[str]) -> None:
    _run([*SHORT[:2], "--epochs", epochs, "--dry-run", "1", "--quiet", "--set", "schedule.warmup=0%"])
    assert capsys.readouterr().out


def _train_into(stdout: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = f"exec {shlex.quote(sys.executable)} -m reconv {shlex.join(SHORT)} --out run {stdout}"
    return subprocess.run(
        ["bash", "-c", command], env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True, timeout=120
    )


@pytest.mark.parametrize("stdout", ["> /dev/full", "> >(head -1)"])
def test_run_continues_if_stdout_fails(stdout: str) -> None:
    done = _train_into(stdout, PYTHONIOENCODING="ascii")
    assert (done.stderr, done.returncode) == ("", 0)
    assert json.loads(Path("run/summary.json").read_text())["steps"] == 3
