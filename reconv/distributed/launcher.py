"""Starts the processes of --devices and --elastic on this machine, by torch's elastic multiprocessing in this process.

With --devices there is no rendezvous: the ranks meet in a folder that only this user can read, and nothing listens on
the network. If this machine is one node of several, rank 0 of all listens at the address that their launcher has set.
When `launch` returns or raises, no process is left.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeVar

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, start_processes
from torch.distributed.elastic.multiprocessing.api import RunProcsResult

from reconv.core.errors import InterruptedRunError, ReconvError, TerminatedError
from reconv.core.stop_signals import handled_stop_signals
from reconv.distributed.environment import (
    FAILURE_DIR_VARIABLE,
    SECRET_VARIABLE,
    NodeEnv,
    read_launch_env,
    read_node_env,
)
from reconv.distributed.failure import choose_failure, read_failures, write_failure
from reconv.distributed.rank_store import new_secret
from reconv.storage.temporary_folder import temporary_folder

T = TypeVar("T")
_TORCH_LOGGERS = ("torch.distributed.elastic", "torch.multiprocessing.spawn")
_POLL_S = 0.1
_PRELOADED = [
    "reconv.api.training",
    "reconv.inference.predict",
    "reconv.distributed.torch_group",
    "torch._dynamo",
]  # DDP imports the last


def launch(num_processes: int, work: Callable[..., T], *args: Any) -> T:
    """Run `work(*args)` in `num_processes` processes. Returns the result of the first, or raises the error of a rank.

    `work` must be a module-level function; its arguments and its result are pickled.
    """
    with temporary_folder("devices") as folder:
        return _launch(num_processes, folder, work, args)


def _launch(num_processes: int, folder: Path, work: Callable[..., T], args: tuple[Any, ...]) -> T:
    node = read_node_env()
    variables = [_variables(rank, num_processes, folder, node) for rank in range(num_processes)]
    if node is None:  # else all nodes have a secret already, or none
        secret = new_secret()
        variables = [{**shared, SECRET_VARIABLE: secret} for shared in variables]
    ended: list[RunProcsResult] = []
    raised: list[BaseException] = []

    def start() -> None:
        try:
            processes = start_ranks(variables, folder, work, args)
            try:
                outcome = processes.wait(period=_POLL_S)
            finally:
                processes.close()
            assert outcome is not None
            ended.append(outcome)
        except BaseException as error:
            raised.append(error)

    signals = forward_signals_during(start)
    if ended and not ended[0].failures:
        result: T = ended[0].return_values[0]
        return result
    if signals and not read_failures(folder):  # before there was anything to save
        raise KeyboardInterrupt if signals[0] == signal.SIGINT else TerminatedError("stopped before the first step")
    first_rank = 0 if node is None else node.node_rank * num_processes
    raise raised[0] if raised else failure_of(ended[0], folder, first_rank)


def start_ranks(
    variables: Sequence[dict[str, str]],
    folder: Path,
    work: Callable[..., Any],
    args: Any,
    start_method: Literal["spawn", "forkserver"] = "spawn",
) -> PContext:
    """Start one process for each set of variables; each writes its error, if it has one, to the folder."""
    for name in _TORCH_LOGGERS:  # the caller reports errors of ranks
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # Processes inherit this thread's signal mask, so a Ctrl-C does not hit them while they import torch. The resource
    # tracker comes first: starting it unblocks the signal again.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    return start_processes(
        name="reconv",
        entrypoint=_run_rank,
        args=dict.fromkeys(range(len(variables)), (str(folder), work, args)),
        envs=dict(enumerate(variables)),
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "torch")),
        start_method=start_method,
    )


def start_fork_server() -> None:
    """Start the process from which ranks are forked again and again; it has already imported what they need.

    It never touches a device, so that each rank can initialize its own.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    first = context.Process(target=str)
    first.start()
    first.join()  # a node that has done this starts its ranks at once


def failure_of(outcome: RunProcsResult, folder: Path, first_rank: int = 0) -> ReconvError:
    """The error of ranks that did not all end well; `first_rank` is the first one of this machine."""
    first = next(iter(outcome.failures.values()))
    message: Any = first.message  # a text, or a dict with a text
    text = str(message["message"] if isinstance(message, dict) else message)
    return choose_failure(read_failures(folder), first_rank + first.local_rank, first.exitcode, first.pid, text)


def _variables(local_rank: int, num_processes: int, folder: Path, node: NodeEnv | None) -> dict[str, str]:
    """The environment of one rank."""
    first, world_size = (0, num_processes) if node is None else (node.node_rank * num_processes, node.world_size)
    addresses = {"MASTER_ADDR": "127.0.0.1"}
    if node is not None:
        addresses = {"MASTER_ADDR": node.master_addr, "MASTER_PORT": str(node.master_port)}
    return {
        "RANK": str(first + local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(num_processes),
        **addresses,
        FAILURE_DIR_VARIABLE: str(folder),
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


def forward_signals_during(start: Callable[[], None], received: list[int] | None = None) -> list[int]:
    """Run the launcher in a thread, so that it does not handle signals, and forward stop signals to the ranks.

    A rank that is asked to stop saves a checkpoint and exits. Returns the signals that came; they are in `received` as
    soon as they come.
    """
    received = [] if received is None else received
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
                signal_ranks(received[0], signaled)
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not installed by Python
    return received


def signal_ranks(number: int, signaled: set[int]) -> None:
    """Forward a signal, once, to each process; as SIGTERM if it is a SIGINT, which reaches all of them by itself."""
    number = signal.SIGTERM if number == signal.SIGINT else number
    for child in multiprocessing.active_children():
        if child.pid is not None and child.pid not in signaled:
            signaled.add(child.pid)
            os.kill(child.pid, number)
