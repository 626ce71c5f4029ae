"""Run folders are numbered without collisions, found again, locked, and RUN means what a person thinks."""

from __future__ import annotations

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from reconv.checkpoint.locate import find_run, locate
from reconv.checkpoint.run_dir import BestCheckpoint, RunDir
from reconv.checkpoint.store import CheckpointStore
from reconv.errors import CheckpointError, ExitCode, ResourceError, RunLockedError, UsageError
from reconv.io.atomic import FileSystem


def begun(root: Path, name: str = "quickstart", *, steps: tuple[int, ...] = ()) -> RunDir:
    run = RunDir.create(root, name)
    run.recipe.write_text("name: quickstart\n")
    for step in steps:
        tensors = {"w": torch.full((2,), float(step))}
        CheckpointStore(run.checkpoints).save(step, {"model": tensors, "ema": tensors}, {})
    return run


def finish(run: RunDir, **summary: object) -> None:
    run.summary.write_text(json.dumps({"exit_code": 0, "steps": 10, "total_steps": 10, **summary}))


def test_runs_are_numbered_from_one_and_gaps_are_not_filled(tmp_path: Path) -> None:
    assert RunDir.create(tmp_path, "a").path == tmp_path / "a" / "1"
    (tmp_path / "a" / "7").mkdir()
    (tmp_path / "a" / "0099").mkdir()
    (tmp_path / "a" / "notes").mkdir()
    assert RunDir.create(tmp_path, "a").path == tmp_path / "a" / "8"
    assert RunDir.create(tmp_path, "b").path == tmp_path / "b" / "1"


def test_processes_that_start_together_get_different_folders(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: RunDir.create(tmp_path, "a").path.name, range(40)))
    assert sorted(map(int, runs)) == list(range(1, 41))


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/tmp"])
def test_a_name_that_is_a_path_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="not a valid name for a run folder"):
        RunDir.create(tmp_path, name)


def test_an_unwritable_root_gives_code_6_with_its_path(tmp_path: Path) -> None:
    class ReadOnly(FileSystem):
        def makedirs(self, path: Path) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for make in (lambda: RunDir.create(tmp_path, "a", ReadOnly()), lambda: RunDir.at(tmp_path / "a", ReadOnly())):
        with pytest.raises(ResourceError, match="folder is not writable") as caught:
            make()
        assert caught.value.where == str(tmp_path / "a")


