"""Digits, CIFAR in four layouts, image folders and synthetic images."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from data_examples import cifar_layout, encode, noise
from sklearn.datasets import load_digits

from reconv.data.dataset import Sample, Subset, evenly_spaced
from reconv.data.readers.arrays import ArrayDataset
from reconv.data.readers.cifar import open_cifar
from reconv.data.readers.digits import open_digits
from reconv.data.readers.factory import open_dataset
from reconv.data.readers.folder import FolderDataset
from reconv.data.readers.synthetic import SyntheticDataset
from reconv.errors import DataError, ExitCode
from reconv.recipe.data_fields import DataConfig, PreprocessConfig


def pixels(sample: Sample) -> np.ndarray:
    assert isinstance(sample.data, np.ndarray)
    return sample.data


def test_digits_are_those_of_scikit_learn_with_every_fifth_for_validation() -> None:
    bunch = load_digits()
    train, val = open_digits("train"), open_digits("val")
    assert (len(train), len(val)) == (1437, 360)
    is_val = np.arange(1797) % 5 == 0
    for source, chosen in ((train, ~is_val), (val, is_val)):
        assert np.array_equal(source.images[:, 0], np.rint(bunch.images[chosen] * 255 / 16).astype(np.uint8))
        assert np.array_equal(source.targets, bunch.target[chosen])
    assert train.images.max() == 255
    assert pixels(val[1]).shape == (8, 8, 1)
    assert val[1].name == "digits[1]"


@pytest.mark.parametrize("kind", ["cifar10", "cifar100"])
def test_both_formats_of_cifar_hold_the_same_samples(
    tmp_path: Path, write_cifar: Callable[..., Path], kind: str
) -> None:
    sources = []
    for cifar_format in ("binary", "python"):
        folder = write_cifar(tmp_path, kind, cifar_format)
        sources.append(open_cifar(cifar_layout(kind, cifar_format), folder, "train"))
    binary, python = sources
    assert len(binary) == (35 if kind == "cifar10" else 7)
    assert np.array_equal(binary.images, python.images)
    assert np.array_equal(binary.targets, python.targets)
    assert binary.class_names == python.class_names
    assert binary.fingerprint() == python.fingerprint()


def test_cifar_pixels_are_planes_and_its_fine_label_is_the_second_byte(
    tmp_path: Path, write_cifar: Callable[..., Path]
) -> None:
    folder = write_cifar(tmp_path, "cifar100", "binary")
    raw = (folder / "test.bin").read_bytes()
    sample = open_cifar(cifar_layout("cifar100", "binary"), folder, "val")[2]
    record = raw[2 * 3074 : 3 * 3074]
    assert sample.target == record[1]
    assert pixels(sample)[3, 5].tolist() == [record[2 + plane * 1024 + 3 * 32 + 5] for plane in range(3)]


def test_truncated_cifar_files_are_named_with_the_download_command(
    tmp_path: Path, write_cifar: Callable[..., Path]
) -> None:
    folder = write_cifar(tmp_path, "cifar10", "binary")
    file = folder / "data_batch_3.bin"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"data_batch_3.bin(.|\n)*reconv data get cifar10") as caught:
        open_cifar(cifar_layout("cifar10", "binary"), folder, "train")
    assert caught.value.code == ExitCode.DATA
    file.write_bytes(file.read_bytes()[: 3073 * 5])
    with pytest.raises(DataError, match="should be equal"):
        open_cifar(cifar_layout("cifar10", "binary"), folder, "train")
    file.unlink()
    with pytest.raises(DataError, match=r"has no data_batch_3\.bin"):
        open_cifar(cifar_layout("cifar10", "binary"), folder, "train")


def test_cifar_label_out_of_range_is_an_error(tmp_path: Path, write_cifar: Callable[..., Path]) -> None:
    folder = write_cifar(tmp_path, "cifar10", "binary")
    file = folder / "test_batch.bin"
    file.write_bytes(b"\x0b" + file.read_bytes()[1:])
    with pytest.raises(DataError, match="label 11 of sample 0 is out of range"):
        open_cifar(cifar_layout("cifar10", "binary"), folder, "val")


class Attack:
    """A pickle that would make a folder."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("attacked",)


@pytest.mark.parametrize("content", [Attack(), {b"data": Attack()}])
def test_a_cifar_pickle_cannot_run_code(tmp_path: Path, write_cifar: Callable[..., Path], content: object) -> None:
    folder = write_cifar(tmp_path, "cifar10", "python")
    (folder / "test_batch").write_bytes(pickle.dumps(content))
    with pytest.raises(DataError, match=r"refused to load posix\.mkdir") as caught:
        open_cifar(cifar_layout("cifar10", "python"), folder, "val")
    assert caught.value.where == str(folder / "test_batch")
    assert not Path("attacked").exists()


