"""Downloads from a server whose file changes, has no version, is too large, or is not https."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from file_server import FileServer, serve

import reconv.storage.download
from reconv.core.errors import DataError, UsageError
from reconv.storage.download import download, no_progress

OLD, NEW = os.urandom(200_000), os.urandom(250_000)


@pytest.fixture
def server() -> Iterator[FileServer]:
    with serve(FileServer(OLD)) as running:
        yield running


def fetch(server: FileServer, part: Path, **options: int) -> bytes:
    download(f"{server.url}/file", part, no_progress, error=DataError, **options)
    return part.read_bytes()


def interrupted(server: FileServer, part: Path) -> None:
    """A first command that gets 100,000 bytes of the old file."""
    server.cut_after_bytes = [100_000, *[0] * 10]
    with pytest.raises(DataError, match="was interrupted"):
        fetch(server, part)
    server.cut_after_bytes = []
    server.asked.clear()


def test_bytes_of_two_versions_are_never_mixed(server: FileServer, tmp_path: Path) -> None:
    interrupted(server, tmp_path / "part")
    server.body, server.etag = NEW, '"version-2"'
    assert fetch(server, tmp_path / "part") == NEW
    assert server.ranges == ["bytes=100000-"]  # it asked for the rest of the old one and got the whole new one


@pytest.mark.parametrize("etag", ['"version-2"', ""])
def test_a_part_of_another_version_is_never_stored(server: FileServer, tmp_path: Path, etag: str) -> None:
    """Some servers ignore If-Range, and send the rest of the version that they have now."""
    interrupted(server, tmp_path / "part")
    server.body, server.etag, server.ignores_if_range = NEW, etag, True
    assert fetch(server, tmp_path / "part") == NEW
    assert server.ranges == ["bytes=100000-", None]


def test_a_version_of_the_length_of_the_part_does_not_complete_it(server: FileServer, tmp_path: Path) -> None:
    interrupted(server, tmp_path / "part")
    server.body, server.etag, server.ignores_if_range = NEW[:100_000], '"version-2"', True
    assert fetch(server, tmp_path / "part") == NEW[:100_000]


def test_the_same_version_is_resumed_and_leaves_no_other_file(server: FileServer, tmp_path: Path) -> None:
    interrupted(server, tmp_path / "part")
    assert fetch(server, tmp_path / "part") == OLD
    assert server.ranges == ["bytes=100000-"]
    assert [path.name for path in tmp_path.iterdir()] == ["part"]


@pytest.mark.parametrize("etag", ["", 'W/"weak"'])
def test_without_a_strong_version_the_download_starts_again(server: FileServer, tmp_path: Path, etag: str) -> None:
    server.etag = etag
    interrupted(server, tmp_path / "part")
    server.body = NEW
    assert fetch(server, tmp_path / "part") == NEW
    assert server.ranges == [None]


def test_a_shorter_new_version_replaces_the_old_part(server: FileServer, tmp_path: Path) -> None:
    interrupted(server, tmp_path / "part")
    server.body = NEW[:1000]  # the server still gives it the old version
    assert fetch(server, tmp_path / "part") == NEW[:1000]


def test_a_file_above_the_limit_is_refused_before_and_while_it_comes(server: FileServer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot download") as error:
        fetch(server, tmp_path / "part", max_bytes=1000)
    assert "200,000 bytes, more than the limit of 1,000" in error.value.why
    assert not (tmp_path / "part").exists()


def test_a_file_without_an_end_is_refused_early(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that announces no length may send for as long as it likes."""
    monkeypatch.setattr(reconv.storage.download, "MAX_UNKNOWN_BYTES", 150_000)
    assert fetch(server, tmp_path / "part") == OLD
    server.announces = False
    with pytest.raises(DataError) as error:
        fetch(server, tmp_path / "other")
    assert "more than the limit of 150,000" in error.value.why


def test_a_file_that_the_disk_has_no_room_for_is_refused(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=(64 << 20) + 1000))
    with pytest.raises(DataError) as error:
        fetch(server, tmp_path / "part")
    assert "the disk has room for 1,000" in error.value.why


@pytest.mark.parametrize("location", ["http://[::1/x", "http://[1:2:3]/x", "https://exa mple/\x01"])
def test_a_redirect_to_what_is_no_address_is_an_error(server: FileServer, tmp_path: Path, location: str) -> None:
    server.location = location
    with pytest.raises(DataError):
        fetch(server, tmp_path / "part")


@pytest.mark.parametrize("suffix", ["", ".etag"])
def test_a_link_in_place_of_the_part_is_neither_followed_nor_sent(
    server: FileServer, tmp_path: Path, suffix: str
) -> None:
    interrupted(server, tmp_path / "part")
    outside, place = tmp_path / "outside", tmp_path / f"part{suffix}"
    outside.write_text("private")
    place.unlink()
    place.symlink_to(outside)
    with pytest.raises(DataError, match="is not a file") as error:
        fetch(server, tmp_path / "part")
    assert str(outside) in error.value.why and outside.read_text() == "private"
    assert server.asked == []


@pytest.mark.usefixtures("no_blocking_pipe")
def test_a_pipe_in_place_of_the_part_is_not_waited_for(server: FileServer, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "part")
    with pytest.raises(DataError, match="is not a file"):
        fetch(server, tmp_path / "part")


def test_plain_http_to_another_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("http://192.0.2.1/file", "http://example.invalid/file", "ftp://192.0.2.1/file"):
        with pytest.raises(UsageError, match="not an https address"):
            download(url, tmp_path / "part", no_progress, error=DataError)
