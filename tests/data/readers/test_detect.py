"""Detecting what a folder holds."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from reconv.core.errors import DataError, ExitCode
from reconv.data.readers.dataset_factory import open_dataset
from reconv.data.readers.detect import detect
from reconv.recipe.parts.data import DataConfig


@pytest.mark.parametrize("kind", ["cifar10", "cifar100"])
@pytest.mark.parametrize("cifar_format", ["binary", "python"])
@pytest.mark.parametrize("inner", ["", "x", "x/y"])
def test_cifar_is_found_at_the_path_and_up_to_two_levels_down(
    tmp_path: Path, write_cifar: Callable[..., Path], kind: str, cifar_format: str, inner: str
) -> None:
    folder = write_cifar(tmp_path / inner if inner != "x/y" else tmp_path / "x", kind, cifar_format)
    for path in (folder, folder.parent, tmp_path):
        found = detect(path)
        assert (found.kind, found.path) == (kind, folder)
        assert folder.name in found.why or "it has" in found.why
        assert found.layout is not None
        assert found.layout.form == cifar_format


def test_a_renamed_cifar_folder_is_known_by_its_files(tmp_path: Path, write_cifar: Callable[..., Path]) -> None:
    folder = write_cifar(tmp_path, "cifar100", "python").rename(tmp_path / "mine")
    found = detect(folder)
    assert (found.kind, found.why) == ("cifar100", "it has train and meta")
    source = open_dataset("auto", folder, "val", DataConfig())
    assert source.kind == "cifar100"
    assert "it has train and meta" in source.origin


def test_image_folders_are_found_at_the_path_and_below(tree: Path) -> None:
    assert (detect(tree).kind, detect(tree).path) == ("folder", tree)
    assert detect(tree.parent).path == tree
    assert len(open_dataset("auto", tree.parent, "val", DataConfig())) == 5


def test_a_folder_that_is_asked_for_is_one_beside_other_formats_but_not_yolo(tree: Path) -> None:
    (tree / "boxes.csv").write_text("file,label\n")
    assert (detect(tree, "folder").path, detect(tree, "folder").why) == (tree, "it has train/")
    for name in ("images", "labels"):
        shutil.copytree(next((tree / "train").iterdir()), tree / "train" / name)
    with pytest.raises(DataError, match="no folder in"):
        detect(tree, "folder")


def test_the_binary_format_is_preferred(tmp_path: Path, write_cifar: Callable[..., Path]) -> None:
    write_cifar(tmp_path, "cifar10", "python")
    binary = write_cifar(tmp_path, "cifar10", "binary")
    assert detect(tmp_path).path == binary


def test_two_kinds_of_data_are_ambiguous(tmp_path: Path, write_cifar: Callable[..., Path]) -> None:
    write_cifar(tmp_path, "cifar10", "binary")
    hundred = write_cifar(tmp_path, "cifar100", "binary")
    with pytest.raises(DataError, match="cifar10, cifar100"):
        detect(tmp_path)
    assert detect(tmp_path, "cifar100").path == hundred


def test_two_image_folders_are_ambiguous(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "train").mkdir(parents=True)
    with pytest.raises(DataError, match="more than one image folder"):
        detect(tmp_path)


def test_each_wrong_path_is_explained(tmp_path: Path, write_cifar: Callable[..., Path]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "cifar.tar.gz").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "other" / "images").mkdir(parents=True)
    write_cifar(tmp_path / "ten", "cifar10", "binary")
    cases = [
        ("missing", "auto", "no such folder", "reconv data get cifar10"),
        ("empty", "auto", "is empty", "reconv data get cifar10"),
        ("emty", "auto", "no such folder", "empty/?"),
        ("cifar.tar.gz", "auto", "not unpacked", "tar -xf"),
        ("notes.txt", "auto", "is a file", "--data"),
        ("other", "auto", "no data recognized", "train/ and val/"),
        ("ten", "cifar100", "it holds cifar10", "reconv data get cifar100"),
    ]
    for name, wanted, why, hint in cases:
        with pytest.raises(DataError) as caught:
            detect(tmp_path / name, wanted)
        assert why in str(caught.value)
        assert hint in caught.value.hint
        assert caught.value.code == ExitCode.DATA


@pytest.mark.parametrize("place", ["1.jpg", "photos.d/1.txt/2024/cat/1.png"])
def test_images_in_no_known_layout_are_explained(tmp_path: Path, place: str) -> None:
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).touch()
    with pytest.raises(DataError, match="no data recognized") as caught:
        detect(tmp_path)
    assert (f"images ({place})" in caught.value.why) == (place == "1.jpg")
    with pytest.raises(DataError) as caught:
        detect(tmp_path, "cifar10")
    assert "images" not in caught.value.why


@pytest.mark.parametrize("inner", ["", "flowers", "downloads/flowers"])
def test_class_folders_without_splits_are_found_at_the_path_and_below(tmp_path: Path, inner: str) -> None:
    for name in ("rose", "tulip"):
        (tmp_path / inner / name).mkdir(parents=True)
        (tmp_path / inner / name / "1.jpg").touch()
    found = detect(tmp_path)
    assert (found.kind, found.path) == ("folder", tmp_path / inner)
    assert "folders hold images" in found.why


def test_known_formats_are_preferred_to_class_folders(tmp_path: Path, write_cifar: Callable[..., Path]) -> None:
    folder = write_cifar(tmp_path, "cifar10", "binary")
    (tmp_path / "previews").mkdir()
    (tmp_path / "previews" / "1.jpg").touch()
    assert detect(tmp_path).path == folder


def test_a_class_called_train_is_not_a_split(tmp_path: Path) -> None:
    for name in ("train", "car"):
        (tmp_path / name).mkdir()
        for number in range(5):
            (tmp_path / name / f"{number}.jpg").touch()
    dataset = open_dataset("auto", tmp_path, "train", DataConfig())
    assert dataset.class_names == ("car", "train")


@pytest.mark.parametrize("name", ["val", "valid", "validation", "test"])
def test_a_validation_set_alone_is_found(tree: Path, name: str) -> None:
    shutil.rmtree(tree / "train")
    (tree / "val").rename(tree / name)
    assert detect(tree).why == f"it has {name}/ and no train/"
    dataset = open_dataset("auto", tree, "val", DataConfig())
    assert (len(dataset), dataset.class_names) == (5, ("ant", "bee", "cat"))
    with pytest.raises(DataError, match="no train/ under"):
        open_dataset("auto", tree, "train", DataConfig())


def test_without_a_path_the_error_says_what_to_type() -> None:
    with pytest.raises(DataError, match="no data folder given for cifar100") as caught:
        open_dataset("cifar100", None, "train", DataConfig())
    assert "reconv data get cifar100" in caught.value.hint
