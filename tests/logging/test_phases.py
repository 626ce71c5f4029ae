"""Phases add up to the elapsed time, with a fake time."""

from __future__ import annotations

import random
import time

import pytest

from reconv.core.machine import Machine, process_age_s
from reconv.logging.clock import RunClock
from reconv.logging.events import RunEnded, decode, encode
from reconv.logging.phases import Phase, PhaseTimer, phase_lines, process_start_s


class FakeTime:
    """A time that the test advances."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_time_counts_for_the_phase_that_is_running() -> None:
    fake = FakeTime()
    timer = PhaseTimer(98.0, fake)
    fake.now_s += 1.0
    timer.enter(Phase.PLAN)
    fake.now_s += 0.5
    with timer.during(Phase.DATA_INDEX):
        fake.now_s += 4.0
        with timer.during(Phase.DEVICE):
            fake.now_s += 0.25
    fake.now_s += 0.5
    assert timer.seconds() == {"imports": 3.0, "device": 0.25, "data_index": 4.0, "plan": 1.0}
    assert timer.elapsed_s == 8.25


def test_phases_in_any_order_add_up_and_none_is_negative() -> None:
    fake, numbers = FakeTime(), random.Random(0)
    timer = PhaseTimer(now=fake)

    def nest(depth: int) -> None:
        for _ in range(numbers.randrange(4)):
            fake.now_s += numbers.random()
            with timer.during(numbers.choice(list(Phase))):
                fake.now_s += numbers.random()
                if depth:
                    nest(depth - 1)

    for _ in range(20):
        timer.enter(numbers.choice(list(Phase)))
        nest(3)
    seconds = timer.seconds()
    assert sum(seconds.values()) == pytest.approx(fake.now_s - 100.0) == pytest.approx(timer.elapsed_s)
    assert min(seconds.values()) >= 0 and len(seconds) == len(Phase)


def test_a_phase_that_fails_ends_where_it_failed() -> None:
    fake = FakeTime()
    timer = PhaseTimer(now=fake)
    with pytest.raises(OSError), timer.during(Phase.SAVES):
        fake.now_s += 2.0
        raise OSError
    fake.now_s += 1.0
    assert timer.seconds() == {"imports": 1.0, "saves": 2.0}


def test_a_start_in_the_future_is_now() -> None:
    fake = FakeTime()
    assert PhaseTimer(101.0, fake).seconds() == {"imports": 0.0}


def test_the_clock_of_a_run_assigns_steps_waits_and_pauses() -> None:
    fake = FakeTime()
    clock = RunClock(0, fake, PhaseTimer(95.0, fake))
    clock.phases.enter(Phase.FIRST_STEP)
    for wait_s, work_s in ((3.0, 7.0), (0.5, 1.0), (0.25, 1.0)):
        with clock.waiting():
            fake.now_s += wait_s
        fake.now_s += work_s
        clock.count_step(10)
        with clock.paused(Phase.EVALUATION):
            fake.now_s += 2.0
    assert clock.startup_s == 15.0
    assert clock.phases.seconds() == {
        "imports": 5.0,
        "first_step": 10.0,
        "training": 2.0,
        "data_wait": 0.75,
        "evaluation": 6.0,
    }


def test_this_process_began_before_it_imported_this_module() -> None:
    age_s, start_s = process_age_s(Machine()), process_start_s()
    assert age_s is not None and age_s > 0
    assert start_s < time.perf_counter()


def test_phases_survive_the_event_file() -> None:
    end = RunEnded(5, 0, "finished", 1.0, 10, 0, startup_s=2.5, phases={"imports": 2.0, "training": 0.25})
    assert decode(encode(end)) == end
    with pytest.raises(ValueError, match="is not of type"):
        decode(encode(end).replace('"phases":{', '"phases":3,"other":{'))


def test_lines_have_seconds_share_and_bar() -> None:
    lines = phase_lines({"imports": 1.0, "data_wait": 3.0}, width=4)
    assert lines == ["  imports          1.00 s   25.0%  #", "  data wait        3.00 s   75.0%  ###"]
    assert phase_lines({"imports": 0.0}) == ["  imports          0.00 s    0.0%"]
