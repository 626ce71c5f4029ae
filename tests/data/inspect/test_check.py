"""Checks of a dataset: every issue is found, named and counted, and nothing is changed."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from data_examples import encode, noise
from PIL import Image

from reconv.build.data import open_datasets
from reconv.core.errors import DataError
from reconv.data.convert.dataset import ConvertTarget, convert
from reconv.data.convert.transcode import TranscodeOptions
from reconv.data.inspect.check import CheckReport, check, class_tiles
from reconv.data.inspect.lenient_open import SPLITS, DataIssue
from reconv.data.readers.dataset_factory import open_dataset
from reconv.data.readers.folder import FolderDataset
from reconv.recipe.loader import load
from reconv.recipe.parts.data import DataConfig


def run_check(path: Path | str, workers: int = 2) -> CheckReport:
    return check(str(path), DataConfig(), workers)


def found(checked: CheckReport) -> dict[str, DataIssue]:
    """The issues by kind, each kind once."""
    kinds = [issue.kind for issue in checked.issues]
    assert len(kinds) == len(set(kinds))
    return {issue.kind: issue for issue in checked.issues}


def everything(root: Path) -> dict[str, tuple[str, int]]:
    """What is under a folder: content and time of change."""
    return {
        str(path): (hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "", path.lstat().st_mtime_ns)
        for path in sorted(root.rglob("*"))
    }


def test_good_folders_have_no_issues_and_are_counted(tree: Path) -> None:
    before = everything(tree)
    checked = run_check(tree)
    assert checked.issues == ()
    assert everything(tree) == before
    train, val = checked.splits["train"], checked.splits["val"]
    assert train.classes == {"ant": 4, "bee": 4, "cat": 3}
    assert val.classes == {"ant": 2, "bee": 2, "cat": 1}
    assert train.formats == {"JPEG": 6, "PNG": 5}
    assert train.modes == {"RGB": 11}
    assert train.orientations == {1: 11}
    assert train.num_bytes == sum(path.stat().st_size for path in (tree / "train").rglob("*.*"))
    assert checked.as_json()["splits"]["train"]["width_px"] == {"min": 50, "median": 60.0, "max": 70}
    assert checked.as_json()["ok"] is True


def test_files_that_do_not_decode_are_named_with_the_reason(tree: Path) -> None:
    files = sorted(path for path in (tree / "train").rglob("*.*") if path.is_file())
    whole = files[0].read_bytes()
    files[0].write_bytes(whole[: len(whole) // 2])
    files[3].write_bytes(b"")
    files[5].write_bytes(b"GIF89a, or so it says")
    files[7].write_bytes(encode(np.zeros((9_470, 9_470), np.uint8), "PNG"))  # more pixels than are decoded
    checked = run_check(tree)
    assert found(checked).keys() == {"bad-image"}
    bad = found(checked)["bad-image"]
    assert bad.level == "error"
    assert bad.paths == tuple(str(files[number]) for number in (0, 3, 5, 7))
    reasons = [why for _, why in checked.splits["train"].bad]
    assert all(word in why for word, why in zip(("damaged", "nothing", "none of", "pixels"), reasons, strict=True))
    assert sum(checked.splits["train"].classes.values()) == 7


def test_the_same_image_in_both_splits_is_a_leak(tree: Path) -> None:
    image = tree / "train/bee/004.JPEG"
    (tree / "val/bee/copy.JPEG").write_bytes(image.read_bytes())
    leak = found(run_check(tree))["leak"]
    assert leak.level == "error"
    assert leak.paths == (f"{image} = {tree / 'val/bee/copy.JPEG'}",)


def test_a_duplicate_is_a_warning_and_with_two_labels_an_error(tree: Path) -> None:
    twice, two = tree / "train/ant/000.JPEG", tree / "train/ant/001.png"
    (tree / "train/ant/again.jpg").write_bytes(twice.read_bytes())
    assert [(f.level, f.kind) for f in run_check(tree).issues] == [("warning", "duplicate")]
    (tree / "train/cat/again.png").write_bytes(two.read_bytes())
    issues = found(run_check(tree))
    assert {kind: issue.level for kind, issue in issues.items()} == {
        "two-labels": "error",
        "duplicate": "warning",
    }
    assert issues["two-labels"].paths == (f"{two} = {tree / 'train/cat/again.png'}",)


def test_everything_training_refuses_or_leaves_out_is_reported_at_once(tree: Path) -> None:
    (tree / "train/empty").mkdir()
    (tree / "val/dog").mkdir()
    (tree / "val/dog/1.png").write_bytes(encode(noise(20, 20, 3, 99)))
    os.symlink(tree / "nowhere", tree / "train/ant/link.jpg")
    (tree / "train/ant/notes.txt").write_text("hello")
    (tree / "train/stray.jpg").write_bytes(encode(noise(20, 20, 3, 98)))
    issues = found(run_check(tree))
    assert {kind: issue.level for kind, issue in issues.items()} == {
        "empty-class": "warning",
        "unknown-class": "error",
        "broken-link": "error",
        "stray": "warning",
        "ignored": "warning",
    }
    assert issues["empty-class"].paths == ("empty",)
    assert issues["unknown-class"].paths == ("dog",)
    assert issues["broken-link"].paths == (str(tree / "train/ant/link.jpg"),)
    assert issues["ignored"].paths == (str(tree / "train/ant/notes.txt"),)
    assert issues["stray"].paths == (str(tree / "train/stray.jpg"),)


def test_without_validation_the_held_out_images_are_checked(tree: Path) -> None:
    (tree / "val").rename(tree.parent / "elsewhere")
    checked = run_check(tree)
    assert found(checked).keys() == set()
    assert "about 20% of each class is held out" in checked.origin
    for split in SPLITS:
        trained_on = FolderDataset(tree, split)
        assert [checked.datasets[split][i].name for i in range(len(checked.datasets[split]))] == [
            trained_on.path(i) for i in range(len(trained_on))
        ]


def test_a_test_set_is_checked_and_said_to_be_used_for_validation(tree: Path) -> None:
    (tree / "val").rename(tree / "test")
    checked = run_check(tree)
    assert list(checked.datasets) == ["train", "val"]
    assert checked.origin.endswith("no val/: test/ is used for validation")
    (tree / "valid" / "ant").mkdir(parents=True)
    (tree / "valid" / "ant" / "v.png").write_bytes(encode(noise(12, 12, 3, 99)))
    assert {split: len(own) for split, own in run_check(tree).datasets.items()} == {"train": 11, "val": 1, "test": 5}


def test_a_single_class_is_an_error(tree: Path) -> None:
    for name in ("bee", "cat"):
        for split in ("train", "val"):
            shutil.rmtree(tree / split / name)
    assert [issue.kind for issue in run_check(tree).errors] == ["one-class"]
    recipe = load("resnet18", [("data.path", str(tree), "test")]).recipe
    with pytest.raises(DataError, match="there is only one class: ant"):
        open_datasets(recipe)


def test_class_folders_alone_and_validation_sets_alone_are_checked(tree: Path) -> None:
    whole = run_check((tree / "train").rename(tree.parent / "flat"))
    assert {split: len(dataset) > 0 for split, dataset in whole.datasets.items()} == {"train": True, "val": True}
    checked = run_check(tree)
    assert list(checked.datasets) == ["val"]
    assert found(checked).keys() == {"no-training"} and not checked.errors


def test_suspicious_labels_are_warnings(tree: Path) -> None:
    for split in ("train", "val"):
        for number, name in enumerate(("Ant", "red fox", "red_fox", "New Folder")):
            folder = tree / split / name
            folder.mkdir()
            for image in range(40):
                seed = 1000 + (split == "val") * 500 + number * 50 + image
                (folder / f"{image}.png").write_bytes(encode(noise(12, 12, 1, seed)[:, :, 0]))
    (tree / "train/lonely").mkdir()
    (tree / "train/lonely/1.png").write_bytes(encode(noise(12, 12, 3, 77)))
    issues = found(run_check(tree))
    assert all(issue.level == "warning" for issue in issues.values())
    assert issues["alike"].paths == ("'Ant' = 'ant'", "'red fox' = 'red_fox'")
    assert issues["no-class"].paths == ("New Folder",)
    assert issues["small-class"].paths == ("lonely: 1",)
    assert issues["not-validated"].paths == ("lonely",)


def test_modes_are_as_stored_and_sizes_upright(tree: Path) -> None:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(noise(20, 300, 3, 5)).save(file, "JPEG", exif=exif)
    (tree / "train/ant/turned.jpg").write_bytes(file.getvalue())
    cmyk = io.BytesIO()
    Image.fromarray(noise(40, 40, 3, 6)).convert("CMYK").save(cmyk, "JPEG")
    (tree / "train/ant/cmyk.jpg").write_bytes(cmyk.getvalue())
    (tree / "train/ant/dot.png").write_bytes(encode(noise(1, 1, 1, 7)[:, :, 0]))
    checked = run_check(tree)
    train = checked.splits["train"]
    assert train.orientations == {1: 13, 6: 1}
    assert train.modes == {"RGB": 12, "CMYK": 1, "L": 1}
    assert checked.as_json()["splits"]["train"]["height_px"]["max"] == 300  # upright
    assert found(checked).keys() == {"tiny-image"}
    assert found(checked)["tiny-image"].total == 1


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_issues_do_not_depend_on_the_number_of_workers(tree: Path, workers: int) -> None:
    for path in ("train/ant/000.JPEG", "val/bee/013.png"):
        (tree / path).write_bytes(b"x")
    (tree / "val/cat/copy.png").write_bytes((tree / "train/cat/009.png").read_bytes())
    done: list[tuple[int, int]] = []
    checked = check(str(tree), DataConfig(), workers, lambda now, total: done.append((now, total)))
    assert done == [(number + 1, 17) for number in range(17)]
    assert [(f.kind, len(f.paths)) for f in checked.issues] == [("bad-image", 1), ("bad-image", 1), ("leak", 1)]
    assert checked.as_json() == run_check(tree, 3).as_json()


@pytest.mark.parametrize("cifar_format", ["binary", "python"])
def test_cifar_is_checked(tmp_path: Path, write_cifar: Callable[..., Path], cifar_format: str) -> None:
    folder = write_cifar(tmp_path, "cifar10", cifar_format)
    checked = run_check(folder)
    assert {split: seen.num_samples for split, seen in checked.splits.items()} == {"train": 35, "val": 7}
    assert checked.splits["train"].formats == {"pixels": 35}
    assert not checked.errors
    if cifar_format == "binary":
        (folder / "test_batch.bin").write_bytes((folder / "data_batch_1.bin").read_bytes())
        assert found(run_check(folder))["leak"].total == 7
        (folder / "test_batch.bin").write_bytes(b"short")
        assert found(run_check(folder))["unreadable-split"].level == "error"


def test_generated_datasets_are_checked_by_name() -> None:
    digits = run_check("digits")
    assert {split: seen.num_samples for split, seen in digits.splits.items()} == {"train": 1437, "val": 360}
    assert digits.errors == []
    with pytest.raises(DataError):
        run_check("no-such-folder")


def test_tiles_show_good_samples_of_every_class(tree: Path) -> None:
    (tree / "train/ant/000.JPEG").write_bytes(b"x")
    tiles = list(class_tiles(run_check(tree)))
    assert [(name, count, len(tiles)) for name, count, tiles in tiles] == [
        ("ant", 3, 3),
        ("bee", 4, 4),
        ("cat", 3, 3),
    ]


def test_every_damaged_shard_of_a_split_is_named(tree: Path, tmp_path: Path) -> None:
    sources = {split: open_dataset("folder", tree, split, DataConfig()) for split in SPLITS}
    convert(
        sources,
        tree,
        tmp_path / "packed",
        ConvertTarget("packed", TranscodeOptions(), per_shard=2),
        1,
        lambda done, total: None,
    )
    damaged = sorted((tmp_path / "packed").glob("train-*"))[1:]
    for path in damaged:
        os.truncate(path, 200)
    checked = run_check(tmp_path / "packed")
    assert len(damaged) > 1
    assert [place for f in checked.errors if f.kind == "unreadable-split" for place in f.paths] == [
        str(path) for path in damaged
    ]
    assert checked.splits["val"].num_samples == len(sources["val"])
