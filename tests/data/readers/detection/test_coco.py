"""COCO's layout: what is read and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from data_examples import encode, noise
from detection_data import opened, rewrite

from reconv.core.errors import DataError
from reconv.data.readers.detect import detect


def test_coco_is_detected_and_ids_with_gaps_become_classes(coco: Path) -> None:
    assert detect(coco).kind == detect(coco.parent).kind == "coco"
    source = opened(coco)
    assert source.class_names == ("person", "dog", "toothbrush") and source.class_ids == (1, 18, 90)
    first = source.annotation(0)
    assert first.labels.tolist() == [2, 0] and first.image_id == 1 and (first.height, first.width) == (30, 40)
    assert first.boxes_xyxy.tolist() == [[0, 0, 10, 10], [5.5, 6.25, 25.5, 16.25]]
    assert first.area.tolist() == [100, 77.5] and source.annotation(1).is_crowd.tolist() == [True]
    sample = source[0]
    assert sample.name.endswith("train2017/b.jpg") and sample.annotation is not None
    assert sample.data == (coco / "train2017" / "b.jpg").read_bytes()


def test_validation_has_the_classes_of_training_wherever_its_file_lists_them(coco: Path) -> None:
    rewrite(coco, lambda content: content.update(categories=content["categories"][:1]), "val")
    assert opened(coco, "val").class_ids == (1, 18, 90)
    # A second word of that name, before the list: the whole file is read instead.
    rewrite(coco, lambda content: content.update(info={"categories": [1, 2]}))
    assert opened(coco, "val").class_ids == (1, 18, 90)


BAD_FILES = {
    "image id 1 occurs 2 times": lambda t: t["images"].append(dict(t["images"][0])),
    "annotation id 1 occurs 2 times": lambda t: t["annotations"].append(dict(t["annotations"][0])),
    "has an unknown image_id": lambda t: t["annotations"][0].update(image_id=999),
    "has no bbox of four numbers": lambda t: t["annotations"][0].update(bbox=[1, 2]),
    "has no category_id": lambda t: t["annotations"][0].pop("category_id"),
    "has no list of annotations": lambda t: t.pop("annotations"),
    "has no list of images": lambda t: t.update(images={}),
    "image number 0 has no id": lambda t: t["images"][0].pop("id"),
    "image number 1 has no id": lambda t: t["images"].__setitem__(1, "a.jpg"),
    "image number 2 has no id": lambda t: t["images"][2].update(id=[3]),
    "image 1 has no file_name": lambda t: t["images"][0].pop("file_name"),
    "image 1 has no width and height": lambda t: t["images"][0].update(width=None),
    "image 11 has no width and height": lambda t: t["images"][1].update(height=10**12),
    "annotation number 0 has an unknown image_id": lambda t: t["annotations"].__setitem__(0, "a box"),
    "annotation 1 has an unknown image_id": lambda t: t["annotations"][0].update(image_id=[1]),
    "annotation 1 has no bbox": lambda t: t["annotations"][0].update(bbox=[0, 0, 10**400, 5]),
    "annotation 1 has no category_id": lambda t: t["annotations"][0].update(category_id=[90]),
    "annotation 1 has an iscrowd that is neither": lambda t: t["annotations"][0].update(iscrowd="0"),
    "annotation 1 has an area that is not a number": lambda t: t["annotations"][0].update(area="large"),
    "has no id or no name": lambda t: t.update(categories=["person"]),
    "category id 90 of .* is used twice": lambda t: t["categories"].append({"id": 90, "name": "comb"}),
}


@pytest.mark.parametrize("message", BAD_FILES)
def test_an_invalid_coco_file_is_refused(coco: Path, message: str) -> None:
    rewrite(coco, BAD_FILES[message])
    with pytest.raises(DataError, match=message) as caught:
        opened(coco)
    assert caught.value.where.endswith("instances_train2017.json") and caught.value.hint


def test_a_class_id_with_another_name_in_validation_is_refused(coco: Path) -> None:
    rewrite(coco, lambda content: content["categories"][1].update(name="wolf"), "val")
    assert len(opened(coco)) == 2
    with pytest.raises(DataError, match="category 18 is 'wolf' here and 'dog' in training"):
        opened(coco, "val")


def test_coco_files_may_leave_out_areas(coco: Path) -> None:
    rewrite(coco, lambda content: content["annotations"][1].update(area=None))
    assert opened(coco).annotation(0).area.tolist() == [100, 200]


def test_invalid_json_and_a_missing_coco_file_are_refused(coco: Path) -> None:
    with pytest.raises(DataError, match="no annotation file for test"):
        opened(coco, "test")
    (coco / "annotations" / "instances_train2017.json").write_text('{"images": [')
    with pytest.raises(DataError, match="is not valid JSON"):
        opened(coco)


def test_other_names_of_coco_files_and_folders_are_found(coco: Path, tmp_path: Path) -> None:
    (coco / "annotations" / "captions_train2017.json").write_text("{}")
    (coco / "images").mkdir()
    (coco / "train2017").rename(coco / "images" / "train2017")
    assert opened(coco)[0].name.endswith("images/train2017/b.jpg")
    inside = tmp_path / "inside"
    for split, name in (("train", "train"), ("val", "valid")):
        (inside / name).mkdir(parents=True)
        content = json.loads((coco / "annotations" / f"instances_{split}2017.json").read_text())
        (inside / name / "_annotations.coco.json").write_text(json.dumps(content))
        for image in content["images"]:
            (inside / name / image["file_name"]).write_bytes(encode(noise(8, 8, 3, 0)))
    assert opened(inside)[0].name.endswith("train/b.jpg")
    assert opened(inside, "val")[0].name.endswith("valid/v.jpg")
