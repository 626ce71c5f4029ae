"""`model.freeze_until` keeps the laws: resume, micro-batches and ranks, before, at and after the switch."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from ranks import in_ranks
from torch import Tensor

import reconv
from reconv.checkpoint.store import CheckpointStore
from reconv.core.errors import PreemptedError
from reconv.logging.event_log import read_events
from reconv.logging.events import Event, LogMessage, TrainProgress

from .conftest import Outcome, Train

FREEZE_STEPS = 4
SETTINGS = {
    "length": "8step",
    "schedule.warmup": "2step",
    "model.freeze_until": f"{FREEZE_STEPS}step",
    "save.every": "1step",
    "save.keep_last": "9",
    "log.every": "1step",
    "evaluate.every": "off",
    "data.subset_percent": "20",
    "batch.size": "64",
    "batch.group": "16",
    "batch.micro": "32",
    "ema.decay": "0.9",
    "engine.num_threads": "1",
}
FRESH = {"length": "2step", "schedule.warmup": "1step", "save.every": "2step", "evaluate.every": "off"}


@pytest.fixture
def weights(train: Train) -> str:
    return str(train("weights", FRESH).folder.path)


def settings(weights: str, **more: str) -> dict[str, str]:
    return {**SETTINGS, "model.init": weights, **{field.replace("__", "."): value for field, value in more.items()}}


def differing(one: Outcome, other: Outcome) -> list[str]:
    ours, theirs = one.bits(), other.bits()
    assert len(ours) > 60 and set(ours) == set(theirs)
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


def tensors_at(outcome: Outcome, step: int) -> dict[str, Tensor]:
    store = CheckpointStore(outcome.folder.checkpoints)
    parts = store.load(store.path(step)).parts
    return {f"{part}/{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


def test_the_backbone_is_untouched_until_its_step_and_trained_from_there_on(train: Train, weights: str) -> None:
    run = train("run", settings(weights, optimizer__weight_decay="0.1"))
    first, last_frozen, after = (tensors_at(run, step) for step in (1, FREEZE_STEPS, FREEZE_STEPS + 1))
    moved = {name for name in first if not torch.equal(first[name], last_frozen[name])}
    assert moved == {
        f"{part}/{name}.{which}"
        for part, name in (("model", "fc"), ("ema", "fc"), ("optimizer", "momentum.fc"))
        for which in ("weight", "bias")
    }
    backbone = {name for name in first if ".fc." not in name and "/fc." not in name}
    still = {name for name in backbone if torch.equal(last_frozen[name], after[name])}
    assert len(backbone) > 60 and still == set()
    texts = [event.text for event in read_events(run.folder.events) if isinstance(event, LogMessage)]
    assert any("until step 4 650 parameters are trained (fc.weight, fc.bias)" in text for text in texts)
    assert "the backbone is unfrozen: all parameters are trained from here on" in texts


@pytest.mark.parametrize("stop_at", [FREEZE_STEPS - 1, FREEZE_STEPS, FREEZE_STEPS + 1])
def test_a_run_stopped_around_the_switch_and_resumed_equals_the_whole_run(
    train: Train, weights: str, tmp_path: Path, stop_at: int
) -> None:
    whole = train("whole", settings(weights))

    def stop(event: Event) -> None:
        if isinstance(event, TrainProgress) and event.step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    given = [(field, value, "--set") for field, value in settings(weights).items()]
    with pytest.raises(PreemptedError):
        reconv.train("quickstart", out=tmp_path / "parts", overrides=given, on_event=stop)
    assert differing(whole, train("parts", settings(weights), resume=True)) == []


def test_adamw_counts_the_steps_of_the_backbone_from_the_switch_on(train: Train, weights: str) -> None:
    given = settings(
        weights, optimizer__name="adamw", optimizer__nesterov="false", optimizer__layer_decay="0.7", schedule__lr="0.01"
    )
    whole = train("whole", given)
    counts = {name: float(t) for name, t in whole.bits().items() if name.startswith("optimizer/step.")}
    assert len(counts) > 20
    assert all(count == (8 if "fc" in name else 8 - FREEZE_STEPS) for name, count in counts.items())
    train("parts", {**given, "schedule.decay_until": "8step", "length": "6step"})
    assert differing(whole, train("parts", {**given, "schedule.decay_until": "8step"}, resume=True)) == []


def train_here(out: str, given: dict[str, str]) -> int:
    overrides = [(field, value, "--set") for field, value in given.items()]
    return reconv.train("quickstart", out=out, overrides=overrides).exit_code


def trained(size: int, given: dict[str, str], name: str) -> Outcome:
    folder = Path.cwd() / f"{name}-{size}"
    assert in_ranks(size, train_here, str(folder), given) == [0] * size
    return Outcome(folder, {})


@pytest.mark.slow
def test_ordered_reduction_and_a_sharded_optimizer_give_the_bits_of_one_rank(weights: str) -> None:
    given = settings(weights, parallel__reduce="ordered")
    one = trained(1, given, "ordered")
    assert differing(one, trained(2, given | {"memory.shard_optimizer": "true"}, "sharded")) == []
    assert differing(one, trained(1, given | {"batch.micro": "16"}, "micro")) == []


@pytest.mark.slow
def test_fast_reduction_sums_each_gradient_once_after_the_switch(weights: str) -> None:
    """DDP is made for one set of trained parameters: the first one would not reduce those of the backbone."""
    given = settings(weights, precision__mode="fp64")
    one, two = trained(1, given, "fast").bits(), trained(2, given, "fast").bits()
    largest = max((one[name].double() - two[name].double()).abs().max().item() for name in one)
    assert set(one) == set(two) and 0 < largest < 1e-12
