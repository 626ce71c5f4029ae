"""YOLO's layout: what is read and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from box_examples import write_voc, write_yolo
from detection_data import opened

from reconv.core.errors import DataError
from reconv.data.readers.detect import detect


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
