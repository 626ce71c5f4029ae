"""Starts the processes of --devices on this machine, by torch's elastic multiprocessing inside this process.

There is no rendezvous: the ranks meet in a folder that only this user can read, and nothing listens on the network.
When `launch` returns or raises, no process is left.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from reconv.distributed.environment import FAILURE_DIR_VARIABLE, read_launch_env
from reconv.distributed.failure import choose_failure, read_failures, write_failure
from reconv.distributed.rank_store import SECRET_VARIABLE, new_secret
from reconv.errors import InterruptedRunError, ReconvError, TerminatedError
from reconv.io.stop_signals import handled_stop_signals
from reconv.io.temporary_folder import temporary_folder

T = TypeVar("T")
_TORCH_LOGGERS = ("torch.distributed.elastic", "torch.multiprocessing.spawn")
_POLL_S = 0.1


def launch(num_processes: int, work: Callable[..., T], *args: Any) -> T:
    """Run `work(*args)` in `num_processes` processes. Returns the result of rank 0, or raises the error of a rank.

    `work` must be a module-level function; its arguments and its result are pickled.
    """
    for name in _TORCH_LOGGERS:  # errors of ranks are reported here
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with temporary_folder("devices") as folder:
        return _launch(num_processes, folder, work, args)


def _launch(num_processes: int, folder: Path, work: Callable[..., T], args: tuple[Any, ...]) -> T:
    secret = new_secret()
    ranks = range(num_processes)
    results: dict[int, T] = {}
    failed: list[ProcessFailure] = []
    raised: list[BaseException] = []

    def start() -> None:
        # Processes inherit this thread's signal mask, so a Ctrl-C does not hit them while they import torch. The
        # resource tracker comes first: starting it unblocks the signal again.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            processes = start_processes(
                name="reconv",
                entrypoint=_run_rank,
                args=dict.fromkeys(ranks, (str(folder), work, args)),
                envs={rank: _variables(rank, num_processes, folder, secret) for rank in ranks},
                logs_specs=DefaultLogsSpecs(log_dir=str(folder / "torch")),
                start_method="spawn",
            )
            try:
                outcome = processes.wait(period=_POLL_S)
            finally:
                processes.close()
            assert outcome is not None
            results.update(outcome.return_values)
            failed.extend(outcome.failures.values())
        except BaseException as error:
            raised.append(error)

    signals = forward_signals_during(start)
    if not raised and not failed:
        return results[0]
    failures = read_failures(folder)
    if signals and not failures:  # before there was anything to save
        raise KeyboardInterrupt if signals[0] == signal.SIGINT else TerminatedError("stopped before the first step")
    if raised:
        raise raised[0]
    first = failed[0]
    message: Any = first.message  # a text, or a dict with a text
    text = str(message["message"] if isinstance(message, dict) else message)
    raise choose_failure(failures, first.local_rank, first.exitcode, first.pid, text)


def _variables(rank: int, num_processes: int, folder: Path, secret: str) -> dict[str, str]:
    """The environment of one rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        FAILURE_DIR_VARIABLE: str(folder),
        SECRET_VARIABLE: secret,
    }


def _run_rank(folder: str, work: Callable[..., T], args: tuple[Any, ...]) -> T:
    """One rank. An error is not returned as a result: torch would wait for the results of ranks that may be lost."""
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return work(*args)
    except (ReconvError, KeyboardInterrupt) as error:
        failure = error if isinstance(error, ReconvError) else InterruptedRunError()
        write_failure(Path(folder), read_launch_env().rank, failure)
        sys.exit(failure.code)


def forward_signals_during(start: Callable[[], None]) -> list[int]:
    """Run the launcher in a thread, so that it does not handle signals, and forward stop signals to the ranks.

    A rank that is asked to stop saves a checkpoint and exits. Returns the signals that came.
    """
    received: list[int] = []
    signaled: set[int] = set()

    def on_signal(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signaled.clear()

    launcher = threading.Thread(target=start, name="reconv-launcher")
    is_main = threading.current_thread() is threading.main_thread()
    previous = {number: signal.signal(number, on_signal) for number in handled_stop_signals() if is_main}
    try:
        launcher.start()
        while launcher.is_alive():
            launcher.join(_POLL_S)
            if received:  # repeatedly: processes may have been started since
                _signal_children(received[0], signaled)
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not installed by Python
    return received


def _signal_children(number: int, signaled: set[int]) -> None:
    """Forward a signal, once, to each process; as SIGTERM if it is a SIGINT, which reaches all of them by itself."""
    number = signal.SIGTERM if number == signal.SIGINT else number
    for child in multiprocessing.active_children():
        if child.pid is not None and child.pid not in signaled:
            signaled.add(child.pid)
            os.kill(child.pid, number)
