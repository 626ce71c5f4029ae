"""Datasets of image files with a table of boxes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from box_examples import write_voc, write_yolo
from detection_data import opened

from reconv.core.errors import DataError
from reconv.data.pipeline.detection import DetectionPipeline
from reconv.recipe.parts.data import PreprocessConfig


def test_a_missing_image_is_named_when_read(coco: Path) -> None:
    (coco / "train2017" / "a.jpg").unlink()
    with pytest.raises(DataError, match=r"a\.jpg"):
        opened(coco)[1]


def test_a_subset_of_training_keeps_the_boxes(coco: Path) -> None:
    some = opened(coco, subset_percent=50)
    assert len(some) == 1 and len(some.annotation(0)) == 2 and "1 of 2 images" in some.origin


def test_every_layout_gives_the_same_boxes(coco: Path, tmp_path: Path) -> None:
    """The same image and boxes in the layouts of COCO, VOC and YOLO."""
    image = (coco / "train2017" / "b.jpg").read_bytes()
    voc = write_voc(
        tmp_path / "v",
        {"train": ["b"], "val": ["b"]},
        {"b": (30, 40, [("person", (1, 1, 10, 10), 0), ("dog", (6.5, 7.25, 25.5, 16.25), 0)])},
    )
    (voc / "JPEGImages" / "b.jpg").write_bytes(image)
    yolo = write_yolo(
        tmp_path / "y",
        "images/train",
        {"b": ["0 0.125 0.16666667 0.25 0.33333333", "1 0.3875 0.375 0.5 0.33333333"]},
        ["p", "d"],
    )
    (yolo / "images" / "train" / "b.jpg").write_bytes(image)
    rows = []
    for root in (coco, voc, yolo):
        fetch = DetectionPipeline(opened(root), PreprocessConfig(size=32, resize=None), None, 4)
        filled = {column.name: column.empty(1) for column in fetch.columns}
        fetch(np.array([0]), None, filled)
        rows.append(filled)
    for other in rows[1:]:
        assert np.array_equal(other["images"], rows[0]["images"])
        assert other["boxes"] == pytest.approx(rows[0]["boxes"], abs=1e-6)
        assert other["num_boxes"].tolist() == [2]
