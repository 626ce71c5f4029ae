"""Evaluation and prediction of a trained run, by the library calls behind the verbs."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import reconv
from reconv.cli import main
from reconv.data.readers.digits import open_digits
from reconv.errors import CheckpointError, DataError, ExitCode, ResourceError, UsageError
from reconv.logging.events import EvalResult, read_events

SETTINGS = {"length": "3ep", "ema.decay": "0.9", "save.keep_last": "3", "save.keep_best": "false"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small finished run with an average and three checkpoints."""
    given = [(field, value, "--set") for field, value in SETTINGS.items()]
    return reconv.train("quickstart", out=tmp_path_factory.mktemp("runs") / "run", overrides=given).folder


def test_evaluation_of_a_run_repeats_the_metrics_of_its_training(run: Path) -> None:
    recorded = [e for e in read_events(run / "events.jsonl") if isinstance(e, EvalResult) and e.step == 66]
    assert [e.weights for e in recorded] == ["raw", "ema"]
    for event in recorded:
        [result] = reconv.evaluate(run, weights=event.weights)
        assert result.metrics == event.metrics
        assert (result.num_samples, result.step) == (360, 66)


def test_the_batch_size_of_an_evaluation_does_not_change_its_counts(run: Path) -> None:
    [whole] = reconv.evaluate(run)
    [parts] = reconv.evaluate(run, batch=7)
    assert parts.metrics["top1"] == whole.metrics["top1"]
    assert parts.num_samples == 360


def test_every_checkpoint_is_scored_once_in_order(run: Path) -> None:
    first = reconv.evaluate(run, all=True)
    assert [r.step for r in first] == [22, 44, 66]
    rows = (run / "evaluations.csv").read_text().splitlines()
    assert len(rows) == 4
    assert "every checkpoint" in (run / "report.html").read_text()
    top1 = rows[2].split(",")[5]
    (run / "evaluations.csv").write_text("\n".join([*rows[:2], rows[2].replace(top1, "0.5"), rows[3]]))
    again = reconv.evaluate(run, all=True)
    assert again[1].metrics["top1"] == 0.5  # a row that is there is not computed again
    assert [again[0], again[2]] == [first[0], first[2]]
    raw = reconv.evaluate(run, all=True, weights="raw")
    assert {r.weights for r in raw} == {"raw"}  # other weights are other scores
    assert raw[2].metrics == reconv.evaluate(run, weights="raw")[0].metrics


def test_scores_that_cannot_be_kept_are_refused_with_what_evaluation_can_do(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("report.html"))
    (copy / "report.html").mkdir()
    with pytest.raises(ResourceError, match="could not write") as caught:
        reconv.evaluate(copy, all=True)
    assert "copy the run" in caught.value.then and "--out" not in caught.value.then


def test_a_damaged_checkpoint_is_left_out_of_the_scores_and_said(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "checkpoints" / "step-000000066" / "ema.safetensors").write_bytes(b"torn")
    told: list[str] = []
    assert [r.step for r in reconv.evaluate(copy, all=True, tell=told.append)] == [22, 44]
    assert any("step-000000066" in text for text in told)
    told.clear()
    assert reconv.evaluate(copy, tell=told.append)[0].step == 44
    assert any("fell back" in text and "step-000000066" in text for text in told)


def test_a_named_checkpoint_without_its_manifest_is_an_error_not_another_checkpoint(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    named = copy / "checkpoints" / "step-000000066"
    (named / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="manifest"):
        reconv.evaluate(named)


def test_a_bad_picture_does_not_silence_the_good_ones(run: Path, tmp_path: Path) -> None:
    Image.new("L", (8, 8), 90).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"no image")
    Image.new("L", (8, 8), 200).save(tmp_path / "c.png")
    answers = reconv.predict(run, [tmp_path], skip_bad=True)
    assert [a.path.name for a in answers] == ["a.png", "b.png", "c.png"]
    assert [bool(a.labels) for a in answers] == [True, False, True]
    assert answers[1].error
    with pytest.raises(DataError):
        reconv.predict(run, [tmp_path])


