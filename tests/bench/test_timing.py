"""Timing of windows without warm-up, and of the parts of a step where the device supports it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from reconv.bench.timing import MAX_STEPS, PARTS, StepTimer, TimingConfig, Timings, measure, percentile
from reconv.core.batch import Batch
from reconv.device import Cpu


class _Batches:
    """An endless stream of one small batch."""

    def steps(self, start: int, stop: int) -> Iterator[Sequence[Batch]]:
        for _ in range(start, stop):
            yield (Batch({}, torch.arange(3), (3,)),)


@pytest.mark.parametrize("percent", [0, 5, 50, 95, 99, 100])
def test_percentile_equals_numpy(percent: float) -> None:
    values = [3.0, 1.0, 4.0, 1.5, 9.0, 2.6]
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))
    assert percentile([2.5], percent) == 2.5


def test_warmup_steps_are_excluded_from_windows() -> None:
    done: list[int] = []
    device = Cpu()
    timer = StepTimer(device)

    def step(number: int, micro_batches: Sequence[Batch]) -> None:
        with timer.annotate("forward"):
            done.append(number)

    windows = measure(step, _Batches(), device, TimingConfig(windows=5, steps=3, warmup=4), timer)
    assert done == list(range(1 + 4 + 5 * 3))
    assert (len(windows.step_s), windows.steps) == (5, 3)
    assert len(timer._times) == 2 * 5 * 3  # input and forward of every step in a window


def test_automatic_window_has_at_most_max_steps() -> None:
    done: list[int] = []
    device = Cpu()
    measure(
        lambda number, batches: done.append(number),
        _Batches(),
        device,
        TimingConfig(windows=5, warmup=2),
        StepTimer(device),
    )
    assert len(done) <= 1 + 2 + 5 * MAX_STEPS


def test_part_times_are_means_over_all_steps() -> None:
    timer = StepTimer(Cpu())
    timer._times += [("forward", lambda: 1.0), ("forward", lambda: 3.0), ("input", lambda: 0.5)]
    parts_s = timer.seconds(2)
    assert parts_s == {"forward": 2.0, "backward": 0.0, "optimizer": 0.0, "input": 0.25}
    step_ms = Timings((0.002, 0.004, 0.003), 2, 0.0, parts_s).step_ms()
    assert step_ms["median"] == 3.0
    assert step_ms["forward"] == 2000.0


class _DeviceWithoutTiming(Cpu):
    kind = "mps"


def test_part_times_are_none_on_devices_without_timing() -> None:
    timer = StepTimer(_DeviceWithoutTiming())
    with timer.annotate("forward"):
        pass
    step_ms = Timings((0.001,), 1, 0.0, timer.seconds(1)).step_ms()
    assert [step_ms[name] for name in PARTS] == [None] * 4
    assert step_ms["median"] == 1.0
