"""A folder's names are synced, and only a file system that cannot is forgiven."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from reconv.io.sync import sync_folder


def test_the_folder_itself_is_synced_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[int, int]] = []

    def record(descriptor: int) -> None:
        status = os.fstat(descriptor)
        assert stat.S_ISDIR(status.st_mode)
        synced.append((descriptor, status.st_ino))

    monkeypatch.setattr(os, "fsync", record)
    sync_folder(tmp_path)
    [(descriptor, inode)] = synced
    assert inode == tmp_path.stat().st_ino
    with pytest.raises(OSError):
        os.fstat(descriptor)


@pytest.mark.parametrize("code,is_forgiven", [(errno.EINVAL, True), (errno.EIO, False), (errno.ENOSPC, False)])
def test_only_a_file_system_that_cannot_sync_folders_is_forgiven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, is_forgiven: bool
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    if is_forgiven:
        sync_folder(tmp_path)
    else:
        with pytest.raises(OSError):
            sync_folder(tmp_path)
    assert tmp_path.is_dir()
