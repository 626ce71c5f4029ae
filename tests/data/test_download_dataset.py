"""Downloads of datasets, against a real HTTP server on this machine."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from box_examples import write_coco
from click.testing import CliRunner
from file_server import FileServer, serve

from reconv.cli import main, reconv
from reconv.core.errors import DataError, ExitCode, ResourceError, UsageError
from reconv.data.download_dataset import (
    DATASETS,
    Archive,
    DatasetArchives,
    download_dataset,
    fetch_archive,
    fetch_archives,
)
from reconv.data.readers.dataset_factory import open_dataset
from reconv.recipe.parts.data import DataConfig


def tar_of(files: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


PIXELS = os.urandom(300_000)
BODY = tar_of({"set-bin/train.bin": PIXELS, "set-bin/names.txt": b"a\nb\n"})
ARCHIVE = Archive("set.tar.gz", hashlib.md5(BODY).hexdigest(), "set-bin", {"train.bin": len(PIXELS)})


@pytest.fixture
def server() -> Iterator[FileServer]:
    with serve(FileServer(BODY, "/some/where")) as running:
        yield running


def fetch(server: FileServer, folder: Path) -> tuple[Path, list[tuple[int, int | None]]]:
    seen: list[tuple[int, int | None]] = []
    got = fetch_archive(ARCHIVE, folder, lambda there, total: seen.append((there, total)), server.url)
    assert not got.already_there
    return got.path, seen


def assert_whole(folder: Path) -> None:
    assert (folder / "set-bin" / "train.bin").read_bytes() == PIXELS
    assert [path.name for path in folder.iterdir()] == ["set-bin"]


def test_a_download_leaves_only_the_unpacked_folder(server: FileServer, tmp_path: Path) -> None:
    path, seen = fetch(server, tmp_path / "new" / "data")
    assert path == tmp_path / "new" / "data" / "set-bin"
    assert_whole(path.parent)
    assert seen[0] == (0, len(BODY))
    assert seen[-1] == (len(BODY), len(BODY))
    assert server.ranges == [None]


def test_a_complete_dataset_is_not_downloaded_again(server: FileServer, tmp_path: Path) -> None:
    fetch(server, tmp_path / "d")
    assert fetch_archive(ARCHIVE, tmp_path / "d", None, server.url).already_there
    assert len(server.ranges) == 1
    (tmp_path / "d" / "set-bin" / "train.bin").write_bytes(b"short")
    with pytest.raises(DataError, match=r"train.bin has another size(.|\n)*rm -r"):
        fetch_archive(ARCHIVE, tmp_path / "d", None, server.url)


def test_a_lost_connection_is_resumed(server: FileServer, tmp_path: Path) -> None:
    server.cut_after_bytes = [100_000, 50_000]
    fetch(server, tmp_path / "d")
    assert_whole(tmp_path / "d")
    assert server.ranges == [None, "bytes=100000-", "bytes=150000-"]


def test_an_interrupted_download_is_resumed_by_the_next_command(server: FileServer, tmp_path: Path) -> None:
    server.cut_after_bytes = [120_000, *[0] * 20]
    with pytest.raises(DataError, match=r"was interrupted(.|\n)*same command again"):
        fetch(server, tmp_path / "d")
    assert (tmp_path / "d" / "set.tar.gz.part").stat().st_size == 120_000
    server.cut_after_bytes = []
    server.asked.clear()
    _, seen = fetch(server, tmp_path / "d")
    assert server.ranges == ["bytes=120000-"]
    assert seen[0] == (120_000, len(BODY))
    assert_whole(tmp_path / "d")


def test_a_server_that_ignores_ranges_sends_the_whole_file(server: FileServer, tmp_path: Path) -> None:
    server.knows_range = False
    server.cut_after_bytes = [100_000]
    fetch(server, tmp_path / "d")
    assert_whole(tmp_path / "d")
    assert len(server.ranges) == 2


def test_a_complete_partial_file_is_used(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "set.tar.gz.part").write_bytes(BODY)
    fetch(server, tmp_path / "d")
    assert_whole(tmp_path / "d")


def test_a_wrong_checksum_is_an_error_and_removes_the_part(server: FileServer, tmp_path: Path) -> None:
    server.body = BODY[:-1] + bytes([BODY[-1] ^ 1])
    with pytest.raises(DataError, match=r"wrong checksum of set\.tar\.gz") as caught:
        fetch(server, tmp_path / "d")
    assert caught.value.code == ExitCode.DATA
    assert list((tmp_path / "d").iterdir()) == []
    server.body = BODY
    fetch(server, tmp_path / "d")


def test_a_stale_partial_file_is_replaced(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "set.tar.gz.part").write_bytes(b"x" * (len(BODY) + 5))
    fetch(server, tmp_path / "d")
    assert_whole(tmp_path / "d")


def test_a_missing_file_is_an_error_with_its_url_and_not_retried(server: FileServer, tmp_path: Path) -> None:
    server.status = 404
    with pytest.raises(DataError, match=r"some/where/cifar-10-binary.tar.gz(.|\n)*404"):
        download_dataset("cifar10", tmp_path / "d", base_url=server.url)
    assert len(server.ranges) == 1


def test_a_failing_server_is_retried(server: FileServer, tmp_path: Path) -> None:
    server.status = 503
    with pytest.raises(DataError, match="503"):
        fetch(server, tmp_path / "d")
    assert len(server.ranges) == 5


def test_an_unreachable_server_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be reached"):
        download_dataset("cifar100", tmp_path / "d", base_url="http://127.0.0.1:9/")


def test_an_archive_cannot_write_outside_its_folder(server: FileServer, tmp_path: Path) -> None:
    body = tar_of({"set-bin/train.bin": b"1", "../../escaped": b"2"})
    server.body = body
    archive = Archive("set.tar.gz", hashlib.md5(body).hexdigest(), "set-bin", {})
    with pytest.raises(DataError, match="cannot unpack"):
        fetch_archive(archive, tmp_path / "a" / "b", None, server.url)
    assert [str(path) for path in tmp_path.rglob("*escaped*")] == []
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_an_unwritable_folder_is_a_resource_error(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="cannot write"):
        fetch(server, tmp_path / "file" / "d")


def test_unknown_datasets_are_a_usage_error_and_known_ones_have_official_urls(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cifar10, cifar100"):
        download_dataset("imagenet", tmp_path)
    folders = [archive.folder for data_set in DATASETS.values() for archive in data_set.archives]
    assert folders == ["cifar-10-batches-bin", "cifar-100-binary", "annotations", "val2017", "train2017"]


def zip_of(files: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as zipped:
        for name, data in files.items():
            zipped.writestr(name, data)
    return file.getvalue()


@pytest.fixture
def coco(tmp_path: Path, server: FileServer) -> DatasetArchives:
    """COCO in miniature on the server: the same three archives, folders and addresses."""
    box = {"category_id": 1, "bbox": [1, 1, 5, 5]}
    root = write_coco(tmp_path / "m", {s: [(f"{s}.jpg", 20, 20, [box])] for s in ("train", "val")}, {1: "person"})
    archives = []
    for archive in DATASETS["coco2017"].archives:
        files = sorted((root / archive.folder).iterdir())
        body = zip_of({f"{archive.folder}/{file.name}": file.read_bytes() for file in files})
        server.files[archive.file] = body
        archives.append(replace(archive, md5=hashlib.md5(body).hexdigest(), num_files=len(files)))
    return replace(DATASETS["coco2017"], archives=tuple(archives))


def test_coco_is_three_archives_in_one_trainable_folder(
    coco: DatasetArchives, server: FileServer, tmp_path: Path
) -> None:
    server.cut_after_bytes = [100, 40]
    got = fetch_archives(coco, tmp_path / "d", None, server.url)
    assert got.path == tmp_path / "d" / "coco2017" and not got.already_there
    assert sorted(path.name for path in got.path.iterdir()) == ["annotations", "train2017", "val2017"]
    assert server.ranges == [None, "bytes=100-", "bytes=140-", None, None]
    source = open_dataset("auto", tmp_path / "d", "train", DataConfig(), boxes=True)
    assert len(source) == 1 and source.class_names == ("person",)


def test_one_command_downloads_coco_and_writes_tfrecords(
    coco: DatasetArchives, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DATASETS, "coco2017", coco)
    command = ["data", "get", "coco2017", str(tmp_path / "d"), "--base-url", server.url, "--to", "tfrecord", "--quiet"]
    assert CliRunner().invoke(reconv, command, catch_exceptions=False, standalone_mode=False).exit_code == 0
    assert len(list((tmp_path / "d" / "coco2017-tfrecord").rglob("*train*-of-*"))) == 1
    source = open_dataset("auto", tmp_path / "d" / "coco2017-tfrecord", "train", DataConfig(), boxes=True)
    assert len(source) == 1 and source.class_names == ("person",)


def test_present_coco_archives_are_kept_and_must_be_complete(
    coco: DatasetArchives, server: FileServer, tmp_path: Path
) -> None:
    train = server.files.pop("zips/train2017.zip")
    with pytest.raises(DataError, match=r"train2017\.zip(.|\n)*404"):
        fetch_archives(coco, tmp_path / "d", None, server.url)
    server.files["zips/train2017.zip"] = train
    server.asked.clear()
    assert not fetch_archives(coco, tmp_path / "d", None, server.url).already_there
    assert len(server.ranges) == 1
    assert fetch_archives(coco, tmp_path / "d", None, server.url).already_there
    (tmp_path / "d" / "coco2017" / "val2017" / "val.jpg").unlink()
    with pytest.raises(DataError, match="it holds 0 files instead of 1"):
        fetch_archives(coco, tmp_path / "d", None, server.url)


def test_a_damaged_coco_archive_is_refused_by_its_checksum(
    coco: DatasetArchives, server: FileServer, tmp_path: Path
) -> None:
    body = server.files["zips/val2017.zip"]
    server.files["zips/val2017.zip"] = body[:-1] + bytes([body[-1] ^ 1])
    with pytest.raises(DataError, match=r"wrong checksum of val2017\.zip"):
        fetch_archives(coco, tmp_path / "d", None, server.url)
    assert sorted(path.name for path in (tmp_path / "d" / "coco2017").iterdir()) == ["annotations"]


def test_an_invalid_zip_cannot_be_unpacked(coco: DatasetArchives, server: FileServer, tmp_path: Path) -> None:
    server.files["zips/val2017.zip"] = b"no zip"
    broken = replace(coco.archives[1], md5=hashlib.md5(b"no zip").hexdigest())
    with pytest.raises(DataError, match=r"cannot unpack val2017\.zip"):
        fetch_archive(broken, tmp_path / "d", None, server.url)
    assert list((tmp_path / "d").iterdir()) == []


def test_the_command_downloads_coco_from_a_mirror(
    server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.files = {"annotations/annotations_trainval2017.zip": b"x"}
    with pytest.raises(SystemExit) as ended:
        main(["data", "get", "coco2017", str(tmp_path), "--base-url", server.url, "--quiet"])
    assert ended.value.code == 3 and "checksum of annotations_trainval2017.zip" in capsys.readouterr().err
