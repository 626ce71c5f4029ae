"""The findings in the formats of Label Studio, FiftyOne and COCO, as their documentation has them."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from jsonschema import validate
from review_examples import picture, write_photos, write_predictions

from reconv.core.errors import UsageError
from reconv.data.boxes.annotations import DetectionDataset
from reconv.metrics.detection_matches import ImageDetections
from reconv.recipe.parts.data import DataConfig
from reconv.review.boxes import box_findings
from reconv.review.exports import export
from reconv.review.images import open_images
from reconv.review.run import Review, ReviewOptions, review

NUMBER, TEXT = {"type": "number"}, {"type": "string"}
BOX = {"type": "array", "items": NUMBER, "minItems": 4, "maxItems": 4}
TASKS = {
    "type": "array",
    "items": {
        "required": ["data", "predictions"],
        "properties": {
            "data": {"required": ["image"], "additionalProperties": TEXT},
            "predictions": {
                "items": {
                    "required": ["model_version", "score", "result"],
                    "properties": {
                        "score": {"type": "number", "minimum": 0, "maximum": 1},
                        "result": {"items": {"required": ["from_name", "to_name", "type", "value"]}},
                    },
                }
            },
        },
    },
}
COCO = {
    "required": ["images", "annotations", "categories"],
    "properties": {
        "images": {"items": {"required": ["id", "file_name", "width", "height"]}},
        "annotations": {
            "items": {
                "required": ["id", "image_id", "category_id", "bbox", "area", "iscrowd"],
                "properties": {"bbox": BOX, "area": NUMBER, "category_id": {"type": "integer", "minimum": 1}},
            }
        },
        "categories": {"items": {"required": ["id", "name"]}},
    },
}
FIFTYONE = {"required": ["classes", "labels"], "properties": {"classes": {"items": TEXT}, "labels": {"type": "object"}}}


@pytest.fixture
def found(tmp_path: Path) -> Review:
    photos = write_photos(tmp_path / "photos ü")
    table = write_predictions(tmp_path / "p.csv", photos, {"train/cat/1.png": "owl", "val/dog/2.png": "cat"})
    return review(ReviewOptions(str(photos), tmp_path / "out", predictions=(table,)), lambda text: None)


def read(path: Path) -> object:
    return json.loads(path.read_text())


def test_classes_are_exported_with_the_proposed_ones(found: Review, tmp_path: Path) -> None:
    assert len(found.findings) == 2
    for kind in ("label-studio", "fiftyone", "coco"):
        export(found.images, list(found.findings), kind, tmp_path)
    tasks = read(tmp_path / "label-studio.json")
    validate(tasks, TASKS)
    by_path = {task["data"]["path"]: task for task in tasks}  # type: ignore[attr-defined,index]
    [prediction] = by_path["train/cat/1.png"]["predictions"]
    assert (
        prediction["result"][0]["value"] == {"choices": ["owl"]}
        and by_path["train/cat/1.png"]["data"]["given"] == "cat"
    )
    assert by_path["train/cat/1.png"]["data"]["image"].endswith("photos%20%C3%BC/train/cat/1.png")
    config = ET.fromstring((tmp_path / "label-studio.xml").read_text())
    assert [choice.get("value") for choice in config.iter("Choice")] == ["cat", "dog", "owl"]
    labels, data = read(tmp_path / "fiftyone" / "labels.json"), read(tmp_path / "fiftyone" / "data.json")
    validate(labels, FIFTYONE)
    assert labels["labels"].keys() == data.keys()  # type: ignore[index,attr-defined]
    assert all(Path(file).is_file() for file in data.values())  # type: ignore[attr-defined]
    assert {label["attributes"]["proposed"] for label in labels["labels"].values()} == {"owl", "cat"}  # type: ignore[index]
    coco = read(tmp_path / "coco.json")
    validate(coco, COCO)
    assert {a["bbox"][2] for a in coco["annotations"]} == {72.0}  # type: ignore[index]


def test_boxes_are_exported_as_the_detector_sees_them(tmp_path: Path) -> None:
    images = open_images(DataConfig(), str(write_boxes(tmp_path / "coco")))
    dataset = images.datasets["train"]
    assert images.has_boxes and isinstance(dataset, DetectionDataset)
    truth = dataset.annotation(0)
    detections = ImageDetections(
        0, truth, np.array([[30.0, 30, 60, 55], [5, 5, 25, 25]]), np.array([0.9, 0.8]), np.array([1, 1])
    )
    findings = box_findings(images, [(0, detections)])
    assert {finding.box.problem for finding in findings if finding.box} == {"missing", "wrong class"}
    for kind in ("label-studio", "fiftyone", "coco"):
        export(images, findings, kind, tmp_path)
    tasks = read(tmp_path / "label-studio.json")
    validate(tasks, TASKS)
    results = tasks[0]["predictions"][0]["result"]  # type: ignore[index]
    assert {r["value"]["rectanglelabels"][0] for r in results} == {"bus"}
    assert {(r["value"]["x"], r["original_width"]) for r in results} == {(6.25, 80), (37.5, 80)}
    labels = read(tmp_path / "fiftyone" / "labels.json")["labels"]["00000000"]  # type: ignore[index]
    assert sorted(box["attributes"]["finding"] for box in labels) == ["missing", "wrong class"]
    assert labels[0]["bounding_box"] == [0.0625, pytest.approx(5 / 60), 0.25, pytest.approx(1 / 3)]
    coco = read(tmp_path / "coco.json")
    validate(coco, COCO)
    assert sorted(a["bbox"] for a in coco["annotations"]) == [[5, 5, 20, 20], [30, 30, 30, 25]]  # type: ignore[index]


def write_boxes(root: Path) -> Path:
    """COCO data with one box in each of two images."""
    for split in ("train", "val"):
        (root / f"{split}2017").mkdir(parents=True)
        picture(1).resize((80, 60)).save(root / f"{split}2017" / "a.png")
        content = {
            "images": [{"id": 1, "file_name": "a.png", "width": 80, "height": 60}],
            "annotations": [
                {"id": 1, "image_id": 1, "category_id": 1, "bbox": [5, 5, 20, 20], "area": 400, "iscrowd": 0}
            ],
            "categories": [{"id": 1, "name": "car"}, {"id": 2, "name": "bus"}],
        }
        (root / "annotations").mkdir(exist_ok=True)
        (root / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(content))
    return root


def test_images_that_are_no_files_are_refused(tmp_path: Path) -> None:
    images = open_images(DataConfig(source="digits"), None)
    with pytest.raises(UsageError, match="no files"):
        export(images, [], "coco", tmp_path)
