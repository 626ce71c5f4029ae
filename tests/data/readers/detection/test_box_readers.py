"""COCO, VOC and YOLO layouts: what is read and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from box_examples import write_coco, write_voc, write_yolo
from data_examples import encode, noise

from reconv.data.boxes.annotations import DetectionDataset
from reconv.data.pipeline.detection_pipeline import DetectionPipeline
from reconv.data.readers.detect import detect
from reconv.data.readers.factory import open_dataset
from reconv.errors import DataError
from reconv.recipe.data_fields import DataConfig, PreprocessConfig

CATEGORIES = {1: "person", 18: "dog", 90: "toothbrush"}


def box(category: int, *corners: float, **more: Any) -> dict[str, Any]:
    left, top, width, height = corners
    return {"category_id": category, "bbox": [left, top, width, height], **more}


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    train = [
        ("b.jpg", 30, 40, [box(90, 0, 0, 10, 10), box(1, 5.5, 6.25, 20, 10, area=77.5)]),
        ("a.jpg", 20, 20, [box(18, 1, 1, 19, 19, iscrowd=1)]),
        ("empty.jpg", 25, 25, []),
    ]
    val = [("v.jpg", 30, 40, [box(1, 2, 3, 4, 5)]), ("none.jpg", 10, 10, [])]
    return write_coco(tmp_path / "coco", {"train": train, "val": val}, CATEGORIES)


def opened(path: Path, split: Any = "train", kind: str = "auto", **data: Any) -> DetectionDataset:
    source = open_dataset(kind, path, split, DataConfig(**data), boxes=True)
    assert isinstance(source, DetectionDataset)
    return source


def rewrite(root: Path, change: Any, split: str = "train") -> None:
    """Change COCO's file in place."""
    file = root / "annotations" / f"instances_{split}2017.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


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


def test_images_without_a_box_are_dropped_from_training_or_kept_as_the_recipe_says(coco: Path) -> None:
    dropped, kept = opened(coco), opened(coco, empty_images="keep")
    assert (len(dropped), len(kept)) == (2, 3) and dropped.box_counts().tolist() == [2, 1]
    assert "2 of 3 images have a usable box" in dropped.origin and "usable" not in kept.origin
    assert len(kept.annotation(2)) == 0
    assert len(opened(coco, "val")) == len(opened(coco, "val", empty_images="keep")) == 2
    assert dropped.fingerprint() != kept.fingerprint()


def test_boxes_without_area_or_outside_the_image_are_skipped(tmp_path: Path) -> None:
    train = [
        ("usable.jpg", 20, 20, [box(1, 0, 0, 20, 20), box(1, 5, 5, 0, 4), box(1, 5, 5, 15.5, 4)]),
        ("rounded.jpg", 20, 20, [box(1, 3.3, 3.3, 16.704, 16.704)]),
        ("degenerate.jpg", 20, 20, [box(1, 5, 5, 10, 0)]),
        ("beyond.jpg", 20, 20, [box(1, 15, 15, 10, 2)]),
        ("nothing.jpg", 20, 20, []),
    ]
    root = write_coco(tmp_path / "c", {"train": train, "val": train[:1]}, CATEGORIES)
    source = opened(root, bad_boxes="skip")
    assert [Path(source[i].name).name for i in range(len(source))] == ["usable.jpg", "rounded.jpg"]
    assert source.box_counts().tolist() == [1, 1]
    assert "2 of 5 images have a usable box" in source.origin
    assert "4 of 6 boxes are unusable and left out" in source.origin
    clipped = opened(root, bad_boxes="clip")
    assert [Path(clipped[i].name).name for i in range(3)] == ["usable.jpg", "rounded.jpg", "beyond.jpg"]
    assert clipped.annotation(2).boxes_xyxy.tolist() == [[15, 15, 20, 17]]
    assert "2 are clipped to the image" in clipped.origin


def test_validation_keeps_every_valid_box(tmp_path: Path) -> None:
    images = [("a.jpg", 20, 20, [box(1, 0, 0, 25, 5), box(1, 0, 0, 5, 5)])]
    root = write_coco(tmp_path / "c", {"train": images, "val": images}, CATEGORIES)
    assert opened(root, "val", bad_boxes="skip").box_counts().tolist() == [2]
    assert opened(root, "train", bad_boxes="skip").box_counts().tolist() == [1]


