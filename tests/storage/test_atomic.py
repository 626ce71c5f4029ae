"""A file is replaced as a whole or not at all, whatever fails and whenever the process dies."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

import pytest
from failing_file_systems import Crash, CrashingFileSystem, PowerCutFileSystem, RefusingFileSystem

from reconv.storage.files import FileSystem, atomic_writer, disk_full_error, fsync_dir, remove_temporaries, write_atomic


def test_after_a_crash_at_any_call_the_file_is_the_old_or_the_new(tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    seen = []
    for crash_at in range(1, 100):
        path.write_bytes(b"old")
        fs = PowerCutFileSystem(crash_at)
        try:
            write_atomic(path, b"new content", fs)
        except Crash:
            for unsynced in fs.unsynced_files:
                os.truncate(unsynced, 0)
            seen.append(path.read_bytes())
        else:
            break
    assert seen == [b"old"] * 4 + [b"new content"]  # create, write, fsync, replace; fsync_dir


def test_a_failed_system_call_leaves_the_old_file_and_no_temporary_one(tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    for refuse_at in range(1, 5):
        path.write_bytes(b"old")
        with pytest.raises(OSError):
            write_atomic(path, b"new content", RefusingFileSystem(refuse_at, errno.ENOSPC))
        assert path.read_bytes() == b"old"
        assert os.listdir(tmp_path) == [path.name]


def test_text_is_utf8_and_undecodable_bytes_of_a_file_name_are_escaped(tmp_path: Path) -> None:
    write_atomic(tmp_path / "report.txt", "Größe " + os.fsdecode(b"\xff"))
    assert (tmp_path / "report.txt").read_bytes() == "Größe \\udcff".encode()


def test_a_writer_renames_the_file_when_the_block_succeeds(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    with atomic_writer(path) as file:
        file.write(b"content")
        assert not path.exists()
    assert path.read_bytes() == b"content"
    with pytest.raises(KeyboardInterrupt), atomic_writer(path, tmp_path / "elsewhere") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"content"
    assert os.listdir(tmp_path) == [path.name]


def test_the_folder_itself_is_synced_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[int, int]] = []

    def record(descriptor: int) -> None:
        status = os.fstat(descriptor)
        assert stat.S_ISDIR(status.st_mode)
        synced.append((descriptor, status.st_ino))

    monkeypatch.setattr(os, "fsync", record)
    fsync_dir(tmp_path)
    [(descriptor, inode)] = synced
    assert inode == tmp_path.stat().st_ino
    with pytest.raises(OSError):
        os.fstat(descriptor)


@pytest.mark.parametrize("code,is_tolerated", [(errno.EINVAL, True), (errno.EIO, False), (errno.ENOSPC, False)])
def test_only_a_file_system_that_cannot_sync_folders_is_tolerated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, is_tolerated: bool
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    if is_tolerated:
        fsync_dir(tmp_path)
    else:
        with pytest.raises(OSError):
            fsync_dir(tmp_path)


def test_temporary_files_of_a_crashed_process_are_removed_and_nothing_else(tmp_path: Path) -> None:
    kept = ["recipe.yaml", ".best.json.tmp", "best.json.0123456789ab.tmp", ".hidden", ".x.0123456789AB.tmp"]
    for name in kept:
        (tmp_path / name).touch()
    with pytest.raises(Crash):
        write_atomic(tmp_path / "best.json", "{}", CrashingFileSystem(crash_at=3))
    [left] = remove_temporaries(tmp_path)
    assert left.startswith(".best.json.")
    assert sorted(os.listdir(tmp_path)) == sorted(kept)


def test_a_writer_whose_temporary_file_is_removed_writes_it_again(tmp_path: Path) -> None:
    class SweptFileSystem(FileSystem):
        """Another process starts, and removes temporary files, before the first rename."""

        was_swept = False

        def replace(self, source: Path, target: Path) -> None:
            if not self.was_swept:
                self.was_swept = True
                assert remove_temporaries(tmp_path) == [source.name]
            super().replace(source, target)

    write_atomic(tmp_path / "report.html", "new", SweptFileSystem())
    assert (tmp_path / "report.html").read_text() == "new"
    assert os.listdir(tmp_path) == ["report.html"]
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "missing" / "report.html", "new")


def test_the_error_of_a_full_disk_needs_no_stat_of_its_path(tmp_path: Path) -> None:
    error = disk_full_error(tmp_path / ("x" * 300) / "file", "the disk is full", 5_000_000)  # stat fails
    assert re.fullmatch(r"[\d.]+ MB needed, [\d,.]+ [MGT]B free", error.why), error.why
