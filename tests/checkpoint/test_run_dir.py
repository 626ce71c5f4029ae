"""Run directories: numbering and the lock."""

from __future__ import annotations

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checkpoint_examples import start_run

from reconv.core.errors import ExitCode, ResourceError, RunLockedError, UsageError
from reconv.logging.run_dir import RunDir
from reconv.storage.files import FileSystem


def finish(run: RunDir, **summary: object) -> None:
    run.summary.write_text(json.dumps({"exit_code": 0, "steps": 10, "total_steps": 10, **summary}))


def test_runs_are_numbered_from_one_and_gaps_are_not_filled(tmp_path: Path) -> None:
    assert RunDir.create(tmp_path, "a").path == tmp_path / "a" / "1"
    (tmp_path / "a" / "7").mkdir()
    (tmp_path / "a" / "0099").mkdir()
    (tmp_path / "a" / "notes").mkdir()
    assert RunDir.create(tmp_path, "a").path == tmp_path / "a" / "8"
    assert RunDir.create(tmp_path, "b").path == tmp_path / "b" / "1"


def test_processes_that_start_together_get_different_directories(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: RunDir.create(tmp_path, "a").path.name, range(40)))
    assert sorted(map(int, runs)) == list(range(1, 41))


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/tmp"])
def test_a_path_is_not_a_valid_run_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="not a valid name for a run directory"):
        RunDir.create(tmp_path, name)


def test_an_unwritable_root_exits_with_code_6(tmp_path: Path) -> None:
    class ReadOnly(FileSystem):
        def makedirs(self, path: Path) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for make in (lambda: RunDir.create(tmp_path, "a", ReadOnly()), lambda: RunDir.at(tmp_path / "a", ReadOnly())):
        with pytest.raises(ResourceError, match="folder is not writable") as exc_info:
            make()
        assert exc_info.value.where == str(tmp_path / "a")


def test_a_file_in_place_of_the_run_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    for wanted in (tmp_path / "out", tmp_path / "out" / "deeper" / "still"):
        with pytest.raises(ResourceError, match="a file is where a folder should be") as exc_info:
            RunDir.at(wanted)
        assert exc_info.value.where == str(tmp_path / "out") and str(wanted) in exc_info.value.why
        assert "disk" not in exc_info.value.hint


def test_newest_unfinished_skips_finished_and_empty_runs(tmp_path: Path) -> None:
    assert RunDir.newest_unfinished(tmp_path, "quickstart") is None
    runs = [start_run(tmp_path) for _ in range(11)]
    RunDir.create(tmp_path, "quickstart")  # killed before it wrote anything
    assert RunDir.newest_unfinished(tmp_path, "quickstart") == runs[10]
    finish(runs[10])
    assert RunDir.newest_unfinished(tmp_path, "quickstart") == runs[9]
    for run in runs:
        finish(run)
    assert RunDir.newest_unfinished(tmp_path, "quickstart") is None
    assert RunDir.all(tmp_path, "quickstart")[0] == runs[10]


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ('{"exit_code": 0, "steps": 10, "total_steps": 10}', True),
        ('{"exit_code": 0}', True),
        ('{"exit_code": 0, "steps": 9, "total_steps": 10}', False),
        ('{"exit_code": 75, "steps": 10, "total_steps": 10}', False),
        ('{"exit_code": null}', False),
        ("[]", False),
        ('{"exit_co', False),
        ("", False),
    ],
)
def test_is_finished_reads_the_summary(tmp_path: Path, text: str, finished: bool) -> None:
    run = RunDir(tmp_path)
    assert not run.is_finished()
    run.summary.write_text(text)
    assert run.is_finished() is finished


def test_the_lock_has_one_holder_and_can_be_taken_again(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with run.lock() as lock:
        with pytest.raises(RunLockedError, match=f"process {os.getpid()} on") as exc_info:
            run.lock()
        assert exc_info.value.code == ExitCode.RUN_LOCKED
        assert exc_info.value.where == str(tmp_path)
    lock.release()
    run.lock().release()


def test_a_lock_file_of_a_dead_process_is_ignored(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.lock_file.write_text('{"pid": 1, "host": "elsewhere", "padding": "' + "x" * 100 + '"}')
    with run.lock():
        assert json.loads(run.lock_file.read_text())["pid"] == os.getpid()
