"""Run directories that do not say the truth: a stale best.json, checkpoints that are gone, misplaced or malformed."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from checkpoint_examples import change_state, sign
from ranks import start

import reconv
from reconv.checkpoint.best import read_best
from reconv.checkpoint.locate import locate
from reconv.checkpoint.store import open_store
from reconv.core.errors import CheckpointError, ExitCode, RecipeError
from reconv.logging.event_log import read_events
from reconv.logging.events import LogMessage
from reconv.logging.run_dir import RunDir
from reconv.trainer.callbacks.checkpoint_average import average

SETTINGS = {
    "length": "9step",
    "schedule.warmup": "0ep",
    "data.subset_percent": "25",
    "batch.size": "32",
    "batch.group": "16",
    "evaluate.every": "3step",
    "save.every": "3step",
    "save.keep_last": "1",
    "engine.num_threads": "1",
}
OVERRIDES = [(field, value, "--set") for field, value in SETTINGS.items()]
NEWEST = "step-000000006"


def train(out: Path, *, resume: bool = False, stop_after: str | None = None) -> None:
    reconv.train("quickstart", out=out, overrides=OVERRIDES, resume=resume, stop_after=stop_after)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with 6 of 9 steps done; its newest checkpoint is the best and the only one."""
    out = tmp_path_factory.mktemp("runs") / "stopped"
    train(out, stop_after="6step")
    assert open_store(RunDir(out)).steps() == [6]
    return out


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> RunDir:
    return RunDir(Path(shutil.copytree(stopped, tmp_path / "run")))


def die_before_the_last_best_json(out: str) -> None:
    replace = os.replace

    def replace_or_die(source: Path, target: Path) -> None:
        if Path(target).name == "best.json" and (Path(out) / "checkpoints" / "step-000000009").is_dir():
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = replace_or_die  # type: ignore[assignment]
    train(Path(out))


def test_a_kill_between_the_last_save_and_best_json_does_not_change_the_best(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "killed")
    [(process, _)] = start(1, die_before_the_last_best_json, str(run.path))
    process.join(100)
    assert process.exitcode == -signal.SIGKILL
    stale = read_best(run)
    assert stale is not None and stale.step == 6, "best.json was written: nothing was tested"
    assert any(name.startswith(".best.json.") for name in os.listdir(run.path))
    best = run.checkpoints / "step-000000009"
    assert locate(run.path, which="best").checkpoint == best
    train(run.path, resume=True)
    found = read_best(run)
    assert found is not None and found.step == 9 and found.value > stale.value
    located = locate(run.path, which="best")
    assert located.checkpoint == best and located.notes == ()
    assert open_store(run).steps() == [9]  # the retention that the kill prevented
    assert [name for name in os.listdir(run.path) if name.startswith(".")] == []
    [result] = reconv.evaluate(run.path, best=True)
    assert result.metrics["top1"] == found.value


def test_all_checkpoints_gone_is_an_error_and_not_a_new_start(run: RunDir) -> None:
    shutil.rmtree(run.checkpoints / NEWEST)
    with pytest.raises(
        CheckpointError, match=r"(?s)checkpoints of this run are gone.*has 2 saves, the last one at step 6"
    ) as error:
        train(run.path, resume=True)
    assert error.value.code == ExitCode.CHECKPOINT
    assert "without --resume" in error.value.hint


def test_a_run_that_ended_before_its_first_checkpoint_starts_again_and_says_what_is_lost(run: RunDir) -> None:
    shutil.rmtree(run.checkpoints)
    lines = run.events.read_text().splitlines()
    run.events.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["kind"] != "checkpoint"))
    train(run.path, resume=True)
    texts = [event.text for event in read_events(run.events) if isinstance(event, LogMessage)]
    assert any("no checkpoint yet (6 steps are lost): starting from step 0" in text for text in texts)


