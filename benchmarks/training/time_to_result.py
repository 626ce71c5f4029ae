"""Run `reconv train` as a fresh process and print all of it, from process start to process end, as a bar of phases.

python -m benchmarks.training.time_to_result [--runs 5] [--json FILE] quickstart [OPTIONS OF reconv train]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from reconv.logging.event_log import read_events
from reconv.logging.events import EvalFinished, TrainProgress
from reconv.logging.phases import Phase, phase_lines
from reconv.logging.run_dir import read_summary

EXIT = "exit"  # after the last event: summary, report and the end of the process, which only this script can time


@dataclass(frozen=True, slots=True)
class TimedProcess:
    """One run, timed from outside."""

    wall_s: float
    cpu_s: float  # user and system, with all child processes that have ended
    startup_s: float | None  # to the end of the first step
    last_step_s: float  # from the start of the process to the end of the last step, its evaluation included
    after_last_step_s: float  # from there to the end of the process
    phases_s: dict[str, float]  # add up to wall_s


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="a file for all measurements")
    given, train = parser.parse_known_args(args)
    if not train:
        parser.error("name a recipe, as in: quickstart")
    processes = []
    for number in range(1, given.runs + 1):
        with tempfile.TemporaryDirectory() as folder:
            processes.append(time_process(train, Path(folder) / "run"))
        print(f"run {number}: {processes[-1].wall_s:.2f} s", file=sys.stderr)
    print("\n".join(describe(processes)))
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(process) for process in processes], indent=2) + "\n")


def time_process(train: Sequence[str], out: Path) -> TimedProcess:
    """Run `reconv train` with these arguments and time it."""
    command = [sys.executable, "-m", "reconv", "train", *train, "--out", str(out)]
    start_s = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall_s, end_time_s = time.perf_counter() - start_s, time.time()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} has ended with code {process.returncode}")
    summary = read_summary(out)
    after_last_step_s = end_time_s - last_step_time_s(out)
    phases_s: dict[str, float] = summary["phases_s"]
    return TimedProcess(
        wall_s=wall_s,
        cpu_s=usage.ru_utime + usage.ru_stime,
        startup_s=summary["startup_s"],
        last_step_s=wall_s - after_last_step_s,
        after_last_step_s=after_last_step_s,
        phases_s={**phases_s, EXIT: wall_s - sum(phases_s.values())},
    )


def last_step_time_s(run: Path) -> float:
    """The time at which the last step, or the evaluation that followed it, was logged."""
    events = read_events(run / "events.jsonl")
    return max(e.time_s or 0.0 for e in events if isinstance(e, TrainProgress | EvalFinished))


def describe(processes: Sequence[TimedProcess]) -> list[str]:
    """The medians over the runs, with lowest and highest."""
    names = [*Phase, EXIT]
    medians = {name: statistics.median(p.phases_s.get(name, 0.0) for p in processes) for name in names}
    return [
        *phase_lines(medians),
        f"medians of {len(processes)} runs (lowest to highest):",
        _spread("whole process", processes, lambda p: p.wall_s),
        _spread("CPU time", processes, lambda p: p.cpu_s),
        _spread("process start to first step", processes, lambda p: p.startup_s),
        _spread("process start to last step and its evaluation", processes, lambda p: p.last_step_s),
        _spread("last step and its evaluation to process end", processes, lambda p: p.after_last_step_s),
    ]


def _spread(name: str, processes: Sequence[TimedProcess], value: Callable[[TimedProcess], Any]) -> str:
    values = [v for v in map(value, processes) if v is not None]
    if not values:
        return f"  {name}: not measured"
    return f"  {name}: {statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
