"""The program of a worker process: fills rows as messages ask for it, until its parent is gone.

It ends when the connection does, whatever happened to the parent. An error of a row is sent back and does not end it.
"""

from __future__ import annotations

import mmap
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import numpy as np

from reconv.core.stop_signals import ignore_stop_signals
from reconv.data.dataset import I64, NamedArrays
from reconv.data.pipeline.buffers import BufferField
from reconv.data.pipeline.samples import SamplePipeline
from reconv.data.pipeline.workers.shared_pickle import picklable_error, unpack
from reconv.data.stage_timing import timed


@dataclass(frozen=True, slots=True)
class Register:
    """Message: keep an object under a number; the descriptor of its arrays follows if `has_file`."""

    number: int
    content: bytes
    extents: tuple[tuple[int, int], ...]
    has_file: bool


@dataclass(frozen=True, slots=True)
class MapBuffer:
    """Message: map a buffer under a number; its descriptor follows."""

    number: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class UnmapBuffer:
    """Message: a buffer is not used any more."""

    number: int


@dataclass(frozen=True, slots=True)
class FillRows:
    """Message: fill rows; the reply is the seconds of its stages, or the error."""

    pipeline: int
    buffer: int
    fields: tuple[BufferField, ...]
    indices: I64
    params: NamedArrays
    first_row: int


class WorkerLoop:
    """Receives messages and fills rows."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._objects: dict[int, Any] = {}
        self._buffers: dict[int, mmap.mmap] = {}

    def run(self) -> None:
        """Handle messages until the connection is closed."""
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, ConnectionResetError):
                return
            match message:
                case Register():
                    self._register(message)
                case MapBuffer():
                    file = recv_handle(self._connection)
                    self._buffers[message.number] = mmap.mmap(file, message.num_bytes)
                    os.close(file)
                case UnmapBuffer():
                    del self._buffers[message.number]
                case FillRows():
                    self._connection.send(self._fill(message))

    def _register(self, message: Register) -> None:
        file = recv_handle(self._connection) if message.has_file else -1
        self._objects[message.number] = unpack(message.content, message.extents, file, self._objects)
        if file >= 0:
            os.close(file)

    def _fill(self, message: FillRows) -> Any:
        pipeline: SamplePipeline = self._objects[message.pipeline]
        memory = np.frombuffer(memoryview(self._buffers[message.buffer]), np.uint8)
        chosen = slice(message.first_row, message.first_row + len(message.indices))
        rows = {field.name: field.view(memory)[chosen] for field in message.fields}
        try:
            return timed(lambda: pipeline(message.indices, message.params, rows))
        except Exception as error:
            return picklable_error(error)


def main() -> None:
    """Serve the connection whose descriptor is the last argument."""
    # The parent decides what a signal to the whole process group means: it may need a batch to finish its step.
    ignore_stop_signals()
    connection: Connection = Connection(int(sys.argv[-1]))
    with suppress(BrokenPipeError):  # the parent ended while a reply was being sent
        WorkerLoop(connection).run()
    os._exit(0)  # Python's own end takes most of a second once torch is imported, and the parent waits for it
