"""Runs commands of reconv in forked children, with faults, and checks that nothing was lost.

The process has imported everything and trained once, so that a case costs a fraction of a second.
"""

from __future__ import annotations

import concurrent.futures.thread
import hashlib
import json
import os
import resource
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from preload import FOREVER, Fault, Layer

STEPS, MIDDLE = 4, 2
LAST = f"step-{STEPS:09d}"
SETTINGS = {
    "length": f"{STEPS}step",
    "schedule.warmup": "0ep",
    "save.every": "1step",
    "save.keep_last": "2",
    "save.background": "false",
    "evaluate.every": f"{MIDDLE}step",
    "evaluate.num_samples": "16",
    "batch.size": "8",
    "ema.decay": "0.9",
    "loggers": "csv",
    "data.subset_percent": "3",
}
DOCUMENTED = {2, 3, 4, 5, 6, 7, 8, 75, 130, 143}  # exit codes that say what happened
MAX_ADDRESS_BYTES = 6 << 30
DEADLINE_S = float(os.environ.get("FAULTS_DEADLINE_S", "60"))


def train_args(out: Path, *more: str, **settings: str) -> list[str]:
    """The command of the tiny training."""
    merged = {**SETTINGS, **{name.replace("__", "."): value for name, value in settings.items()}}
    options = [word for name, value in merged.items() for word in ("--set", f"{name}={value}")]
    return ["train", "quickstart", "--quiet", "--out", str(out), *options, *more]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int  # negative: the signal that killed it
    stderr: str
    num_struck: int = 0
    is_late: bool = False
    counts: Mapping[str, int] = field(default_factory=dict)

    def problem(self, path: Path | str = "", codes: Sequence[int] = tuple(DOCUMENTED)) -> str:
        """Why this is no documented end, or nothing; an error must name a path that begins with `path`."""
        if self.is_late:
            return f"no end within {DEADLINE_S:.0f} s: {self.stderr[-300:]}"
        if "Traceback (most recent call last)" in self.stderr:
            return f"a traceback: {self.stderr[-600:]}"
        if self.code not in (0, *codes):
            return f"exit code {self.code}: {self.stderr[-600:]}"
        if self.code not in (0, 75, 130, 143) and str(path) not in self.stderr:
            return f"exit code {self.code} without the path: {self.stderr[-600:]}"
        return ""


