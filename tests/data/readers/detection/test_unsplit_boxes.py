"""Detection data without a validation split, with a test split, or for validation alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from box_examples import write_coco, write_voc, write_yolo
from detection_data import box, opened

from reconv.core.errors import DataError
from reconv.data.boxes.annotations import DetectionDataset
from reconv.data.inspect.check import check
from reconv.data.readers.detect import detect
from reconv.recipe.parts.data import DataConfig

NUM_IMAGES = 12


def make(kind: str, root: Path) -> Path:
    """A dataset with one list of images."""
    stems = [f"p{number}" for number in range(NUM_IMAGES)]
    if kind == "voc":
        images = {stem: (20, 20, [("dog", (1, 1, 9, 9), 0)]) for stem in stems}
        return write_voc(root, {"trainval": stems}, images)
    if kind == "yolo":
        write_yolo(root, "images/train", {stem: ["0 0.5 0.5 0.2 0.2"] for stem in stems}, ["dog"])
        for name in ("images", "labels"):
            shutil.rmtree(root / name / "val")
        return root
    images = [(f"{stem}.jpg", 20, 20, [box(1, 1, 1, 9, 9)]) for stem in stems]
    return write_coco(root, {"train": images}, {1: "dog"})


def files(dataset: DetectionDataset) -> list[str]:
    return [dataset[index].name for index in range(len(dataset))]


@pytest.mark.parametrize("kind", ["coco", "voc", "yolo"])
def test_a_single_list_is_split_and_said_so(tmp_path: Path, kind: str) -> None:
    root = make(kind, tmp_path / kind)
    train, val = opened(root), opened(root, "val")
    assert len(val) >= 1 and len({*files(train), *files(val)}) == NUM_IMAGES == len(train) + len(val)
    assert f"{len(train)} images for training, {len(val)} for validation" in train.origin
    assert [len(val.annotation(index)) for index in range(len(val))] == [1] * len(val)
    names = [Path(file).name for file in files(val)]
    moved = root.rename(tmp_path / "moved")
    assert [Path(file).name for file in files(opened(moved, "val"))] == names
    assert len(opened(moved, "val", validation_split=0.8)) > len(val)
    report = check(str(moved), DataConfig(), 1)
    assert {split: own.num_samples for split, own in report.splits.items()} == {"train": len(train), "val": len(val)}
    assert "is held out for validation" in report.origin
    with pytest.raises(DataError):
        opened(moved, "test")


@pytest.mark.parametrize("name", ["annotations/instances_default.json", "result.json", "annotations/trainval.json"])
def test_a_single_coco_file_of_any_name_is_found(tmp_path: Path, name: str) -> None:
    root = make("coco", tmp_path / "c")
    (root / "annotations" / "instances_train2017.json").rename(root / name)
    (root / "train2017").rename(root / "photos")
    assert "has the lists images, annotations and categories" in detect(root).why
    assert len(opened(root)) + len(opened(root, "val")) == NUM_IMAGES
    assert opened(root)[0].name.startswith(str(root / "photos"))


def test_voc_without_lists_uses_all_annotations(tmp_path: Path) -> None:
    root = make("voc", tmp_path / "v")
    listed = files(opened(root, "val"))
    shutil.rmtree(root / "ImageSets")
    assert sorted(files(opened(root, "val"))) == sorted(listed)
    assert "all annotations" in opened(root).origin


def test_yolo_files_in_one_folder_are_split(tmp_path: Path) -> None:
    root = make("yolo", tmp_path / "y")
    for name in ("images", "labels"):
        (root / name / "train").rename(root / "moved")
        (root / name).rmdir()
        (root / "moved").rename(root / name)
    assert len(opened(root)) + len(opened(root, "val")) == NUM_IMAGES


def test_test_splits_are_read_and_used_for_validation_if_there_is_no_other(tmp_path: Path) -> None:
    voc, yolo, coco = (make(kind, tmp_path / kind) for kind in ("voc", "yolo", "coco"))
    (voc / "ImageSets/Main/test.txt").write_text("p3\np4\n")
    shutil.copytree(yolo / "images/train", yolo / "holdout")
    (yolo / "data.yaml").write_text("names: [dog]\ntest: holdout\n")
    content = json.loads((coco / "annotations/instances_train2017.json").read_text())
    (coco / "annotations/instances_test2017.json").write_text(json.dumps(content))
    (coco / "annotations/image_info_test-dev2017.json").write_text('{"images": []}')
    (coco / "train2017").rename(coco / "images")
    for root, count in ((voc, 2), (yolo, NUM_IMAGES), (coco, NUM_IMAGES)):
        sizes = [len(opened(root, split, empty_images="keep")) for split in ("train", "val", "test")]
        assert sizes == [NUM_IMAGES, count, count]
        assert "test" in opened(root, "val").origin.rpartition(";")[2]


@pytest.mark.parametrize("kind", ["coco", "voc", "yolo"])
def test_a_validation_set_alone_has_its_own_classes(tmp_path: Path, kind: str) -> None:
    root = make(kind, tmp_path / kind)
    if kind == "voc":
        (root / "ImageSets/Main/trainval.txt").rename(root / "ImageSets/Main/val.txt")
    elif kind == "yolo":
        for name in ("images", "labels"):
            (root / name / "train").rename(root / name / "val")
    else:
        (root / "annotations/instances_train2017.json").rename(root / "annotations/instances_val2017.json")
        (root / "train2017").rename(root / "val2017")
    val = opened(root, "val")
    assert len(val) == NUM_IMAGES and "dog" in val.class_names
    with pytest.raises(DataError):
        opened(root)
