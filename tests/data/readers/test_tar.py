"""Tar shards in the WebDataset layout."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from data_examples import encode, noise

from reconv.core.errors import DataError, ExitCode
from reconv.data.readers.dataset_factory import open_dataset
from reconv.data.readers.detect import detect
from reconv.data.readers.tar import open_tar
from reconv.recipe.parts.data import DataConfig

Member = tuple[str, bytes]


def write_tar(path: Path, members: Iterable[Member], tar_format: int = tarfile.GNU_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def sample(key: str, label: int, seed: int = 0, ending: str = "jpg") -> list[Member]:
    return [(f"{key}.{ending}", encode(noise(9, 7, 3, seed), "PNG")), (f"{key}.cls", b"%d\n" % label)]


def write_set(root: Path, layout: str = "flat") -> Path:
    """Two training shards of two samples and a validation shard of one."""
    for split, shards in (("train", ([1, 0], [2, 1])), ("val", ([2],))):
        for number, labels in enumerate(shards):
            members = [
                m for row, label in enumerate(labels) for m in sample(f"{number}{row}", label, 10 * number + row)
            ]
            name = f"{number:06}.tar"
            write_tar(root / split / name if layout == "folders" else root / f"set-{split}-{name}", members)
    return root


@pytest.mark.parametrize("layout", ["folders", "flat"])
def test_shards_are_found_and_read_in_order(tmp_path: Path, layout: str) -> None:
    root = write_set(tmp_path / "set", layout)
    found = detect(root)
    assert (found.kind, found.path) == ("tar", root)
    assert "000000.tar" in found.why
    train, val = (open_dataset("auto", root, split, DataConfig()) for split in ("train", "val"))  # type: ignore[arg-type]
    assert (len(train), len(val)) == (4, 1)
    assert [train[index].target for index in range(4)] == [1, 0, 2, 1]
    assert [train[index].data for index in (0, 3)] == [encode(noise(9, 7, 3, seed), "PNG") for seed in (0, 11)]
    assert val.class_names == ("class0", "class1", "class2")
    assert ", byte 512" in val[0].name


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_tar_format_with_long_names_folders_and_other_members(tmp_path: Path, tar_format: int) -> None:
    key = "a/" * 40 + "k" * 90 if tar_format != tarfile.USTAR_FORMAT else "a/" * 40 + "k" * 60
    members = [("README", b"x"), *sample(key, 1), (f"{key}.json", b"{}"), (f"{key}.seg.png", b"mask"), ("._k.jpg", b"")]
    members += sample("last", 0, ending="JPEG")
    for split in ("train", "val"):
        write_tar(tmp_path / "set" / split / "0.tar", members, tar_format)
    source = open_tar(tmp_path / "set", "train")
    assert [source[index].target for index in range(len(source))] == [1, 0]


def test_names_are_in_classes_txt(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set")
    (root / "classes.txt").write_text("ant\nbee\ncat\ndog\n")
    assert open_tar(root, "val").class_names == ("ant", "bee", "cat", "dog")
    (root / "classes.txt").write_text("ant\nbee\n")
    with pytest.raises(DataError, match="label 2 out of range") as caught:
        open_tar(root, "val")
    assert "set-val-000000.tar, byte" in caught.value.where
    (root / "classes.txt").write_text("ant\nant\n")
    with pytest.raises(DataError, match="repeats a class"):
        open_tar(root, "val")


IMAGE = encode(noise(9, 7, 3, 0), "PNG")
BROKEN: dict[str, tuple[list[Member], str, str]] = {
    "no label": ([*sample("a", 1), ("b.jpg", IMAGE)], "b has an image but no label", "byte {second}"),
    "no image": ([*sample("a", 1), ("b.cls", b"1")], "b has a label but no image", "byte {second}"),
    "a pair torn apart": ([("a.jpg", IMAGE), *sample("b", 1), ("a.cls", b"1")], "a has an image but", "byte 0"),
    "two images": ([*sample("a", 1), ("a.png", IMAGE)], "two images for a", "byte {second}"),
    "a word as label": ([("a.cls", b"cat"), ("a.jpg", IMAGE)], "label of a is not a number", "byte 0"),
    "an essay as label": ([("a.cls", b"1" * 100), ("a.jpg", IMAGE)], "label of a is not a number", "byte 0"),
    "a negative label": ([("a.cls", b"-1"), ("a.jpg", IMAGE)], "label -1 out of range", "byte 0"),
    "no sample": ([("README", b"x")], "no samples in the shards", ""),
}


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_damaged_shard_is_refused_with_its_path_and_byte(tmp_path: Path, name: str) -> None:
    members, what, where = BROKEN[name]
    path = write_tar(tmp_path / "set" / "train" / "0.tar", members)
    with pytest.raises(DataError, match=what) as caught:
        open_tar(tmp_path / "set", "train")
    second = 512 + (len(IMAGE) + 511) // 512 * 512 + 1024
    assert caught.value.code == ExitCode.DATA
    assert caught.value.where.startswith(f"{path}")
    assert where.format(second=second) in caught.value.where
    assert caught.value.why


def test_a_truncated_or_damaged_tar_is_refused(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "whole.tar", [m for n in range(3) for m in sample(str(n), n, n)]).read_bytes()
    used = len(whole.rstrip(b"\0"))
    path = tmp_path / "set" / "train" / "0.tar"
    path.parent.mkdir(parents=True)
    cuts = [0, 1, 300, 512, 700, 1024, used // 2, used - 1]
    for content in (*(whole[:size] for size in cuts), whole[:2100] + b"?" * 300 + whole[2400:], b"no tar" * 300):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"truncated|ends early|no image|no label|no samples") as caught:
            open_tar(tmp_path / "set", "train")
        assert str(path) in caught.value.where
    path.write_bytes(whole[: (used + 511) // 512 * 512 + 512])  # one block of the end mark is enough
    assert len(open_tar(tmp_path / "set", "train")) == 3


def test_a_link_in_a_tar_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "set" / "train" / "0.tar"
    path.parent.mkdir(parents=True)
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("a.jpg")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(info)
    with pytest.raises(DataError, match=r"a\.jpg is not a regular file"):
        open_tar(tmp_path / "set", "train")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    root = tmp_path / "set"
    for number in (0, 1, 3, 4):
        write_tar(root / f"train-{number:04}.tar", sample("a", 0))
    with pytest.raises(DataError, match=r"missing shard: train-0002\.tar") as caught:
        open_tar(root, "train")
    assert caught.value.where == str(root / "train-0002.tar")


def test_imagenet_archives_and_those_beside_class_folders_are_not_shards(tree: Path, tmp_path: Path) -> None:
    write_tar(tree / "train" / "ant.tar", sample("a", 0))
    write_tar(tree / "ILSVRC2012_img_train.tar", sample("a", 0))
    assert detect(tree).kind == "folder"
    write_tar(tmp_path / "other" / "train" / "n01440764.tar", sample("a", 0))
    assert detect(tmp_path / "other").kind == "folder"
