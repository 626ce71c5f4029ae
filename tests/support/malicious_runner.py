"""Runs commands on malicious inputs, each in a forked process with limits of time and memory.

`MaliciousRunner` forks from a process that has done nothing else: what a test process has run before (threads, torch's
pools) does not survive a fork. It imports what most commands import when they need it: each fork would do so again.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import numpy.ma  # noqa: F401
import rich.console  # noqa: F401
import torch
from malicious_inputs import CASES, Context

import reconv.api
import reconv.cli
import reconv.data.inspect.check

LIMIT_S = 60  # of wall-clock time on a busy machine
CPU_S = 20
MEMORY_BYTES = 3 << 30  # of address space, beyond what the process has
DOCUMENTED = (0, 2, 3, 4, 6)


@dataclass(frozen=True)
class Outcome:
    """How the command ended."""

    code: int
    cpu_s: float
    output: str
    files: frozenset[str]  # in its working folder

    @property
    def problem(self) -> str:
        """What is wrong with it; empty if nothing is."""
        if self.code not in DOCUMENTED:
            return f"code {self.code}: {self.output[-600:]}"
        if "Traceback" in self.output or "hacked" in self.files:
            return self.output[-600:]
        return "" if self.cpu_s < CPU_S else f"{self.cpu_s:.0f} s of CPU time"


class MaliciousRunner:
    """Runs cases one after the other; a context manager."""

    def __enter__(self) -> MaliciousRunner:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", "malicious_runner"]
        self._process = subprocess.Popen(
            command, text=True, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._outcomes = self._process.stdin, self._process.stdout
        return self

    def __exit__(self, *error: object) -> None:
        self._requests.close()
        self._outcomes.close()
        self._process.wait()

    def run(self, name: str, folder: Path, finished_run: Path) -> Outcome:
        self._requests.write(json.dumps([name, str(folder), str(finished_run)]) + "\n")
        self._requests.flush()
        code, cpu_s, output, files = json.loads(self._outcomes.readline())
        return Outcome(code, cpu_s, output, frozenset(files))


def serve() -> None:
    """Run the cases that are named on standard input."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        name, folder, finished_run = json.loads(line)
        outcome = run_case(name, Path(folder), Path(finished_run))
        print(json.dumps([outcome.code, outcome.cpu_s, outcome.output, sorted(outcome.files)]), flush=True)


def run_case(name: str, folder: Path, finished_run: Path) -> Outcome:
    """Write the files of a case into a folder and run its command there."""
    return run_command(CASES[name](Context(folder, finished_run)), folder)


def run_command(arguments: list[str], folder: Path) -> Outcome:
    """Run `reconv` with these arguments in a folder."""
    output = folder.parent / f"{folder.name}.output"
    began_s = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _run_child(arguments, folder, output)
    while (done := os.wait4(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() - began_s > LIMIT_S:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.005)
    _, status, usage = done
    text = output.read_text(errors="backslashreplace")
    files = frozenset(os.listdir(folder))
    return Outcome(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, text, files)


def _run_child(arguments: list[str], folder: Path, output: Path) -> None:
    code = 98
    try:
        os.setsid()
        os.chdir(folder)
        descriptor = os.open(output, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        lines = Path("/proc/self/status").read_text().splitlines()
        used = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmSize"))
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
        reconv.cli.main(arguments)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0
    except BaseException:
        traceback.print_exc()
        code = 99
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