def test_a_checkpoint_of_another_run_is_refused_on_resume_and_nothing_is_changed(run: RunDir, tmp_path: Path) -> None:
    other = tmp_path / "other"
    train(other)
    foreign = run.checkpoints / "step-000000009"
    shutil.copytree(other / "checkpoints" / foreign.name, foreign)
    for use in (
        lambda: train(run.path, resume=True),
        lambda: reconv.evaluate(run.path),
        lambda: reconv.evaluate(run.path, all=True),
        lambda: reconv.evaluate(foreign),
        lambda: average(run.path),
    ):
        with pytest.raises(CheckpointError, match="step-000000009 is a checkpoint of another run"):
            use()
    assert sorted(os.listdir(run.checkpoints)) == [NEWEST, foreign.name]
    outside = foreign.rename(tmp_path / foreign.name)
    assert reconv.evaluate(outside)[0].step == 9


def test_an_edited_recipe_is_refused_unless_the_result_does_not_depend_on_the_field(run: RunDir) -> None:
    original = run.recipe.read_text()
    run.recipe.write_text(original.replace("momentum: 0.9", "momentum: 0.8"))
    assert run.recipe.read_text() != original
    with pytest.raises(
        RecipeError, match=r"(?s)recipe\.yaml was changed.*momentum: 0\.9 in step-000000006, 0\.8 in"
    ) as error:
        reconv.train(run.recipe, out=run.path, resume=True)
    assert error.value.what.count("\n") == 1
    run.recipe.write_text(original.replace("keep_last: 1", "keep_last: 2"))
    reconv.train(run.recipe, out=run.path, resume=True)
    assert open_store(run).steps() == [6, 9]


def not_json(folder: Path) -> None:
    (folder / "state.json").write_text("{")
    sign(folder)


def no_object(folder: Path) -> None:
    (folder / "state.json").write_text("[1, 2]")
    sign(folder)


def no_history(folder: Path) -> None:
    change_state(folder, history=None)


def evaluation_without_the_metric(folder: Path) -> None:
    change_state(folder, history=[{"step": 3, "weights": "raw", "metrics": {"loss": 1.0}}])


def step_of_a_billion(folder: Path) -> None:
    (folder / "state.json").write_text(
        json.dumps({**json.loads((folder / "state.json").read_text()), "step": 10**9, "total_steps": 10**9})
    )
    sign(folder, step=10**9)
    folder.rename(folder.with_name("step-1000000000"))


def another_step_in_the_state(folder: Path) -> None:
    change_state(folder, step=10**9)


def garbage_tensors(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0" + bytes(range(200)))
    sign(folder)


def tensors_of_another_shape(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    safetensors.torch.save_file({name: torch.ones(3, 3) for name in tensors}, folder / "model.safetensors")
    sign(folder)


MALFORMED = [not_json, no_object, no_history, evaluation_without_the_metric, another_step_in_the_state]
MALFORMED += [garbage_tensors, tensors_of_another_shape]


@pytest.mark.parametrize("break_it", MALFORMED, ids=lambda function: function.__name__)
def test_malformed_contents_with_right_checksums_exit_with_code_4(
    run: RunDir, break_it: Callable[[Path], None]
) -> None:
    break_it(run.checkpoints / NEWEST)
    for use in (lambda: train(run.path, resume=True), lambda: reconv.evaluate(run.path)):
        with pytest.raises(CheckpointError) as error:
            use()
        assert error.value.code == ExitCode.CHECKPOINT
        assert NEWEST in error.value.where and error.value.hint


def test_a_step_after_the_end_of_the_run_exits_with_code_4(run: RunDir) -> None:
    step_of_a_billion(run.checkpoints / NEWEST)
    with pytest.raises(CheckpointError, match=r"step 1,000,000,000, but the run has 9 steps") as error:
        train(run.path, resume=True)
    assert error.value.code == ExitCode.CHECKPOINT


def test_a_checkpoint_without_optimizer_state_is_evaluated_but_not_resumed(run: RunDir) -> None:
    (run.checkpoints / NEWEST / "optimizer.safetensors").unlink()
    sign(run.checkpoints / NEWEST)
    assert reconv.evaluate(run.path)[0].step == 6
    with pytest.raises(CheckpointError, match="the checkpoint has no optimizer"):
        train(run.path, resume=True)


def test_deep_json_in_a_manifest_is_damage(run: RunDir) -> None:
    (run.checkpoints / NEWEST / "manifest.json").write_bytes(b'{"a":' * 20_000)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        reconv.evaluate(run.checkpoints / NEWEST)