def test_a_file_where_the_run_folder_should_be_is_explained(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    for wanted in (tmp_path / "out", tmp_path / "out" / "deeper" / "still"):
        with pytest.raises(ResourceError, match="a file is where a folder should be") as caught:
            RunDir.at(wanted)
        assert caught.value.where == str(tmp_path / "out") and str(wanted) in caught.value.why
        assert "disk" not in caught.value.then


def test_newest_unfinished_passes_over_finished_and_empty_runs(tmp_path: Path) -> None:
    assert RunDir.newest_unfinished(tmp_path, "quickstart") is None
    runs = [begun(tmp_path) for _ in range(11)]
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
def test_finished_is_what_the_summary_says(tmp_path: Path, text: str, finished: bool) -> None:
    run = RunDir(tmp_path)
    assert not run.is_finished()
    run.summary.write_text(text)
    assert run.is_finished() is finished


def test_the_lock_refuses_a_second_holder_and_can_be_taken_again(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with run.lock() as lock:
        with pytest.raises(RunLockedError, match=f"process {os.getpid()} on") as caught:
            run.lock()
        assert caught.value.code == ExitCode.RUN_LOCKED
        assert caught.value.where == str(tmp_path)
    lock.release()
    run.lock().release()


def test_a_lock_file_left_by_a_dead_process_does_not_hold(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.lock_file.write_text('{"pid": 1, "host": "elsewhere", "padding": "' + "x" * 100 + '"}')
    with run.lock():
        assert json.loads(run.lock_file.read_text())["pid"] == os.getpid()


def test_best_is_read_back_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.read_best() is None
    for best in (BestCheckpoint(10, "top1", 0.1 + 0.2, "raw"), BestCheckpoint(20, "top1", 0.5, "ema")):
        run.write_best(best)
        assert run.read_best() == best
    assert os.listdir(tmp_path) == ["best.json"]
    run.best.write_text('{"step": 3')
    with pytest.raises(CheckpointError, match=r"best\.json is damaged"):
        run.read_best()


def test_a_run_folder_means_its_newest_valid_checkpoint(tmp_path: Path) -> None:
    run = begun(tmp_path, steps=(10, 20))
    found = locate(run.path)
    assert (found.kind, found.run, found.skipped) == ("run", run, ())
    assert found.checkpoint == run.checkpoints / "step-000000020"
    assert found.weights == run.checkpoints / "step-000000020" / "model.safetensors"
    assert found.ema == run.checkpoints / "step-000000020" / "ema.safetensors"
    found.weights.write_bytes(b"torn")
    again = locate(str(run.path))
    assert again.checkpoint == run.checkpoints / "step-000000010"
    assert again.skipped[0][0] == run.checkpoints / "step-000000020"


def test_best_and_a_step_number_choose_a_checkpoint(tmp_path: Path) -> None:
    run = begun(tmp_path, steps=(10, 20))
    with pytest.raises(CheckpointError, match="no best checkpoint yet"):
        locate(run.path, which="best")
    run.write_best(BestCheckpoint(10, "top1", 0.9, "raw"))
    assert locate(run.path, which="best").checkpoint == run.checkpoints / "step-000000010"
    assert locate(run.path, which=20).checkpoint == run.checkpoints / "step-000000020"
    with pytest.raises(CheckpointError, match=r"(?s)no such checkpoint.*the run has steps: 10, 20"):
        locate(run.path, which=15)


def test_a_folder_of_runs_means_its_newest_run(tmp_path: Path) -> None:
    runs = [begun(tmp_path, steps=(5,)) for _ in range(10)]
    RunDir.create(tmp_path, "quickstart")
    assert find_run(tmp_path / "quickstart") == runs[9]
    assert locate(tmp_path / "quickstart").run == runs[9]


def test_checkpoint_folders_and_weights_files_know_their_run(tmp_path: Path) -> None:
    run = begun(tmp_path, steps=(10,))
    folder = run.checkpoints / "step-000000010"
    found = locate(folder)
    assert (found.kind, found.run, found.checkpoint) == ("checkpoint", run, folder)
    found = locate(folder / "ema.safetensors")
    assert (found.kind, found.run, found.checkpoint) == ("weights", run, folder)
    assert found.weights == folder / "ema.safetensors"
    assert found.ema is None  # the file that was named is the one that is meant
    assert find_run(folder) == run
    elsewhere = tmp_path / "elsewhere"
    folder.rename(elsewhere)
    assert locate(elsewhere).run is None
    assert locate(elsewhere).checkpoint == elsewhere


def test_a_damaged_checkpoint_folder_is_named(tmp_path: Path) -> None:
    folder = begun(tmp_path, steps=(10,)).checkpoints / "step-000000010"
    (folder / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"state\.json is missing"):
        locate(folder)


def test_what_is_no_run_is_said_with_a_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = begun(Path("runs"))
    (tmp_path / "empty").mkdir()
    cases = {
        "quickstart": r"(?s)no such run.*runs/quickstart",
        "absent": r"(?s)no such run.*reconv train",
        "empty": "not a run folder",
        "runs": r"(?s)several recipes.*quickstart",
        str(run.path): r"(?s)no valid checkpoint.*nothing was saved yet",
    }
    for name, message in cases.items():
        with pytest.raises(CheckpointError, match=message) as caught:
            locate(name)
        assert caught.value.code == ExitCode.CHECKPOINT
        assert caught.value.then
    assert len(cases) == 5