BAD_BOXES = {
    "is partly outside of its image: box 2 of": lambda a: a.update(bbox=[30, 0, 20, 10]),
    "has no area": lambda a: a.update(bbox=[3, 3, 0, 10]),
    "has swapped corners": lambda a: a.update(bbox=[20, 20, -5, 4]),
    "has an unknown class": lambda a: a.update(category_id=5),
    "has a corner that is not finite": lambda a: a.update(bbox=[float("nan"), 0, 5, 5]),
}


@pytest.mark.parametrize("message", BAD_BOXES)
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_bad_box_is_an_error_with_its_file_and_what_to_do(coco: Path, message: str, split: str) -> None:
    rewrite(coco, lambda content: BAD_BOXES[message](content["annotations"][-1 if split == "val" else 1]), split)
    with pytest.raises(DataError) as caught:
        opened(coco, split)
    expected = message.replace("box 2", "box 1") if split == "val" else message
    assert expected in caught.value.what and "reconv data check" in caught.value.then
    file = "v.jpg" if split == "val" else "b.jpg"
    assert file in caught.value.where
    can_be_tolerated = "unknown class" not in message and "not finite" not in message
    if split == "val":
        can_be_tolerated &= "swapped" not in message
    assert ("data.bad_boxes=skip" in caught.value.then) == can_be_tolerated
    if can_be_tolerated:
        assert len(opened(coco, split, bad_boxes="skip"))


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
    assert caught.value.where.endswith("instances_train2017.json") and caught.value.then


def test_a_class_id_with_another_name_in_validation_is_refused(coco: Path) -> None:
    rewrite(coco, lambda content: content["categories"][1].update(name="wolf"), "val")
    assert len(opened(coco)) == 2
    with pytest.raises(DataError, match="category 18 is 'wolf' here and 'dog' in training"):
        opened(coco, "val")


def test_coco_files_may_leave_out_areas(coco: Path) -> None:
    rewrite(coco, lambda content: content["annotations"][1].update(area=None))
    assert opened(coco).annotation(0).area.tolist() == [100, 200]


def test_invalid_json_and_a_missing_coco_file_are_refused(coco: Path) -> None:
    (coco / "annotations" / "instances_val2017.json").unlink()
    with pytest.raises(DataError, match="no annotation file for val"):
        opened(coco, "val")
    (coco / "annotations" / "instances_train2017.json").write_text('{"images": [')
    with pytest.raises(DataError, match="is not valid JSON"):
        opened(coco)


def test_a_missing_image_is_named_when_read(coco: Path) -> None:
    (coco / "train2017" / "a.jpg").unlink()
    with pytest.raises(DataError, match=r"a\.jpg"):
        opened(coco)[1]


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


def test_voc_lists_boxes_and_difficult_flags_are_read(tmp_path: Path) -> None:
    images = {
        "p1": (30, 40, [("dog", (1, 1, 40, 30), 0), ("cat", (11, 6, 20, 12), 1)]),
        "p2": (20, 20, [("person", (3, 3, 9, 9), 0)]),
    }
    root = write_voc(tmp_path / "VOCdevkit" / "VOC2012", {"train": ["p1"], "val": ["p2"]}, images)
    assert detect(tmp_path / "VOCdevkit").kind == "voc"
    source = opened(root)
    assert len(source.class_names) == 20 and source.class_names[11] == "dog" and source.class_ids[11] == 12
    annotation = source.annotation(0)
    assert annotation.boxes_xyxy.tolist() == [[0, 0, 40, 30], [10, 5, 20, 12]]  # pixels count from 1, both ends inside
    assert (
        annotation.labels.tolist() == [11, 7]
        and annotation.difficult.tolist() == [False, True]
        and annotation.image_id == "p1"
    )
    assert [opened(root, "val").annotation(0).image_id] == ["p2"]


def test_voc_without_val_uses_test_and_custom_classes_come_from_training(tmp_path: Path) -> None:
    images = {name: (20, 20, [("screw", (1, 1, 5, 5), 0), ("nut", (0, 0, 5, 5), 0)]) for name in ("a", "b")}
    root = write_voc(tmp_path / "v", {"trainval": ["a"], "test": ["b"]}, images)
    assert opened(root).class_names == opened(root, "val").class_names == ("nut", "screw")
    assert "list test" in opened(root, "val").origin
    assert opened(root).annotation(0).boxes_xyxy[1].tolist() == [0, 0, 5, 5]


