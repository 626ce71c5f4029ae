"""Real ranks for tests, forked from a server process that has already imported torch.

`import torch` takes seconds per process; a fork server that has done it starts four ranks in a tenth of a second.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

LIMIT_S = 120


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server() -> Any:
    """The multiprocessing context of the fork server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["reconv.api.training", "reconv.inference.predict", "reconv.distributed.torch_group", "torch._dynamo"]
    )  # DDP imports the last
    return context


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """The variables that torchrun would set."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _run_rank(results: Connection, variables: dict[str, str], folder: str, work: Callable[..., Any], args: Any) -> None:
    import torch

    os.environ.update(variables)
    os.chdir(folder)
    torch.set_num_threads(1)
    try:
        results.send((True, work(*args)))
    except SystemExit:
        raise
    except BaseException:
        results.send((False, traceback.format_exc()))


def start(size: int, work: Callable[..., Any], *args: Any) -> list[tuple[Any, Connection]]:
    """Start `work(*args)` in `size` ranks of one process group; returns each process and the pipe with its result."""
    port = free_port()
    started = []
    for rank in range(size):
        here, there = multiprocessing.Pipe(duplex=False)
        variables = environment(rank, size, port) if size > 1 else {}
        process = server().Process(target=_run_rank, args=(there, variables, os.getcwd(), work, args))
        process.start()
        there.close()
        started.append((process, here))
    return started


def in_ranks(size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """What `work(*args)` returns in each of `size` ranks; the first failure fails the test with its traceback."""
    started = start(size, work, *args)
    results: dict[int, Any] = {}
    pending = {pipe: rank for rank, (_, pipe) in enumerate(started)}
    try:
        while pending:
            ready = [pipe for pipe in wait(list(pending), timeout=LIMIT_S) if isinstance(pipe, Connection)]
            assert ready, f"ranks {sorted(pending.values())} returned nothing within {LIMIT_S} s"
            for pipe in ready:
                rank = pending.pop(pipe)
                has_succeeded, value = pipe.recv()
                assert has_succeeded, f"rank {rank}:\n{value}"
                results[rank] = value
    finally:
        for process, _ in started:
            process.join(5 if not pending else 0)
            process.kill()
    return [results[rank] for rank in range(size)]
