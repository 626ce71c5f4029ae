"""A save or a deletion that is interrupted anywhere, or fails on disk errors, loses no earlier checkpoint.

Power loss and kills of whole runs are in the fault matrix.
"""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import pytest
import torch
from failing_file_systems import (
    CountingFileSystem,
    Crash,
    CrashingFileSystem,
    FullFileSystem,
    RefusingFileSystem,
)
from torch import Tensor

from reconv.checkpoint.manifest import PARALLEL_BYTES
from reconv.checkpoint.store import CheckpointStore
from reconv.core.errors import ExitCode, ResourceError, UnreadableRunError
from reconv.storage import transient
from reconv.storage.files import FileSystem

OLD, NEW = 100, 200
NUM_SAVE_CALLS = 19  # claim; create, write, sync of five files; sync folder; rename; sync folder
NUM_RESAVE_CALLS = 21  # also: the old one is renamed away, and deleted at the end
NUM_RETAIN_CALLS = 5  # two renames, sync folder, two deletions


def parts_of(value: float) -> dict[str, dict[str, Tensor]]:
    return {part: {"a": torch.full((3, 5), value), "b": torch.tensor(7)} for part in ("model", "ema", "optimizer")}


def value_in(store: CheckpointStore) -> float:
    """What the newest valid checkpoint holds, the same in all its parts."""
    path = store.newest().path
    assert path is not None
    loaded = store.load(path)
    values = {float(loaded.state["value"])} | {float(x) for p in loaded.parts.values() for x in p["a"].flatten()}
    assert len(loaded.parts) == 3
    (value,) = values
    return value


def save(store: CheckpointStore, step: int, value: float) -> None:
    store.save(step, parts_of(value), {"value": value})


def hidden(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(".")]


@pytest.mark.parametrize(("step", "num_calls"), [(NEW, NUM_SAVE_CALLS), (OLD, NUM_RESAVE_CALLS)])
def test_crash_at_every_call_of_a_save_leaves_the_old_or_the_new(tmp_path: Path, step: int, num_calls: int) -> None:
    seen: list[float] = []
    for crash_at in range(1, 100):
        folder = tmp_path / str(crash_at)
        save(CheckpointStore(folder), OLD, 1.0)
        files = CrashingFileSystem(crash_at)
        try:
            save(CheckpointStore(folder, files), step, 2.0)
        except Crash:
            seen.append(value_in(CheckpointStore(folder)))
            save(CheckpointStore(folder), 300, 3.0)
            assert value_in(CheckpointStore(folder)) == 3.0
            assert hidden(folder) == []
            assert set(CheckpointStore(folder).steps()) in ({OLD, 300}, {OLD, NEW, 300})
        else:
            assert files.num_calls == crash_at - 1
            assert value_in(CheckpointStore(folder)) == 2.0
            break
    assert len(seen) == num_calls
    assert seen == sorted(seen), "once the new one was found it must stay found"
    assert seen[0] == 1.0
    assert seen[-1] == 2.0


def test_a_crash_in_the_first_save_leaves_nothing_that_looks_valid(tmp_path: Path) -> None:
    num_without = 0
    for crash_at in range(1, 100):
        folder = tmp_path / str(crash_at) / "checkpoints"
        folder.parent.mkdir()
        try:
            save(CheckpointStore(folder, CrashingFileSystem(crash_at)), NEW, 2.0)
        except Crash:
            newest = CheckpointStore(folder).newest()
            num_without += newest.path is None
            assert newest.skipped == ()
        else:
            break
    assert num_without == NUM_SAVE_CALLS + 2 - 1  # also make and sync the folder; the last sync comes after the rename


def test_a_crash_during_cleanup_after_a_crashed_replacement_loses_nothing(tmp_path: Path) -> None:
    num_crashes = 0
    for first_crash in range(1, NUM_RESAVE_CALLS + 1):
        for crash_at in range(1, 100):
            folder = tmp_path / f"{first_crash}-{crash_at}"
            save(CheckpointStore(folder), OLD, 1.0)
            with pytest.raises(Crash):
                save(CheckpointStore(folder, CrashingFileSystem(first_crash)), OLD, 2.0)
            try:
                CheckpointStore(folder, CrashingFileSystem(crash_at)).remove_leftovers()
            except Crash:
                num_crashes += 1
                assert value_in(CheckpointStore(folder)) in (1.0, 2.0)
            else:
                assert hidden(folder) == []
                assert CheckpointStore(folder).steps() == [OLD]
                break
    assert num_crashes >= NUM_RESAVE_CALLS - 3


def test_a_crash_at_every_call_of_pruning_keeps_the_newest_and_leaves_nothing_incomplete(tmp_path: Path) -> None:
    num_crashes = 0
    for crash_at in range(1, 100):
        folder = tmp_path / str(crash_at)
        for step in (1, 2, 3, 4):
            save(CheckpointStore(folder), step, float(step))
        try:
            assert CheckpointStore(folder, CrashingFileSystem(crash_at)).prune(keep_last=2) == [1, 2]
        except Crash:
            num_crashes += 1
            store = CheckpointStore(folder)
            assert value_in(store) == 4.0
            assert {3, 4} <= set(store.steps())
            assert all(store.load(store.path(step)).step == step for step in store.steps())
            store.prune(keep_last=2)
            assert sorted(os.listdir(folder)) == ["step-000000003", "step-000000004"]
        else:
            break
    assert num_crashes == NUM_RETAIN_CALLS


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EACCES, "folder is not writable"),
    ],
)
def test_a_disk_error_at_every_call_of_a_save_is_explained_and_loses_nothing(
    tmp_path: Path, code: int, message: str
) -> None:
    num_refusals = 0
    for refuse_at in range(1, 100):
        folder = tmp_path / str(refuse_at)
        save(CheckpointStore(folder), OLD, 1.0)
        store = CheckpointStore(folder, RefusingFileSystem(refuse_at, code))
        try:
            save(store, OLD, 2.0)
        except ResourceError as error:
            num_refusals += 1
            assert error.code == ExitCode.RESOURCES
            assert message in str(error)
            assert str(folder) in error.where
            assert error.hint
            assert value_in(CheckpointStore(folder)) in (1.0, 2.0)
            assert not [name for name in hidden(folder) if name.startswith(".tmp")], "the space was not freed"
            save(store, OLD, 4.0)
            assert value_in(CheckpointStore(folder)) == 4.0
            assert hidden(folder) == []
        else:
            break
    assert num_refusals == NUM_RESAVE_CALLS


