"""Every schedule equals its published formula at every step of a full ImageNet run.

The formulas are written out here once more, from the programs' descriptions, with epochs, iterations and warm-up in
their own terms; nothing of `reconv.optim.lr_schedule` is used to make the expected numbers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from reconv.recipe.loader import load
from reconv.recipe.parts.schedule import learning_rate
from reconv.recipe.plan import Facts, make_plan
from reconv.recipe.schema import Recipe

IMAGENET = 1_281_167


def rates(length: str, batch: int, num_train: int = IMAGENET, **schedule: Any) -> tuple[np.ndarray, int, int]:
    """The rate of every step of a run, its steps per epoch and its steps."""
    recipe = Recipe.model_validate({"length": length, "batch": {"size": batch}, "schedule": schedule})
    plan = make_plan(recipe, Facts(num_train, 50_000, 1000))
    all_rates = np.array([learning_rate(plan.schedule, step) for step in range(plan.total_steps)])
    return all_rates, int(plan.steps_per_epoch), plan.total_steps


def check(found: np.ndarray, formula: Callable[[int], float]) -> None:
    expected = np.array([formula(i) for i in range(len(found))])
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize(("epochs", "batch", "base", "warmup"), [(90, 2048, 2.048, 8), (250, 4096, 4.096, 16)])
def test_nvidias_cosine_changes_once_per_epoch_after_warm_up(epochs, batch, base, warmup) -> None:
    found, per_epoch, total = rates(
        f"{epochs}ep", batch, name="cosine", lr=0.256, base_batch_size=256, warmup=f"{warmup}ep", interval="epoch"
    )
    assert (per_epoch, total) == (IMAGENET // batch, epochs * (IMAGENET // batch))

    def formula(i: int) -> float:
        epoch = i // per_epoch
        if epoch < warmup:
            return base * (epoch + 1) / warmup
        e, es = epoch - warmup, epochs - warmup
        return 0.5 * (1 + math.cos(math.pi * e / es)) * base

    check(found, formula)


def test_nvidias_cosine_with_an_end_rate_stays_above_it() -> None:
    found, per_epoch, _ = rates("50ep", 4096, name="cosine", lr=4.096, warmup="5ep", interval="epoch", end_lr=0.5)

    def formula(i: int) -> float:
        epoch = i // per_epoch
        if epoch < 5:
            return 4.096 * (epoch + 1) / 5
        return 0.5 + (4.096 - 0.5) * (1 + math.cos(math.pi * (epoch - 5) / 45)) / 2

    check(found, formula)


def test_nvidias_linear_decays_once_per_epoch() -> None:
    found, per_epoch, _ = rates("90ep", 1024, name="linear", lr=1.024, warmup="8ep", interval="epoch")

    def formula(i: int) -> float:
        epoch = i // per_epoch
        return 1.024 * (epoch + 1) / 8 if epoch < 8 else 1.024 * (1 - (epoch - 8) / (90 - 8))

    check(found, formula)


def test_nvidias_steps_are_at_epochs_30_60_and_80() -> None:
    found, per_epoch, _ = rates(
        "90ep", 2048, name="multistep", lr=0.8, milestones=["30ep", "60ep", "80ep"], warmup="5ep", interval="epoch"
    )

    def formula(i: int) -> float:
        epoch = i // per_epoch
        if epoch < 5:
            return 0.8 * (epoch + 1) / 5
        return 0.8 * 0.1 ** sum(epoch >= m for m in (30, 60, 80))

    check(found, formula)


def test_nvidias_unused_exponential_ends_at_a_thousandth() -> None:
    found, per_epoch, _ = rates("90ep", 2048, name="exponential", lr=1.0, gamma=0.001, period="100%", interval="epoch")
    check(found, lambda i: 0.001 ** ((i // per_epoch) / 90))


@pytest.mark.parametrize(("gamma", "size", "base"), [(0.1, 30, 0.1), (0.98, 1, 0.36)])
def test_habanas_step_decays_by_gamma_per_period(gamma, size, base) -> None:
    found, per_epoch, _ = rates("90ep", 2048, name="step", lr=base, gamma=gamma, period=f"{size}ep")
    check(found, lambda i: base * gamma ** ((i // per_epoch) // size))


@pytest.mark.parametrize(
    ("base", "values", "milestones"),
    [
        (0.1, [0.275, 0.45, 0.625, 0.8, 0.08, 0.008, 0.0008], [1, 2, 3, 4, 30, 60, 80]),
        (0.1, [0.475, 0.85, 1.225, 1.6, 0.16, 0.016, 0.0016], [1, 2, 3, 4, 30, 60, 80]),
        (0.1, [0.1, 0.01, 0.001, 0.0001], [0, 30, 60, 80]),
    ],
)
def test_habanas_table_prepends_the_base_rate_and_appends_the_last_epoch(base, values, milestones) -> None:
    found, per_epoch, _ = rates(
        "90ep", 2048, name="piecewise", lr=base, milestone_lrs=values, milestones=[f"{m}ep" for m in milestones]
    )
    all_values, bounds = [base, *values], [0, *milestones, 90]

    def formula(i: int) -> float:
        epoch = i // per_epoch
        return next(v for v, low, high in zip(all_values, bounds, bounds[1:], strict=True) if low <= epoch < high)

    check(found, formula)


def test_habanas_resnext_cosine_is_counted_from_step_0_and_jumps_where_warm_up_ends() -> None:
    found, per_epoch, total = rates(
        "90ep",
        1024,
        name="cosine",
        lr=0.256,
        base_batch_size=256,
        warmup="8ep",
        warmup_from="zero",
        warmup_mode="replace",
    )
    lr0, warmup_steps = 0.256 * 1024 / 256, 8 * per_epoch

    def formula(step: int) -> float:
        if step < warmup_steps:
            return lr0 * step / warmup_steps
        return 0.5 * lr0 * (1 + math.cos(math.pi * step / (per_epoch * 90)))

    check(found, formula)
    assert total == per_epoch * 90
    assert found[warmup_steps - 1] > found[warmup_steps] + 0.01, "the published curve jumps down"


def test_habanas_piecewise_alternative_has_five_levels() -> None:
    found, per_epoch, _ = rates(
        "100ep", 1024, name="multistep", lr=0.128, base_batch_size=256, milestones=["30ep", "60ep", "80ep", "90ep"],
        warmup="5ep", warmup_from="zero",
    )  # fmt: skip
    lr0, boundaries, factors = 0.128 * 4, (30, 60, 80, 90), (1, 0.1, 0.01, 0.001, 1e-4)

    def formula(step: int) -> float:
        if step < 5 * per_epoch:
            return lr0 * step / (5 * per_epoch)
        return lr0 * factors[sum(step >= b * per_epoch for b in boundaries)]

    check(found, formula)


def test_habanas_lars_polynomial_has_its_own_horizon() -> None:
    """Theirs counts an epoch one step short, and takes 1 for 0 in the first step after warm-up; the rest is equal."""
    per_epoch, base, end = IMAGENET // 2048, 9.0, 1e-4
    warmup_steps = 3 * (per_epoch - 1)
    decay_steps = 36 * (per_epoch - 1) - warmup_steps + 1
    found, _, total = rates(
        "35ep", 2048, name="polynomial", lr=base, end_lr=end, warmup=f"{warmup_steps}step", warmup_from="zero",
        decay_until=f"{warmup_steps + decay_steps}step",
    )  # fmt: skip
    assert total == 35 * per_epoch < warmup_steps + decay_steps

    def formula(step: int) -> float:
        if step < warmup_steps:
            return base * step / warmup_steps
        gone = max(step - warmup_steps, 1)
        return (base - end) * (1 - gone / decay_steps) ** 2 + end

    assert found[warmup_steps] == base
    found[warmup_steps] = formula(warmup_steps)
    check(found, formula)


@pytest.mark.parametrize(("exponent", "batch", "epochs"), [(-13, 16384, 100), (-11, 768, 20)])
def test_graphcores_cosine_is_counted_from_step_0_and_scaled_by_warm_up(exponent, batch, epochs) -> None:
    found, per_epoch, total = rates(
        f"{epochs}ep", batch, name="cosine", lr=f"2^{exponent} per image", warmup="5ep", warmup_from="zero",
        warmup_mode="multiply",
    )  # fmt: skip
    lr0, w = 2.0**exponent * batch, 5 * per_epoch
    check(found, lambda i: lr0 / 2 * (1 + math.cos(math.pi * i / total)) * (i / w if i < w else 1))
    half = w // 2
    assert found[half] < lr0 * half / w, "the curve is scaled, not the peak"


@pytest.mark.parametrize(
    ("epochs", "batch", "num_train", "exponent", "tenths"),
    [(100, 1023, IMAGENET, -11, (3.0, 6.0, 8.0, 9.0)), (10, 32, 50_000, -6, (5.0, 7.5))],
)
def test_graphcores_steps_are_at_fractions_of_the_run(epochs, batch, num_train, exponent, tenths) -> None:
    found, per_epoch, total = rates(
        f"{epochs}ep", batch, num_train, name="multistep", lr=f"2^{exponent} per image", milestone_when="exceeded",
        milestones=[f"{10 * share:g}%" for share in tenths], warmup="5ep", warmup_from="zero", warmup_mode="multiply",
    )  # fmt: skip
    lr0, w = 2.0**exponent * batch, 5 * per_epoch
    assert all(total * share % 10 == 0 for share in tenths), "whole steps, where reaching and exceeding differ"

    def formula(i: int) -> float:
        return lr0 * 0.1 ** sum(10 * i > share * total for share in tenths) * min(1, i / w)

    check(found, formula)


def test_graphcores_smoke_test_follows_the_formula_at_every_step() -> None:
    plan = make_plan(load("cifar10-resnet8-gc").recipe, Facts(50_000, 10_000, 10)).schedule
    total, w = 10 * 1562, 5 * 1562

    def formula(i: int) -> float:
        return 2.0**-6 * 32 * 0.1 ** ((i > total / 2) + (i > 3 * total / 4)) * min(1, i / w)

    check(np.array([learning_rate(plan, step) for step in range(total)]), formula)


def test_fractional_milestone_drops_at_the_next_step() -> None:
    found, _, total = rates("1ep", 1, 101, name="multistep", lr=1, milestones=["30%", "60%", "90%"], gamma=0.5)
    check(found, lambda i: 0.5 ** sum(i > fraction * total for fraction in (0.3, 0.6, 0.9)))


def test_graphcores_exponential_drops_146_times_in_the_run() -> None:
    epochs, drops, decay = 350, 146, 0.97
    found, per_epoch, total = rates(
        f"{epochs}ep", 6144, name="exponential", lr="2^-14 per image", gamma=decay, num_periods=drops, staircase=True,
        warmup="5ep", warmup_from="zero", warmup_mode="multiply",
    )  # fmt: skip
    lr0, w = 2.0**-14 * 6144, 5 * per_epoch
    assert total == epochs * per_epoch

    def formula(i: int) -> float:
        level = i * drops // total  # floor(epoch / (epochs / drops)) without the rounding of fractions
        return lr0 * decay**level * min(1, i / w)

    check(found, formula)
    assert len(set(found[w:])) in (drops - 2, drops - 1, drops)


@pytest.mark.parametrize(
    ("batch", "lr", "warmup", "epochs", "per_epoch"),
    [
        (1920, 3.824, 5, 40, 667),
        (3200, 10.72, 2, 38, 400),
        (3840, 12.15, 2, 38, 333),
        (5120, 11.2, 2, 41, 250),
        (10240, 17.2, 2, 45, 125),
    ],
)
def test_graphcores_polynomial_falls_from_the_end_of_warm_up(batch, lr, warmup, epochs, per_epoch) -> None:
    found, steps, total = rates(
        f"{epochs}ep", batch, name="polynomial", lr=lr, end_lr=1e-4, warmup=f"{warmup}ep", warmup_from="zero"
    )
    assert (steps, total) == (per_epoch, per_epoch * epochs)
    w = warmup * per_epoch
    check(found, lambda i: lr * i / w if i <= w else (lr - 1e-4) * (1 - (i - w) / (total - w)) ** 2 + 1e-4)


def test_end_lr_ratio_is_relative_to_the_peak() -> None:
    found, _, total = rates("20ep", 1024, name="polynomial", lr="2^-10 per image", power=3, end_lr_ratio=1e-5)
    check(found, lambda i: (1 - 1e-5) * (1 - i / total) ** 3 + 1e-5)


def test_exponential_decay_is_smooth_or_staircase() -> None:
    smooth, per_epoch, _ = rates("20ep", 1024, name="exponential", lr=0.256, gamma=0.97, period="2.4ep")
    stairs, _, _ = rates("20ep", 1024, name="exponential", lr=0.256, gamma=0.97, period="2.4ep", staircase=True)
    check(smooth, lambda i: 0.256 * 0.97 ** (i / (2.4 * per_epoch)))
    check(stairs, lambda i: 0.256 * 0.97 ** (10 * i // (24 * per_epoch)))


@pytest.mark.parametrize("anneal", ["cosine", "linear"])
def test_one_cycle_equals_torch(anneal: str) -> None:
    found, _, total = rates(
        "10ep",
        4096,
        name="one-cycle",
        lr=2.0,
        warmup="30%",
        start_lr_ratio=0.04,
        end_lr_ratio=0.04 / 1e4,
        anneal_strategy=anneal,
    )
    assert total * 3 % 10 == 0, "the peak falls on a whole step"
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    form = {"cosine": "cos", "linear": "linear"}[anneal]
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2.0, total, pct_start=0.3, anneal_strategy=form)
    expected = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of steps without an optimizer step
        for _ in range(total):
            expected.append(optimizer.param_groups[0]["lr"])
            if len(expected) < total:
                cycle.step()
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_constant_schedule_after_either_warm_up() -> None:
    first, per_epoch, _ = rates("3ep", 1024, name="constant", lr=0.5, warmup="1ep")
    zero, _, _ = rates("3ep", 1024, name="constant", lr=0.5, warmup="1ep", warmup_from="zero")
    check(first, lambda i: 0.5 * min(1, (i + 1) / per_epoch))
    check(zero, lambda i: 0.5 * min(1, i / per_epoch))


def test_a_warm_up_begins_at_a_fraction_and_rises_or_does_not() -> None:
    rising, per_epoch, _ = rates("3ep", 1024, name="constant", lr=0.5, warmup="1ep", warmup_from=0.1)
    level, _, _ = rates("3ep", 1024, name="constant", lr=0.5, warmup="1ep", warmup_from=0.1, warmup_shape="constant")
    check(rising, lambda i: 0.5 * min(1, 0.1 + 0.9 * i / per_epoch))
    check(level, lambda i: 0.05 if i < per_epoch else 0.5)
