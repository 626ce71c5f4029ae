"""Worker processes that fill rows of shared memory: for decoders that hold the GIL.

They give the rows and errors of threads. A worker that dies is an error that names its cause. Workers end with their
parent, however it ends, and shared memory has no name that could be left behind.
"""

from __future__ import annotations

import itertools
import mmap
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any, NamedTuple

from reconv.core.errors import ResourceError, UsageError
from reconv.core.machine import process_state
from reconv.core.python_child import python_command
from reconv.core.wait import ProcessWait
from reconv.data.dataset import Dataset
from reconv.data.pipeline.buffers import Buffer
from reconv.data.pipeline.workers.main import FillRows, MapBuffer, Register, UnmapBuffer
from reconv.data.pipeline.workers.shared_pickle import NotPicklableError, SharedPickle, pack, shared_file
from reconv.data.pipeline.workers.thread_pool import FillTask, Wait
from reconv.data.stage_timing import Seconds

_PROGRAM = "from reconv.data.pipeline.workers.main import main; main()"
_WAIT_STEP_S = 1.0
_NOTICE_S = 30.0  # a worker may be starting, or reading from a slow disk
_CLOSE_TIMEOUT_S = 10  # for a worker to finish its rows before it is killed


class _SharedObject(NamedTuple):
    obj: Any  # kept alive, so that its id stays its own
    number: int
    pickle: SharedPickle


class ProcessPool:
    """Worker processes, each driven by a thread of this process."""

    def __init__(self, num_workers: int) -> None:
        if not sys.platform.startswith("linux"):
            raise UsageError(
                "worker processes need Linux",
                where="data.backend",
                why="they share memory through memfd",
                hint="--set data.backend=threads",
            )
        self.num_workers = num_workers
        self._numbers = itertools.count()
        self._shared: dict[int, _SharedObject] = {}  # by id
        self._lock = threading.Lock()
        self._idle: queue.SimpleQueue[_WorkerProcess] = queue.SimpleQueue()
        self._workers = [_WorkerProcess() for _ in range(num_workers)]
        for worker in self._workers:
            self._idle.put(worker)
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="reconv-data")

    def share(self, dataset: Dataset) -> None:
        """Send a dataset once, however many pipelines read from it."""
        self._share(dataset)

    def allocate(self, num_bytes: int) -> Buffer:
        file = shared_file(num_bytes)
        return Buffer(mmap.mmap(file, num_bytes), file)

    def start(self, task: FillTask) -> Wait:
        self._share(task.pipeline)
        return self._pool.submit(self._run, task).result

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.hang_up()
        for worker in self._workers:
            worker.wait()
        for shared in self._shared.values():
            shared.pickle.close()
        self._shared.clear()

    @property
    def process_ids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    @property
    def shared_bytes(self) -> int:
        """Bytes of the arrays of datasets and pipelines, held once for all workers."""
        return sum(shared.pickle.shared_bytes for shared in self._shared.values())

    def _share(self, obj: Any) -> None:
        """Pickle an object for the workers unless that is done."""
        with self._lock:
            if id(obj) in self._shared:
                return
            try:
                pickle = pack(obj, {key: shared.number for key, shared in self._shared.items()})
            except NotPicklableError as error:
                raise UsageError(
                    "this dataset cannot be sent to worker processes",
                    where="data.backend",
                    why=str(error),
                    hint="--set data.backend=threads",
                ) from error
            self._shared[id(obj)] = _SharedObject(obj, next(self._numbers), pickle)

    def _run(self, task: FillTask) -> Seconds:
        worker = self._idle.get()
        try:
            return worker.fill(task, self._shared)
        finally:
            self._idle.put(worker)


class _WorkerProcess:
    """One worker process and what was sent to it; used by one thread at a time."""

    def __init__(self) -> None:
        ours, theirs = multiprocessing.Pipe(duplex=True)  # a socket pair, which can carry descriptors
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}  # there are as many workers as the plan wants threads
        self.process = subprocess.Popen(
            python_command(_PROGRAM, str(theirs.fileno())), pass_fds=[theirs.fileno()], env=environ
        )
        theirs.close()
        self._connection: Connection = ours
        self._registered: set[int] = set()
        self._mapped: dict[int, tuple[Buffer, int]] = {}  # by id: the buffer and its number
        self._buffer_numbers = itertools.count()

    def fill(self, task: FillTask, shared: Mapping[int, _SharedObject]) -> Seconds:
        """Have rows filled and wait for it."""
        for _, number, pickle in list(shared.values()):  # datasets come before the pipelines that refer to them
            self._register(number, pickle)
        buffer = self._map(task.view.buffer)
        pipeline = shared[id(task.pipeline)].number
        first_row = task.rows.start or 0
        self._send(FillRows(pipeline, buffer, task.view.fields, task.indices, task.params, first_row))
        reply = self._receive()
        if isinstance(reply, Exception):
            raise reply
        seconds: Seconds = reply
        return seconds

    def hang_up(self) -> None:
        """Close the connection, which ends the process."""
        self._connection.close()
        self._mapped.clear()

    def wait(self) -> None:
        """Wait for the end of the process, and kill it if that takes too long."""
        try:
            self.process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _register(self, number: int, pickle: SharedPickle) -> None:
        if number not in self._registered:
            self._send(Register(number, pickle.content, pickle.extents, pickle.file >= 0), pickle.file)
            self._registered.add(number)

    def _map(self, buffer: Buffer) -> int:
        """The number of a buffer in the worker, which maps it first if it must."""
        if id(buffer) not in self._mapped:
            for key, (old, number) in list(self._mapped.items()):
                if old.is_released:
                    self._send(UnmapBuffer(number))
                    del self._mapped[key]
            assert buffer.file is not None
            number = next(self._buffer_numbers)
            self._send(MapBuffer(number, buffer.num_bytes), buffer.file)
            self._mapped[id(buffer)] = (buffer, number)
        return self._mapped[id(buffer)][1]

    def _send(self, message: object, file: int = -1) -> None:
        try:
            self._connection.send(message)
            if file >= 0:
                send_handle(self._connection, file, self.process.pid)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._died() from error

    def _receive(self) -> Any:
        wait = ProcessWait(notice_s=_NOTICE_S)
        try:
            while not self._connection.poll(_WAIT_STEP_S):
                wait.tick(
                    f"data worker process {self.process.pid}",
                    where=process_state(self.process.pid),
                    hint="a stopped process continues with kill -CONT; a read may hang on a network disk",
                    sleep_s=0,
                )
            return self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._died() from error

    def _died(self) -> ResourceError:
        code = self.process.wait()
        ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return ResourceError(
            "a data worker process died",
            where=f"process {self.process.pid}",
            why=f"it ended by {ended}; SIGKILL mostly means that memory ran out",
            hint="use fewer workers: --workers 1, or --set data.backend=threads",
        )
