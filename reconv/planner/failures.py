"""Time that a run loses to lost devices: predicted from a failure rate, the pause of an engine and the saves.

    lost fraction = save / interval + failures per second x (interval / 2 + pause)

A failure loses half an interval of steps on average, and the pause until training goes on. The best interval is Daly's
(2006), which is Young's sqrt(2 x save x time between failures) where failures are rare.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from reconv.planner.tables import read_table

DAY_S = 86_400.0
# Llama 3, 405B: 419 unexpected interruptions in 54 days on 16,384 GPUs (arXiv:2407.21783, section 3.3.4).
FAILURES_PER_1000_DEVICES_AND_DAY = 419 / 54 / 16.384
SAVE_S = 0.027  # that training stands still: 40 saves of 188 MB took 1.0 to 1.1 s on an H200, benchmarks/LOG.md
LARGEST = 10_000  # devices of the curve


@dataclass(frozen=True, slots=True)
class EnginePause:
    """Seconds that training stands still when a node is lost."""

    engine: str
    pause_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Failures:
    """Failure rate of a device, and what a save costs."""

    per_1000_devices_and_day: float = FAILURES_PER_1000_DEVICES_AND_DAY
    save_s: float = SAVE_S

    def per_day(self, devices: int) -> float:
        return self.per_1000_devices_and_day * devices / 1000

    def between_s(self, devices: int) -> float:
        """The mean time between failures."""
        return DAY_S / self.per_day(devices)

    def best_interval_s(self, devices: int) -> float:
        """The interval between saves that loses least time."""
        between_s, save_s = self.between_s(devices), self.save_s
        if save_s >= 2 * between_s:
            return between_s
        ratio = math.sqrt(save_s / (2 * between_s))
        return math.sqrt(2 * save_s * between_s) * (1 + ratio / 3 + ratio**2 / 9) - save_s

    def lost_s_per_day(self, devices: int, interval_s: float, pause_s: float) -> float:
        """Seconds of a day without progress: saves, steps that are repeated, and pauses."""
        fraction = self.save_s / interval_s + (interval_s / 2 + pause_s) / self.between_s(devices)
        return DAY_S * min(1.0, fraction)


@dataclass(frozen=True, slots=True)
class LostTime:
    """Cost of failures for a run on one number of devices; None: the recipe saves nothing before its end."""

    devices: int
    failures_per_day: float
    interval_s: float | None  # the recipe's
    best_interval_s: float
    lost_s_per_day: dict[str, float]  # by engine, with the recipe's interval, or with the best one
    best_lost_s_per_day: dict[str, float]


def engine_pauses() -> list[EnginePause]:
    """The measured pauses."""
    return [EnginePause(r["engine"], float(r["pause_s"]), r["source"]) for r in read_table("engine_pauses.csv")]


def lost_time(devices: int, interval_s: float | None, failures: Failures, pauses: list[EnginePause]) -> LostTime:
    """The cost of failures with each engine."""
    best_s = failures.best_interval_s(devices)

    def lost(every_s: float) -> dict[str, float]:
        return {pause.engine: failures.lost_s_per_day(devices, every_s, pause.pause_s) for pause in pauses}

    return LostTime(devices, failures.per_day(devices), interval_s, best_s, lost(interval_s or best_s), lost(best_s))


def curve(interval_s: float | None, failures: Failures, pause: EnginePause) -> list[tuple[float, float, float]]:
    """Devices, and the percent of time that is lost with the interval of a run and with the best one."""
    points = []
    for devices in sorted({round(LARGEST ** (number / 40)) for number in range(41)}):
        found = lost_time(devices, interval_s, failures, [pause])
        percents = [100 * lost[pause.engine] / DAY_S for lost in (found.lost_s_per_day, found.best_lost_s_per_day)]
        points.append((float(devices), percents[0], percents[1]))
    return points
