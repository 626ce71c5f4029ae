"""Holding out a share of the images where a dataset has no validation split."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from reconv.core.errors import DataError
from reconv.data.readers.folder import FolderDataset
from reconv.data.readers.validation_split import ValidationSplit
from reconv.recipe.parts.data import DataConfig


def write(root: Path, counts: dict[str, int], start: int = 0) -> Path:
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(start, start + count):
            (root / name / f"{number:04}.jpg").write_bytes(b"image")
    return root


def names(root: Path, split: str, data: DataConfig | None = None) -> list[str]:
    dataset = FolderDataset(root, split, data=data or DataConfig())  # type: ignore[arg-type]
    return [os.path.relpath(dataset.path(index), root) for index in range(len(dataset))]


def test_every_image_is_in_one_split_and_every_class_in_both(tmp_path: Path) -> None:
    root = write(tmp_path, {"rose": 300, "tulip": 2, "daisy": 5, "one only": 1})
    train, val = FolderDataset(root, "train"), FolderDataset(root, "val")
    everything = sorted(os.path.relpath(path, root) for path in root.glob("*/*"))
    assert sorted(names(root, "train") + names(root, "val")) == everything
    assert train.class_names == val.class_names == ("daisy", "one only", "rose", "tulip")
    counts = np.bincount(val.targets, minlength=4)
    assert counts[1] == 0, "a single image is trained on"
    assert counts[3] == 1
    assert 1 <= counts[0] <= 2
    assert 30 < counts[2] < 90
    assert "about 20% of each class" in train.origin and f"{len(train)} images for training" in train.origin


def test_small_classes_are_near_the_fraction(tmp_path: Path) -> None:
    root = write(tmp_path, {f"class {number}": 10 for number in range(40)})
    counts = np.bincount(FolderDataset(root, "val").targets, minlength=40)
    assert counts.min() >= 1 and counts.max() == 3


def test_images_stay_in_their_split_when_others_are_added(tmp_path: Path) -> None:
    root = write(tmp_path, {"rose": 100, "tulip": 100})
    before = set(names(root, "val"))
    first = FolderDataset(root, "val").fingerprint()
    write(root, {"rose": 100, "daisy": 50}, start=500)
    after = set(names(root, "val"))
    assert before == {name for name in after if int(Path(name).stem) < 500}
    assert FolderDataset(root, "val").fingerprint() != first


def test_the_split_depends_on_its_fraction_and_its_seed_only(tmp_path: Path) -> None:
    root = write(tmp_path, {"rose": 200, "tulip": 200})
    default = names(root, "val")
    assert default == names(root, "val")
    assert default != names(root, "val", DataConfig(split_seed=1))
    half = names(root, "val", DataConfig(validation_split=0.5))
    assert 150 < len(half) < 250
    assert set(default) < set(half)


def test_the_split_is_the_same_on_every_machine() -> None:
    paths = [f"rose/{number}.jpg" for number in range(20)]
    held_out = ValidationSplit(0.2, 0).held_out(paths)
    assert np.flatnonzero(held_out).tolist() == [0, 5, 11, 14, 19]


def test_a_training_set_without_validation_is_split_too(tree: Path) -> None:
    whole = FolderDataset(tree, "train").fingerprint()
    (tree / "val").rename(tree / ".val")
    train, val = FolderDataset(tree, "train"), FolderDataset(tree, "val")
    assert len(train) + len(val) == 11
    assert set(val.targets) == {0, 1, 2}
    assert train.fingerprint() != whole


def test_without_val_the_test_set_is_used_and_named(tree: Path) -> None:
    (tree / "val").rename(tree / "test")
    val = FolderDataset(tree, "val")
    assert len(val) == 5 and "test/ is used for validation" in val.origin
    assert len(FolderDataset(tree, "train")) == 11
    assert FolderDataset(tree, "test").fingerprint() == val.fingerprint()


def test_a_test_set_is_a_split_of_its_own(tree: Path) -> None:
    (tree / "val").rename(tree / "test")
    write(tree / "valid", {"ant": 3})
    assert [len(FolderDataset(tree, split)) for split in ("train", "val", "test")] == [11, 3, 5]


def test_one_image_per_class_cannot_be_split(tmp_path: Path) -> None:
    root = write(tmp_path, {"rose": 1, "tulip": 1})
    with pytest.raises(DataError, match="no image can be held out") as caught:
        FolderDataset(root, "train")
    assert "no class has two images" in caught.value.why


def test_class_folders_alone_have_no_test_split(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no test split"):
        FolderDataset(write(tmp_path, {"rose": 5}), "test")
