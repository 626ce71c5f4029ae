"""Checkpoints know their run, recipe and step, and are refused in the place of another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from checkpoint_examples import RECIPE_DIGEST, save, sign, start_run

from reconv.checkpoint import manifest
from reconv.checkpoint.locate import locate
from reconv.checkpoint.run_identity import read_identity, write_identity
from reconv.checkpoint.store import MisplacedCheckpointError, open_store
from reconv.core.errors import CheckpointError, ExitCode


def test_run_id_recipe_and_step_are_in_the_manifest_and_the_state(tmp_path: Path) -> None:
    run = start_run(tmp_path, steps=(10,))
    identity = read_identity(run)
    found = manifest.read(run.checkpoints / "step-000000010")
    assert (found.run_id, found.recipe_digest, found.step) == (identity.run_id, RECIPE_DIGEST, 10)
    state = open_store(run).read_state(run.checkpoints / "step-000000010")
    assert (state["run_id"], state["recipe_digest"], state["step"]) == (identity.run_id, RECIPE_DIGEST, 10)
    assert read_identity(start_run(tmp_path)).run_id != identity.run_id


@pytest.mark.parametrize("field", ["run_id", "recipe_digest", "step"])
def test_an_identity_edited_in_the_manifest_is_damage(tmp_path: Path, field: str) -> None:
    run = start_run(tmp_path, steps=(10,))
    path = run.checkpoints / "step-000000010" / "manifest.json"
    content = json.loads(path.read_text())
    content[field] = 20 if field == "step" else "other"
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="its digest does not match its content"):
        locate(run.checkpoints / "step-000000010")


@pytest.mark.parametrize("which", ["newest", 20, "checkpoint", "weights file"])
def test_a_checkpoint_of_another_run_is_refused_by_name(tmp_path: Path, which: str | int) -> None:
    run, other = start_run(tmp_path, steps=(10,)), start_run(tmp_path, steps=(20,))
    copied = run.checkpoints / "step-000000020"
    shutil.copytree(other.checkpoints / copied.name, copied)
    named = {"checkpoint": copied, "weights file": copied / "model.safetensors"}.get(str(which), run.path)
    with pytest.raises(MisplacedCheckpointError, match="step-000000020 is a checkpoint of another run") as refusal:
        locate(named, which=which if which in ("newest", 20) else "newest")
    assert refusal.value.code == ExitCode.CHECKPOINT
    assert read_identity(other).run_id in refusal.value.why and "--init" in refusal.value.hint
    outside = tmp_path / "outside"
    copied.rename(outside)
    assert locate(outside).checkpoint == outside
    assert locate(run.path).checkpoint == run.checkpoints / "step-000000010"


def test_a_renamed_checkpoint_is_refused_with_the_command_that_renames_it_back(tmp_path: Path) -> None:
    run = start_run(tmp_path, steps=(10,))
    renamed = run.checkpoints / "step-000000500"
    (run.checkpoints / "step-000000010").rename(renamed)
    for path in (run.path, renamed):
        with pytest.raises(MisplacedCheckpointError, match=r"step-000000500 is the checkpoint of step 10\b") as refusal:
            locate(path)
        assert refusal.value.hint.endswith(f"mv '{renamed}' '{run.checkpoints}/step-000000010'")


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path: Path) -> None:
    run = start_run(tmp_path, steps=(10, 20))
    sign(run.checkpoints / "step-000000020", recipe_digest="f" * 32)
    with pytest.raises(MisplacedCheckpointError, match="step-000000020 was trained with another recipe"):
        locate(run.path)
    write_identity(run, read_identity(run).with_recipe("f" * 32))  # the run was extended
    assert locate(run.path).checkpoint == run.checkpoints / "step-000000020"
    assert locate(run.path, which=10).checkpoint == run.checkpoints / "step-000000010"


def test_pruning_neither_counts_nor_deletes_a_checkpoint_of_another_run(tmp_path: Path) -> None:
    run, other = start_run(tmp_path), start_run(tmp_path, steps=(15, 90))
    for step in (10, 20, 30):
        save(run, step)
    for name in ("step-000000015", "step-000000090"):
        shutil.copytree(other.checkpoints / name, run.checkpoints / name)
    assert open_store(run).prune(keep_last=2) == [10]
    assert open_store(run).steps() == [15, 20, 30, 90]


def test_saving_moves_a_checkpoint_of_another_run_aside(tmp_path: Path) -> None:
    run, other = start_run(tmp_path, steps=(10,)), start_run(tmp_path, steps=(20,))
    foreign = manifest.digest(other.checkpoints / "step-000000020")
    shutil.copytree(other.checkpoints / "step-000000020", run.checkpoints / "step-000000020")
    save(run, 20)
    save(run, 20)
    assert locate(run.path).checkpoint == run.checkpoints / "step-000000020"
    [aside] = run.checkpoints.glob("misplaced-*")
    assert manifest.digest(aside) == foreign and manifest.digest(run.checkpoints / "step-000000020") != foreign


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "a version of Reconv that wrote none; this is"),
        ("{", "it is damaged"),
        ('{"format": 1, "run_id": "", "recipe_digests": ["a"]}', "it is damaged"),
        ('{"format": 7}', "it has format 7"),
    ],
)
def test_a_run_without_a_usable_identity_exits_with_code_4(tmp_path: Path, content: str | None, why: str) -> None:
    run = start_run(tmp_path, steps=(10,))
    run.identity.unlink() if content is None else run.identity.write_text(content)
    with pytest.raises(CheckpointError, match=r"run\.json cannot be used") as refusal:
        locate(run.path)
    assert refusal.value.code == ExitCode.CHECKPOINT
    assert refusal.value.where == str(run.identity) and why in refusal.value.why
