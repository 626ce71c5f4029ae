"""Lists of a review change which images are used and with which labels, not the files; folds partition the data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from reconv.core.errors import DataError, RecipeError
from reconv.data.dataset import Dataset, Split, all_targets, sample_files, sample_paths
from reconv.data.readers.dataset_factory import open_dataset
from reconv.recipe.loader import load
from reconv.recipe.parts.data import DataConfig


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for split, count in (("train", 10), ("val", 3)):
        for number, name in enumerate(("cat", "dog")):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (4, 4), (number, i, 0)).save(tmp_path / split / name / f"{i}.png")
    return tmp_path


def opened(root: Path, split: Split = "train", **fields: object) -> Dataset:
    return open_dataset("folder", root, split, DataConfig.model_validate(fields))


def test_listed_images_are_left_out_and_relabeled(photos: Path) -> None:
    file = photos / "list.csv"
    file.write_text(
        "path,action,label\ntrain/cat/3.png,exclude,\ntrain/cat/4.png,relabel,dog\n"
        f"{photos}/val/dog/0.png,relabel,cat\ntrain/dog/1.png,,\n"
    )
    train = opened(photos, exclude=str(file), relabel=str(file))
    names = [Path(path).relative_to(photos / "train").as_posix() for path in sample_paths(train)]
    assert "cat/3.png" not in names and len(train) == 19
    targets = dict(zip(names, all_targets(train).tolist(), strict=True))
    assert targets["cat/4.png"] == 1 and targets["cat/5.png"] == 0 and targets["dog/1.png"] == 1
    assert [train[i].target for i in range(len(train))] == list(targets.values())
    files = sample_files(train, np.arange(len(train)))
    assert files is not None and files[1].tolist() == list(targets.values())
    val = opened(photos, "val", exclude=str(file), relabel=str(file))
    assert (len(val), int(all_targets(val).sum())) == (6, 2)
    assert train.fingerprint() != opened(photos).fingerprint()
    file.write_text(file.read_text().replace("cat/3", "cat/2"))
    assert opened(photos, exclude=str(file), relabel=str(file)).fingerprint() != train.fingerprint()


def test_lists_that_cannot_be_meant_are_errors(photos: Path) -> None:
    cases = {
        "path,label\ntrain/cat/0.png,cow\n": "'cow', which is no class",
        "path,label\nelsewhere/0.png,cat\n": "none of the 1 images",
        "file,label\na,b\n": "no column path",
        "path\ntrain/cat/0.png\n": "no column label",
    }
    for text, message in cases.items():
        (photos / "list.csv").write_text(text)
        with pytest.raises(DataError, match=message):
            opened(photos, relabel=str(photos / "list.csv"))
    with pytest.raises(DataError, match="cannot read"):
        opened(photos, exclude=str(photos / "missing.csv"))


@pytest.mark.parametrize("source", ["digits", "folder"])
def test_folds_partition_the_training_set_by_class(photos: Path, source: str) -> None:
    path = None if source == "digits" else photos
    whole = open_dataset(source, path, "train", DataConfig())
    held_out: list[str] = []
    for number in (1, 2, 3):
        data = DataConfig(fold=f"{number}/3")
        train, val = (open_dataset(source, path, split, data) for split in ("train", "val"))
        names = sample_paths(train), sample_paths(val)
        assert not set(names[0]) & set(names[1]) and len(train) + len(val) == len(whole)
        shares = np.bincount(all_targets(val)) / np.bincount(all_targets(whole))
        assert np.abs(shares - 1 / 3).max() < 0.1
        held_out += names[1]
    assert sorted(held_out) == sorted(sample_paths(whole))


def test_a_fold_that_does_not_exist_is_refused() -> None:
    for fold in ("3/2", "1/1"):
        with pytest.raises(RecipeError, match="is no fold"):
            load("quickstart", [("data.fold", fold, "--set")])


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbfpath,action,label\r\ntrain/cat/4.png,relabel,dog\r\n",
        b"\xef\xbb\xbfpath;action;label\r\ntrain/cat/4.png;relabel;dog\r\n",
        b"path,action,label\ntrain/cat/4.png,relabel,dog\ntrain/cat/5.png\n",
    ],
)
def test_lists_of_spreadsheets_are_read(photos: Path, content: bytes) -> None:
    file = photos / "list.csv"
    file.write_bytes(content)
    assert all_targets(opened(photos, relabel=str(file))).sum() == 11


def test_rows_of_one_split_leave_the_other_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "list.csv"
    plain = open_dataset("digits", None, "val", DataConfig())
    wrong = (int(all_targets(plain)[4]) + 1) % 10
    file.write_text(f"path,split,action,label\ndigits[3],train,exclude,\ndigits[4],val,relabel,{wrong}\n")
    corrected = DataConfig(exclude=str(file), relabel=str(file))
    train, val = (open_dataset("digits", None, split, corrected) for split in ("train", "val"))
    assert (len(train), len(val)) == (1436, 360)
    assert np.flatnonzero(all_targets(val) != all_targets(plain)).tolist() == [4]


def test_a_list_without_findings_changes_nothing(photos: Path) -> None:
    file = photos / "list.csv"
    file.write_text("path,split,action,label\n")
    assert len(opened(photos, relabel=str(file), exclude=str(file))) == 20


@pytest.mark.parametrize(
    ("content", "message"),
    [("path,label\n" + "x" * 200_000 + ",dog\n", "not CSV"), ("label,path\ndog\n", "a row without a path")],
)
def test_lists_that_are_broken_are_refused(photos: Path, content: str, message: str) -> None:
    file = photos / "list.csv"
    file.write_text(content)
    with pytest.raises(DataError, match=message):
        opened(photos, relabel=str(file))
