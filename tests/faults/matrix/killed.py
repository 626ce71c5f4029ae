"""kill -9 at every operation that changes the disk, and at random moments; then a resume."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab import Fault, Lab, train_args
from preload import CHANGES

NUM_PAIRS, NUM_MOMENTS = 300, 300


def cases_at_operations(lab: Lab) -> Iterator[dict[str, Any]]:
    for start in ("new", "middle"):
        counts = lab.counts(start)
        total = sum(counts[call] for call in CHANGES)
        for number in range(1, total + 1):
            yield {"start": start, "kills": [["kill", number]]}
        for number in range(1, counts["write"] + 1):
            yield {"start": start, "kills": [["tear_and_kill", number]]}
    draw = random.Random(1)
    for _ in range(NUM_PAIRS):
        kills = [["kill", draw.randint(1, total)] for _ in range(draw.randint(2, 3))]
        yield {"start": "new", "kills": kills}


def run_at_operation(lab: Lab, case: dict[str, Any], folder: Path) -> str:
    run = lab.start_run(case["start"], folder)
    for action, number in case["kills"]:
        calls = CHANGES if action == "kill" else ("write",)
        ended = lab.command(train_args(run, "--resume"), Fault(calls, action, number), below=run)
        if ended.code not in (0, -9):
            return ended.problem() or f"exit code {ended.code}: {ended.stderr[-300:]}"
    return lab.resume_problem(run)


def cases_at_moments(lab: Lab) -> Iterator[dict[str, Any]]:
    draw = random.Random(2)
    for _ in range(NUM_MOMENTS):
        yield {"kills_s": [round(draw.uniform(0.02, 0.6), 4) for _ in range(draw.randint(1, 3))]}


def run_at_moment(lab: Lab, case: dict[str, Any], folder: Path) -> str:
    run = folder / "run"
    for kill_s in case["kills_s"]:
        ended = lab.command(train_args(run, "--resume", save__background="true"), kill_after_s=kill_s)
        if ended.code not in (0, -9):
            return ended.problem() or f"exit code {ended.code}: {ended.stderr[-300:]}"
    return lab.resume_problem(run)