def test_invalid_voc_files_are_refused(tmp_path: Path) -> None:
    images = {"a": (20, 20, [("dog", (1, 1, 5, 5), 0)]), "b": (20, 20, [("dog", (1, 1, 5, 5), 0)])}
    root = write_voc(tmp_path / "v", {"train": ["a"], "val": ["b"]}, images)
    good = (root / "Annotations" / "a.xml").read_text()
    bad = {
        "cannot be read: not valid XML": good[:-20],
        "a has no size": good.replace("<width>20</width>", ""),
        "a has no .?size": good.replace("<width>20</width>", "<width>inf</width>"),
        "a box that is partly outside of its image": good.replace("<xmax>5</xmax>", "<xmax>25</xmax>"),
        "a box that has swapped corners": good.replace("<xmax>5</xmax>", "<xmax>-1</xmax>"),
        "a box that has a corner that is not finite": good.replace("<xmax>5</xmax>", "<xmax>wide</xmax>"),
    }
    for message, text in bad.items():
        (root / "Annotations" / "a.xml").write_text(text)
        with pytest.raises(DataError, match=message) as caught:
            opened(root)
        assert caught.value.where.endswith("a.xml")
    (root / "Annotations" / "a.xml").write_text(good)
    (root / "Annotations" / "b.xml").write_text(good.replace("dog", "dragon"))
    with pytest.raises(DataError, match="b has the unknown class 'dragon'"):
        opened(root, "val")
    (root / "ImageSets" / "Main" / "train.txt").write_text("a\na\n")
    with pytest.raises(DataError, match="a is listed twice"):
        opened(root)
    (root / "ImageSets" / "Main" / "train.txt").write_text("\n")
    with pytest.raises(DataError, match=r"train.txt is empty"):
        opened(root)


@pytest.mark.parametrize("layout", ["images/train", "train/images"])
def test_relative_yolo_boxes_become_pixels(tmp_path: Path, layout: str) -> None:
    lines = {"a": ["1 0.5 0.5 0.5 0.25", "0 0.1 0.1 0.3 0.2 0.2 0.4"], "b": None}
    root = write_yolo(tmp_path / "y", layout, lines, ["cat", "dog"], size=(20, 40))
    assert detect(root).kind == "yolo"
    source = opened(root, empty_images="keep")
    assert source.class_names == ("cat", "dog") and source.class_ids == (0, 1)
    annotation = source.annotation(0)
    assert annotation.boxes_xyxy == pytest.approx(np.array([[10, 7.5, 30, 12.5], [4, 2, 12, 8]]), abs=1e-4)
    assert annotation.labels.tolist() == [1, 0] and (annotation.height, annotation.width) == (20, 40)
    assert annotation.area == pytest.approx([100, 48], abs=1e-2)
    assert len(source.annotation(1)) == 0 and len(opened(root)) == 1
    assert source[0].annotation is not None and len(opened(root, "val")) == 2


def test_yolo_lists_of_files_and_names_without_yaml_are_read(tmp_path: Path) -> None:
    root = write_yolo(tmp_path / "y", "images/train", {"a": ["0 0.5 0.5 0.2 0.2"]}, ["cat"], size=(20, 40))
    (root / "data.yaml").write_text("train: train.txt\nval: images/val\nnames: {0: cat, 2: cow}\n")
    (root / "train.txt").write_text("./images/train/a.jpg\n")
    assert opened(root).class_names == ("cat", "class1", "cow") and len(opened(root)) == 1
    (root / "train.txt").write_text("./images/train/a.jpg\n./images/train/a.jpg\n")
    with pytest.raises(DataError, match="is listed 2 times"):
        opened(root)
    (root / "data.yaml").unlink()
    with pytest.raises(DataError, match="no class names"):
        opened(root)
    (root / "classes.txt").write_text("cat\n")
    assert opened(root).class_names == ("cat",)


def test_names_with_spaces_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    stems = ["mein bild 1", "猫 2"]
    images = {stem: (20, 20, [("große schraube", (1, 1, 5, 5), 0)]) for stem in stems}
    voc = write_voc(tmp_path / "v", {"train": stems, "val": stems}, images)
    assert [opened(voc).annotation(i).image_id for i in range(2)] == stems
    assert opened(voc).class_names == ("große schraube",) and len(opened(voc)[1].data)
    (voc / "ImageSets" / "Main" / "train.txt").write_text("".join(f"{stem}  -1\n" for stem in stems))
    assert [opened(voc).annotation(i).image_id for i in range(2)] == stems
    (voc / "classes.txt").write_bytes("\ufeffgroße schraube\nmutter\n".encode())
    assert opened(voc).class_names == ("große schraube", "mutter")
    yolo = write_yolo(tmp_path / "y", "images/train", {"ein bild": ["1.0 0.5 0.5 0.2 0.2"]}, ["c", "d"])
    (yolo / "data.yaml").write_text("train: train.txt\nval: images/val\nnames: {'0': cat, '1': dog}\n")
    (yolo / "train.txt").write_bytes("\ufeffimages/train/ein bild.jpg\n".encode())
    assert opened(yolo).class_names == ("cat", "dog") and opened(yolo).annotation(0).labels.tolist() == [1]
    (yolo / "data.yaml").write_text("train: train.txt\nval: images/val\nnames: {cat: 0}\n")
    with pytest.raises(DataError, match="keys of names must be numbers"):
        opened(yolo)


