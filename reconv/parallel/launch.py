"""Several processes on this machine, started by torch's own elastic launcher inside this one.

Owns starting them, passing on signals and collecting what came of each. Refuses to know what they do. Invariant: when
this returns or raises, no process is left.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import uuid
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from reconv.errors import LostPeerError, PeerError, ReconvError

T = TypeVar("T")


def launch(num_processes: int, work: Callable[..., T], *args: Any) -> T:
    """Run `work(*args)` in so many processes and return what rank 0 does; the error of one is raised here.

    `work` is a function of a module, its arguments and its result can be pickled.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it has to say is said here
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
    )
    ended: dict[int, T | PeerError] = {}
    failed: list[BaseException] = []

    def start() -> None:
        try:
            ended.update(elastic_launch(config, _enter)(work, args))
        except BaseException as error:
            failed.append(error)

    _run_beside_signals(start)
    if failed:
        raise _told(failed[0]) from failed[0]
    errors = [result for result in ended.values() if isinstance(result, PeerError)]
    if errors:
        first = min(errors, key=lambda error: error.is_told)
        raise PeerError.of(first)
    return ended[0]  # type: ignore[return-value]


def _enter(work: Callable[..., T], args: tuple[Any, ...]) -> T | PeerError:
    """One process: an error meant for people is a result like another, so that the launcher ends nobody for it."""
    try:
        return work(*args)
    except ReconvError as error:
        return PeerError.of(error, error.is_told)


def _run_beside_signals(start: Callable[[], None]) -> None:
    """Run the launcher in a thread of its own, where it leaves signals alone: those asked to stop save and end."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        for child in multiprocessing.active_children():
            if child.pid is not None:
                os.kill(child.pid, signal.SIGTERM)  # a terminal sends SIGINT to all of them itself

    launcher = threading.Thread(target=start, name="reconv-launcher")
    is_main = threading.current_thread() is threading.main_thread()
    previous = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT) if is_main}
    try:
        launcher.start()
        launcher.join()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _told(error: BaseException) -> BaseException:
    """What a person should read when a process ended without a word."""
    if not isinstance(error, ChildFailedError):
        return error
    rank, failure = error.get_first_failure()
    said: Any = failure.message  # a text, or a record with a text in it
    why = "" if failure.exitcode < 0 else str(said["message"] if isinstance(said, dict) else said)
    return LostPeerError(f"rank {rank} {_ending(failure)}", where=f"process {failure.pid}", why=why, then=_NEXT)


_NEXT = "see logs/ in the run folder; then run the same command with --resume"


def _ending(failure: ProcessFailure) -> str:
    if failure.exitcode < 0:
        return f"was ended by {signal.Signals(-failure.exitcode).name}"
    return f"ended with code {failure.exitcode}"
