"""The program of a worker process: told what to fill, it fills it, until its parent is gone.

Owns the loop and the words both sides use. Refuses to know order and steps. Invariant: it ends when the connection
does, whatever happened to the parent; an error of a row travels back and is not the end.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import numpy as np

from reconv.data.dataset import I64
from reconv.data.pipeline.buffers import BufferField
from reconv.data.pipeline.sample_pipeline import Draws, SamplePipeline
from reconv.data.pipeline.shared_pickle import portable, unpack
from reconv.data.pipeline.stage_timing import timed


@dataclass(frozen=True, slots=True)
class Register:
    """An object to keep under a number; the descriptor of its arrays follows where there are some."""

    number: int
    content: bytes
    extents: tuple[tuple[int, int], ...]
    has_file: bool


@dataclass(frozen=True, slots=True)
class Map:
    """A slab to map under a number; its descriptor follows."""

    slab: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Unmap:
    """A slab that is not used any more."""

    slab: int


@dataclass(frozen=True, slots=True)
class Fill:
    """Rows to fill; answered by the seconds of its stages, or by the error."""

    fetch: int
    slab: int
    places: tuple[BufferField, ...]
    indices: I64
    draws: Draws | None
    first_row: int


class Worker:
    """What a worker process knows."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._kept: dict[int, Any] = {}
        self._slabs: dict[int, mmap.mmap] = {}

    def serve(self) -> None:
        """Do what is asked until nobody asks."""
        while True:
            try:
                asked = self._connection.recv()
            except (EOFError, ConnectionResetError):
                return
            match asked:
                case Register():
                    self._take(asked)
                case Map():
                    file = recv_handle(self._connection)
                    self._slabs[asked.slab] = mmap.mmap(file, asked.num_bytes)
                    os.close(file)
                case Unmap():
                    del self._slabs[asked.slab]
                case Fill():
                    self._answer(asked)

    def _take(self, asked: Register) -> None:
        file = recv_handle(self._connection) if asked.has_file else -1
        self._kept[asked.number] = unpack(asked.content, asked.extents, file, self._kept)
        if file >= 0:
            os.close(file)

    def _answer(self, asked: Fill) -> None:
        answer: Any
        try:
            answer = timed(lambda: self._fill(asked))
        except Exception as error:
            answer = portable(error)
        self._connection.send(answer)

    def _fill(self, asked: Fill) -> None:
        fetch: SamplePipeline = self._kept[asked.fetch]
        whole = np.frombuffer(memoryview(self._slabs[asked.slab]), np.uint8)
        rows = slice(asked.first_row, asked.first_row + len(asked.indices))
        fetch(asked.indices, asked.draws, {place.name: place.of(whole)[rows] for place in asked.places})


def main() -> None:
    """Serve the connection whose descriptor is the last argument."""
    # The parent decides what a signal to the whole group means: it may still need a batch to finish its step.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection: Connection = Connection(int(sys.argv[-1]))
    sys.path[:] = connection.recv()
    try:
        Worker(connection).serve()
    except BrokenPipeError:  # the parent went while an answer was on its way
        return
