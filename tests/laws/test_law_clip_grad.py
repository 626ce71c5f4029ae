"""Gradient clipping sees the whole gradient: micro-batches, ranks, shards and pipelines change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import in_ranks

import reconv

from .conftest import Outcome, Train

SHORT = {
    "length": "4step",
    "schedule.warmup": "0ep",
    "save.every": "4step",
    "evaluate.every": "off",
    "data.subset_percent": "30",
    "batch.size": "48",
    "batch.group": "8",
    "batch.micro": "48",
    "engine.num_threads": "1",
}
MODES = {
    "norm": {"optimizer.clip_grad": "0.5"},
    "value": {"optimizer.clip_grad": "0.01", "optimizer.clip_mode": "value"},
    "agc": {"optimizer.clip_grad": "0.01", "optimizer.clip_mode": "agc"},
}
LAMB = {"optimizer.name": "lamb", "optimizer.nesterov": "false", "schedule.lr": "0.02", "optimizer.clip_grad": "0.1"}


def train_here(out: str, settings: dict[str, str]) -> int:
    given = [(field, value, "--set") for field, value in settings.items()]
    return reconv.train("quickstart", out=out, overrides=given).exit_code


def differing(one: Outcome, other: Outcome) -> list[str]:
    ours, theirs = one.bits(), other.bits()
    assert len(ours) > 40 and set(ours) == set(theirs)
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_give_the_same_bits(mode: str, train: Train) -> None:
    settings = {**SHORT, **MODES[mode], "parallel.reduce": "ordered"}
    whole = train("whole", settings)
    assert differing(whole, train("split", {**settings, "batch.micro": "16"})) == []
    assert differing(whole, train("unclipped", {**settings, "optimizer.clip_grad": "off"})) != []


@pytest.mark.slow
def test_ranks_with_sharded_state_give_the_bits_of_one_process(train: Train) -> None:
    settings = {**SHORT, **LAMB, "parallel.reduce": "ordered"}
    folder = Path.cwd() / "sharded"
    assert in_ranks(3, train_here, str(folder), {**settings, "memory.shard_optimizer": "true"}) == [0, 0, 0]
    assert differing(train("whole", settings), Outcome(folder, {})) == []


@pytest.mark.slow
def test_a_pipeline_gives_the_bits_of_one_process(train: Train) -> None:
    settings = {**SHORT, **LAMB, "batch.micro": "8"}
    pipeline = {"parallel.pipeline_stages": "2", "parallel.pipeline_splits": "[layer2.0]"}
    folder = Path.cwd() / "pipeline"
    assert in_ranks(2, train_here, str(folder), {**settings, **pipeline}) == [0, 0]
    assert differing(train("whole", settings), Outcome(folder, {})) == []
