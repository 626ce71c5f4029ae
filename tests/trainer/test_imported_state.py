"""Checkpoints of other programs are continued: the run ends with the weights of one that was never interrupted."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import reconv
from reconv.checkpoint.interop.torch_programs import read_training_state
from reconv.checkpoint.store import CheckpointStore
from reconv.core.custom_code import CustomCodeError
from reconv.core.errors import CheckpointError, RecipeError
from reconv.distributed.collectives import decode, encode
from reconv.logging.event_log import read_events
from reconv.logging.events import LogMessage, TrainProgress
from reconv.logging.run_dir import RunDir
from reconv.models import build_model
from reconv.trainer.callbacks.custom import Callback, RunInfo
from reconv.trainer.imported_state import ImportedState

SHORT: dict[str, Any] = {
    "model.name": "resnet8_cifar",
    "data.num_samples": 96,
    "data.source": "synthetic",
    "data.num_classes": 4,
    "data.preprocess.size": 16,
    "batch.size": 16,
    "length": "3ep",
    "save.every": "1ep",
    "save.keep_last": 5,
    "evaluate.every": "off",
    "log.every": "1step",
    "schedule.name": "cosine",
    "schedule.warmup": "2ep",
    "data.num_workers": 0,
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer.name": "sgd", "optimizer.momentum": 0.9},
    "rmsprop": {
        "optimizer.name": "rmsprop",
        "optimizer.momentum": 0.9,
        "optimizer.nesterov": False,
        "schedule.lr": 0.001,
    },
    "adamw": {"optimizer.name": "adamw", "optimizer.nesterov": False, "schedule.lr": 0.001},
}


def train(out: Path, **settings: Any) -> Path:
    given = {**SHORT, **settings}
    overrides = [(name, value, "test") for name, value in given.items() if value is not None]
    return reconv.train("quickstart", out=out, overrides=overrides, console="quiet").folder


def tensors(run: Path, step: int, part: str) -> dict[str, Tensor]:
    folder = CheckpointStore(RunDir(run).checkpoints).path(step)
    return safetensors.torch.load_file(folder / f"{part}.safetensors")


def notes(run: Path) -> str:
    return "\n".join(event.text for event in read_events(RunDir(run).events) if isinstance(event, LogMessage))


def torch_optimizer(kind: str, groups: list[list[str]], run: Path, step: int) -> dict[str, Any]:
    """torch's own state of an optimizer with these groups of parameters, at a step of a run."""
    weights, state = tensors(run, step, "model"), tensors(run, step, "optimizer")
    parameters = {name: torch.nn.Parameter(weights[name]) for group in groups for name in group}
    lists = [{"params": [parameters[name] for name in group]} for group in groups]
    if kind == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(lists, lr=0.1, momentum=0.9)
    elif kind == "rmsprop":
        optimizer = torch.optim.RMSprop(lists, lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(lists, lr=0.1)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes the state, with torch's names
    theirs = {"momentum": "momentum_buffer", "square": "square_avg"}
    for key, tensor in state.items():
        name, _, parameter_name = key.partition(".")
        if parameter_name in parameters:
            optimizer.state[parameters[parameter_name]][theirs.get(name, name)] = tensor
    return optimizer.state_dict()


def names(run: Path) -> list[str]:
    return [name for name, _ in build_model("resnet8_cifar", num_classes=4).named_parameters()]


def torchvision(run: Path, kind: str, step: int, epochs: int) -> dict[str, Any]:
    args = argparse.Namespace(epochs=3, lr=0.1)
    optimizer = torch_optimizer(kind, [names(run)], run, step)
    weights = tensors(run, step, "model")
    return {"model": ordered(weights), "optimizer": optimizer, "epoch": epochs - 1, "args": args, "lr_scheduler": {}}


def torchvision_norms(run: Path, kind: str, step: int, epochs: int) -> dict[str, Any]:
    weights = tensors(run, step, "model")
    norms = [name for name in names(run) if f"{name.rpartition('.')[0]}.running_mean" in weights]
    groups = [[name for name in names(run) if name not in norms], norms]
    return {**torchvision(run, kind, step, epochs), "optimizer": torch_optimizer(kind, groups, run, step)}


def nvidia(run: Path, kind: str, step: int, epochs: int) -> dict[str, Any]:
    groups = [[name for name in names(run) if ("bn" in name) == is_bn] for is_bn in (True, False)]
    weights = {f"module.{name}": tensor for name, tensor in ordered(tensors(run, step, "model")).items()}
    optimizer = torch_optimizer(kind, groups, run, step)
    return {"epoch": epochs, "arch": "resnet50", "state_dict": weights, "best_prec1": 1.0, "optimizer": optimizer}


def example(run: Path, kind: str, step: int, epochs: int) -> dict[str, Any]:
    optimizer = torch_optimizer(kind, [names(run)], run, step)
    weights = ordered(tensors(run, step, "model"))
    return {"epoch": epochs, "state_dict": weights, "best_acc1": torch.tensor(1.0), "optimizer": optimizer}


def timm(run: Path, kind: str, step: int, epochs: int) -> dict[str, Any]:
    weights = ordered(tensors(run, step, "model"))
    groups = [[name for name in names(run) if (weights[name].dim() <= 1) == is_vector] for is_vector in (True, False)]
    optimizer = torch_optimizer(kind, groups, run, step)
    return {"epoch": epochs - 1, "state_dict": weights, "optimizer": optimizer, "version": 2, "args": {}}


def ordered(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in the order of the network, as state_dict() has them."""
    return {name: weights[name] for name in build_model("resnet8_cifar", num_classes=4).state_dict()}


Layout = Callable[[Path, str, int, int], dict[str, Any]]
LAYOUTS: list[Layout] = [torchvision, torchvision_norms, nvidia, example, timm]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Whole runs of three epochs, by optimizer."""
    runs: dict[str, Path] = {}

    def run(kind: str) -> Path:
        if kind not in runs:
            runs[kind] = train(tmp_path_factory.mktemp("runs") / kind, **OPTIMIZERS[kind])
        return runs[kind]

    return run


@pytest.mark.parametrize(
    ("layout", "kind"), [*((layout, "sgd") for layout in LAYOUTS), (torchvision, "rmsprop"), (timm, "adamw")]
)
def test_a_checkpoint_of_another_program_is_continued_bit_by_bit(
    layout: Layout, kind: str, finished: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = finished(kind)
    torch.save(layout(whole, kind, 6, 1), tmp_path / "checkpoint.pth.tar")
    settings = {**OPTIMIZERS[kind], "model.resume_from": str(tmp_path / "checkpoint.pth.tar")}
    continued = train(tmp_path / "run", **settings)
    for part in ("model", "optimizer"):
        expected = tensors(whole, 18, part)
        actual = tensors(continued, 18, part)
        assert expected.keys() == actual.keys()
        assert all(torch.equal(expected[name], actual[name]) for name in expected)
    rates = [
        {event.step: event.lr for event in read_events(RunDir(run).events) if isinstance(event, TrainProgress)}
        for run in (whole, continued)
    ]
    assert rates[1] == {step: lr for step, lr in rates[0].items() if step > 6}
    text = notes(continued)
    assert "after epoch 1 = step 6" in text and "of 23 parameters" in text and "lost" not in text


class FailAt(Callback):
    """Ends a run with an error after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: RunInfo) -> None:
        if run.step == self.step:
            raise RuntimeError("lost power")


def test_the_last_epochs_count_whole_and_the_first_checkpoint_can_be_lost(
    finished: Callable[[str], Path], tmp_path: Path
) -> None:
    """A run that is killed before its first own checkpoint continues from the file again, not from step 0."""
    whole = finished("sgd")
    torch.save(nvidia(whole, "sgd", 12, 2), tmp_path / "checkpoint.pth.tar")
    settings = {**OPTIMIZERS["sgd"], "model.resume_from": str(tmp_path / "checkpoint.pth.tar")}
    overrides = [(name, value, "test") for name, value in {**SHORT, **settings, "save.every": "3ep"}.items()]
    out = tmp_path / "run"
    with pytest.raises(CustomCodeError):
        reconv.train("quickstart", out=out, overrides=overrides, console="quiet", callbacks=[FailAt(14)])
    assert not RunDir(out).checkpoints.exists() or not list(RunDir(out).checkpoints.iterdir())
    reconv.train("quickstart", out=out, overrides=overrides, resume=True, console="quiet", callbacks=[FailAt(99)])
    expected, actual = tensors(whole, 18, "model"), tensors(out, 18, "model")
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_ranks_send_an_imported_state_to_each_other(finished: Callable[[str], Path], tmp_path: Path) -> None:
    torch.save(nvidia(finished("sgd"), "sgd", 12, 2), tmp_path / "c.pth")
    state = read_training_state(tmp_path / "c.pth")
    received = decode(memoryview(encode(ImportedState(state, 12, ("a note",)))))
    assert isinstance(received, ImportedState) and (received.step, received.notes) == (12, ("a note",))
    momentum = received.state.optimizer["momentum"]
    assert all(torch.equal(momentum[name], state.optimizer["momentum"][name]) for name in momentum)


def test_what_a_file_lacks_is_named(finished: Callable[[str], Path], tmp_path: Path) -> None:
    content = nvidia(finished("sgd"), "sgd", 6, 1)
    del content["optimizer"]
    torch.save(content, tmp_path / "c.pth")
    run = train(tmp_path / "run", **{"model.resume_from": str(tmp_path / "c.pth"), "ema.decay": 0.9})
    assert "lost: the file has no state of the optimizer: momentum starts at zero" in notes(run)
    assert "lost: the file has no average of weights" in notes(run)


def test_another_learning_rate_than_the_files_is_named(finished: Callable[[str], Path], tmp_path: Path) -> None:
    torch.save(example(finished("sgd"), "sgd", 6, 1), tmp_path / "c.pth")
    settings = {"model.resume_from": str(tmp_path / "c.pth"), "schedule.lr": 0.7}
    assert "the learning rate of the file is 0.1; this recipe has" in notes(train(tmp_path / "run", **settings))


def test_averages_and_loss_scales_are_read(tmp_path: Path) -> None:
    weights = {"fc.weight": torch.ones(2, 3)}
    average = {"module.fc.weight": torch.zeros(2, 3), "n_averaged": torch.tensor(3)}
    scaler = {"scale": 1024.0, "growth_factor": 2.0, "_growth_tracker": 7}
    torch.save({"model": weights, "epoch": 4, "model_ema": average, "scaler": scaler}, tmp_path / "c.pth")
    state = read_training_state(tmp_path / "c.pth")
    assert (state.program, state.epochs, state.loss_scale) == ("torchvision", 5, (1024.0, 7))
    assert state.ema is not None and state.ema.keys() == {"fc.weight"}


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("made",))


@pytest.mark.parametrize("content", [{"state_dict": {}, "epoch": Evil()}, {"optimizer": Evil(), "epoch": 3}])
def test_no_code_of_a_checkpoint_runs(content: dict[str, Any], tmp_path: Path) -> None:
    torch.save(content, tmp_path / "c.pth")
    with pytest.raises(CheckpointError, match=r"would run \w+\.mkdir"):
        read_training_state(tmp_path / "c.pth")
    assert not Path("made").exists()


@pytest.mark.parametrize(
    "content", [{"fc.weight": torch.ones(2)}, {"state_dict": {}, "epoch": "5"}, {"epoch": -1}, [1]]
)
def test_a_file_without_an_epoch_cannot_be_continued(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "c.pth")
    with pytest.raises(CheckpointError, match="cannot be continued from this file"):
        read_training_state(tmp_path / "c.pth")


def test_weights_of_another_network_are_refused_before_there_is_a_run(tmp_path: Path) -> None:
    torch.save({"state_dict": {"conv9.weight": torch.ones(2, 3)}, "epoch": 1}, tmp_path / "c.pth")
    with pytest.raises(CheckpointError, match="the weights do not match the model"):
        train(tmp_path / "run", **{"model.resume_from": str(tmp_path / "c.pth")})
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_to_continue_and_initial_weights_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"model\.resume_from: has the weights, too"):
        train(tmp_path / "run", **{"model.resume_from": "a.pth", "model.init": "b.pth"})
