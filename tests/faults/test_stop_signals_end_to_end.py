"""Real processes that get the signals of schedulers, or whose terminal is closed, save and end with 75."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from reconv.checkpoint.store import open_store
from reconv.core.errors import ExitCode
from reconv.logging.run_dir import RunDir

LIMIT_S = 60
SETTINGS = ["length=100000step", "schedule.warmup=0ep", "save.every=90000step", "evaluate.every=off"]
SETTINGS += ["engine.num_threads=1", "data.backend=processes", "data.num_workers=2", "batch.size=32", "batch.group=16"]

# Pays for the import of torch once; each line on stdin forks a training in a session of its own, with a terminal as its
# standard streams if the line names one.
FORK_SERVER = """
import os, signal, sys, torch
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a shell's nohup has it ignored
import reconv.api
from reconv.cli import main
for line in sys.stdin:
    out, terminal = line.split()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        if terminal != "-":
            device = os.open(terminal, os.O_RDWR)  # becomes the controlling terminal of the session
            for stream in range(3):
                os.dup2(device, stream)
        main(["train", "quickstart", "--out", out, *sys.argv[1:]])
    print(pid, flush=True)
    _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def is_training(run: RunDir) -> bool:
    return run.events.exists() and '"kind":"train"' in run.events.read_text()


@pytest.fixture(scope="module")
def fork_server() -> subprocess.Popen[str]:
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RECONV_STOP_SIGNAL": "SIGRTMIN+2"}
    command = [sys.executable, "-c", FORK_SERVER, *settings]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as process:
        yield process
        process.stdin.close()


def start(server: subprocess.Popen[str], run: RunDir, terminal: str = "-") -> int:
    server.stdin.write(f"{run.path} {terminal}\n")
    server.stdin.flush()
    pid = next_number(server)
    wait_for(lambda: is_training(run))
    return pid


def next_number(server: subprocess.Popen[str]) -> int:
    for line in server.stdout:
        if line.strip().lstrip("-").isdecimal():  # others are of the training
            return int(line)
    raise AssertionError("the fork server has ended")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGUSR1", "SIGRTMIN+2"])
def test_a_signal_to_all_processes_of_a_run_saves_and_exits_with_75(
    fork_server: subprocess.Popen[str], tmp_path: Path, name: str
) -> None:
    run = RunDir(tmp_path / "run")
    pid = start(fork_server, run)
    number = signal.SIGRTMIN + 2 if name == "SIGRTMIN+2" else signal.Signals[name]
    os.killpg(pid, number)  # the data workers get it, too
    os.killpg(pid, number)
    assert next_number(fork_server) == ExitCode.PREEMPTED
    assert len(open_store(run).steps()) == 1
    assert f"stopped by {name} after step" in run.events.read_text()


@pytest.mark.slow
def test_a_terminal_that_is_closed_saves_and_exits_with_75(fork_server: subprocess.Popen[str], tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    master, slave = pty.openpty()
    start(fork_server, run, os.ttyname(slave))
    os.close(slave)
    os.close(master)  # the kernel sends SIGHUP, and every write to stdout and stderr fails from now on
    assert next_number(fork_server) == ExitCode.PREEMPTED
    assert len(open_store(run).steps()) == 1
    assert run.report.exists() and "stopped by SIGHUP after step" in run.summary.read_text()
