"""Worker processes that fill rows of shared memory: for decoders that do not let go of the GIL.

Owns starting, feeding, ending and missing them. Refuses to know order and steps. Invariant: same rows, same errors as
threads; a worker that dies is an error with its cause; when the parent goes, however it goes, the workers go, and no
shared memory has a name that could be left behind.
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
from typing import Any

from reconv.data.dataset import Dataset
from reconv.data.pipeline.buffers import Buffer
from reconv.data.pipeline.shared_pickle import CannotTravelError, SharedPickle, pack, shared_file
from reconv.data.pipeline.stage_timing import Seconds
from reconv.data.pipeline.thread_pool import FillTask, Wait
from reconv.data.pipeline.worker_main import Fill, Map, Register, Unmap
from reconv.errors import ResourceError, UsageError

_PROGRAM = "from reconv.data.pipeline.worker_main import main; main()"
_ENDING_S = 10  # what a worker may take to finish a row before it is killed


class ProcessPool:
    """Worker processes, each fed by a thread of its own here."""

    def __init__(self, num_workers: int) -> None:
        if not sys.platform.startswith("linux"):
            raise UsageError(
                "worker processes need Linux",
                where="data.backend",
                why="they share memory that has no name (memfd)",
                then="--set data.backend=threads",
            )
        self.num_workers = num_workers
        self._numbers = itertools.count()
        self._parcels: dict[int, tuple[Any, int, SharedPickle]] = {}  # by id: the object, its number, how it travels
        self._lock = threading.Lock()
        self._idle: queue.SimpleQueue[_Child] = queue.SimpleQueue()
        self._children = [_Child() for _ in range(num_workers)]
        for child in self._children:
            self._idle.put(child)
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="reconv-data")

    def share(self, source: Dataset) -> None:
        """Send a source once, however many fetches read from it."""
        self._number(source)

    def slab(self, num_bytes: int) -> Buffer:
        """Memory that the workers map."""
        file = shared_file(num_bytes)
        return Buffer(mmap.mmap(file, num_bytes), file)

    def start(self, task: FillTask) -> Wait:
        """Begin to fill the rows as soon as a worker is free."""
        self._number(task.fetch)
        return self._pool.submit(self._run, task).result

    def close(self) -> None:
        """Forget what was not begun, wait for the rest and see every worker off."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        for child in self._children:
            child.close()
        for _, _, parcel in self._parcels.values():
            parcel.close()
        self._parcels.clear()

    @property
    def process_ids(self) -> list[int]:
        """Of the workers."""
        return [child.process.pid for child in self._children]

    @property
    def shared_bytes(self) -> int:
        """Bytes of sources and fetches that all workers share."""
        return sum(parcel.shared_bytes for _, _, parcel in self._parcels.values())

    def _number(self, obj: Any) -> int:
        """The number under which the workers know an object, which is packed when it is first met."""
        with self._lock:
            if id(obj) not in self._parcels:
                known = {key: number for key, (_, number, _) in self._parcels.items()}
                try:
                    parcel = pack(obj, known)
                except CannotTravelError as error:
                    raise UsageError(
                        "this data cannot be given to other processes",
                        where="data.backend",
                        why=str(error),
                        then="--set data.backend=threads",
                    ) from error
                self._parcels[id(obj)] = (obj, next(self._numbers), parcel)
            return self._parcels[id(obj)][1]

    def _run(self, task: FillTask) -> Seconds:
        child = self._idle.get()
        try:
            return child.fill(task, self._parcels)
        finally:
            self._idle.put(child)


class _Child:
    """One worker process and what it was told; used by one thread at a time."""

    def __init__(self) -> None:
        ours, theirs = _connections()
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}  # there are as many workers as the plan wants threads
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(theirs.fileno())], pass_fds=[theirs.fileno()], env=environ
        )
        theirs.close()
        self._connection = ours
        self._known: set[int] = set()
        self._slabs: dict[int, tuple[Buffer, int]] = {}  # by id: the slab and its number
        self._slab_numbers = itertools.count()
        self._send(sys.path)

    def fill(self, task: FillTask, parcels: Mapping[int, tuple[Any, int, SharedPickle]]) -> Seconds:
        """Have the rows filled and wait for that."""
        for _, number, parcel in list(parcels.values()):  # sources come before the fetches that need them
            self._teach(number, parcel)
        slab = self._map(task.lease.slab)
        number = parcels[id(task.fetch)][1]
        first_row = task.rows.start or 0
        self._send(Fill(number, slab, task.lease.places, task.indices, task.draws, first_row))
        answer = self._receive()
        if isinstance(answer, Exception):
            raise answer
        seconds: Seconds = answer
        return seconds

    def close(self) -> None:
        """End the process: it goes when nobody asks any more."""
        self._connection.close()
        self._slabs.clear()
        try:
            self.process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _teach(self, number: int, parcel: SharedPickle) -> None:
        if number not in self._known:
            self._send(Register(number, parcel.content, parcel.extents, parcel.file >= 0), parcel.file)
            self._known.add(number)

    def _map(self, slab: Buffer) -> int:
        if id(slab) not in self._slabs:
            for key, (old, number) in list(self._slabs.items()):
                if old.is_dropped:
                    self._send(Unmap(number))
                    del self._slabs[key]
            assert slab.file is not None
            number = next(self._slab_numbers)
            self._send(Map(number, slab.num_bytes), slab.file)
            self._slabs[id(slab)] = (slab, number)
        return self._slabs[id(slab)][1]

    def _send(self, message: object, file: int = -1) -> None:
        try:
            self._connection.send(message)
            if file >= 0:
                send_handle(self._connection, file, self.process.pid)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._gone() from error

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._gone() from error

    def _gone(self) -> ResourceError:
        code = self.process.wait()
        ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return ResourceError(
            "a worker process that reads images has died",
            where=f"process {self.process.pid}",
            why=f"it ended by {ended}; SIGKILL mostly means that memory ran out",
            then="fewer of them: --workers 1, or --set data.backend=threads",
        )


def _connections() -> tuple[Connection, Connection]:
    """Two ends of a connection over which descriptors can travel."""
    return multiprocessing.Pipe(duplex=True)
