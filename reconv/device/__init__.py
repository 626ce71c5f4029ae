"""Chips behind one small protocol. Every vendor import of the project lives in this room."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from reconv.batch import Batch, CopyEvent
from reconv.device.cpu import Cpu
from reconv.device.cuda import Cuda, CudaGraph
from reconv.device.hpu import Hpu, count_hpus, has_hpu, load_backend
from reconv.device.mps import Mps
from reconv.errors import UsageError
from reconv.recipe.schema import EngineConfig

__all__ = [
    "Cpu",
    "Cuda",
    "CudaGraph",
    "Device",
    "Hpu",
    "Mps",
    "configure_algorithms",
    "count_devices",
    "device_kind",
    "is_out_of_memory",
    "load_backend",
    "open_device",
]


class Device(Protocol):
    """What a device is to the parts that choose one; the engine sees less of it."""

    kind: str
    channels_last: bool  # whether convolutions like their images so
    compile_backend: str | None  # torch.compile's backend here; None: networks are not compiled
    raises_oom: bool  # whether what does not fit into memory raises an error that can be borne
    torch: torch.device

    def move(self, tensor: Tensor) -> Tensor: ...
    def pin(self, memory: Tensor) -> Callable[[], None]: ...
    def send(self, batch: Batch) -> tuple[Batch, CopyEvent | None]: ...
    def set_cudnn_benchmark(self, limit: int | None) -> None:
        """Try so many algorithms for each operation and keep the fastest; 0: all there are; None: do not try."""
        ...

    def warm_up(self) -> None:
        """Begin to load what the first step would load, once it is known which algorithms may be chosen."""
        ...

    def copy_to_host(self, value: Tensor) -> Callable[[], Tensor]: ...
    def graph_capture(self) -> CudaGraph | None:
        """What records work and launches it again as a whole, where the device has that."""
        ...

    def synchronize(self) -> None: ...
    def step_boundary(self) -> None:
        """What was asked for so far is a whole: a device that gathers work into graphs launches it."""
        ...

    def sgd_implementation(self) -> Literal["fused", "foreach"] | Callable[..., Optimizer]:
        """How gradients are descended fastest: by torch's kernels, or by a vendor's optimizer like torch.optim.SGD."""
        ...

    def release_memory(self) -> None: ...
    def peak_memory_bytes(self) -> int: ...
    def total_memory_bytes(self) -> int: ...
    def describe(self) -> str: ...
    def pci_address(self) -> str | None: ...


def device_kind(name: str = "auto") -> str:
    """What kind of device a person means: cpu, cuda, ..."""
    if name != "auto":
        return name.split(":")[0]
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "hpu" if has_hpu() else "cpu"


def count_devices(kind: str) -> int | None:
    """How many devices of a kind this machine has; None: a process takes what there is."""
    if kind == "cuda":
        return torch.cuda.device_count()
    if kind == "hpu":
        return count_hpus()
    return 1 if kind == "mps" else None


def open_device(name: str = "auto", threads: int | None = None, local_rank: int = 0) -> Device:
    """The device a person named, or the best one there; sets torch's threads when told how many.

    The `local_rank` of a process among those on this machine chooses one of several devices that the name leaves open.
    """
    if name == "auto":
        name = device_kind(name)
    if name == "cuda" and local_rank and torch.cuda.is_available():
        name = f"cuda:{local_rank % torch.cuda.device_count()}"  # a launcher may show each process its own alone
    if name == "cpu":
        return Cpu(threads)
    if name == "mps":
        return Mps(threads)
    match = re.fullmatch(r"(cuda|hpu)(?::(\d+))?", name)
    if match is None:
        raise UsageError(f"there is no device called {name!r}", then="use auto, cpu, cuda, cuda:1, mps or hpu")
    if match[1] == "hpu":
        return Hpu(local_rank if match[2] is None else int(match[2]), threads)
    return Cuda(int(match[2] or 0), threads)


def configure_algorithms(device: Device, engine: EngineConfig) -> None:
    """Let torch try algorithms and keep the fastest, or take only those that give the same bits every time.

    From then on the device may load its libraries.
    """
    is_deterministic = engine.deterministic
    if is_deterministic:
        # cuBLAS reads it when it starts, and refuses to promise equal bits without.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Filling what is about to be overwritten costs a pass over every tensor, and nothing here reads it before.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    tries = engine.cudnn_benchmark == "on" or (engine.cudnn_benchmark == "auto" and not is_deterministic)
    limit = 0 if engine.cudnn_benchmark_limit == "all" else engine.cudnn_benchmark_limit
    device.set_cudnn_benchmark(limit if tries else None)
    if torch.are_deterministic_algorithms_enabled() != is_deterministic:
        # Only when it changes: the call imports torch's compiler, which takes seconds.
        torch.use_deterministic_algorithms(is_deterministic)
    device.warm_up()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that the host or the device ran out of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # torch's host allocator, cuDNN and mps raise a plain RuntimeError.
    words = ("can't allocate memory", "out of memory", "CUDNN_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