def test_invalid_yolo_lines_are_refused_with_file_and_line(tmp_path: Path) -> None:
    not_a_box = "line 2 is neither a box nor a polygon"
    bad_lines = {
        "3 0.5 0.5 0.1 0.1": "class 3 is not one of 0 to 1",
        "1e999 0.5 0.5 0.1 0.1": not_a_box,
        "0.7 0.5 0.5 0.1 0.1": not_a_box,
        "1 0.5 0.5": not_a_box,
        "1 0.9 0.5 0.4 0.1": "a box that is partly outside of its image",
        "1 0.9 0.5 0.0 0.1": "a box that has no area",
    }
    for number, (line, message) in enumerate(bad_lines.items()):
        root = write_yolo(tmp_path / str(number), "images/train", {"a": ["0 0.5 0.5 0.1 0.1", line]}, ["c", "d"])
        with pytest.raises(DataError, match=message) as caught:
            opened(root)
        assert "labels/train/a.txt" in caught.value.where


def test_no_usable_box_and_data_of_another_task_are_errors(coco: Path, tmp_path: Path) -> None:
    empty = write_coco(tmp_path / "e", {"train": [("a.jpg", 9, 9, [])], "val": [("b.jpg", 9, 9, [])]}, CATEGORIES)
    with pytest.raises(DataError, match="no training image has a usable box"):
        opened(empty)
    assert len(opened(empty, empty_images="keep")) == 1
    with pytest.raises(DataError, match="coco data has boxes, but the recipe's task is classification") as caught:
        open_dataset("auto", coco, "train", DataConfig())
    assert "ssd-resnet34" in caught.value.then
    tree = tmp_path / "tree"
    for split in ("train", "val"):
        (tree / split / "cat").mkdir(parents=True)
        (tree / split / "cat" / "1.jpg").write_bytes(encode(noise(8, 8, 3, 0), "JPEG"))
    with pytest.raises(DataError, match="folder data has no boxes, but the recipe's task is detection"):
        opened(tree)


def test_a_subset_of_training_keeps_the_boxes(coco: Path) -> None:
    some = opened(coco, subset_percent=50)
    assert len(some) == 1 and len(some.annotation(0)) == 2 and "1 of 2 images" in some.origin


def test_every_layout_gives_the_same_boxes(coco: Path, tmp_path: Path) -> None:
    """The same image and boxes as COCO, VOC and YOLO say them."""
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


def test_scattered_digits_are_fixed_and_boxes_hold_their_digits() -> None:
    data: dict[str, Any] = {"num_samples": 40, "preprocess": {"size": 96, "resize": None}}
    train, val = (open_dataset("scattered-digits", None, s, DataConfig(**data), boxes=True) for s in ("train", "val"))
    assert isinstance(train, DetectionDataset) and isinstance(val, DetectionDataset)
    assert (len(train), len(val)) == (40, 8) and train.class_names == tuple("0123456789")
    counts = []
    for index in range(40):
        sample = train[index]
        annotation = sample.annotation
        assert annotation is not None and isinstance(sample.data, np.ndarray) and sample.data.shape == (96, 96, 3)
        assert np.array_equal(sample.data, train[index].data)
        boxes = annotation.boxes_xyxy.astype(int)
        assert (boxes >= 0).all() and (boxes <= 96).all() and len(boxes) == train.box_counts()[index]
        outside = np.ones((96, 96), bool)
        for left, top, right, bottom in boxes:
            assert sample.data[top:bottom, left:right].max() > 150
            outside[top:bottom, left:right] = False
        assert sample.data[outside].max() <= 96
        counts.append(len(boxes))
    assert min(counts) == 1 and 4 <= max(counts) <= 6
    assert not np.array_equal(train[0].data, val[0].data)
    assert train.fingerprint() != val.fingerprint()


def test_digits_of_validation_never_occur_in_training() -> None:
    from reconv.data.readers.digits import open_digits

    train, val = open_digits("train").images, open_digits("val").images
    assert len({t.tobytes() for t in train} & {v.tobytes() for v in val}) == 0
