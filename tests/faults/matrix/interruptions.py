"""Signals at every moment, clocks that jump, limits of the system, and two processes that want the same run."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lab import Ended, Fault, Lab, train_args
from preload import CHANGES

SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU")
JUMPS_S = (-1e9, -86_400, -3_600, -2, 2, 3_600, 86_400, 1e9, 3e9)
NUM_CLOCK_MOMENTS, NUM_DOUBLE = 14, 60
NUM_PAIRS = 60


def signal_cases(lab: Lab) -> Iterator[dict[str, Any]]:
    calls = (*CHANGES, "open")
    for start in ("new", "middle"):
        counts = lab.counts(start)
        for number in range(1, sum(counts[call] for call in calls) + 1):
            yield {"start": start, "number": number, "again": 0, "signal": SIGNALS[number % len(SIGNALS)]}
    draw = random.Random(3)
    for _ in range(NUM_DOUBLE):
        again = draw.randint(1, 40)
        yield {"start": "new", "number": draw.randint(1, 200), "again": again, "signal": draw.choice(SIGNALS)}


def run_signal(lab: Lab, case: dict[str, Any], folder: Path) -> str:
    run = lab.start_run(case["start"], folder)
    number = getattr(signal, case["signal"])
    # A signal at call n, and with `again` one at each call up to n + again.
    fault = Fault((*CHANGES, "open"), "signal", case["number"], case["number"] + case["again"], number)
    ended = lab.command(train_args(run, "--resume"), fault, below=run)
    if ended.code == -number:  # before the first step a signal ends the process
        return lab.resume_problem(run)
    return lab.check(ended, run, (75, 130, 143))


def clock_cases(lab: Lab) -> Iterator[dict[str, Any]]:
    for jump_s in JUMPS_S:
        for number in range(NUM_CLOCK_MOMENTS):
            yield {"jump_s": jump_s, "at": 1 + 6 * number, "start": ("new", "middle")[number % 2]}


def run_clock(lab: Lab, case: dict[str, Any], folder: Path) -> str:
    run = lab.start_run(case["start"], folder)
    ended = lab.command(train_args(run, "--resume"), setup=lambda: lab.layer.set_clock(case["jump_s"], case["at"]))
    return lab.check(ended, run, ())


def limit_cases(lab: Lab) -> Iterator[dict[str, Any]]:
    for start in ("new", "middle"):
        for extra in range(24):
            yield {"start": start, "limit": "NOFILE", "extra": extra}
        for size in (
            2_000,
            3_000,
            4_000,
            5_000,
            8_000,
            20_000,
            50_000,
            100_000,
            200_000,
            300_000,
            312_000,
            400_000,
            1_000_000,
        ):
            yield {"start": start, "limit": "FSIZE", "extra": size}
        for megabytes in (0, 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128):
            yield {"start": start, "limit": "AS", "extra": megabytes << 20}


def run_limit(lab: Lab, case: dict[str, Any], folder: Path) -> str:
    run = lab.start_run(case["start"], folder)

    def limit() -> None:
        kind = getattr(resource, f"RLIMIT_{case['limit']}")
        base = {
            "NOFILE": lambda: max(map(int, os.listdir("/proc/self/fd"))) + 1,
            "AS": _address_space,
            "FSIZE": lambda: 0,
        }
        resource.setrlimit(kind, (base[case["limit"]]() + case["extra"], resource.getrlimit(kind)[1]))

    ended = lab.command(train_args(run, "--resume"), setup=limit)
    path = "" if case["limit"] == "AS" else run  # out of memory is about no file
    return ended.problem(path, (6,)) or lab.check(Ended(ended.code, f"{run} {ended.stderr}"), run, (6,))


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def pair_cases(lab: Lab) -> Iterator[dict[str, Any]]:
    draw = random.Random(4)
    for number in range(NUM_PAIRS):
        yield {"delay_s": round(draw.uniform(0, 0.5), 3), "start": ("new", "middle")[number % 2]}


def run_pair(lab: Lab, case: dict[str, Any], folder: Path) -> str:
    """Two processes resume the same run at almost the same time; the second has code 8, or comes after the first."""
    from reconv.cli import main

    run = lab.start_run(case["start"], folder)

    def other() -> None:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                time.sleep(case["delay_s"])
                main(train_args(run, "--resume"))
            except SystemExit as error:
                code = int(error.code or 0)
            finally:
                os._exit(code)
        own = _code(lambda: main(train_args(run, "--resume")))
        codes = {own, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}
        raise SystemExit(0 if codes <= {0, 8} and 0 in codes else 1)

    ended = lab.call(other)
    return f"{ended.code}: {ended.stderr}" if ended.code or ended.is_late else lab.weights_problem(run)


def _code(function: Callable[[], None]) -> int:
    try:
        function()
    except SystemExit as error:
        return int(error.code or 0)
    return 0
