"""The classes of faults: each lists its cases and runs one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import damaged_files
import failing_calls
import failing_disks
import foreign
import fuzzed
import interruptions
import killed
import malicious
import power_loss
import ranks
import soak
from lab import Lab

Case = dict[str, Any]  # plain data, so that a case can be run again by itself


@dataclass(frozen=True, slots=True)
class FaultClass:
    """The cases of a class, and the function that returns why one did not survive, or nothing."""

    cases: Callable[[Lab], Iterable[Case]]
    run: Callable[[Lab, Case, Path], str]
    limit: int | None = None  # cases that are run without --whole, spread evenly


SOAK = "soak"  # its cases are seeds, as many as there is time for
CLASSES = {
    "kill -9 at every file operation": FaultClass(killed.cases_at_operations, killed.run_at_operation),
    "kill -9 at random moments": FaultClass(killed.cases_at_moments, killed.run_at_moment),
    "power loss": FaultClass(power_loss.cases, power_loss.run),
    "failing system calls": FaultClass(failing_calls.cases, failing_calls.run),
    "full, read-only, broken and lost disks": FaultClass(failing_disks.cases, failing_disks.run),
    "failing reads of data": FaultClass(failing_disks.data_cases, failing_disks.run_data),
    "damaged files": FaultClass(damaged_files.cases, damaged_files.run),
    "signals": FaultClass(interruptions.signal_cases, interruptions.run_signal),
    "clock jumps": FaultClass(interruptions.clock_cases, interruptions.run_clock),
    "limits": FaultClass(interruptions.limit_cases, interruptions.run_limit),
    "two writers": FaultClass(interruptions.pair_cases, interruptions.run_pair),
    "fuzzed recipes": FaultClass(fuzzed.recipe_cases, fuzzed.run_recipe),
    "fuzzed command lines": FaultClass(fuzzed.command_cases, fuzzed.run_command),
    "malicious inputs": FaultClass(malicious.cases, malicious.run),
    "foreign folders": FaultClass(foreign.cases, foreign.run, limit=3_000),
    "ranks killed, stopped, paused, late and cut off": FaultClass(ranks.cases, ranks.run),
    SOAK: FaultClass(lambda lab: [], soak.run),
}
