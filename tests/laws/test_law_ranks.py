"""Law 3: N ranks equal one rank on the same global batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import in_ranks

import reconv
from reconv.logging.event_log import read_events
from reconv.logging.events import EvalFinished, TrainProgress

from .conftest import Outcome

SHORT = {
    "length": "6step",
    "schedule.warmup": "2step",
    "save.every": "6step",
    "log.every": "1step",
    "evaluate.every": "6step",
    "data.subset_percent": "30",
    "batch.size": "66",  # groups of 16, 16, 16, 16, 2, dealt 3 + 2, 2 + 2 + 1 and 2 + 1 + 1 + 1
    "batch.group": "16",
    "batch.micro": "16",
    "engine.num_threads": "1",
}
MIXED = {"augment.mixup.alpha": "0.3", "augment.cutmix.alpha": "1.0", "ema.decay": "0.9"}


def train_here(out: str, settings: dict[str, str], resume: bool = False) -> int:
    given = [(field, value, "--set") for field, value in settings.items()]
    return reconv.train("quickstart", out=out, overrides=given, resume=resume).exit_code


def trained(size: int, settings: dict[str, str], name: str = "") -> Outcome:
    """Train on `size` ranks, in a separate directory."""
    folder = Path.cwd() / (name or f"of-{size}")
    assert in_ranks(size, train_here, str(folder), settings) == [0] * size
    return Outcome(folder, {})


def differing(one: Outcome, other: Outcome) -> list[str]:
    ours, theirs = one.bits(), other.bits()
    assert len(ours) > 60 and set(ours) == set(theirs)
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


def losses(outcome: Outcome) -> list[float]:
    return [event.loss for event in read_events(outcome.folder.events) if isinstance(event, TrainProgress)]


def scores(outcome: Outcome) -> list[dict[str, float]]:
    events = read_events(outcome.folder.events)
    return [dict(event.metrics) for event in events if isinstance(event, EvalFinished)]


def test_ordered_reduction_gives_the_same_bits_on_1_2_3_and_4_ranks() -> None:
    settings = {**SHORT, **MIXED, "parallel.reduce": "ordered"}
    one = trained(1, settings)
    assert len(losses(one)) == 6
    for size in (2, 3, 4):
        several = trained(size, settings)
        assert differing(one, several) == []
        assert losses(several) == losses(one)
        assert scores(several) == scores(one)


def largest_difference(one: Outcome, other: Outcome) -> float:
    ours, theirs = one.bits(), other.bits()
    assert len(ours) > 40 and set(ours) == set(theirs)
    return max((ours[name].double() - theirs[name].double()).abs().max().item() for name in ours)


LONGER_IN_FP64 = {
    **SHORT,
    "length": "10step",
    "save.every": "10step",
    "evaluate.every": "off",
    "precision.mode": "fp64",
}


def test_fast_reduction_agrees_to_1e_12_in_fp64_after_10_steps() -> None:
    settings = {**LONGER_IN_FP64, **MIXED}
    assert 0 < largest_difference(trained(1, settings), trained(3, settings)) < 1e-12


def test_fast_reduction_gives_the_first_loss_of_one_rank() -> None:
    one, several = trained(1, SHORT), trained(4, SHORT)
    assert losses(several)[0] == pytest.approx(losses(one)[0], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "group"), [(3, "all"), (4, "25")])
def test_group_spanning_ranks_equals_the_group_on_one_rank(size: int, group: str) -> None:
    settings = {**LONGER_IN_FP64, "batch.size": "50", "batch.group": group, "batch.micro": "auto"}
    assert 0 < largest_difference(trained(1, settings), trained(size, settings)) < 1e-12


@pytest.mark.slow
def test_bf16_gradient_compression_is_close_but_not_equal() -> None:
    one = trained(1, SHORT)
    several = trained(2, {**SHORT, "parallel.gradient_compression": "bf16", "parallel.bucket_cap_mb": "0.05"})
    assert losses(several)[-1] == pytest.approx(losses(one)[-1], rel=0.05)
    assert differing(one, several) != []
