"""Unusable boxes, images without boxes, and the recipe's policies for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from box_examples import write_coco
from data_examples import encode, noise
from detection_data import CATEGORIES, box, opened, rewrite

from reconv.core.errors import DataError
from reconv.data.readers.dataset_factory import open_dataset
from reconv.recipe.parts.data import DataConfig


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
    assert expected in caught.value.what and "reconv data check" in caught.value.hint
    file = "v.jpg" if split == "val" else "b.jpg"
    assert file in caught.value.where
    can_be_tolerated = "unknown class" not in message and "not finite" not in message
    if split == "val":
        can_be_tolerated &= "swapped" not in message
    assert ("data.bad_boxes=skip" in caught.value.hint) == can_be_tolerated
    if can_be_tolerated:
        assert len(opened(coco, split, bad_boxes="skip"))


def test_no_usable_box_and_data_of_another_task_are_errors(coco: Path, tmp_path: Path) -> None:
    empty = write_coco(tmp_path / "e", {"train": [("a.jpg", 9, 9, [])], "val": [("b.jpg", 9, 9, [])]}, CATEGORIES)
    with pytest.raises(DataError, match="no training image has a usable box"):
        opened(empty)
    assert len(opened(empty, empty_images="keep")) == 1
    with pytest.raises(DataError, match="coco data has boxes, but the recipe's task is classification") as caught:
        open_dataset("auto", coco, "train", DataConfig())
    assert "reconv train finetune-detection --data" in caught.value.hint
    tree = tmp_path / "tree"
    for split in ("train", "val"):
        (tree / split / "cat").mkdir(parents=True)
        (tree / split / "cat" / "1.jpg").write_bytes(encode(noise(8, 8, 3, 0), "JPEG"))
    with pytest.raises(DataError, match="folder data has no boxes, but the recipe's task is detection"):
        opened(tree)
