"""Sharding or offloading optimizer state changes no bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import in_ranks

import reconv
from reconv.core.errors import RecipeError
from reconv.optim import build_optimizer
from reconv.optim import optimizer as optimizer_module
from reconv.optim.sharded_optimizer import shard_owners
from reconv.recipe.loader import load
from reconv.recipe.parts.optimizer import OptimizerConfig

from .conftest import Outcome, Train

SHORT = {
    "length": "4step",
    "schedule.warmup": "0ep",
    "save.every": "2step",
    "evaluate.every": "off",
    "data.subset_percent": "30",
    "batch.size": "48",
    "batch.group": "16",
    "batch.micro": "16",
    "engine.num_threads": "1",
    "parallel.reduce": "ordered",
}


def train_here(out: str, settings: dict[str, str], resume: bool = False) -> int:
    given = [(field, value, "--set") for field, value in settings.items()]
    return reconv.train("quickstart", out=out, overrides=given, resume=resume).exit_code


def differing(one: Outcome, other: Outcome) -> list[str]:
    ours, theirs = one.bits(), other.bits()
    assert len(ours) > 40 and set(ours) == set(theirs)
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


@pytest.mark.parametrize("kind", ["sgd", "rmsprop-tf"])
def test_sharded_optimizer_saves_the_checkpoint_of_one_process(train: Train, kind: str) -> None:
    settings = {**SHORT, "optimizer.name": kind, "optimizer.nesterov": "false", "schedule.lr": "0.01"}
    settings |= {"optimizer.layer_decay": "0.7", "optimizer.backbone_lr_scale": "0.3"}
    whole = train("whole", settings)
    folder = Path.cwd() / f"divided-{kind}"
    assert in_ranks(3, train_here, str(folder), {**settings, "memory.shard_optimizer": "true"}) == [0, 0, 0]
    assert differing(whole, Outcome(folder, {})) == []


@pytest.mark.slow
def test_sharded_run_resumes_on_another_number_of_ranks(train: Train) -> None:
    divided = {**SHORT, "memory.shard_optimizer": "true"}
    whole = train("whole", {**SHORT, "length": "6step"})
    folder = str(Path.cwd() / "moved")
    for size, steps in ((3, "2step"), (2, "4step"), (1, "6step")):
        # The schedule is stretched as a run is extended; a constant rate does not care.
        settings = {**divided, "length": steps, "schedule.name": "constant"}
        assert in_ranks(size, train_here, folder, settings, steps != "2step") == [0] * size
    constant = train("constant", {**SHORT, "length": "6step", "schedule.name": "constant"})
    assert differing(constant, Outcome(Path(folder), {})) == []
    assert differing(constant, whole) != []


@pytest.mark.parametrize("kind", ["sgd", "lars", "rmsprop", "adamw", "lamb"])
def test_optimizer_offload_is_bitwise_equal(train: Train, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**SHORT, "optimizer.name": kind, "optimizer.nesterov": "false", "schedule.lr": "0.01"}
    whole = train("whole", settings)
    monkeypatch.setattr(optimizer_module, "_OFFLOAD_CHUNK_BYTES", 10_000)
    assert differing(whole, train("host", {**settings, "memory.offload_optimizer": "true"})) == []


def test_offloaded_optimizer_state_is_not_on_the_device() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = build_optimizer(OptimizerConfig(), model)
    before = {name: tensor.data_ptr() for name, tensor in optimizer.state_dict().items()}
    optimizer.offload()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for group in optimizer.param_groups():
        stored = optimizer.state_dict()
        assert {t.data_ptr() for t in group.state_tensors["momentum"]}.isdisjoint(t.data_ptr() for t in stored.values())
    assert all(tensor.data_ptr() != before[name] for name, tensor in optimizer.state_dict().items())


def test_shards_are_whole_parameters_and_balanced() -> None:
    sizes = {f"p{i}": size for i, size in enumerate([100, 60, 50, 40, 30, 20, 1, 1])}
    owner = shard_owners(sizes, 3)
    loads = [sum(size for name, size in sizes.items() if owner[name] == rank) for rank in range(3)]
    assert sum(loads) == 302 and max(loads) - min(loads) <= 20


@pytest.mark.parametrize(
    "settings",
    [
        {"memory.shard_optimizer": "true", "precision.mode": "16.16"},
        {"memory.offload_optimizer": "true", "optimizer.momentum": "0"},
        {"memory.offload_optimizer": "true", "engine.cuda_graphs": "on"},
        {"memory.activation_checkpointing": "all", "engine.compile": "on"},
    ],
)
def test_invalid_memory_settings_are_an_error(settings: dict[str, str]) -> None:
    with pytest.raises(RecipeError, match="memory"):
        load("quickstart", [(field, value, "--set") for field, value in settings.items()])
