"""Datasets in object stores: every format gives the samples of the local copy, and errors say what is wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from web_folder import WebFolder

from reconv.core.errors import ChangedDataError, DataError, ExitCode, UnreadableDataError
from reconv.data.convert.dataset import convert, make_target
from reconv.data.convert.open_splits import open_splits
from reconv.data.convert.transcode import TranscodeOptions
from reconv.data.dataset import Dataset, Split, sample_files, sample_ranges
from reconv.data.readers.dataset_factory import open_dataset
from reconv.inference.image_input import image_files, to_pil
from reconv.recipe.parts.data import DataConfig
from reconv.storage import remote_tree
from reconv.storage.bounded import read_bytes
from reconv.storage.local import read
from reconv.storage.remote_index import INDEX_NAME, write_index
from reconv.storage.remote_tree import local_data_path, mount, remote_file, shared_cache, shown_path


def _same_samples(local: Dataset, remote: Dataset) -> None:
    assert len(local) == len(remote) > 0
    assert local.class_names == remote.class_names
    assert local.fingerprint() == remote.fingerprint()
    for index in range(len(local)):
        ours, theirs = local[index], remote[index]
        assert ours.target == theirs.target
        assert np.array_equal(ours.data, theirs.data) if isinstance(ours.data, np.ndarray) else ours.data == theirs.data


def _converted(tree: Path, web: WebFolder, kind: str) -> Path:
    folder = web.folder / kind
    if kind == "folder":
        shutil.copytree(tree, folder)
    else:
        shards: dict[Split, int] | None = {"train": 3, "val": 2} if kind == "tfrecord" else None
        target = make_target(kind, TranscodeOptions(), None if shards else 5, shards)
        splits, root = open_splits(str(tree), "auto", None, None)
        convert(splits, root, folder, target, 1, lambda done, total: None)
    return folder


@pytest.mark.parametrize("kind", ["packed", "tar", "tfrecord", "folder"])
@pytest.mark.parametrize("scheme", ["http", "file"])
def test_samples_equal_those_of_the_local_copy(tree: Path, web: WebFolder, kind: str, scheme: str) -> None:
    folder = _converted(tree, web, kind)
    if scheme == "http":
        write_index(folder)
    url = f"{web.url}/{kind}" if scheme == "http" else folder.as_uri()
    for split in ("train", "val"):
        remote = open_dataset("auto", Path(url), split, DataConfig())
        assert remote.kind == kind
        _same_samples(open_dataset("auto", folder, split, DataConfig()), remote)
        assert url in remote.origin
        assert remote[0].name.startswith(url)
        indices = np.arange(len(remote), dtype=np.int64)
        assert sample_files(remote, indices) is None  # the compiled decoder would read empty files
        found = sample_ranges(remote, indices)
        assert len(found) == len(remote)
        assert all(remote_file(path) is not None for path, _, _ in found)


def test_a_second_opening_asks_for_nothing_but_the_index(tree: Path, web: WebFolder) -> None:
    folder = _converted(tree, web, "packed")
    write_index(folder)
    path = mount(f"{web.url}/packed")
    read(path / "train-00000-of-00003.packed", 0, 10)
    web.requests.clear()
    remote_tree._mount.cache_clear()
    again = mount(f"{web.url}/packed")
    assert again == path
    read(again / "train-00000-of-00003.packed", 5, 10)
    assert {key.rpartition("/")[2] for key in web.requests} == {INDEX_NAME}


def test_the_bytes_of_an_object_are_never_those_of_its_empty_file(tree: Path, web: WebFolder) -> None:
    folder = _converted(tree, web, "packed")
    write_index(folder)
    shard = mount(f"{web.url}/packed") / "train-00000-of-00003.packed"
    assert shard.stat().st_size == (folder / shard.name).stat().st_size
    with pytest.raises(OSError, match="in an object store"):
        read_bytes(shard, 10**9)
    assert shown_path(shard) == f"{web.url}/packed/{shard.name}"


def test_a_replaced_file_is_noticed_while_it_is_in_use(tree: Path, web: WebFolder) -> None:
    folder = _converted(tree, web, "packed")
    data = open_dataset("packed", local_data_path(folder.as_uri()), "train", DataConfig(), boxes=False)
    shutil.rmtree(shared_cache().folder)
    shared_cache()._mapped.clear()
    shard = folder / "train-00000-of-00003.packed"
    shard.write_bytes(shard.read_bytes()[::-1])
    with pytest.raises(ChangedDataError, match="cannot read") as error:
        data[0]
    assert error.value.code == ExitCode.DATA
    assert "as a new run" in error.value.hint


def test_an_upload_that_differs_from_the_index_is_never_used(tree: Path, web: WebFolder) -> None:
    folder = _converted(tree, web, "folder")
    write_index(folder)
    image = folder / "train" / "ant" / "000.JPEG"
    image.write_bytes(image.read_bytes()[:-1] + b"x")
    data = open_dataset("folder", Path(f"{web.url}/folder"), "train", DataConfig())
    with pytest.raises(UnreadableDataError) as error:
        data[0]
    assert "checksum is not the one in the index" in error.value.why


@pytest.mark.parametrize(
    ("case", "kind", "why"),
    [
        ("no index", DataError, "a web server has no list of files"),
        ("denied", UnreadableDataError, "403"),
        ("down", UnreadableDataError, "503"),
        ("damaged index", DataError, "truncated or damaged"),
    ],
)
def test_an_address_that_cannot_be_read_is_explained(
    tree: Path, web: WebFolder, case: str, kind: type[DataError], why: str
) -> None:
    folder = _converted(tree, web, "packed")
    if case != "no index":
        write_index(folder)
    if case == "damaged index":
        (folder / INDEX_NAME).write_bytes((folder / INDEX_NAME).read_bytes()[:-20])
    web.is_down = case == "down"
    web.faults.extend(["403"] * 9 if case == "denied" else [])
    with pytest.raises(kind) as error:
        mount(f"{web.url}/packed")
    assert why in error.value.why
    assert error.value.hint


def test_an_empty_or_missing_place_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no objects at"):
        mount((tmp_path / "nothing").as_uri())


def _write_index(folder: Path, *lines: str) -> None:
    body = "\n".join(["reconv file index 1", *lines, ""])
    (folder / INDEX_NAME).write_text(f"{body}end {google_crc32c.value(body.encode()):08x}\n")


def test_names_that_lead_out_of_the_folder_are_refused(web: WebFolder) -> None:
    _write_index(web.folder, "00000000 3 ../../evil.packed")
    with pytest.raises(Exception, match="name that cannot be read"):
        mount(web.url)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["00000000 -5 a.tar"], "malformed"),
        (["00000000 1_000 a.tar"], "malformed"),
        ([f"00000000 {10**14} a.tar"], "malformed"),
        ([f"00000000 {'9' * 5000} a.tar"], "malformed"),
        (["-1 5 a.tar"], "malformed"),
        (["123456789 5 a.tar"], "malformed"),
        (["00000000 5 a.tar", "00000000 6 a.tar"], "twice"),
    ],
)
def test_an_index_with_impossible_lines_is_refused(web: WebFolder, lines: list[str], why: str) -> None:
    _write_index(web.folder, *lines)
    with pytest.raises(DataError) as error:
        mount(web.url)
    assert why in error.value.why


@pytest.mark.parametrize("size", [5, 11])
def test_an_index_that_lies_about_a_size_gives_no_data(web: WebFolder, size: int) -> None:
    (web.folder / "a.tar").write_bytes(b"12345678")
    _write_index(web.folder, f"{google_crc32c.value(b'12345678'):08x} {size} a.tar")
    path = mount(web.url) / "a.tar"
    with pytest.raises(UnreadableDataError):
        read(path, 0, 5)


def test_objects_that_mark_folders_or_are_hidden_are_no_files(tmp_path: Path) -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    for name, content in {"d/x.jpg": b"1", "d/.h/y.jpg": b"2", "d/.reconv-url/z.jpg": b"3"}.items():
        fs.pipe_file(f"/marked/{name}", content)
    fs.store["/marked/d"] = fs.store["/marked/d/x.jpg"].__class__(fs, "/marked/d", b"")
    root = mount("memory://marked")
    assert [path.name for path in (root / "d").iterdir()] == ["x.jpg"]
    fs.pipe_file("/both/d/x.jpg", b"1")
    fs.store["/both/d"] = fs.store["/marked/d/x.jpg"].__class__(fs, "/both/d", b"content")
    with pytest.raises(DataError, match="has the name of a folder"):
        mount("memory://both")


def test_the_same_files_at_two_addresses_are_two_trees(tree: Path, web: WebFolder) -> None:
    for name in ("a/b", "a%b"):
        shutil.copytree(tree, web.folder / name)
        write_index(web.folder / name)
    first, second = mount(f"{web.url}/a/b"), mount(f"{web.url}/a%b")
    assert first != second


def test_predict_finds_the_images_of_a_store(tree: Path, web: WebFolder) -> None:
    folder = _converted(tree, web, "folder")
    write_index(folder)
    logged: list[str] = []
    found = image_files(Path(f"{web.url}/folder"), logged.append)
    assert len(found) == len(image_files(folder)) == 16
    assert web.url in logged[0]
    assert to_pil(found[0], 3).tobytes() == to_pil(image_files(folder)[0], 3).tobytes()
