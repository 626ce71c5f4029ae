"""Pickles for worker processes whose large arrays lie in memory that all of them map.

Arrays are read-only in the workers and held once for all processes. The memory has no name in the file system, so
nothing is left behind when the processes end.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ALIGN_BYTES = 64  # a cache line


class NotPicklableError(Exception):
    """An object that cannot be sent to another process."""


@dataclass(frozen=True, slots=True)
class SharedPickle:
    """The pickle without its arrays, where these are in the shared memory, and the descriptor of that memory."""

    content: bytes
    extents: tuple[tuple[int, int], ...]  # start and length of each array
    file: int  # -1: no arrays

    @property
    def shared_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(length for _, length in self.extents)

    def close(self) -> None:
        """Close the descriptor; processes that have mapped the memory keep it."""
        if self.file >= 0:
            os.close(self.file)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, known: Mapping[int, int], buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self._known = known

    def persistent_id(self, obj: Any) -> int | None:
        return self._known.get(id(obj))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, known: Mapping[int, Any], buffers: Sequence[memoryview]) -> None:
        super().__init__(file, buffers=buffers)
        self._known = known

    def persistent_load(self, pid: Any) -> Any:
        return self._known[pid]


def pack(obj: Any, known: Mapping[int, int]) -> SharedPickle:
    """Pickle an object; `known` has the numbers of objects, by their id, that the workers already have."""
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    try:
        _Pickler(file, known, buffers).dump(obj)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise NotPicklableError(str(error)) from error
    views = [buffer.raw() for buffer in buffers]
    extents, end = [], 0
    for view in views:
        extents.append((end, len(view)))
        end += -(-len(view) // _ALIGN_BYTES) * _ALIGN_BYTES
    shared = -1
    if end:
        shared = shared_file(end)
        with mmap.mmap(shared, end) as memory:
            for (start, length), view in zip(extents, views, strict=True):
                memory[start : start + length] = view
    return SharedPickle(file.getvalue(), tuple(extents), shared)


def unpack(content: bytes, extents: Sequence[tuple[int, int]], file: int, known: Mapping[int, Any]) -> Any:
    """The object, its arrays in the shared memory; `known` has the objects received before, by number."""
    memory = memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_READ)) if file >= 0 else memoryview(b"")
    views = [memory[start : start + length] for start, length in extents]
    return _Unpickler(io.BytesIO(content), known, views).load()


def picklable_error(error: Exception) -> Exception:
    """The error if it survives pickling, else a RuntimeError with its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an exception's constructor may fail in any way when it is unpickled
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def shared_file(num_bytes: int) -> int:
    """The descriptor of new memory that other processes can map; it is freed with the last of them."""
    file = os.memfd_create("reconv-data", os.MFD_CLOEXEC)
    os.ftruncate(file, num_bytes)
    return file
