"""What RUN on the command line refers to: a run, a checkpoint or weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from checkpoint_examples import save, start_run

from reconv.checkpoint.best import BestCheckpoint, write_best
from reconv.checkpoint.load_weights import read_weights
from reconv.checkpoint.locate import find_run, locate, read_located
from reconv.checkpoint.store import CheckpointStore, open_store
from reconv.core.errors import CheckpointError, ExitCode
from reconv.logging.run_dir import RunDir
from reconv.storage.files import FileSystem


def test_a_run_directory_resolves_to_its_newest_valid_checkpoint(tmp_path: Path) -> None:
    run = start_run(tmp_path, steps=(10, 20))
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
    run = start_run(tmp_path, steps=(10, 20))
    with pytest.raises(CheckpointError, match="no best checkpoint yet"):
        locate(run.path, which="best")
    save(run, 20, {10: 0.9, 20: 0.8})
    write_best(run, BestCheckpoint(10, "top1", 0.9, "raw"))
    found = locate(run.path, which="best")
    assert found.checkpoint == run.checkpoints / "step-000000010" and found.notes == ()
    assert locate(run.path, which=20).checkpoint == run.checkpoints / "step-000000020"
    with pytest.raises(CheckpointError, match=r"(?s)no such checkpoint.*the run has steps: 10, 20"):
        locate(run.path, which=15)


def test_a_directory_of_runs_resolves_to_its_newest_run(tmp_path: Path) -> None:
    runs = [start_run(tmp_path, steps=(5,)) for _ in range(10)]
    RunDir.create(tmp_path, "quickstart")
    assert find_run(tmp_path / "quickstart") == runs[9]
    assert locate(tmp_path / "quickstart").run == runs[9]


def test_the_run_of_a_checkpoint_directory_or_weights_file_is_found(tmp_path: Path) -> None:
    run = start_run(tmp_path, steps=(10,))
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


def test_a_damaged_checkpoint_directory_is_an_error(tmp_path: Path) -> None:
    folder = start_run(tmp_path, steps=(10,)).checkpoints / "step-000000010"
    (folder / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"state\.json is missing"):
        locate(folder)


def test_a_run_that_failed_before_its_first_save_says_so(tmp_path: Path) -> None:
    run = start_run(tmp_path / "runs")
    for code, reason in ((2, "the loss of my_loss raised ValueError"), (4, "no space left on device")):
        run.summary.write_text(json.dumps({"exit_code": code, "reason": reason}))
        with pytest.raises(CheckpointError, match="failed before its first save") as caught:
            locate(run.path)
        assert (caught.value.why, caught.value.where) == (reason, str(run.path))
        assert f"reconv resume {run.path}" in str(caught.value)
    for code in (0, 75, 130):  # finished without saving, stopped
        run.summary.write_text(json.dumps({"exit_code": code, "reason": "stopped"}))
        with pytest.raises(CheckpointError, match="no valid checkpoint"):
            locate(run.path)


def test_other_paths_are_errors_with_a_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = start_run(Path("runs"))
    (tmp_path / "empty").mkdir()
    cases = {
        "quickstart": r"(?s)no such run.*runs/quickstart",
        "absent": r"(?s)no such run.*use one of runs/quickstart/1",
        "empty": "not a run directory",
        "runs": r"(?s)several recipes.*quickstart",
        str(run.path): r"(?s)no valid checkpoint.*nothing was saved yet",
    }
    for name, message in cases.items():
        with pytest.raises(CheckpointError, match=message) as exc_info:
            locate(name)
        assert exc_info.value.code == ExitCode.CHECKPOINT
        assert exc_info.value.hint
    assert len(cases) == 5


class PruningFileSystem(FileSystem):
    """Each time a folder is listed, the training saves a newer checkpoint and deletes what was listed, a few times."""

    def __init__(self, run: RunDir, num_times: int) -> None:
        self.run, self.num_times = run, num_times

    def listdir(self, path: Path) -> list[str]:
        names = super().listdir(path)
        if path == self.run.checkpoints and self.num_times > 0:
            self.num_times -= 1
            step = max(CheckpointStore(path).steps()) + 10
            save(self.run, step, {step: 0.5})
            for name in names:
                shutil.rmtree(path / name)
        return names


def test_newest_lists_again_when_retention_deletes_what_it_has_listed(tmp_path: Path) -> None:
    run = start_run(tmp_path, steps=(10,))
    newest = open_store(run, PruningFileSystem(run, 3)).newest()
    assert newest.path == run.checkpoints / "step-000000040"
    assert newest.skipped == ()


def test_a_reader_reads_the_newer_checkpoint_when_its_own_is_deleted(tmp_path: Path) -> None:
    run = start_run(tmp_path)
    save(run, 10, {10: 0.5})
    for which in ("newest", "best"):
        located = locate(run.path, which=which)
        assert located.checkpoint is not None
        step = max(open_store(run).steps()) + 10
        save(run, step, {step: 0.9})
        shutil.rmtree(located.checkpoint)
        read = read_located(located, lambda found: (found.checkpoint, read_weights(found.weights)["w"].tolist()))
        assert read == (open_store(run).path(step), [step, step])
    named = locate(open_store(run).path(30))
    shutil.rmtree(named.weights.parent)
    with pytest.raises(CheckpointError, match="no such weights file"):
        read_located(named, lambda found: read_weights(found.weights))
