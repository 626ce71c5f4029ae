"""Image folders."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from data_examples import encode, noise
from PIL import Image

from reconv.core.errors import DataError, ExitCode
from reconv.data.decode.pillow import _register_heif, decode, reads_heic
from reconv.data.readers.folder import FolderDataset


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
    wanted = ("a.JPG", "b.jpeg", "c.Png", "d.webp", "e.bmp", "f.tif", "g.TIFF", "h.gif")
    for name in (*wanted, "h.txt", ".hidden.png", "i.svg"):
        (inner / name).write_bytes(data)
    source = FolderDataset(tree, "train")
    found = [os.path.basename(source.path(i)) for i in range(len(source)) if "more" in source.path(i)]
    assert found == list(wanted)


HEIC = b"\0\0\0\x18ftypheic\0\0\0\0"
PILLOW_HEIF = """
from PIL import Image, PngImagePlugin

def register_heif_opener(thumbnails):
    def read(file, name):
        file.seek(16)
        return PngImagePlugin.PngImageFile(file)
    Image.register_open("HEIF", read, lambda prefix: prefix[4:12] == b"ftypheic")
"""


@pytest.fixture
def heic_tree(tree: Path) -> Iterator[Path]:
    """A tree whose class `ant` has a HEIC image, whose pixels are those of a PNG: a stand-in package reads them."""
    (tree / "train/ant/z.HEIC").write_bytes(HEIC + encode(noise(4, 6, 3, 0), "PNG"))
    for cached in (reads_heic, _register_heif):
        cached.cache_clear()
    yield tree
    for cached in (reads_heic, _register_heif):
        cached.cache_clear()
    if Image.OPEN.pop("HEIF", None):
        Image.ID.remove("HEIF")


def test_heic_images_are_left_out_by_name_without_their_package(
    heic_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    source = FolderDataset(heic_tree, "train")
    assert len(source) == 11
    assert "left out: 1 HEIC image (ant/z.HEIC): pip install 'reconv[heic]'" in source.origin
    with pytest.raises(DataError, match=r"need pillow-heif(.|\n)*reconv\[heic\]"):
        decode((heic_tree / "train/ant/z.HEIC").read_bytes(), 3)
    shutil.rmtree(heic_tree / "train")
    (heic_tree / "train/ant").mkdir(parents=True)
    (heic_tree / "train/ant/1.heic").write_bytes(HEIC)
    with pytest.raises(DataError, match=r"reconv\[heic\]"):
        FolderDataset(heic_tree, "train")


def test_heic_images_are_read_by_their_package(
    heic_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pillow_heif.py").write_text(PILLOW_HEIF)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pillow_heif", raising=False)
    source = FolderDataset(heic_tree, "train")
    assert len(source) == 12 and "HEIC" not in source.origin
    pixels = decode(source[4].data, 3)
    assert source.path(4).endswith("z.HEIC") and np.array_equal(pixels, noise(4, 6, 3, 0))
    assert decode(encode(noise(4, 6, 3, 0), "PNG"), 3).shape == (4, 6, 3)  # other formats as before


def test_validation_may_lack_classes_but_not_add_any(tree: Path) -> None:
    os.rename(tree / "val", tree / "validation")
    for file in (tree / "validation" / "ant").iterdir():
        file.unlink()
    (tree / "validation" / "ant").rmdir()
    source = FolderDataset(tree, "val")
    assert source.class_names == ("ant", "bee", "cat")
    assert [source[index].target for index in range(3)] == [1, 1, 2]
    (tree / "validation" / "dog").mkdir()
    (tree / "validation" / "dog" / "1.png").write_bytes(b"png")
    with pytest.raises(DataError, match="training does not have: dog"):
        FolderDataset(tree, "val")


def test_a_class_folder_without_images_is_named(tree: Path) -> None:
    (tree / "train" / "bat").mkdir()
    (tree / "train" / "bat" / "readme.txt").write_text("soon")
    with pytest.raises(DataError, match="class folder bat has no images") as caught:
        FolderDataset(tree, "train")
    assert caught.value.where == str(tree / "train" / "bat")


def test_an_empty_class_folder_is_left_out_with_a_warning(tree: Path) -> None:
    for name in ("bat", "bee-old", ".hidden"):
        (tree / "train" / name / "more").mkdir(parents=True)
    dataset = FolderDataset(tree, "train")
    assert dataset.class_names == ("ant", "bee", "cat")
    assert dataset.warnings == (f"empty class folders in {tree / 'train'} left out: bat, bee-old",)
    assert FolderDataset(tree, "val").class_names == dataset.class_names
    assert FolderDataset(tree, "val").warnings == ()
    for file in (tree / "train").rglob("*.*"):
        if file.is_file():
            file.unlink()
    with pytest.raises(DataError, match=r"class folders in .* are empty"):
        FolderDataset(tree, "train")


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


def test_links_to_themselves_or_to_a_folder_around_them_are_named(tree: Path) -> None:
    flat = (tree / "train").rename(tree.parent / "flat")
    (flat / "self").symlink_to(".")
    (flat / "a").symlink_to("b")
    (flat / "b").symlink_to("a")
    with pytest.raises(DataError, match=r"3 entries in .*/a, .*/b, .*/self"):
        FolderDataset(flat, "train")
    for name in ("self", "a", "b"):
        (flat / name).unlink()
    (flat / "ant" / "loop.png").symlink_to("loop.png")
    with pytest.raises(DataError, match=r"1 entries in .*ant/loop\.png"):
        FolderDataset(flat, "train")


def test_images_beside_class_folders_are_counted_and_runs_are_no_class(tree: Path) -> None:
    flat = (tree / "train").rename(tree.parent / "flat")
    (flat / "cover.jpg").touch()
    run = flat / "runs" / "quickstart" / "1"
    (run / "images").mkdir(parents=True)
    (run / "recipe.yaml").touch()
    (run / "images" / "1.png").touch()
    dataset = FolderDataset(flat, "train")
    assert dataset.class_names == ("ant", "bee", "cat")
    assert "not used: 1 image beside the class folders" in dataset.origin


def test_names_with_spaces_and_letters_of_any_script_are_classes(tmp_path: Path) -> None:
    for name in ("rose garden", "Tulpe (rot)", "ひまわり"):
        (tmp_path / name).mkdir()
        for number in range(3):
            (tmp_path / name / f"photo {number} é.JPG").touch()
    dataset = FolderDataset(tmp_path, "train")
    assert dataset.class_names == ("Tulpe (rot)", "rose garden", "ひまわり")
    assert len(dataset) + len(FolderDataset(tmp_path, "val")) == 9
