from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from reconv.storage.temporary_folder import sweep, temporary_folder


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_the_folder_of_a_killed_process_is_deleted_by_the_next_start(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        with temporary_folder("devices") as folder:
            (folder / "file").write_text("x")
            os._exit(0)  # as kill -9: nothing is cleaned up
    os.waitpid(pid, 0)
    [left] = tmp_path.glob("reconv-devices-*")
    with temporary_folder("devices") as folder:
        assert not left.exists()
        assert folder.is_dir()
    assert not list(tmp_path.glob("reconv-devices-*"))


def test_the_folder_of_a_living_process_stays(tmp_path: Path) -> None:
    with temporary_folder("devices") as first, temporary_folder("devices") as second:
        assert first.is_dir() and second.is_dir()


def test_folders_of_another_kind_and_new_ones_without_a_lock_stay(tmp_path: Path) -> None:
    others = [tmp_path / "reconv-other-1", tmp_path / "reconv-devices-new"]
    for other in others:
        other.mkdir()
    with temporary_folder("devices"):
        assert all(other.is_dir() for other in others)


def test_a_folder_that_another_process_sweeps_at_the_same_time_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("reconv-devices-1", "reconv-devices-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".in-use").touch()
    real = shutil.rmtree

    def delete_all(path: str, ignore_errors: bool = False) -> None:
        for folder in tmp_path.glob("reconv-devices-*"):
            real(folder, ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", delete_all)
    assert len(sweep("reconv-devices-")) == 1
    assert not list(tmp_path.iterdir())
