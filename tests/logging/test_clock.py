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


class DeviceEvent:
    """An event that a device of the test reaches at a time."""

    def __init__(self, fake: FakeTime, reached_s: float) -> None:
        self._fake, self.reached_s = fake, reached_s

    def query(self) -> bool:
        return self._fake.now_s >= self.reached_s

    def elapsed_time(self, end_event: DeviceEvent) -> float:
        return 1000 * (end_event.reached_s - self.reached_s)


class FakeDevice:
    """A device that works through what was launched, one step after the other."""

    def __init__(self, fake: FakeTime) -> None:
        self._fake = fake
        self.idle_at_s = fake.now_s

    def launch(self, seconds: float) -> None:
        self.idle_at_s = max(self.idle_at_s, self._fake.now_s) + seconds

    def record_event(self) -> DeviceEvent:
        return DeviceEvent(self._fake, max(self.idle_at_s, self._fake.now_s))


def train_on_device(
    fetch_s: float, device_s: float, num_steps: int = 20, warmup_steps: int = 0
) -> tuple[RunClock, FakeTime]:
    """Steps whose batches the host fetches while the device works on the step before."""
    fake = FakeTime()
    device = FakeDevice(fake)
    clock = RunClock(warmup_steps, fake, record_event=device.record_event)
    for _ in range(num_steps):
        with clock.waiting():
            fake.now_s += fetch_s
        previous_ends_s = device.idle_at_s
        device.launch(device_s)
        fake.now_s = max(fake.now_s, previous_ends_s)  # the host is at most one step ahead
        clock.count_step(10)
    fake.now_s = device.idle_at_s
    return clock, fake


def test_a_fetch_while_the_device_is_busy_is_no_wait() -> None:
    clock, _ = train_on_device(fetch_s=2.0, device_s=5.0)
    assert clock.wait_s == pytest.approx(2.0)  # of the first step: the device had nothing to do
    assert clock.phases.seconds()["training"] == pytest.approx(clock.train_s - 2.0, abs=5.0)
    assert clock.phases.seconds().get("data_wait", 0.0) == pytest.approx(0.0)


def test_a_fetch_that_takes_longer_than_the_device_is_a_wait_for_the_difference() -> None:
    clock, _ = train_on_device(fetch_s=7.0, device_s=5.0)
    assert clock.wait_s == pytest.approx(7.0 + 19 * 2.0)
    assert clock.phases.seconds()["data_wait"] == pytest.approx(19 * 2.0)


def test_waits_of_steps_that_are_not_timed_do_not_change_those_of_others() -> None:
    clock, _ = train_on_device(fetch_s=7.0, device_s=5.0, warmup_steps=3)
    assert clock.wait_s == pytest.approx(17 * 2.0)


def test_the_phases_of_a_device_that_works_ahead_still_add_up() -> None:
    clock, fake = train_on_device(fetch_s=7.0, device_s=5.0)
    _ = clock.wait_s
    assert sum(clock.phases.seconds().values()) == pytest.approx(fake.now_s - 100.0)


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
