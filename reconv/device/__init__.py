"""Chips behind one small protocol. Every vendor import of the project lives in this room."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from reconv.batch import Batch, Copied
from reconv.device.cpu import Cpu
from reconv.device.cuda import Cuda, Recorder
from reconv.device.mps import Mps
from reconv.errors import UsageError

__all__ = ["Cpu", "Cuda", "Device", "Mps", "Recorder", "is_out_of_memory", "open_device"]


class Device(Protocol):
    """What a device is to the parts that choose one; the engine sees less of it."""

    kind: str
    channels_last: bool  # whether convolutions like their images so
    torch: torch.device

    def move(self, tensor: Tensor) -> Tensor: ...
    def pin(self, memory: Tensor) -> Callable[[], None]: ...
    def send(self, batch: Batch) -> tuple[Batch, Copied | None]: ...
    def autotune(self, is_on: bool) -> None: ...
    def later(self, value: Tensor) -> Callable[[], Tensor]: ...
    def recorder(self) -> Recorder | None:
        """What records work and launches it again as a whole, where the device has that."""
        ...

    def synchronize(self) -> None: ...
    def step_boundary(self) -> None: ...
    def peak_memory_bytes(self) -> int: ...
    def total_memory_bytes(self) -> int: ...
    def describe(self) -> str: ...


def open_device(name: str = "auto", threads: int | None = None) -> Device:
    """The device a person named, or the best one there; sets torch's threads when told how many."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cpu":
        return Cpu(threads)
    if name == "mps":
        return Mps(threads)
    if name.split(":")[0] == "hpu":
        raise UsageError("hpu is not built yet", then="use cpu, cuda or mps")
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if match is None:
        raise UsageError(f"there is no device called {name!r}", then="use auto, cpu, cuda, cuda:1 or mps")
    return Cuda(int(match[1] or 0), threads)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that the host or the device ran out of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # torch's host allocator, cuDNN and mps raise a plain RuntimeError.
    words = ("can't allocate memory", "out of memory", "CUDNN_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
