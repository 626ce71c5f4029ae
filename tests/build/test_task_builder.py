"""Detection runs: train, evaluate, dry run, initial weights, benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from PIL import Image

import reconv
from reconv.bench.timing import TimingConfig
from reconv.bench.train import bench_train
from reconv.build.postprocess import build_anchors
from reconv.build.saved_model import read_saved_model
from reconv.checkpoint.locate import locate
from reconv.core.errors import DataError, ReconvError
from reconv.logging.events import Event, LogMessage
from reconv.models import build_model, init_weights
from reconv.recipe.loader import Override, load
from reconv.trainer.dry_run import dry_run

SMALL: dict[str, object] = {
    "model.options.width": 8,
    "model.options.extra_widths": [16, 16, 16],
    "data.preprocess.size": 64,
    "data.num_samples": 40,
    "length": "2step",
    "schedule.warmup": "1step",
    "batch.size": 8,
    "evaluate.every": "2step",
    "save.every": "2step",
}


def small(**more: object) -> list[Override]:
    values = SMALL | {field.replace("__", "."): value for field, value in more.items()}
    return [(field, value, "test") for field, value in values.items()]


def test_evaluating_a_detector_reproduces_the_metric_of_its_run(tmp_path: Path) -> None:
    run = reconv.train("quickstart-detection", out=tmp_path / "run", overrides=small(), device="cpu")
    [score] = reconv.evaluate(run.folder, device="cpu", backend="eager")
    assert score.num_samples == 8
    assert score.metrics["voc10"] == run.summary["value"]
    assert run.summary["metric"] == "voc10"
    assert {"ap", "ap50", "ar100", "voc07"} <= score.metrics.keys()


def test_number_of_classes_is_read_from_detector_weights(tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text("extends: quickstart-detection\nmodel: {options: {width: 8, extra_widths: [16, 16, 16]}}\n")
    model = build_model(
        "ssd_resnet34", 11, depths=[1, 1, 1], width=8, extra_widths=[16] * 3, boxes_per_cell=[4] * 4, in_channels=1
    )
    safetensors.torch.save_file(model.state_dict(), tmp_path / "bare.safetensors")
    saved = read_saved_model(locate(tmp_path / "bare.safetensors"), weights="auto", recipe=str(recipe))
    assert len(saved.class_names) == 10


def test_dry_run_of_a_detector() -> None:
    result = dry_run("quickstart-detection", steps=2, overrides=small(length="9step"), device="cpu")
    assert (result.steps, result.total_steps) == (2, 9)
    assert result.evaluation_s is not None and result.checkpoint_bytes is not None


def test_detector_initialized_from_a_classifier_logs_missing_and_unexpected_keys(tmp_path: Path) -> None:
    classifier = build_model("resnet10", num_classes=5, in_channels=1, width=8)
    init_weights(classifier, seed=77)
    file = tmp_path / "classifier.safetensors"
    safetensors.torch.save_file(classifier.state_dict(), file)
    events: list[Event] = []
    given = small(model__init=str(file), model__freeze_backbone=True, evaluate__every="off")
    run = reconv.train(
        "quickstart-detection", out=tmp_path / "run", overrides=given, device="cpu", on_event=events.append
    )
    notes = [event.text for event in events if isinstance(event, LogMessage)]
    words = ("unexpected: fc.bias, fc.weight, layer4.0", "missing from the file: extras.0")
    assert any(all(word in text for word in words) for text in notes)
    assert any("are frozen" in text for text in notes)
    [saved] = (run.folder / "checkpoints").glob("*/model.safetensors")
    weights = safetensors.torch.load_file(saved)
    name = "layer3.0.conv2.weight"
    assert torch.equal(weights[name], classifier.get_parameter(name))


def test_bench_train_of_a_detector_uses_synthetic_boxes() -> None:
    result = bench_train(
        "quickstart-detection", overrides=small(), device="cpu", config=TimingConfig(windows=5, steps=1, warmup=0)
    )
    assert result["images_per_s"] > 0
    assert "with boxes in 10 classes" in result["data"]
    assert result["input"] == "device"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model__name": "resnet10", "model__options": {}}, "resnet10 is not a detector"),
        ({"model__options": {"boxes_per_cell": [4]}}, "follows from detection.anchors.aspect_ratios"),
        ({"model__options": {"extra_widths": [16, 16]}}, "boxes for 4 maps in all"),
        ({"model__options": {"extra_widths": [16, 16, 16], "num_halved": 0}}, "too small for 4 maps"),
    ],
)
def test_models_that_do_not_match_the_anchors_are_an_error_before_training(
    changed: dict[str, object], said: str, tmp_path: Path
) -> None:
    given = [*small(data__preprocess__size=32), *((f.replace("__", "."), v, "test") for f, v in changed.items())]
    with pytest.raises(ReconvError, match=said):
        reconv.train("quickstart-detection", out=tmp_path / "run", overrides=given, device="cpu")
    assert not (tmp_path / "run").exists()


def test_detector_for_classification_is_an_error(tmp_path: Path) -> None:
    given: list[Override] = [("model.name", "ssd_resnet34", "test"), ("model.options", {}, "test")]
    with pytest.raises(ReconvError, match="is a detector, and the task is classification"):
        reconv.train("quickstart", out=tmp_path / "run", overrides=given, device="cpu")


def test_dataset_without_boxes_is_an_error_for_detection(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for name in ("a", "b"):
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            (folder / "0.png").write_bytes(b"")
    given = small(data__source="auto", data__num_samples=None, data__path=str(tmp_path / "data"))
    with pytest.raises(DataError, match="no boxes"):
        reconv.train("quickstart-detection", out=tmp_path / "run", overrides=given, device="cpu")


def test_number_of_anchors_at_300_and_512_pixels() -> None:
    assert build_anchors(load("ssd-resnet34").recipe).shape == (8732, 4)
    larger = load("ssd-resnet34", [("data.preprocess.size", 512, "test")]).recipe
    assert build_anchors(larger).shape == (64**2 * 4 + (32**2 + 16**2 + 8**2) * 6 + (6**2 + 4**2) * 4, 4)


def test_damaged_validation_image_is_skipped_if_the_recipe_tolerates_it(tmp_path: Path) -> None:
    data = tmp_path / "yolo"
    for split in ("train", "val"):
        for kind in ("images", "labels"):
            (data / kind / split).mkdir(parents=True)
        for number in range(8):
            image = Image.new("RGB", (32, 32), (30 * number, 99 * (split == "val"), 0))
            image.save(data / "images" / split / f"{number}.png")
            (data / "labels" / split / f"{number}.txt").write_text("0 0.5 0.5 0.4 0.4\n")
    (data / "classes.txt").write_text("thing\n")
    (data / "images" / "val" / "0.png").write_bytes(b"no image")
    own = {"data__source": "yolo", "data__path": str(data), "data__num_samples": None, "length": "2step"}
    given = small(**own, data__preprocess={"size": 64, "resize": None}, batch__size=4, save__every="2step")
    tolerant = [*given, ("data.bad_images", "skip up to 1", "test")]
    run = reconv.train("quickstart-detection", out=tmp_path / "run", overrides=tolerant, device="cpu")
    assert (run.summary["num_samples"], run.summary["bad_images"]) == (7, 1)
    with pytest.raises(DataError, match="does not decode"):
        reconv.train("quickstart-detection", out=tmp_path / "other", overrides=given, device="cpu")


def test_weights_of_another_backbone_are_rejected_with_a_suggestion(tmp_path: Path) -> None:
    safetensors.torch.save_file({"fc.weight": torch.zeros(10, 8)}, tmp_path / "other.safetensors")
    given = small(model__init=str(tmp_path / "other.safetensors"))
    with pytest.raises(ReconvError, match="the weights do not match the model") as caught:
        reconv.train("quickstart-detection", out=tmp_path / "run", overrides=given, device="cpu")
    assert "with the same backbone, or omit --init" in caught.value.hint
