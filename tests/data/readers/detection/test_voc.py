"""Pascal VOC's layout: what is read and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from box_examples import write_voc
from detection_data import opened

from reconv.core.errors import DataError
from reconv.data.readers.detect import detect


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
