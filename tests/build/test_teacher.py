"""Distillation runs: resume, micro-batches, and teachers that do not match the run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

import reconv
from reconv.checkpoint.safetensors_bytes import encode
from reconv.checkpoint.store import CheckpointStore
from reconv.core.errors import CheckpointError, ExitCode, PreemptedError, RecipeError, UsageError
from reconv.logging.event_log import read_events
from reconv.logging.events import Event, LogMessage, TrainProgress
from reconv.logging.run_dir import RunDir

Run = Callable[..., Path]
SHORT = {
    "length": "6step",
    "schedule.warmup": "1step",
    "save.every": "6step",
    "evaluate.every": "off",
    "log.every": "1step",
    "batch.size": "60",
    "batch.group": "15",
    "augment.mixup.alpha": "0.3",
    "ema.decay": "0.9",
}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def train(name: str, resume: bool = False, on_event: Callable[[Event], None] | None = None, **given: str) -> Path:
        settings = {**SHORT, **{field.replace("__", "."): value for field, value in given.items()}}
        overrides = [(field, value, "--set") for field, value in settings.items()]
        out = tmp_path / name
        return reconv.train("quickstart", out=out, overrides=overrides, resume=resume, on_event=on_event).folder

    return train


@pytest.fixture
def teacher(run: Run) -> Path:
    return run("teacher", seed="9", model__name="resnet14_cifar")


def newest(folder: Path) -> Path:
    path = CheckpointStore(RunDir(folder).checkpoints).newest().path
    assert path is not None
    return path


def bits(folder: Path) -> dict[str, Tensor]:
    files = list(newest(folder).glob("*.safetensors"))
    assert len(files) == 3
    return {f"{f.stem}/{n}": t for f in files for n, t in safetensors.torch.load_file(f).items()}


def test_teacher_changes_training_and_is_logged(run: Run, teacher: Path) -> None:
    plain, taught = run("plain"), run("taught", distill__teacher=str(teacher), distill__alpha="0.9")
    assert any(not t.equal(bits(taught)[name]) for name, t in bits(plain).items())
    notes = [e.text for e in read_events(RunDir(taught).events) if isinstance(e, LogMessage)]
    assert any("resnet14_cifar, ema weights, weight 0.9, temperature 4" in note for note in notes)


def test_alpha_zero_equals_the_run_without_a_teacher(run: Run, teacher: Path) -> None:
    plain, idle = bits(run("plain")), bits(run("idle", distill__teacher=str(teacher), distill__alpha="0"))
    assert [name for name in plain if not plain[name].equal(idle[name])] == []


@pytest.mark.slow
def test_k_micro_batches_equal_one_batch_with_a_teacher(run: Run, teacher: Path) -> None:
    settings = {"distill__teacher": str(teacher), "parallel__reduce": "ordered"}
    one, split = bits(run("one", batch__micro="60", **settings)), bits(run("split", batch__micro="15", **settings))
    assert [name for name in one if not one[name].equal(split[name])] == []
    exact = {"distill__teacher": str(teacher), "precision__mode": "fp64"}
    one, split = bits(run("one64", batch__micro="60", **exact)), bits(run("split64", batch__micro="15", **exact))
    assert max(float((one[n].double() - split[n].double()).abs().max()) for n in one) < 1e-12


def test_resume_is_bitwise_and_requires_the_same_teacher(run: Run, teacher: Path) -> None:
    settings = {"distill__teacher": str(newest(teacher) / "model.safetensors")}
    whole = run("whole", **settings)

    def stop(event: Event) -> None:
        if isinstance(event, TrainProgress) and event.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(PreemptedError):
        run("parts", on_event=stop, **settings)
    hidden = teacher.rename(teacher.with_name("hidden"))
    other = run("teacher", seed="10", model__name="resnet14_cifar")
    with pytest.raises(RecipeError, match="teacher has changed"):
        run("parts", resume=True, **settings)
    other.rename(other.with_name("other"))
    hidden.rename(teacher)
    resumed = run("parts", resume=True, **settings)
    one, two = bits(whole), bits(resumed)
    assert [name for name in one if not one[name].equal(two[name])] == []


def test_teacher_weights_file_without_metadata_needs_a_recipe(run: Run, teacher: Path, tmp_path: Path) -> None:
    file = tmp_path / "teacher.safetensors"
    file.write_bytes(encode(safetensors.torch.load_file(newest(teacher) / "model.safetensors")))
    with pytest.raises(UsageError, match=r"distill\.teacher_recipe"):
        run("a", distill__teacher=str(file))
    recipe = tmp_path / "teacher.yaml"
    recipe.write_text("extends: quickstart\nmodel:\n  name: resnet14_cifar\n")
    named = run("b", distill__teacher=str(newest(teacher) / "model.safetensors"))
    bare = run("c", distill__teacher=str(file), distill__teacher_recipe=str(recipe))
    one, two = bits(named), bits(bare)
    assert [name for name in one if not one[name].equal(two[name])] == []


def test_teacher_with_other_classes_or_preprocessing_is_an_error(run: Run, teacher: Path, tmp_path: Path) -> None:
    synthetic = {"data__source": "synthetic", "data__num_samples": "120", "data__num_classes": "4"}
    with pytest.raises(CheckpointError, match=r"(?s)other classes.*10 classes there, 4 here") as caught:
        run("a", distill__teacher=str(teacher), **synthetic)
    assert caught.value.code == ExitCode.CHECKPOINT
    with pytest.raises(RecipeError, match=r"(?s)other preprocessing.*data\.preprocess\.mean") as refused:
        run("b", distill__teacher=str(teacher), data__preprocess__mean="[0.25]")
    assert refused.value.hint.startswith("--set data.preprocess.mean=[")
    with pytest.raises(RecipeError, match=r"distill\.teacher"):
        run("c", distill__teacher_recipe="quickstart")
    with pytest.raises(CheckpointError, match="no such run"):
        run("d", distill__teacher=str(tmp_path / "absent"))


def test_teacher_weights_do_not_change(run: Run, teacher: Path) -> None:
    before = bits(teacher)
    run("student", distill__teacher=str(teacher))
    after = bits(teacher)
    assert all(torch.equal(before[name], after[name]) for name in before)