@pytest.mark.usefixtures("nobody_waits")
def test_a_pipe_in_a_folder_of_pictures_is_a_bad_picture_and_one_that_is_named_is_read(
    run: Path, tmp_path: Path
) -> None:
    Image.new("L", (8, 8), 90).save(tmp_path / "a.png")
    os.mkfifo(tmp_path / "b.png")
    (tmp_path / "c.png").symlink_to(tmp_path / "not-mounted.png")
    good, *bad = reconv.predict(run, [tmp_path], skip_bad=True)
    assert good.labels and [(answer.path.name, bool(answer.error)) for answer in bad] == [("b.png", 1), ("c.png", 1)]
    with pytest.raises(DataError, match=r"b\.png"):
        reconv.predict(run, [tmp_path])
    writer = threading.Thread(target=(tmp_path / "b.png").write_bytes, args=[(tmp_path / "a.png").read_bytes()])
    writer.start()
    [named] = reconv.predict(run, [tmp_path / "b.png"])
    writer.join()
    assert named.labels == good.labels


def test_where_no_picture_can_be_read_no_answers_are_spoken_of(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.png").touch()
    Image.new("L", (8, 8), 90).save(tmp_path / "good.png")
    for names, words in ((["bad.png"], False), (["bad.png", "good.png"], True)):
        with pytest.raises(SystemExit) as ended:
            main(["predict", str(run), *(str(tmp_path / name) for name in names)])
        assert ended.value.code == ExitCode.DATA
        assert ("the others are answered" in capsys.readouterr().err) is words


def test_a_picture_in_the_place_of_a_run_is_not_called_weights_without_a_recipe(run: Path, tmp_path: Path) -> None:
    Image.new("L", (8, 8), 90).save(tmp_path / "a.png")
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        reconv.predict(tmp_path / "a.png", [tmp_path / "a.png"])
    assert caught.value.where == str(tmp_path / "a.png") and "not a weights file" in caught.value.why


def test_a_checkpoint_folder_and_its_weights_are_runs_too(run: Path) -> None:
    [by_run] = reconv.evaluate(run, weights="raw")
    [by_checkpoint] = reconv.evaluate(run / "checkpoints" / "step-000000066", weights="raw")
    [by_file] = reconv.evaluate(run / "checkpoints" / "step-000000066" / "model.safetensors", recipe="quickstart")
    assert by_checkpoint.metrics == by_run.metrics == by_file.metrics


def test_prediction_uses_the_preprocessing_of_evaluation(run: Path, tmp_path: Path) -> None:
    digits = open_digits("val")
    [score] = reconv.evaluate(run)
    right = 0
    folder = tmp_path / "images"
    folder.mkdir()
    for index in range(60):
        data = digits[index].data
        assert isinstance(data, np.ndarray)
        Image.fromarray(data[:, :, 0]).save(folder / f"{index:03d}.png")
    predictions = reconv.predict(run, [folder], top=3)
    assert [p.path.name for p in predictions] == [f"{i:03d}.png" for i in range(60)]
    for index, prediction in enumerate(predictions):
        assert len(prediction.labels) == 3
        right += prediction.labels[0][0] == digits.class_names[digits[index].target]
        assert 0 <= sum(s for _, s in prediction.labels) <= 1 + 1e-9
    assert abs(right / 60 - score.metrics["top1"]) < 0.15


def test_what_is_not_there_is_said(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        reconv.evaluate(tmp_path / "nowhere")
    with pytest.raises(DataError, match="no such image"):
        reconv.predict(run, [tmp_path / "none.png"])
    bare = tmp_path / "bare.safetensors"
    bare.write_bytes((run / "checkpoints" / "step-000000066" / "model.safetensors").read_bytes())
    with pytest.raises(UsageError, match="recipe"):
        reconv.evaluate(bare)
    with pytest.raises(CheckpointError, match="another model"):
        reconv.evaluate(bare, recipe="cifar10-resnet20")
