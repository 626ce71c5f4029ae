"""Two ranks of which one is killed, stopped, paused, late or cut off: the other ends in time, and a resume is exact."""

from __future__ import annotations

import errno
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab import DEADLINE_S, FOREVER, Fault, Lab, train_args, weights_of

NUM_EACH = 12
KINDS = ("killed", "stopped", "paused", "late", "cut")
SETTINGS = {"batch__group": "4", "parallel__reduce": "ordered", "parallel__heartbeat_timeout_s": "4"}
SETTINGS |= {"evaluate__every": "4step"}
# The survivor names the rank that is lost, or passes on the error it got; a signal may come before anything listens.
CODES = {0, 6, 7, -signal.SIGKILL}


def cases(lab: Lab) -> Iterator[dict[str, Any]]:
    draw = random.Random(5)
    for kind in KINDS:
        for number in range(NUM_EACH):
            after_s = round(draw.uniform(0.05, 2.5), 3)
            yield {"kind": kind, "rank": number % 2, "after_s": after_s, "number": draw.randint(1, 60)}


def run(lab: Lab, case: dict[str, Any], folder: Path) -> str:
    reference = lab.folder / "of-ranks"
    if not reference.exists():
        lab.command(train_args(reference, **SETTINGS))
    run = folder / "run"
    ended = lab.call(lambda: sys.exit(two_ranks(lab, run, case)), deadline_s=2 * DEADLINE_S)
    if ended.is_late or "Traceback" in ended.stderr or ended.code:
        return f"exit code {ended.code}, late: {ended.is_late}: {ended.stderr[-1500:]}"
    ended = lab.command(train_args(run, "--resume", **SETTINGS))
    if ended.code:
        return f"the resume failed with {ended.code}: {ended.stderr[-600:]}"
    return "" if weights_of(run) == weights_of(reference) else "the weights differ"


def two_ranks(lab: Lab, run: Path, case: dict[str, Any]) -> int:
    """Start both ranks and let something happen to one; 0 if both end as documented."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = [_start_rank(lab, run, rank, port, case) for rank in range(2)]
    victim = pids[case["rank"]]
    if case["kind"] in ("killed", "stopped", "paused"):
        time.sleep(case["after_s"])
        os.kill(victim, signal.SIGKILL if case["kind"] == "killed" else signal.SIGSTOP)
    if case["kind"] == "paused":
        time.sleep(1.0)
        os.kill(victim, signal.SIGCONT)
    other = os.waitstatus_to_exitcode(os.waitpid(pids[1 - case["rank"]], 0)[1])
    if case["kind"] == "stopped":
        os.kill(victim, signal.SIGKILL)
    codes = (other, os.waitstatus_to_exitcode(os.waitpid(victim, 0)[1]))
    must_finish = case["kind"] in ("late", "paused")
    if set(codes) <= ({0} if must_finish else CODES):
        return 0
    print(f"exit codes {codes}", file=sys.stderr)
    return 9


def _start_rank(lab: Lab, run: Path, rank: int, port: int, case: dict[str, Any]) -> int:
    from reconv.cli import main

    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        variables = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
        os.environ.update({name: str(value) for name, value in variables.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        is_victim = rank == case["rank"]
        if is_victim and case["kind"] == "late":
            time.sleep(case["after_s"])
        if is_victim and case["kind"] == "cut":
            fault = Fault(("read", "write"), "fail", case["number"], FOREVER, errno.ECONNRESET)
            lab.layer.arm(Path("socket:"), fault)
        main(train_args(run, "--resume", **SETTINGS))
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    finally:
        sys.stderr.flush()
        os._exit(code)