def test_a_damaged_cifar_pickle_is_a_data_error(tmp_path: Path, write_cifar: Callable[..., Path]) -> None:
    folder = write_cifar(tmp_path, "cifar10", "python")
    whole = (folder / "test_batch").read_bytes()
    others = (pickle.dumps([1, 2]), pickle.dumps({b"data": b"text"}))
    for content in (*others, *(whole[:length] for length in (0, 1, len(whole) // 2, len(whole) - 1))):
        (folder / "test_batch").write_bytes(content)
        with pytest.raises(DataError, match="test_batch"):
            open_cifar(cifar_layout("cifar10", "python"), folder, "val")


def test_folder_classes_are_sorted_and_samples_follow_names(tree: Path) -> None:
    source = FolderDataset(tree, "train")
    assert source.class_names == ("ant", "bee", "cat")
    assert [source[index].target for index in range(len(source))] == [0] * 4 + [1] * 4 + [2] * 3
    names = [os.path.relpath(source.path(index), tree) for index in range(len(source))]
    assert names == sorted(names)
    assert names[0] == os.path.join("train", "ant", "000.JPEG")
    assert source[0].data == (tree / names[0]).read_bytes()


def test_folder_finds_every_extension_at_any_depth_and_ignores_the_rest(tree: Path) -> None:
    data = encode(noise(4, 4, 3, 0))
    inner = tree / "train" / "ant" / "more"
    inner.mkdir()
    wanted = ("a.JPG", "b.jpeg", "c.Png", "d.webp", "e.bmp", "f.tif", "g.TIFF")
    for name in (*wanted, "h.txt", ".hidden.png", "i.gif"):
        (inner / name).write_bytes(data)
    source = FolderDataset(tree, "train")
    found = [os.path.basename(source.path(i)) for i in range(len(source)) if "more" in source.path(i)]
    assert found == list(wanted)


def test_validation_may_lack_classes_but_not_add_any(tree: Path) -> None:
    os.rename(tree / "val", tree / "validation")
    for file in (tree / "validation" / "ant").iterdir():
        file.unlink()
    (tree / "validation" / "ant").rmdir()
    source = FolderDataset(tree, "val")
    assert source.class_names == ("ant", "bee", "cat")
    assert [source[index].target for index in range(3)] == [1, 1, 2]
    (tree / "validation" / "dog").mkdir()
    with pytest.raises(DataError, match="training does not have: dog"):
        FolderDataset(tree, "val")


def test_a_class_folder_without_images_is_named(tree: Path) -> None:
    (tree / "train" / "bat").mkdir()
    (tree / "train" / "bat" / "readme.txt").write_text("soon")
    with pytest.raises(DataError, match="class folder bat has no images") as caught:
        FolderDataset(tree, "train")
    assert caught.value.where == str(tree / "train" / "bat")


def test_a_deleted_file_is_a_data_error_with_its_path(tree: Path) -> None:
    source = FolderDataset(tree, "train")
    os.unlink(source.path(3))
    with pytest.raises(DataError) as caught:
        source[3]
    assert caught.value.where == source.path(3)


def test_folder_fingerprint_depends_on_names_sizes_and_classes(tree: Path) -> None:
    first = FolderDataset(tree, "train").fingerprint()
    assert FolderDataset(tree, "train").fingerprint() == first
    file = tree / "train" / "bee" / "004.JPEG"
    file.write_bytes(file.read_bytes() + b"\0")
    resized = FolderDataset(tree, "train").fingerprint()
    os.rename(file, file.with_name("zzz.JPEG"))
    renamed = FolderDataset(tree, "train").fingerprint()
    os.rename(tree / "train" / "bee", tree / "train" / "bug")
    assert len({first, resized, renamed, FolderDataset(tree, "train").fingerprint()}) == 4


def test_folder_index_is_small(tmp_path: Path) -> None:
    for split in ("train", "val"):
        folder = tmp_path / split / "n01440764"
        folder.mkdir(parents=True)
        for number in range(500):
            (folder / f"ILSVRC2012_val_{number:08}.JPEG").touch()
    source = FolderDataset(tmp_path, "train")
    assert source.index_bytes / len(source) < 60


def test_names_that_are_not_utf8_are_read(tree: Path) -> None:
    path = os.path.join(os.fsencode(tree / "train" / "ant"), b"caf\xe9.png")
    with open(path, "wb") as file:
        file.write(b"bytes")
    source = FolderDataset(tree, "train")
    samples = [source[index] for index in range(len(source))]
    assert [sample.data for sample in samples if os.fsencode(sample.name) == path] == [b"bytes"]
    assert source.fingerprint()


def test_broken_links_are_counted_and_named(tree: Path) -> None:
    for number in range(7):
        (tree / "train" / "ant" / f"x{number}.png").symlink_to(tree / "not-mounted" / f"{number}.png")
    (tree / "train" / "bee" / "more").symlink_to(tree / "not-mounted")
    with pytest.raises(DataError) as caught:
        FolderDataset(tree, "train")
    assert caught.value.what.startswith("8 entries in ")
    assert str(tree / "train" / "ant" / "x0.png") in caught.value.what
    assert "and 3 more" in caught.value.what


def test_a_class_of_broken_links_is_not_reported_as_empty(tree: Path) -> None:
    folder = tree / "train" / "dog"
    folder.mkdir()
    (folder / "1.png").symlink_to(tree / "not-mounted.png")
    with pytest.raises(DataError, match=r"1 entries in .*dog/1\.png"):
        FolderDataset(tree, "train")


def test_a_class_folder_that_is_a_broken_link_is_an_error(tree: Path) -> None:
    (tree / "train" / "dog").symlink_to(tree / "not-mounted")
    with pytest.raises(DataError, match=r"1 entries in .*train/dog"):
        FolderDataset(tree, "train")


def test_an_image_that_is_not_a_file_is_refused(tree: Path) -> None:
    os.mkfifo(tree / "val" / "ant" / "pipe.jpg")
    with pytest.raises(DataError, match=r"pipe\.jpg"):
        FolderDataset(tree, "val")


def test_links_to_files_and_class_folders_are_followed(tree: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (tree / "train" / "cat").rename(elsewhere)
    (tree / "train" / "cat").symlink_to(elsewhere)
    (tree / "train" / "ant" / "linked.png").symlink_to(next(elsewhere.iterdir()))
    assert len(FolderDataset(tree, "train")) == 12


def test_a_class_name_that_is_not_utf8_is_refused_and_shown_escaped(tree: Path) -> None:
    os.mkdir(os.path.join(os.fsencode(tree / "train"), b"\xff\xfe"))
    with pytest.raises(DataError) as caught:
        FolderDataset(tree, "train")
    assert "\\xff\\xfe" in caught.value.what
    assert caught.value.code == ExitCode.DATA
    str(caught.value).encode()


def test_synthetic_images_depend_on_their_index_and_show_their_class() -> None:
    train, val = (SyntheticDataset(split, 40, 4, 16, 3) for split in ("train", "val"))  # type: ignore[arg-type]
    assert np.array_equal(pixels(train[7]), pixels(train[7]))
    assert not np.array_equal(pixels(train[7]), pixels(train[11]))
    assert not np.array_equal(pixels(train[7]), pixels(val[7]))
    assert (train[7].target, train[8].target) == (3, 0)
    means = np.stack([np.mean([pixels(train[i]) for i in range(c, 40, 4)], axis=0) for c in range(4)])
    right = [int(np.argmin([np.abs(pixels(val[i]) - mean).mean() for mean in means])) == i % 4 for i in range(40)]
    assert all(right)


def test_subset_percent_selects_training_samples_evenly_and_keeps_validation(tree: Path) -> None:
    data = DataConfig(subset_percent=50)
    train = open_dataset("folder", tree, "train", data)
    assert isinstance(train, Subset)
    assert [train[index].target for index in range(len(train))] == [0, 0, 0, 1, 1, 2]
    assert len(open_dataset("folder", tree, "val", data)) == 5
    digits = open_dataset("digits", None, "train", data)
    assert isinstance(digits, ArrayDataset)
    assert len(digits) == 718
    assert digits.fingerprint() != open_digits("train").fingerprint()
    assert evenly_spaced(7, 100).tolist() == list(range(7))
    assert evenly_spaced(1000, 0.01).tolist() == [0]


def test_synthetic_is_shaped_by_the_recipe() -> None:
    data = DataConfig(
        num_samples=20, num_classes=3, preprocess=PreprocessConfig(size=12, channels=1, mean=(0.5,), std=(0.5,))
    )
    for kind in ("synthetic", "synthetic-device"):
        source = open_dataset(kind, None, "train", data)
        assert (source.kind, len(source), len(source.class_names)) == (kind, 20, 3)
        assert pixels(source[0]).shape == (12, 12, 1)
        assert len(open_dataset(kind, None, "val", data)) == 4
