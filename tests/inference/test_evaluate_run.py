"""`evaluate` repeats the metrics of training, for one checkpoint or for all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from ranks import in_ranks

import reconv
from reconv.api import EvalResult
from reconv.checkpoint.safetensors_bytes import encode
from reconv.cli import main
from reconv.core.errors import CheckpointError, ResourceError, UsageError
from reconv.logging.event_log import read_events
from reconv.logging.events import EvalFinished


def test_evaluation_repeats_the_metrics_of_training(classifier: Path) -> None:
    recorded = [e for e in read_events(classifier / "events.jsonl") if isinstance(e, EvalFinished) and e.step == 66]
    assert [e.weights for e in recorded] == ["raw", "ema"]
    for event in recorded:
        [result] = reconv.evaluate(classifier, weights=event.weights, backend="eager")
        assert result.metrics == event.metrics
        assert (result.num_samples, result.step) == (360, 66)


def test_the_batch_size_does_not_change_the_counts(classifier: Path) -> None:
    [whole] = reconv.evaluate(classifier)
    [small_batches] = reconv.evaluate(classifier, batch_size=7)
    assert small_batches.metrics["top1"] == whole.metrics["top1"]
    assert small_batches.num_samples == 360


def test_all_evaluates_every_checkpoint_once_in_order(classifier: Path) -> None:
    first = reconv.evaluate(classifier, all=True)
    assert [r.step for r in first] == [22, 44, 66]
    rows = (classifier / "evaluations.csv").read_text().splitlines()
    assert len(rows) == 4
    assert "every checkpoint" in (classifier / "report.html").read_text()
    top1 = rows[2].split(",")[5]
    (classifier / "evaluations.csv").write_text("\n".join([*rows[:2], rows[2].replace(top1, "0.5"), rows[3]]))
    again = reconv.evaluate(classifier, all=True)
    assert again[1].metrics["top1"] == 0.5  # a row in the file is not computed again
    assert [again[0], again[2]] == [first[0], first[2]]
    raw = reconv.evaluate(classifier, all=True, weights="raw")
    assert {r.weights for r in raw} == {"raw"}  # other weights have rows of their own
    assert raw[2].metrics == reconv.evaluate(classifier, weights="raw")[0].metrics


def evaluate_in_rank(run: Path, options: dict[str, Any]) -> list[EvalResult]:
    return reconv.evaluate(run, **options)


@pytest.mark.parametrize("batch_size", [50, 300])  # eight batches, or two: then one of three ranks has none
def test_ranks_have_the_result_of_one_process(classifier: Path, batch_size: int) -> None:
    options = {"batch_size": batch_size, "per_class": True, "device": "cpu"}
    [one] = reconv.evaluate(classifier, **options)
    for [result] in in_ranks(3, evaluate_in_rank, classifier, options):
        assert result == one  # the bits of the loss included
        assert result.analysis == one.analysis


def test_ranks_evaluate_a_detector_as_one_process_does(detector: Path) -> None:
    options = {"batch_size": 7, "per_class": True, "device": "cpu"}
    [one] = reconv.evaluate(detector, **options)
    for [result] in in_ranks(2, evaluate_in_rank, detector, options):
        assert result == one
        assert result.analysis == one.analysis


def test_all_by_several_ranks_writes_the_rows_of_one_process(classifier: Path, tmp_path: Path) -> None:
    copies = [tmp_path / name for name in ("one", "ranks")]
    for copy in copies:
        shutil.copytree(classifier, copy, ignore=shutil.ignore_patterns("evaluations.csv"))
    reconv.evaluate(copies[0], all=True)
    first, second = in_ranks(2, evaluate_in_rank, copies[1], {"all": True, "device": "cpu"})
    assert first == second
    assert [result.step for result in first] == [22, 44, 66]
    assert (copies[1] / "evaluations.csv").read_text() == (copies[0] / "evaluations.csv").read_text()


@pytest.mark.slow
def test_several_devices_are_processes_of_their_own(classifier: Path) -> None:
    [one] = reconv.evaluate(classifier, batch_size=50)
    [result] = reconv.evaluate(classifier, batch_size=50, devices=2, device="cpu")
    assert result.metrics["top1"] == one.metrics["top1"]
    assert result.num_samples == 360
    assert result.images_per_s is not None and result.images_per_s > 0


def test_the_analysis_by_class_adds_up_to_the_metrics(classifier: Path) -> None:
    [result] = reconv.evaluate(classifier, per_class=True)
    assert result.analysis is not None
    assert sum(row["num_images"] for row in result.analysis["classes"]) == 360
    correct = sum(row["recall"] * row["num_images"] for row in result.analysis["classes"])
    assert correct / 360 == pytest.approx(result.metrics["top1"])
    assert reconv.evaluate(classifier)[0].analysis is None


def test_all_rejects_options_of_a_single_evaluation(classifier: Path, tmp_path: Path) -> None:
    for options in ({"samples": 50}, {"weights": "averaged"}, {"per_class": True}):
        with pytest.raises(UsageError, match="--all"):
            reconv.evaluate(classifier, all=True, **options)
    bare = shutil.copy(_weights_file(classifier), tmp_path)
    with pytest.raises(UsageError, match="--all"):
        reconv.evaluate(bare, all=True, recipe="quickstart")


def test_a_report_that_cannot_be_written_is_a_resource_error(classifier: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(classifier, copy, ignore=shutil.ignore_patterns("report.html"))
    (copy / "report.html").mkdir()
    with pytest.raises(ResourceError) as caught:
        reconv.evaluate(copy, all=True)
    assert "copy the run" in caught.value.hint and "--out" not in caught.value.hint


def test_a_damaged_checkpoint_is_skipped_and_logged(classifier: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(classifier, copy)
    (copy / "checkpoints" / "step-000000066" / "ema.safetensors").write_bytes(b"torn")
    for is_all, steps in ((True, [22, 44]), (False, [44])):
        messages: list[str] = []
        assert [r.step for r in reconv.evaluate(copy, all=is_all, log=messages.append)] == steps
        assert any("step-000000066" in text for text in messages)


def test_a_named_checkpoint_without_its_manifest_is_an_error(classifier: Path, tmp_path: Path) -> None:
    shutil.copytree(classifier, tmp_path / "copy")
    named = tmp_path / "copy" / "checkpoints" / "step-000000066"
    (named / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="manifest"):
        reconv.evaluate(named)


def test_a_run_its_checkpoint_and_its_weights_file_give_the_same_metrics(classifier: Path) -> None:
    [by_run] = reconv.evaluate(classifier, weights="raw")
    [by_checkpoint] = reconv.evaluate(classifier / "checkpoints" / "step-000000066", weights="raw")
    [by_file] = reconv.evaluate(_weights_file(classifier), recipe="quickstart")
    assert by_checkpoint.metrics == by_run.metrics == by_file.metrics


def test_missing_runs_and_wrong_recipes_are_rejected(classifier: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        reconv.evaluate(tmp_path / "nowhere")
    bare = tmp_path / "bare.safetensors"
    bare.write_bytes(encode(safetensors.torch.load_file(_weights_file(classifier))))
    with pytest.raises(UsageError, match="recipe"):
        reconv.evaluate(bare)
    with pytest.raises(CheckpointError):
        reconv.evaluate(bare, recipe="cifar10-resnet20")


def _weights_file(run: Path) -> Path:
    return run / "checkpoints" / "step-000000066" / "model.safetensors"


def test_classes_with_few_images_are_named_beside_the_metric(
    classifier: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [whole] = reconv.evaluate(classifier, device="cpu")
    assert whole.few_images == {}
    [some] = reconv.evaluate(classifier, samples=50, device="cpu")
    assert 0 < len(some.few_images) <= 10 and all(count < 10 for count in some.few_images.values())
    with pytest.raises(SystemExit):
        main(["eval", str(classifier), "--samples", "50", "--device", "cpu"])
    assert "few validation images: " in capsys.readouterr().err
