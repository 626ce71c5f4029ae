"""Detection data converted to another layout and back."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from box_examples import write_coco, write_voc, write_yolo
from data_examples import encode, noise
from PIL import Image

from reconv.cli import main
from reconv.core.errors import DataError
from reconv.data.boxes.annotations import DetectionDataset
from reconv.data.readers.dataset_factory import open_dataset
from reconv.detection.annotation import Annotation
from reconv.recipe.parts.data import DataConfig

CATEGORIES = {1: "person", 18: "dog", 90: "toothbrush"}


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    def box(category: int, *corners: float, **more: Any) -> dict[str, Any]:
        return {"category_id": category, "bbox": list(corners), **more}

    train = [
        ("a.jpg", 30, 40, [box(90, 0, 0, 10, 10), box(1, 5.5, 6.25, 20, 10, area=77.5)]),
        ("b.jpg", 20, 50, [box(18, 1, 1, 19, 19, iscrowd=1), box(18, 45, 1, 9, 9)]),
        ("empty.jpg", 25, 25, []),
        ("useless.jpg", 25, 25, [box(1, 20, 20, 9, 9), box(1, 2, 2, 0, 5)]),
    ]
    val = [("v.jpg", 30, 40, [box(1, 2, 3, 4, 5)]), ("none.jpg", 10, 10, [])]
    return write_coco(tmp_path / "coco", {"train": train, "val": val}, CATEGORIES)


def command(*words: object) -> int:
    """The exit code of a command line."""
    with pytest.raises(SystemExit) as ended:
        main(["data", "convert", *map(str, words), "--quiet"])
    return int(ended.value.code or 0)


def opened(path: Path, split: Any = "train", **data: Any) -> DetectionDataset:
    source = open_dataset("auto", path, split, DataConfig(**data), boxes=True)
    assert isinstance(source, DetectionDataset)
    return source


def by_id(source: DetectionDataset) -> dict[int | str, tuple[Annotation, bytes]]:
    found = {}
    for index in range(len(source)):
        sample = source[index]
        assert sample.annotation is not None and isinstance(sample.data, bytes)
        found[sample.annotation.image_id] = (sample.annotation, sample.data)
    return found


def assert_same(first: DetectionDataset, second: DetectionDataset) -> None:
    assert first.class_names == second.class_names and first.class_ids == second.class_ids
    ones, others = by_id(first), by_id(second)
    assert set(ones) == set(others) and len(ones) > 0
    for image_id, (one, data) in ones.items():
        other, other_data = others[image_id]
        assert data == other_data and (one.height, one.width) == (other.height, other.width)
        assert other.boxes_xyxy == pytest.approx(one.boxes_xyxy, abs=1e-3)
        assert other.area == pytest.approx(one.area, rel=1e-4)
        assert np.array_equal(one.labels, other.labels) and np.array_equal(one.is_crowd, other.is_crowd)


def test_coco_becomes_records_and_back(coco: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records, back = tmp_path / "records", tmp_path / "back"
    assert command(coco, records, "--to", "tfrecord", "--shards", "2,1") == 0
    output = capsys.readouterr().out
    assert "train: 2 of 4 images have a usable box; the others are left out" in output
    assert "train: 3 of 6 boxes are unusable and left out" in output
    assert sorted(p.name for p in records.iterdir() if not p.name.startswith(".")) == [
        "label_map.pbtxt",
        "reconv.json",
        "train-00000-of-00002",
        "train-00001-of-00002",
        "val-00000-of-00001",
    ]
    for split in ("train", "val"):
        assert_same(opened(coco, split, bad_boxes="skip"), opened(records, split))
    assert command(records, back, "--to", "coco") == 0
    for split in ("train", "val"):
        assert_same(opened(records, split), opened(back, split))
    content = json.loads((back / "annotations" / "instances_train.json").read_text())
    assert content["categories"] == [{"id": number, "name": name} for number, name in CATEGORIES.items()]
    assert {image["file_name"] for image in content["images"]} == {"000000000001.jpg", "000000000011.jpg"}


def test_a_class_without_boxes_is_kept_in_records(coco: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        file = coco / "annotations" / f"instances_{split}2017.json"
        content = json.loads(file.read_text())
        content["categories"].append({"id": 200, "name": 'a "rare" \\ 猫'})
        file.write_text(json.dumps(content))
    records, back = tmp_path / "records", tmp_path / "back"
    assert command(coco, records, "--to", "tfrecord", "--shards", "1,1") == 0
    assert command(records, back, "--to", "coco") == 0
    expected = opened(coco, "train", bad_boxes="skip")
    assert expected.class_names[-1] == 'a "rare" \\ 猫' and expected.class_ids[-1] == 200
    for root in (records, back):
        assert opened(root).class_names == opened(root, "val").class_names == expected.class_names
        assert opened(root).class_ids == expected.class_ids


def test_a_foreign_label_map_is_read_and_a_damaged_one_refused(coco: Path, tmp_path: Path) -> None:
    records = tmp_path / "records"
    assert command(coco, records, "--to", "tfrecord", "--shards", "1,1") == 0
    items = "".join(f"item {{ name: 'c{number}', id: {number} }}\n" for number in CATEGORIES)
    (records / "label_map.pbtxt").write_text(items)
    assert opened(records).class_names == tuple(f"c{number}" for number in sorted(CATEGORIES))
    (records / "label_map.pbtxt").write_text("item { id: 1 }")
    with pytest.raises(DataError, match="has no id or no name"):
        opened(records)
    (records / "label_map.pbtxt").write_text("")
    with pytest.raises(DataError, match="has no item"):
        opened(records)


def test_options_for_empty_images_and_bad_boxes_apply_to_the_output(coco: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    assert command(coco, new, "--to", "coco", "--bad-boxes", "clip", "--empty-images", "keep") == 0
    source = opened(new, empty_images="keep")
    assert len(source) == 4
    assert source.annotation(3).boxes_xyxy.tolist() == [[20, 20, 25, 25]]
    assert command(coco, tmp_path / "other", "--to", "coco", "--bad-boxes", "stop") == 3


def test_boxes_are_scaled_with_downscaled_images(coco: Path, tmp_path: Path) -> None:
    new = tmp_path / "small"
    assert command(coco, new, "--to", "tfrecord", "--longest", 20, "--shards", "1,1") == 0
    before, after = by_id(opened(coco, bad_boxes="skip")), by_id(opened(new))
    for image_id, (annotation, data) in after.items():
        old = before[image_id][0]
        assert max(annotation.height, annotation.width) == 20
        with Image.open(io.BytesIO(data)) as image:
            assert image.size == (annotation.width, annotation.height)
        scale = np.array([annotation.width / old.width, annotation.height / old.height] * 2)
        assert annotation.boxes_xyxy == pytest.approx(old.boxes_xyxy * scale, abs=1e-3)


def test_voc_and_yolo_become_coco_with_their_own_names(tmp_path: Path) -> None:
    images = {n: (20, 30, [("dog", (3, 4, 9, 12), 1)]) for n in ("2008_01", "2008_02")}
    voc = write_voc(tmp_path / "voc", {"train": ["2008_01"], "val": ["2008_02"]}, images)
    yolo = write_yolo(tmp_path / "yolo", "images/train", {"a": ["1 0.5 0.5 0.2 0.2"]}, ["c", "d"], (20, 30))
    for number, root in enumerate((voc, yolo)):
        new = tmp_path / f"new{number}"
        assert command(root, new, "--to", "coco") == 0
        old = opened(root)
        assert opened(new).class_names == old.class_names and opened(new).class_ids == old.class_ids
        assert opened(new).annotation(0).boxes_xyxy == pytest.approx(old.annotation(0).boxes_xyxy, abs=1e-3)
    assert (tmp_path / "new0" / "train" / "2008_01.jpg").is_file() and (tmp_path / "new1" / "val" / "a.jpg").is_file()
    records = tmp_path / "records"
    assert command(voc, records, "--to", "tfrecord", "--shards", "1,1") == 0
    assert opened(records).annotation(0).difficult.tolist() == [True]


def test_the_number_of_threads_does_not_change_a_byte(coco: Path, tmp_path: Path) -> None:
    for kind in ("coco", "tfrecord"):
        shards = ("--shards", "2,1") if kind == "tfrecord" else ("--per-shard", 1)
        contents = []
        for workers in (1, 4):
            new = tmp_path / f"{kind}{workers}"
            assert command(coco, new, "--to", kind, "--workers", workers, *shards) == 0
            contents.append({str(p.relative_to(new)): p.read_bytes() for p in sorted(new.rglob("*")) if p.is_file()})
        assert contents[0] == contents[1] and len(contents[0]) > 3


def test_formats_without_boxes_and_data_without_boxes_are_refused(
    coco: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(coco, tmp_path / "x", "--to", "packed") == 2
    assert "images with boxes cannot be written as packed" in capsys.readouterr().err
    assert command("digits", tmp_path / "x", "--to", "coco") == 2
    assert "images without boxes cannot be written as coco" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_an_image_rotated_by_exif_is_not_reencoded_against_its_boxes(
    coco: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    (coco / "train2017" / "a.jpg").write_bytes(encode(noise(30, 40, 3, 0), "JPEG", exif=exif))
    assert command(coco, tmp_path / "whole", "--to", "coco") == 0
    assert command(coco, tmp_path / "x", "--to", "coco", "--longest", 20) == 3
    assert "rotated by its EXIF orientation" in capsys.readouterr().err
