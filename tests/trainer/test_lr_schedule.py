from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reconv.recipe.parts.schedule import ScheduleConfig, SchedulePlan, learning_rate

KINDS = get_args(ScheduleConfig.model_fields["name"].annotation)
RAMPED = [kind for kind in KINDS if kind != "one-cycle"]  # it has a rise of its own


def curve(kind: str, **fields: Any) -> list[float]:
    """The rate of every step of a run of 100 steps, 10 an epoch, with peak 1 unless said."""
    given_fields = {"peak_lr": 1.0, "end_lr": 0.0, "total_steps": 100, "steps_per_epoch": 10.0, "warmup_steps": 0}
    given_fields |= {"period_steps": Fraction(10 if kind == "exponential" else 30), "milestone_lrs": (0.5, 0.25)}
    plan = SchedulePlan(name=kind, milestone_steps=(50, 80), **(given_fields | fields))
    return [learning_rate(plan, step) for step in range(plan.total_steps)]


@pytest.mark.parametrize("kind", RAMPED)
def test_warm_up_is_linear_and_ends_at_the_peak(kind: str) -> None:
    assert len(RAMPED) >= 8
    assert curve(kind, warmup_steps=4, peak_lr=2.0)[:4] == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize("kind", [kind for kind in RAMPED if kind != "step"])
def test_every_curve_starts_at_its_peak_after_warm_up(kind: str) -> None:
    assert curve(kind)[0] == 1.0
    assert curve(kind, warmup_steps=4)[4] == 1.0


def test_cosine_is_measured_from_the_end_of_warm_up() -> None:
    rates = curve("cosine", warmup_steps=20, end_lr=0.1)
    assert rates[60] == pytest.approx(0.1 + 0.9 / 2)
    assert rates[40] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert rates[99] > 0.1


def test_linear_and_polynomial_reach_the_end_value_one_step_after_the_last() -> None:
    assert curve("linear", end_lr=0.5)[50] == pytest.approx(0.75)
    assert curve("linear", end_lr=0.5)[99] == pytest.approx(0.505)
    assert curve("polynomial", power=2.0)[50] == pytest.approx(0.25)
    assert curve("polynomial", power=3.0, end_lr=0.2)[50] == pytest.approx(0.2 + 0.8 / 8)


def test_steps_and_milestones_count_from_the_start_of_the_run() -> None:
    rates = curve("step", warmup_steps=10)
    assert rates[29:31] == pytest.approx([1.0, 0.1])
    assert rates[90] == pytest.approx(1e-3)
    rates = curve("multistep", gamma=0.5)
    assert (rates[49], rates[50], rates[79], rates[80]) == (1.0, 0.5, 0.5, 0.25)


def test_exponential_decays_by_gamma_per_epoch() -> None:
    rates = curve("exponential", gamma=0.5, warmup_steps=10)
    assert rates[20] == pytest.approx(0.5)
    assert rates[15] == pytest.approx(0.5**0.5)


def test_epoch_interval_uses_the_rate_of_the_first_step_of_the_epoch() -> None:
    by_step, by_epoch = curve("cosine", warmup_steps=20), curve("cosine", warmup_steps=20, tick_steps=10)
    assert by_epoch[20:] == [by_step[step - step % 10] for step in range(20, 100)]
    assert by_epoch[:20] == [0.5] * 10 + [1.0] * 10


def test_warm_up_by_epochs_over_part_of_an_epoch_does_not_pass_the_peak() -> None:
    assert max(curve("constant", warmup_steps=15, tick_steps=10)) == 1.0


def test_rate_stays_at_the_end_value_after_the_horizon() -> None:
    rates = curve("polynomial", end_steps=50, end_lr=0.25)
    assert rates[25] == pytest.approx(0.25 + 0.75 / 4)
    assert set(rates[50:]) == {0.25}


def test_constant_schedule_does_not_change() -> None:
    assert set(curve("constant")) == {1.0}


@settings(deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 50), st.integers(0, 50), st.floats(1e-6, 10), st.floats(0, 1))
def test_rates_stay_between_zero_and_the_peak(kind: str, total: int, warmup: int, peak: float, end: float) -> None:
    ends = {"end_lr": end * peak, "start_lr": end * peak, "milestone_lrs": (peak, end * peak)}
    rates = curve(kind, total_steps=total, warmup_steps=min(warmup, total), peak_lr=peak, **ends)
    assert len(rates) == total
    assert all(0 <= rate <= peak * (1 + 1e-12) for rate in rates)


def test_a_step_past_the_end_keeps_the_end_value() -> None:
    plan = SchedulePlan("cosine", 1.0, 0.25, total_steps=10, steps_per_epoch=5.0, warmup_steps=10)
    assert learning_rate(plan, 10) == learning_rate(plan, 99) == 0.25
