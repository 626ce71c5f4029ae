"""An object as it travels to worker processes: its large arrays lie in memory that all of them map.

Owns the packing. Refuses to know who sends it. Invariant: what comes out equals what went in, arrays are read-only
there and held once for all processes; it is a pickle between processes of one run, and is never a file with a name.
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


class CannotTravelError(Exception):
    """An object that exists in its own process alone."""


@dataclass(frozen=True, slots=True)
class SharedPickle:
    """What is sent: the object without its arrays, where these lie, and the descriptor of their memory."""

    content: bytes
    extents: tuple[tuple[int, int], ...]  # start and length of each array
    file: int  # -1: there are none

    @property
    def shared_bytes(self) -> int:
        """Bytes of the arrays, held once."""
        return sum(length for _, length in self.extents)

    def close(self) -> None:
        """Let go of the memory; who has mapped it keeps it."""
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
    """Pack an object; `known` gives the numbers of objects, by their id, that were sent before."""
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    try:
        _Pickler(file, known, buffers).dump(obj)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise CannotTravelError(str(error)) from error
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
    """The object; its arrays stay in the shared memory."""
    memory = memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_READ)) if file >= 0 else memoryview(b"")
    views = [memory[start : start + length] for start, length in extents]
    return _Unpickler(io.BytesIO(content), known, views).load()


def portable(error: Exception) -> Exception:
    """The error itself where it can travel, else its words."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever an exception's own constructor makes of being unpacked
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def shared_file(num_bytes: int) -> int:
    """The descriptor of new memory that other processes can map; it is gone when the last of them is."""
    file = os.memfd_create("reconv-data", os.MFD_CLOEXEC)
    os.ftruncate(file, num_bytes)
    return file