def test_an_error_of_a_network_disk_that_passes_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transient, "RETRY_DELAYS_S", (0.0, 0.0))
    for refuse_at in range(1, NUM_RESAVE_CALLS + 1):
        folder = tmp_path / str(refuse_at)
        save(CheckpointStore(folder), OLD, 1.0)
        save(CheckpointStore(folder, RefusingFileSystem(refuse_at, errno.EIO)), OLD, 2.0)
        assert value_in(CheckpointStore(folder)) == 2.0
        assert hidden(folder) == []
        assert "Input/output error; try 2 of 3 in 0 s" in capsys.readouterr().err


def test_an_error_that_does_not_pass_ends_after_a_few_tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(CountingFileSystem):
        def fsync(self, file: io.FileIO) -> None:
            super().fsync(file)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(transient, "RETRY_DELAYS_S", (0.0, 0.0))
    with pytest.raises(ResourceError, match=r"(?s)could not write.*step-000000200.*EIO"):
        save(CheckpointStore(tmp_path, Broken()), NEW, 2.0)
    assert os.listdir(tmp_path) == []


def test_an_unreadable_checkpoint_is_not_taken_for_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unreadable(FileSystem):
        names: tuple[str, ...] = ()

        def open(self, path: Path) -> io.BufferedReader:
            if path.parent.name in self.names:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().open(path)

    monkeypatch.setattr(transient, "RETRY_DELAYS_S", (0.0,))
    files = Unreadable()
    store = CheckpointStore(tmp_path, files)
    for step in (OLD, NEW):
        save(store, step, float(step))
    files.names = ("step-000000200",)
    assert value_in(store) == OLD, "an older one is used"
    with pytest.raises(UnreadableRunError):  # nothing is deleted on the word of a disk that fails
        store.prune(keep_last=1)
    assert store.steps() == [OLD, NEW]
    files.names = ("step-000000100", "step-000000200")
    with pytest.raises(UnreadableRunError, match=r"manifest\.json cannot be read: Input/output error") as error:
        store.newest()
    assert error.value.code == ExitCode.RESOURCES


def test_crash_at_every_call_of_a_save_in_threads_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    """Large parts are written at the same time, so which calls have been made at the crash varies."""
    numbers = torch.arange(PARALLEL_BYTES // 4, dtype=torch.int32)
    old, new = ({"model": {"a": numbers + add}, "optimizer": {"b": numbers - add}} for add in (1, 2))
    store = CheckpointStore(tmp_path)
    store.save(OLD, old, {})
    for crash_at in range(1, 100):
        try:
            CheckpointStore(tmp_path, CrashingFileSystem(crash_at)).save(NEW, new, {})
        except Crash:
            path = store.newest().path
            assert path is not None
            expected, found = old if path == store.path(OLD) else new, store.load(path).parts
            assert {part: list(tensors) for part, tensors in found.items()} == {"model": ["a"], "optimizer": ["b"]}
            assert all(torch.equal(found[part][name], expected[part][name]) for part in found for name in found[part])
            store.prune(keep_last=1)
        else:
            break
    assert 10 < crash_at < 99
    assert store.newest().path == store.path(NEW)


def test_a_full_disk_found_by_a_thread_fails_the_save(tmp_path: Path) -> None:
    large = {part: {"a": torch.zeros(PARALLEL_BYTES, dtype=torch.uint8)} for part in ("model", "optimizer")}
    save(CheckpointStore(tmp_path), OLD, 1.0)
    for refuse_at in range(2, 2 + 4 * 2):  # after the folder: create, header, tensor and sync of two files
        with pytest.raises(ResourceError, match="disk is full"):
            CheckpointStore(tmp_path, RefusingFileSystem(refuse_at, errno.ENOSPC)).save(NEW, large, {})
        assert value_in(CheckpointStore(tmp_path)) == 1.0
        assert os.listdir(tmp_path) == ["step-000000100"]


def test_a_full_disk_exits_with_code_6_and_reports_path_and_free_space(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path), OLD, 1.0)
    with pytest.raises(ResourceError, match=r"(?s)disk is full.*step-000000200.*MB free.*--resume"):
        save(CheckpointStore(tmp_path, FullFileSystem()), NEW, 2.0)
    assert value_in(CheckpointStore(tmp_path)) == 1.0
    assert os.listdir(tmp_path) == ["step-000000100"]


def test_too_little_space_is_reported_before_anything_is_written(tmp_path: Path) -> None:
    class SmallDisk(CountingFileSystem):
        def free_bytes(self, path: Path) -> int:
            return 1000

    files = SmallDisk()
    with pytest.raises(ResourceError, match=r"(?s)not enough disk space.*needed.*free"):
        save(CheckpointStore(tmp_path, files), NEW, 2.0)
    assert files.num_calls == 0
