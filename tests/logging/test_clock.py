"""Rates and remaining time, with a fake time."""

from __future__ import annotations

import pytest

from reconv.logging.clock import RunClock
from reconv.logging.phases import Phase


class FakeTime:
    """A time that the test advances."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def step(clock: RunClock, fake: FakeTime, wait_s: float, work_s: float, images: int = 10) -> None:
    with clock.waiting():
        fake.now_s += wait_s
    fake.now_s += work_s
    clock.count_step(images)


def test_rates_with_and_without_waits() -> None:
    fake = FakeTime()
    clock = RunClock(0, fake)
    step(clock, fake, wait_s=1.0, work_s=3.0)
    step(clock, fake, wait_s=0.0, work_s=4.0)
    rates = clock.interval()
    assert rates.images_per_s == pytest.approx(20 / 8)
    assert rates.compute_images_per_s == pytest.approx(20 / 7)
    assert rates.data_wait_fraction == pytest.approx(1 / 8)


def test_the_first_steps_are_not_timed() -> None:
    fake = FakeTime()
    clock = RunClock(2, fake)
    step(clock, fake, wait_s=5.0, work_s=50.0)
    assert clock.interval().images_per_s is None
    assert clock.eta_s(10) is None
    step(clock, fake, wait_s=5.0, work_s=50.0)
    step(clock, fake, wait_s=0.0, work_s=2.0)
    assert clock.interval().images_per_s == pytest.approx(5.0)
    assert (clock.train_s, clock.wait_s, clock.timed_images) == (2.0, 0.0, 10)


def test_a_pause_counts_in_the_remaining_time_but_not_in_the_rate() -> None:
    fake = FakeTime()
    clock = RunClock(0, fake)
    step(clock, fake, wait_s=0.0, work_s=1.0)
    with clock.paused(Phase.EVALUATION):
        fake.now_s += 8.0
    step(clock, fake, wait_s=0.0, work_s=1.0)
    assert clock.interval().images_per_s == pytest.approx(10.0)
    assert clock.eta_s(40) == pytest.approx(20.0)


def test_an_interval_begins_where_the_last_one_ended() -> None:
    fake = FakeTime()
    clock = RunClock(0, fake)
    step(clock, fake, wait_s=0.0, work_s=1.0)
    clock.interval()
    step(clock, fake, wait_s=0.0, work_s=5.0)
    assert clock.interval().images_per_s == pytest.approx(2.0)
    assert clock.interval().images_per_s is None
    assert clock.train_s == pytest.approx(6.0)


def test_a_wait_that_fails_is_still_counted() -> None:
    fake = FakeTime()
    clock = RunClock(0, fake)
    with pytest.raises(OSError), clock.waiting():
        fake.now_s += 1.0
        raise OSError
    step(clock, fake, wait_s=0.0, work_s=1.0)
    assert clock.interval().data_wait_fraction == pytest.approx(0.5)
