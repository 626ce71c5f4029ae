"""`reconv serve --processes N`: starts server processes that share the port, restarts one that dies, stops them all.

All accept connections from the same listening socket, so a connection that waits while one of them dies is taken by
another. The parent serves no requests. Processes are spawned, because CUDA does not work after a fork.

Processes share the listening socket, the counts of their connections and the files of the metrics, nothing else; one
accepts only when its models are loaded (tests/serve/test_server_processes.py).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from prometheus_client.multiprocess import mark_process_dead

from reconv.core.errors import ExitCode, ReconvError, RemoteRankError, ServerProcessError
from reconv.core.stop_signals import signal_name
from reconv.inference.backends.base import LogFunction
from reconv.serve.http_server import HttpServer, ServeSettings, Shared, end_process
from reconv.serve.shared_listener import ConnectionCounts
from reconv.storage.temporary_folder import temporary_folder

MAX_DEATHS = 4  # of one process in a row, each less than `_STABLE_S` after it was ready
_STABLE_S = 60.0
_POLL_S = 0.1  # for signals
_WATCH_S = 1.0
_KILL_AFTER_S = 10.0  # beyond the time to drain
_METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client reads it when it is imported
_MAX_LINES = 1000


def serve_in_processes(
    settings: ServeSettings, tokens: tuple[bytes, ...], listener: socket.socket, log: LogFunction
) -> None:
    """Serve in `settings.num_processes` processes until SIGTERM or SIGINT."""
    with temporary_folder("serve") as folder, _environment(_METRICS_VARIABLE, str(folder)), listener:
        _Parent(settings, tokens, listener, folder, log).run()


@dataclass(slots=True)
class _Child:
    """A server process, as its parent sees it."""

    process: Any  # multiprocessing's SpawnProcess
    channel: Connection
    is_loaded: bool = False  # its models are loaded
    has_models: bool = False  # False: a run has no checkpoint yet (`--follow`)
    is_accepting: bool = False
    loaded_s: float = 0.0
    error: ReconvError | None = None  # that it has ended with
    said: Counter[str] = field(default_factory=Counter)

    def describe_end(self) -> str:
        code = self.process.exitcode
        how = f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
        return how if self.error is None else f"{how}: {self.error.what}"


class _Parent:
    """Starts the processes and watches them."""

    def __init__(
        self,
        settings: ServeSettings,
        tokens: tuple[bytes, ...],
        listener: socket.socket,
        folder: Path,
        log: LogFunction,
    ) -> None:
        self._settings, self._tokens, self._listener, self._folder, self._log = settings, tokens, listener, folder, log
        self._children: list[_Child] = []
        self._deaths = [0] * settings.num_processes  # of each process, in a row
        self._held: list[str] | None = []  # lines to log when all processes are ready; None: they are
        self._printed: Counter[str] = Counter()
        self._counts = ConnectionCounts(folder, settings.num_processes)
        self._is_stopping = self._is_forced = False

    def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            self._children = [self._start(index) for index in range(self._settings.num_processes)]
            while not self._is_stopping:
                self._watch()
            self._drain()
        finally:
            for child in self._children:
                child.process.kill()
                child.process.join()
            self._release_lines()

    def _on_signal(self, number: int, frame: Any) -> None:
        self._is_forced = self._is_stopping and number == signal.SIGINT
        self._is_stopping = True

    def _start(self, index: int) -> _Child:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_run_child, args=(self._settings, self._tokens, self._listener, theirs, self._folder, index)
        )
        # A Ctrl-C is for the parent: it reaches all processes of the terminal, but a child inherits the mask. The
        # resource tracker comes first: starting it unblocks the signal again.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            theirs.close()
        return _Child(process, ours)

    def _watch(self) -> None:
        """Wait for messages or the end of a process, and act on them."""
        for child in self._wait():
            if not child.process.is_alive() and not self._is_stopping:  # systemd sends SIGTERM to all at once
                self._on_death(child)
        if self._held is not None and all(child.is_loaded for child in self._children):
            for child in self._children:
                self._let_accept(child)
            self._release_lines()
            pids = ", ".join(str(child.process.pid) for child in self._children)
            state = "ready" if all(child.has_models for child in self._children) else "started"
            self._log(f"{state}: {len(self._children)} processes (pids {pids})")

    def _wait(self) -> list[_Child]:
        """The children that have sent something, which is handled, or have ended."""
        sources: dict[Any, _Child] = {}
        for child in self._children:
            sources[child.process.sentinel] = child
            if not child.channel.closed:
                sources[child.channel] = child
        changed = {id(child): child for child in (sources[source] for source in wait(list(sources), _POLL_S))}
        for child in changed.values():
            self._receive(child)
        return list(changed.values())

    def _receive(self, child: _Child) -> None:
        try:
            while not child.channel.closed and child.channel.poll():
                kind, value = child.channel.recv()
                if kind == "log":
                    self._say(child, value)
                elif kind == "error":
                    child.error = RemoteRankError.from_dict(value)
                else:
                    child.is_loaded, child.has_models, child.loaded_s = True, value, time.monotonic()
                    if self._held is None:  # it replaces one that died
                        self._let_accept(child)
                        self._log(f"the new process (pid {child.process.pid}) is ready")
        except (EOFError, OSError):
            child.channel.close()

    def _let_accept(self, child: _Child) -> None:
        child.is_accepting = True
        with suppress(OSError):  # it has died since
            child.channel.send("accept")

    def _say(self, child: _Child, text: str) -> None:
        """Log a line once, although all processes say it."""
        if len(self._printed) > _MAX_LINES:
            self._printed.clear()
            for each in self._children:
                each.said.clear()
        child.said[text] += 1
        if child.said[text] > self._printed[text]:
            self._printed[text] += 1
            if self._held is None:
                self._log(text)
            else:
                self._held.append(text)

    def _release_lines(self) -> None:
        for text in self._held or ():
            self._log(text)
        self._held = None

    def _on_death(self, child: _Child) -> None:
        """Replace a process, unless it cannot be started or dies again and again."""
        if self._held is not None and child.error is not None:
            raise child.error
        child.process.join()
        child.channel.close()
        mark_process_dead(child.process.pid, str(self._folder))  # type: ignore[no-untyped-call]
        index = self._children.index(child)
        self._counts.set_absent(index)
        is_stable = child.is_loaded and time.monotonic() - child.loaded_s > _STABLE_S
        self._deaths[index] = 1 if is_stable else self._deaths[index] + 1
        how = child.describe_end()
        if self._deaths[index] == MAX_DEATHS:
            raise ServerProcessError(
                f"a server process ended {MAX_DEATHS} times in a row",
                why=how,
                hint="see the log above; memory is short?",
            )
        self._log(f"process {child.process.pid} ended unexpectedly ({how}); another one is started")
        self._children[index] = self._start(index)

    def _drain(self) -> None:
        """Ask all processes to finish what they have begun, and wait for their end; a second Ctrl-C ends them now."""
        self._listener.close()
        for child in self._children:
            child.process.terminate()
        deadline = time.monotonic() + self._settings.limits.drain_timeout_s + _KILL_AFTER_S
        alive = list(self._children)
        while alive and not self._is_forced and time.monotonic() < deadline:
            wait([child.process.sentinel for child in alive], _POLL_S)
            for child in alive:
                self._receive(child)
            alive = [child for child in alive if child.process.is_alive()]
        for child in self._children:
            if child.is_accepting and child.process.exitcode != 0:
                how = "was killed" if child in alive else f"ended: {child.describe_end()}"
                self._log(f"process {child.process.pid} did not finish what it had begun; it {how}")


def _run_child(
    settings: ServeSettings,
    tokens: tuple[bytes, ...],
    listener: socket.socket,
    connection: Connection,
    folder: Path,
    index: int,
) -> None:
    """The main function of a server process."""
    channel = _Channel(connection)
    try:
        shared = Shared(folder, ConnectionCounts(folder, settings.num_processes), index)
        code = _serve(HttpServer(settings, tokens, listener, channel.log, shared), channel)
    except ReconvError as error:
        channel.send("error", error.to_dict())
        code = error.code
    except BaseException:  # of any kind: the parent starts another process
        traceback.print_exc()
        code = ExitCode.UNEXPECTED
    end_process(code)


def _serve(server: HttpServer, channel: _Channel) -> ExitCode:
    channel.send("loaded", server.load())
    if channel.wait_until_accept():
        threading.Thread(target=_watch_over, args=(server,), name="reconv-watch", daemon=True).start()
        server.run()
    return ExitCode.OK


class _Channel:
    """Messages of a server process to its parent, from any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def send(self, kind: str, value: Any) -> None:
        with self._lock, suppress(OSError):  # the parent has died
            self._connection.send((kind, value))

    def log(self, text: str) -> None:
        self.send("log", text)

    def wait_until_accept(self) -> bool:
        """Wait until the parent wants connections to be accepted; False: it has died."""
        try:
            self._connection.recv()
        except (EOFError, OSError):
            return False
        return True


def _watch_over(server: HttpServer) -> None:
    """End this process when its parent has died or its device is lost."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    while not wait([parent.sentinel], _WATCH_S):
        server.sample_metrics()
        server.stop_if_broken()
    server.stop()


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """A variable of the environment that processes started meanwhile inherit."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
