"""Detectors trained on annotated images: class ids, policies for boxes, and resuming."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from box_examples import write_coco

import reconv
from reconv.cli import main
from reconv.core.errors import DataError

RECIPE = """\
name: tiny-detector
task: detection
length: 2step
model:
  name: ssd_resnet34
  options: {depths: [1, 1, 1], width: 8, extra_widths: [16, 16]}
data: {num_workers: 0, preprocess: {size: 64, resize: null}}
augment: {crop: none}
batch: {size: 4}
schedule: {name: constant, lr: 0.01}
detection:
  metric: voc10
  anchors: {scales: [0.2, 0.4, 0.6, 0.8], aspect_ratios: [[2], [2], [2]]}
evaluate: {batch_size: 3}
engine: {num_threads: 1}
"""
CATEGORIES = {3: "cat", 7: "dog", 50: "unseen"}


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    """Six training images, one of them without a box, and classes with gaps of which one never occurs."""

    def boxes(number: int) -> list[dict[str, Any]]:
        first = {"category_id": 3, "bbox": [number, 2, 20, 20]}
        return [first, {"category_id": 7, "bbox": [20, 10, 15, 15 + number]}]

    train = [(f"{n}.jpg", 40, 60, boxes(n) if n else []) for n in range(6)]
    return write_coco(tmp_path / "coco", {"train": train, "val": train[1:3]}, CATEGORIES)


def train(data: Path, folder: Path, *settings: tuple[str, object], resume: bool = False) -> Any:
    folder.mkdir(exist_ok=True)
    recipe = folder / "tiny-detector.yaml"
    recipe.write_text(RECIPE)
    overrides = [(field, value, "test") for field, value in settings]
    return reconv.train(recipe, data=data, out=folder / "run", overrides=overrides, device="cpu", resume=resume)


def losses(folder: Path) -> list[float]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if "loss" in event and isinstance(event["loss"], float)]


def test_class_ids_are_saved_and_part_of_predictions(
    coco: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(coco, tmp_path / "t")
    [state] = sorted(result.folder.glob("checkpoints/*/state.json"))[-1:]
    content = json.loads(state.read_text())
    assert content["class_ids"] == [3, 7, 50] and content["class_names"] == ["cat", "dog", "unseen"]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["predict", str(result.folder), str(coco / "val2017" / "1.jpg"), "--json", "--min-score", "0"])
    boxes = json.loads(capsys.readouterr().out)[0]["boxes"]
    assert boxes and {(box["name"], box["class_id"]) for box in boxes} <= {("cat", 3), ("dog", 7), ("unseen", 50)}
    assert math.isfinite(result.summary["value"])


@pytest.mark.parametrize(
    "settings",
    [
        (("data.empty_images", "keep"), ("augment.crop", "ssd"), ("augment.zoom_out.probability", 0.5)),
        (
            ("augment.color_jitter.hue", 0.05),
            ("augment.color_jitter.implementation", "tensorflow"),
            ("augment.hflip", 1.0),
        ),
        (("detection.max_gt_boxes", 1), ("data.cache", "ram")),
    ],
)
def test_losses_are_finite_with_empty_images_unseen_classes_and_augmentation(
    coco: Path, tmp_path: Path, settings: tuple[tuple[str, object], ...]
) -> None:
    result = train(coco, tmp_path / "t", ("log.every", "1step"), *settings)
    found = losses(result.folder)
    assert len(found) >= 2 and all(map(math.isfinite, found))
    log = (result.folder / "events.jsonl").read_text()
    dropped = "5 training images have more than 1 boxes" in log and "5 of 10 boxes" in log
    assert dropped == ("detection.max_gt_boxes" in dict(settings))


def test_losses_are_finite_without_any_box(coco: Path, tmp_path: Path) -> None:
    file = coco / "annotations" / "instances_train2017.json"
    content = json.loads(file.read_text())
    content["annotations"] = []
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match="no training image has a usable box"):
        train(coco, tmp_path / "refused")
    result = train(coco, tmp_path / "t", ("data.empty_images", "keep"), ("log.every", "1step"))
    assert all(map(math.isfinite, losses(result.folder)))


def test_a_bad_box_stops_training_before_anything_is_written(coco: Path, tmp_path: Path) -> None:
    file = coco / "annotations" / "instances_train2017.json"
    content = json.loads(file.read_text())
    content["annotations"][0]["bbox"] = [50, 2, 20, 20]
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match="a box that is partly outside of its image") as caught:
        train(coco, tmp_path / "t")
    assert "1.jpg" in caught.value.where and not (tmp_path / "t" / "run").exists()


def test_an_empty_validation_set_is_refused(coco: Path, tmp_path: Path) -> None:
    file = coco / "annotations" / "instances_val2017.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "images": [], "annotations": []}))
    with pytest.raises(DataError, match="validation set is empty"):
        train(coco, tmp_path / "t")


def test_resumed_detection_has_the_weights_of_an_uninterrupted_run(coco: Path, tmp_path: Path) -> None:
    settings = (("augment.crop", "ssd"), ("save.every", "1step"), ("save.keep_last", 9))
    whole = train(coco, tmp_path / "whole", *settings).folder
    parts = tmp_path / "parts"
    train(coco, parts, *settings, ("length", "1step"))
    train(coco, parts, *settings, resume=True)
    last = [
        sorted(folder.glob("checkpoints/*/model.safetensors"))[-1].read_bytes() for folder in (whole, parts / "run")
    ]
    assert last[0] == last[1]
