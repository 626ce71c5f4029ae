"""The copy of a run in an object store: what is uploaded, in which order, and what another machine takes back."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import pytest
from checkpoint_examples import save, start_run

import reconv
from reconv.checkpoint import manifest
from reconv.checkpoint.locate import locate
from reconv.checkpoint.mirror import lease as run_lease
from reconv.checkpoint.mirror import upload as run_mirror
from reconv.checkpoint.mirror.download import download_run
from reconv.checkpoint.mirror.upload import RunMirror
from reconv.core.errors import CheckpointError, ExitCode, ResourceError, RunLockedError, UnreadableRunError, UsageError
from reconv.logging.run_dir import RunDir
from reconv.storage.object_stores import errors as store_errors
from reconv.storage.object_stores.store import open_object_store


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RECONV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(run_lease, "_SETTLE_S", 0.0)
    monkeypatch.setattr(run_mirror, "_POLL_S", 0.02)
    monkeypatch.setattr(store_errors, "RETRY_DELAYS_S", (0.01,))


def _copy(run: RunDir, url: str, resume: bool = True) -> None:
    with RunMirror.open(url, run, resume, print) as mirror:
        mirror.start(run)
        mirror.finish()


def _files(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name not in ("lock", "mirror.json")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return tmp_path / "store" / "run"


def test_the_copy_has_every_file_and_another_machine_gets_them_back(tmp_path: Path, copy: Path) -> None:
    run = start_run(tmp_path / "runs", steps=(10, 20))
    run.events.write_text("events")
    (run.path / "images").mkdir()
    (run.path / "images" / "a.png").write_bytes(b"image")
    _copy(run, copy.as_uri())
    assert _files(copy) == _files(run.path)
    other = RunDir(tmp_path / "other")
    assert download_run(open_object_store(copy.as_uri()), other, print)
    assert _files(other.path) == _files(run.path)


def test_a_run_continues_on_another_machine_bitwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = {"length": "6step", "schedule.warmup": "1step", "evaluate.every": "off", "engine.num_threads": 1}
    whole = reconv.train("quickstart", out=tmp_path / "whole", overrides=overrides, device="cpu")
    url = (tmp_path / "store" / "moved").as_uri()
    for machine, stop_after in (("first", "3step"), ("second", None)):
        (tmp_path / machine).mkdir()
        monkeypatch.chdir(tmp_path / machine)
        resume = machine == "second"
        moved = reconv.train(
            "quickstart", out=url, overrides=overrides, device="cpu", resume=resume, stop_after=stop_after
        )
        assert moved.folder.resolve().is_relative_to(tmp_path / machine)
    name = "checkpoints/step-000000006/model.safetensors"
    assert (moved.folder / name).read_bytes() == (whole.folder / name).read_bytes()
    assert (tmp_path / "store" / "moved" / name).read_bytes() == (whole.folder / name).read_bytes()
    assert not (tmp_path / "store" / "moved" / "lease.json").exists()
    with pytest.raises(UsageError, match="already contains a run"):
        reconv.train("quickstart", out=url, overrides=overrides, device="cpu")


def test_the_manifest_is_uploaded_after_the_files_of_its_checkpoint(
    tmp_path: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = start_run(tmp_path / "runs", steps=(10,))
    _copy(run, copy.as_uri())
    folder = copy / "checkpoints" / "step-000000010"
    times = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert len(times) == 4
    assert max(times, key=lambda name: times[name]) == manifest.NAME
    (folder / manifest.NAME).unlink()  # as if the upload had been cut
    other = RunDir(tmp_path / "other")
    assert download_run(open_object_store(copy.as_uri()), other, print)
    assert list(other.checkpoints.iterdir()) == []


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_a_damaged_checkpoint_in_the_store_is_left_out(tmp_path: Path, copy: Path, damage: str) -> None:
    _copy(start_run(tmp_path / "runs", steps=(10, 20)), copy.as_uri())
    file = copy / "checkpoints" / "step-000000020" / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if damage == "flipped" else data[:-1])
    if damage == "missing":
        file.unlink()
    notes: list[str] = []
    other = RunDir(tmp_path / "other")
    download_run(open_object_store(copy.as_uri()), other, notes.append)
    assert [path.name for path in other.checkpoints.iterdir()] == ["step-000000010"]
    assert any("step-000000020 is damaged" in note for note in notes)


def test_pruned_checkpoints_are_deleted_and_a_repeated_step_is_replaced(tmp_path: Path, copy: Path) -> None:
    run = start_run(tmp_path / "runs", steps=(10, 20))
    with RunMirror.open(copy.as_uri(), run, True, print) as mirror:
        mirror.start(run)
        while not (copy / "checkpoints" / "step-000000020" / manifest.NAME).exists():
            pass
        shutil.rmtree(run.checkpoints / "step-000000010")
        shutil.rmtree(run.checkpoints / "step-000000020")
        save(run, 20, {10: 0.5})
        mirror.request()
        mirror.finish()
    assert _files(copy) == _files(run.path)
    assert not list((copy / "checkpoints" / "step-000000010").iterdir())


def test_a_store_that_fails_is_reported_at_the_end_and_the_next_start_copies_the_rest(
    tmp_path: Path, copy: Path
) -> None:
    run = start_run(tmp_path / "runs", steps=(10,))
    copy.mkdir(parents=True)
    (copy / "checkpoints").write_text("a file where a folder should be")
    with pytest.raises(ResourceError, match="is not complete") as error:
        _copy(run, copy.as_uri())
    assert error.value.code == ExitCode.RESOURCES
    assert "checkpoints" in error.value.why
    (copy / "checkpoints").unlink()
    _copy(run, copy.as_uri())
    assert _files(copy) == _files(run.path)


def test_the_newer_one_of_two_copies_wins_and_another_run_is_refused(tmp_path: Path, copy: Path) -> None:
    run = start_run(tmp_path / "runs", steps=(10,))
    _copy(run, copy.as_uri())
    store = open_object_store(copy.as_uri())
    assert not download_run(store, run, print)  # as new as the copy
    other = RunDir(tmp_path / "other")
    download_run(store, other, print)
    save(run, 20)
    _copy(run, copy.as_uri())
    assert download_run(store, other, print)
    assert _files(other.path) == _files(run.path)
    with pytest.raises(CheckpointError, match="different runs"):
        download_run(store, start_run(tmp_path / "runs", steps=(5,)), print)


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b'{"run_id": 5}', b"[" * 10**5, b" " * (2 << 20)])
def test_a_copy_with_a_damaged_identity_is_refused(tmp_path: Path, copy: Path, content: bytes) -> None:
    run = start_run(tmp_path / "runs", steps=(10,))
    _copy(run, copy.as_uri())
    other = RunDir(tmp_path / "other")
    download_run(open_object_store(copy.as_uri()), other, print)
    save(run, 20)
    _copy(run, copy.as_uri())
    (copy / "run.json").write_bytes(content)
    with pytest.raises(CheckpointError):
        download_run(open_object_store(copy.as_uri()), other, print)


def _lease(copy: Path, host: str, pid: int, number: int = 0, pids: str | None = None) -> None:
    copy.mkdir(parents=True, exist_ok=True)
    pids = run_lease._pid_namespace() if pids is None else pids
    lease = {"id": f"other{number}", "host": host, "pids": pids, "pid": pid, "time": 0}
    (copy / run_lease.NAME).write_text(json.dumps(lease))


@pytest.mark.parametrize("content", [b"", b"[]", b"[" * 10**5, b" " * (1 << 20), b'{"id": 1, "pid": "../../etc"}'])
def test_a_lease_that_is_none_is_replaced(
    tmp_path: Path, copy: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lease, "EXPIRE_S", 0.05)
    copy.mkdir(parents=True)
    (copy / run_lease.NAME).write_bytes(content)
    with RunMirror.open(copy.as_uri(), start_run(tmp_path / "runs"), True, print):
        assert json.loads((copy / run_lease.NAME).read_text())["pid"] == os.getpid()


def test_a_writer_in_another_container_of_the_same_name_is_not_taken_for_dead(
    tmp_path: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _lease(copy, socket.gethostname(), 2**22 + 1, pids="another boot/pid:[1]")
    lease = run_lease.RunLease(open_object_store(copy.as_uri()))
    found = lease._read()
    assert found is not None
    assert not lease._is_dead(found)


def test_the_lease_of_a_dead_process_is_taken_over(tmp_path: Path, copy: Path) -> None:
    _lease(copy, socket.gethostname(), 2**22 + 1)
    with RunMirror.open(copy.as_uri(), start_run(tmp_path / "runs"), True, print):
        assert json.loads((copy / run_lease.NAME).read_text())["pid"] == os.getpid()
    assert not (copy / run_lease.NAME).exists()


def test_a_lease_that_is_not_renewed_expires(tmp_path: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lease, "EXPIRE_S", 0.05)
    _lease(copy, "elsewhere", 7)
    with RunMirror.open(copy.as_uri(), start_run(tmp_path / "runs"), True, print):
        assert json.loads((copy / run_lease.NAME).read_text())["pid"] == os.getpid()


def test_a_lease_that_is_renewed_is_respected(tmp_path: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _lease(copy, "elsewhere", 7)
    monkeypatch.setattr(run_lease.time, "sleep", lambda seconds: _lease(copy, "elsewhere", 7, 1))
    with (
        pytest.raises(RunLockedError, match="another process writes this run") as error,
        RunMirror.open(copy.as_uri(), start_run(tmp_path / "runs"), True, print),
    ):
        pass
    assert "process 7 on elsewhere" in error.value.why


def test_a_writer_that_lost_its_lease_stops_writing(tmp_path: Path, copy: Path) -> None:
    run = start_run(tmp_path / "runs", steps=(10,))
    with RunMirror.open(copy.as_uri(), run, True, print) as mirror:
        _lease(copy, "elsewhere", 7)
        mirror.start(run)
        with pytest.raises(ResourceError) as error:
            mirror.finish()
    assert "process 7 on elsewhere has taken over" in error.value.why
    assert list(_files(copy)) == [run_lease.NAME]


def test_a_store_that_cannot_be_reached_is_an_error_before_training(tmp_path: Path) -> None:
    url = "http://127.0.0.1:9"
    with pytest.raises(UnreadableRunError, match="cannot reach"), RunMirror.open(url, RunDir(tmp_path), True, print):
        pass


def test_commands_find_a_run_by_its_address(tmp_path: Path, copy: Path) -> None:
    _copy(start_run(tmp_path / "runs", steps=(10,)), copy.as_uri())
    located = locate(copy.as_uri())
    assert located.weights.parent.name == "step-000000010"
    assert located.run is not None
    assert located.run.path.is_relative_to("runs/file")
    with pytest.raises(CheckpointError, match="no run at"):
        locate((tmp_path / "nothing").as_uri())