class Lab:
    """A folder, the layer and the result of an undisturbed training."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.layer = Layer()
        self._number = 0
        self._counts: dict[str, Mapping[str, int]] = {}
        self.sample: int | None = None  # how many cases of a class will be run
        self.warm_up()
        self.reference = folder / "reference"
        self.middle = folder / "middle"
        self._train_once(self.reference)
        self._train_once(self.middle, "--stop-after", f"{MIDDLE}step")
        self.expected = weights_of(self.reference)

    def warm_up(self) -> None:
        """Train once in this process, which imports what is imported late."""
        from reconv.cli import main
        from reconv.core import wait
        from reconv.distributed import rank_store
        from reconv.storage import transient

        rank_store.WAIT_TIMEOUT_S = wait.WAIT_TIMEOUT_S = DEADLINE_S / 3
        transient.RETRY_DELAYS_S = (0.001,) * len(transient.RETRY_DELAYS_S)
        for args in (train_args(self.folder / "warm"), ["eval", str(self.folder / "warm")]):
            with suppress(SystemExit):
                main(args)
        if threading.active_count() > 1:
            raise RuntimeError(f"threads are left that a fork would lose: {threading.enumerate()}")

    def _train_once(self, out: Path, *more: str) -> None:
        ended = self.command(train_args(out, *more))
        if ended.code:
            raise RuntimeError(f"the undisturbed training failed: {ended.stderr}")

    def new_folder(self) -> Path:
        """An own empty folder for a case."""
        self._number += 1
        path = self.folder / f"case-{self._number}"
        path.mkdir()
        return path

    def command(
        self,
        args: Sequence[str],
        fault: Fault | None = None,
        *,
        below: Path | None = None,
        setup: Callable[[], None] | None = None,
        kill_after_s: float | None = None,
        signals: Sequence[tuple[float, int]] = (),
    ) -> Ended:
        """Run a command in a child; calls on files `below` a folder are struck by the fault."""
        from reconv.cli import main

        def child() -> None:
            if setup is not None:
                setup()
            if fault is not None:
                self.layer.arm(below or self.folder, fault)
            main(list(args))

        return self.call(child, kill_after_s=kill_after_s, signals=signals)

    def call(
        self,
        function: Callable[[], None],
        kill_after_s: float | None = None,
        signals: Sequence[tuple[float, int]] = (),
        deadline_s: float = DEADLINE_S,
    ) -> Ended:
        """Call a function in a forked child as if it were a program."""
        log, result = self.folder / "stderr.txt", self.folder / "result.json"
        result.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            _be_child(function, log, result, self.layer)
        is_late = not _wait(pid, kill_after_s, signals, deadline_s)
        _, status = os.waitpid(pid, 0)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # data workers and ranks of a killed process
        found = json.loads(result.read_text()) if result.exists() else {"num_struck": 1, "counts": {}}
        text = log.read_text(errors="replace") if log.exists() else ""
        return Ended(os.waitstatus_to_exitcode(status), text, found["num_struck"], is_late, found["counts"])

    def start_run(self, start: str, folder: Path) -> Path:
        """A run directory: of a run that was stopped in the middle, or one that does not exist yet (`new`)."""
        return copy_run(self.middle, folder / "run") if start == "middle" else folder / "run"

    def counts(self, start: str) -> Mapping[str, int]:
        """How many calls of each kind a training makes on the files of its run."""
        if start not in self._counts:
            run = self.start_run(start, self.new_folder())
            ended = self.command(train_args(run, "--resume"), Fault((), "nothing"), below=run)
            if ended.code:
                raise RuntimeError(f"the undisturbed training failed: {ended.stderr}")
            self._counts[start] = ended.counts
        return self._counts[start]

    def resume_problem(self, run: Path) -> str:
        """Resume without faults: why the result is not that of the undisturbed training, or nothing."""
        ended = self.command(train_args(run, "--resume"))
        if ended.code or ended.is_late:
            return f"the resume failed with {ended.code}: {ended.stderr[-600:]}"
        return self.weights_problem(run)

    def weights_problem(self, run: Path) -> str:
        """Why the last checkpoint is not that of the undisturbed training, or nothing."""
        found = weights_of(run)
        return "" if found == self.expected else f"the weights differ: {found} instead of {self.expected}"

    def check(self, ended: Ended, run: Path, codes: Sequence[int] = tuple(DOCUMENTED)) -> str:
        """Whether a training that was disturbed ended as documented, and can be resumed to the right result."""
        problem = ended.problem(run, codes)
        if problem:
            return problem
        return self.weights_problem(run) if ended.code == 0 else self.resume_problem(run)


def weights_of(run: Path) -> str:
    """A hash of the tensors and the optimizer state of the last checkpoint."""
    return hash_checkpoint(run / "checkpoints" / LAST)


def hash_checkpoint(folder: Path) -> str:
    """A hash of the tensors of a checkpoint."""
    digest = hashlib.sha256()
    for name in ("model", "ema", "optimizer"):
        file = folder / f"{name}.safetensors"
        digest.update(file.read_bytes() if file.exists() else b"missing")
    return digest.hexdigest()[:16]


def _be_child(function: Callable[[], None], log: Path, result: Path, layer: Layer) -> None:
    """Be a program: call the function, write what the layer saw, and exit."""
    os.setsid()
    # A case that reads without end must not take the memory of the machine.
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(descriptor, 2)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    os.dup2(1, 0)
    code = 1
    try:
        function()
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        layer.arm(Path("/nowhere"), Fault((), "nothing"))
        for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_AS):
            with suppress(ValueError, OSError):
                hard = resource.getrlimit(limit)[1]
                resource.setrlimit(limit, (hard, hard))
        concurrent.futures.thread._python_exit()  # as Python does: idle threads of pools end
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        with suppress(Exception):
            sys.stderr.flush()
        with suppress(Exception):
            result.write_text(json.dumps({"num_struck": layer.num_struck(), "counts": layer.counts()}))
        os._exit(code)


def _wait(pid: int, kill_after_s: float | None, signals: Sequence[tuple[float, int]], deadline_s: float) -> bool:
    """Wait for a child, sending it signals on the way; whether it ended before the deadline."""
    start_s = time.monotonic()
    events = sorted([*signals, *([(kill_after_s, signal.SIGKILL)] if kill_after_s is not None else [])])
    descriptor = os.pidfd_open(pid)
    try:
        for at_s, number in [*events, (deadline_s, signal.SIGKILL)]:
            left_s = max(0.0, start_s + at_s - time.monotonic())
            if select.select([descriptor], [], [], left_s)[0]:
                return True
            os.kill(pid, number)
            if number == signal.SIGKILL:
                return at_s < deadline_s
    finally:
        os.close(descriptor)
    return True


def copy_run(source: Path, target: Path) -> Path:
    """A copy of a run directory."""
    return Path(shutil.copytree(source, target, symlinks=True))


__all__ = ["DOCUMENTED", "FOREVER", "Ended", "Fault", "Lab", "copy_run", "train_args", "weights_of"]
