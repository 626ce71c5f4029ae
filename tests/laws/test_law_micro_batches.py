"""Law 2: k micro-batches equal one batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import reconv

from .conftest import Outcome, Train

Bits = Callable[[dict[str, str]], dict[str, Tensor]]

SHORT = {
    "length": "10step",
    "schedule.warmup": "2step",
    "save.every": "10step",
    "evaluate.every": "off",
    "batch.size": "60",
    "batch.group": "15",
}
MIXED = {"augment.mixup.alpha": "0.3", "augment.cutmix.alpha": "1.0", "ema.decay": "0.9"}


@pytest.fixture(scope="module")
def undivided(tmp_path_factory: pytest.TempPathFactory) -> Bits:
    """The tensors of a run without micro-batches, which is trained once per settings."""
    known: dict[str, dict[str, Tensor]] = {}

    def run(settings: dict[str, str]) -> dict[str, Tensor]:
        if str(settings) not in known:
            given = [(field, value, "--set") for field, value in {**settings, "batch.micro": "60"}.items()]
            result = reconv.train("quickstart", out=tmp_path_factory.mktemp("undivided") / "run", overrides=given)
            known[str(settings)] = Outcome(result.folder, result.summary).bits()
        return known[str(settings)]

    return run


@pytest.mark.parametrize("micro", [15, 30])
def test_ordered_reduction_gives_the_same_bits_for_every_split(train: Train, undivided: Bits, micro: int) -> None:
    settings = {**SHORT, **MIXED, "parallel.reduce": "ordered"}
    one = undivided(settings)
    split = train("split", {**settings, "batch.micro": str(micro)}).bits()
    assert len(one) > 60
    assert [name for name in one if not torch.equal(one[name], split[name])] == []


@pytest.mark.parametrize("micro", [15, 30])
def test_fast_reduction_agrees_to_1e_12_in_fp64(train: Train, undivided: Bits, micro: int) -> None:
    settings = {**SHORT, **MIXED, "precision.mode": "fp64"}
    one = undivided(settings)
    split = train("split", {**settings, "batch.micro": str(micro)}).bits()
    assert max((one[n].double() - split[n].double()).abs().max().item() for n in one) < 1e-12


def test_ordered_reduction_with_an_uneven_last_group(train: Train) -> None:
    settings = {**SHORT, "batch.size": "50", "batch.group": "16", "parallel.reduce": "ordered"}  # 16, 16, 18
    one = train("one", {**settings, "batch.micro": "50"}).bits()
    split = train("split", {**settings, "batch.micro": "16"}).bits()
    assert [name for name in one if not torch.equal(one[name], split[name])] == []


def test_group_size_changes_the_result(train: Train) -> None:
    """Otherwise the tests above would hold trivially."""
    one = train("one", {**SHORT, "batch.group": "all"}).bits()
    other = train("other", {**SHORT, "batch.group": "15"}).bits()
    assert any(not torch.equal(one[n], other[n]) for n in one)
