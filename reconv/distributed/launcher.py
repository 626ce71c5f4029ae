"""Several processes on this machine, started by torch's own elastic launcher inside this one.

Owns starting them, passing on signals and collecting what came of each. Refuses to know what they do. Invariant: when
this returns or raises, no process is left; what torch's launcher has to say of processes that end is said here.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from reconv.distributed.environment import FAILURE_DIR_VARIABLE, read_launch_env
from reconv.distributed.failure import leave_words, read_words
from reconv.errors import ExitCode, InterruptedRunError, RankLostError, ReconvError, RemoteRankError, TerminatedError

T = TypeVar("T")
_TORCH_LOGGERS = ("torch.distributed.elastic", "torch.multiprocessing.spawn")
_POLL_S = 0.1


def launch(num_processes: int, work: Callable[..., T], *args: Any) -> T:
    """Run `work(*args)` in so many processes and return what rank 0 does; the error of one is raised here.

    `work` is a function of a module, its arguments and its result can be pickled.
    """
    for name in _TORCH_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="reconv-devices-") as folder:
        return _launch(num_processes, Path(folder), work, args)


def _launch(num_processes: int, folder: Path, work: Callable[..., T], args: tuple[Any, ...]) -> T:
    """The same, with a folder for what processes leave behind."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="spawn",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "torch")),
    )
    ended: dict[int, T] = {}
    failed: list[BaseException] = []

    def start() -> None:
        # Processes inherit what this thread holds back, so a Ctrl-C does not meet them while they import torch. The
        # tracker comes first: starting it ends with letting the signal through again.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            ended.update(elastic_launch(config, _enter)(str(folder), work, args))
        except BaseException as error:
            failed.append(error)

    asked = run_beside_signals(start)
    if not failed:
        return ended[0]
    words = read_words(folder)
    if asked and not words:  # before there was anything to save
        raise KeyboardInterrupt if asked[0] == signal.SIGINT else TerminatedError("stopped before the first step")
    raise _told(failed[0], words) from failed[0]


def _enter(folder: str, work: Callable[..., T], args: tuple[Any, ...]) -> T:
    """One process; one that returned an error as its result would wait for the results of others, who may be lost."""
    os.environ[FAILURE_DIR_VARIABLE] = folder
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return work(*args)
    except (ReconvError, KeyboardInterrupt) as error:
        said = error if isinstance(error, ReconvError) else InterruptedRunError()
        leave_words(Path(folder), read_launch_env().rank, said)
        sys.exit(said.code)


def run_beside_signals(start: Callable[[], None]) -> list[int]:
    """Run the launcher in a thread of its own, where it leaves signals alone: those asked to stop save and end.

    The signals that came are returned.
    """
    came: list[int] = []
    told: set[int] = set()

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        told.clear()

    launcher = threading.Thread(target=start, name="reconv-launcher")
    is_main = threading.current_thread() is threading.main_thread()
    previous = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT) if is_main}
    try:
        launcher.start()
        while launcher.is_alive():
            launcher.join(_POLL_S)
            if came:  # also those that were started since
                _ask_to_stop(told)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return came


def _ask_to_stop(told: set[int]) -> None:
    """Pass a signal on to the processes that have not been told: a terminal sends SIGINT to all of them itself."""
    for child in multiprocessing.active_children():
        if child.pid is not None and child.pid not in told:
            told.add(child.pid)
            os.kill(child.pid, signal.SIGTERM)


def _told(error: BaseException, words: Sequence[RemoteRankError]) -> BaseException:
    """What a person should read: the words of a process, or, where one ended without any, what others know of it."""
    if not isinstance(error, ChildFailedError):
        return error
    rank, failure = error.get_first_failure()
    causes = [said for said in words if said.code != ExitCode.RANK_LOST]
    if causes or (words and failure.exitcode >= 0):
        return RemoteRankError.of([*causes, *words][0])
    message: Any = failure.message  # a text, or a record with a text in it
    why = "" if failure.exitcode < 0 else str(message["message"] if isinstance(message, dict) else message)
    known = next((said.why for said in words if said.what.startswith(f"rank {rank} ")), why)
    return RankLostError(f"rank {rank} {_ending(failure)}", where=f"process {failure.pid}", why=known, then=_NEXT)


_NEXT = "see logs/ in the run folder; then run the same command with --resume"


def _ending(failure: ProcessFailure) -> str:
    if failure.exitcode < 0:
        return f"was ended by {signal.Signals(-failure.exitcode).name}"
    return f"ended with code {failure.exitcode}"
