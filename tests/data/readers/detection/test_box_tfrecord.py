"""TFRecords with boxes, in the layout of TensorFlow's object detection programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from data_examples import encode, noise

from reconv.core.errors import DataError
from reconv.data.boxes.annotations import DetectionDataset
from reconv.data.readers.dataset_factory import open_dataset
from reconv.data.readers.detect import detect
from reconv.data.readers.shards.tfrecord_format import Values, encode_example, write_records
from reconv.recipe.parts.data import DataConfig


def record(source_id: str, boxes: list[tuple[int, float, float, float, float]], **more: Values) -> bytes:
    """One image of 20 x 40; boxes as (label, xmin, ymin, xmax, ymax)."""
    names = {1: b"person", 3: b"car", 90: b"toothbrush"}
    features: dict[str, Values] = {
        "image/encoded": [encode(noise(20, 40, 3, len(boxes)), "JPEG")],
        "image/format": [b"jpeg"],
        "image/height": [20],
        "image/width": [40],
        "image/filename": [f"{source_id}.jpg".encode()],
        "image/source_id": [source_id.encode()],
        "image/object/class/label": [label for label, *_ in boxes],
        "image/object/class/text": [names.get(label, b"") for label, *_ in boxes],
    }
    for number, edge in enumerate(("xmin", "ymin", "xmax", "ymax"), 1):
        features[f"image/object/bbox/{edge}"] = [float(box[number]) for box in boxes]
    return encode_example({**features, **more})


def write(root: Path, name: str, records: list[bytes]) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    write_records(root / name, records)
    return root


def opened(root: Path, split: Any = "train", **data: Any) -> DetectionDataset:
    source = open_dataset("auto", root, split, DataConfig(**data), boxes=True)
    assert isinstance(source, DetectionDataset)
    return source


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    root = tmp_path / "records"
    two = record(
        "17",
        [(90, 0.25, 0.5, 0.5, 1.0), (1, 0, 0, 1, 1)],
        **{"image/object/is_crowd": [0, 1], "image/object/area": [70.5, 800.0], "image/object/difficult": [1, 0]},
    )
    write(root, "train-00000-of-00002", [two, record("18", [])])
    write(root, "train-00001-of-00002", [record("5", [(3, 0.1, 0.1, 0.2, 0.2)])])
    return write(root, "val-00000-of-00001", [record("x9", [(3, 0.1, 0.1, 0.2, 0.2)]), record("x10", [])])


def test_records_give_images_with_boxes_in_pixels(shards: Path) -> None:
    assert detect(shards).kind == "tfrecord"
    source = opened(shards)
    assert source.class_ids == (1, 3, 90) and source.class_names == ("person", "car", "toothbrush")
    assert len(source) == 2 and source.box_counts().tolist() == [2, 1]
    assert "2 of 3 images have a usable box" in source.origin
    sample = source[0]
    annotation = source.annotation(0)
    assert sample.annotation is not None and sample.data == encode(noise(20, 40, 3, 2), "JPEG")
    for one in (annotation, sample.annotation):
        assert one.boxes_xyxy.tolist() == [[10, 10, 20, 20], [0, 0, 40, 20]] and one.labels.tolist() == [2, 0]
        assert one.is_crowd.tolist() == [False, True] and one.difficult.tolist() == [True, False]
        assert one.area.tolist() == pytest.approx([70.5, 800]) and one.image_id == 17
        assert (one.height, one.width) == (20, 40)
    assert source.annotation(1).area.tolist() == pytest.approx([8], abs=1e-4)
    val = opened(shards, "val")
    assert len(val) == 2 and val.class_ids == (1, 3, 90) and val.annotation(1).image_id == "x10"
    assert len(opened(shards, empty_images="keep")) == 3


def test_file_names_of_tensorflows_converter_are_detected(tmp_path: Path) -> None:
    root = tmp_path / "r"
    for split in ("train", "val"):
        write(root, f"coco_{split}.record-00000-of-00001", [record("1", [(1, 0.1, 0.1, 0.9, 0.9)])])
    assert detect(root).kind == "tfrecord" and len(opened(root)) == len(opened(root, "val")) == 1


def test_bad_boxes_in_records_stop_are_skipped_or_clipped(tmp_path: Path) -> None:
    root = tmp_path / "r"
    bad = [(1, 0.5, 0.5, 0.5, 0.9), (1, 0.5, 0.5, 1.5, 0.9), (3, 0.1, 0.1, 0.2, 0.2)]
    write(root, "train-00000-of-00001", [record("1", [(1, 0.1, 0.1, 0.9, 0.9)]), record("2", bad)])
    write(root, "val-00000-of-00001", [record("3", [(1, 0.1, 0.1, 0.9, 0.9)])])
    with pytest.raises(DataError, match="a box that has no area") as caught:
        opened(root)
    assert "train-00000-of-00001, byte" in caught.value.where and "data.bad_boxes=skip" in caught.value.hint
    skipped, clipped = opened(root, bad_boxes="skip"), opened(root, bad_boxes="clip")
    assert skipped.annotation(1).labels.tolist() == [1] and "2 boxes are unusable" in skipped.origin
    assert clipped.annotation(1).boxes_xyxy[:, 2].tolist() == pytest.approx([40, 8])


def test_unknown_classes_and_uneven_lists_in_records_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "r"
    write(root, "train-00000-of-00001", [record("1", [(1, 0.1, 0.1, 0.9, 0.9)])])
    write(root, "val-00000-of-00001", [record("3", [(3, 0.1, 0.1, 0.9, 0.9)])])
    with pytest.raises(DataError, match="has an unknown class"):
        opened(root, "val").annotation(0)
    other = write(tmp_path / "s", "train-00000-of-00001", [record("1", [], **{"image/object/class/label": [1]})])
    with pytest.raises(DataError, match="features of different lengths"):
        opened(other)
    empty = write(tmp_path / "t", "train-00000-of-00001", [record("1", [])])
    with pytest.raises(DataError, match="no training image has a usable box"):
        opened(empty)
