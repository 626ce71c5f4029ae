"""The device protocol, and opening a device by its name."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from reconv.core.batch import Batch, CopyEvent, TimingEvent
from reconv.core.errors import UsageError
from reconv.device.cpu import Cpu
from reconv.device.cuda import Cuda, CudaGraph
from reconv.device.hpu import Hpu, count_hpus, has_hpu
from reconv.device.mps import Mps
from reconv.recipe.parts.engine import EngineConfig

MIN_BENCHMARKED_STEPS = 4000  # of a run whose convolution algorithms are timed without being asked for


class Device(Protocol):
    """The interface of a device: everything that differs between CPU, CUDA, MPS and HPU."""

    kind: str  # cpu, cuda, mps or hpu
    channels_last: bool  # whether convolutions prefer this memory format
    compile_backend: str | None  # of torch.compile; None: models are not compiled
    raises_oom: bool  # whether running out of memory raises an error that training can recover from
    torch: torch.device

    def move(self, tensor: Tensor) -> Tensor:
        """The tensor on this device."""
        ...

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """Page-lock host memory for asynchronous copies; returns the call that unlocks it."""
        ...

    def send(self, batch: Batch) -> tuple[Batch, CopyEvent | None]:
        """The batch on this device and its copy; None: it is finished.

        What is computed with the batch must wait for the copy; its host memory may be reused when it has finished.
        """
        ...

    def copy_to_host(self, value: Tensor) -> Callable[[], Tensor]:
        """Start copying a small tensor to the host; the returned call waits for it."""
        ...

    def set_cudnn_benchmark(self, limit: int | None) -> None:
        """Try this many convolution algorithms per shape and keep the fastest; 0: all; None: do not try."""
        ...

    def cudnn_benchmark_limit(self) -> int | None:
        """The limit that is set; None: algorithms are not tried."""
        ...

    def warm_up(self) -> None:
        """Start loading the libraries of the first step; called when determinism and benchmarking are configured."""
        ...

    def record_event(self) -> TimingEvent | None:
        """An event after the work that was launched so far, to be timed; None: the device has no such events."""
        ...

    def graph_capture(self) -> CudaGraph | None:
        """Capturer of steps as graphs, if the device supports that."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has finished all work."""
        ...

    def step_boundary(self) -> None:
        """Launch the work so far, on devices that collect it into graphs (Gaudi's mark_step)."""
        ...

    def sgd_implementation(self) -> Literal["fused", "foreach"] | Callable[..., Optimizer]:
        """The fastest SGD here: one of torch's, or a vendor's class with the interface of torch.optim.SGD."""
        ...

    def release_memory(self) -> None:
        """Return cached memory to the system and reset the peak."""
        ...

    def peak_memory_bytes(self) -> int: ...
    def total_memory_bytes(self) -> int: ...
    def describe(self) -> str: ...
    def pci_address(self) -> str | None: ...


def device_kind(name: str = "auto") -> str:
    """The kind of a device name (cuda of cuda:1); for auto the best that is available."""
    if name != "auto":
        return name.split(":")[0]
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "hpu" if has_hpu() else "cpu"


def count_devices(kind: str) -> int | None:
    """The number of devices of a kind on this machine; None: any number of processes may share it."""
    if kind == "cuda":
        return torch.cuda.device_count()
    if kind == "hpu":
        return count_hpus()
    return 1 if kind == "mps" else None


def open_device(name: str = "auto", threads: int | None = None, local_rank: int = 0) -> Device:
    """Open a device by name; sets torch's number of CPU threads if given.

    `local_rank` chooses among several devices of a kind if the name has no index.
    """
    if name == "auto":
        name = device_kind(name)
    if name == "cuda" and local_rank and torch.cuda.is_available():
        name = f"cuda:{local_rank % torch.cuda.device_count()}"  # a launcher may show each process only its own GPU
    if name == "cpu":
        return Cpu(threads)
    if name == "mps":
        return Mps(threads)
    match = re.fullmatch(r"(cuda|hpu)(?::(\d+))?", name)
    if match is None:
        raise UsageError(f"unknown device {name!r}", hint="use auto, cpu, cuda, cuda:1, mps or hpu")
    if match[1] == "hpu":
        return Hpu(local_rank if match[2] is None else int(match[2]), threads)
    return Cuda(int(match[2] or 0), threads)


def configure_algorithms(device: Device, engine: EngineConfig, num_steps: int | None = None) -> None:
    """Choose between the fastest and the deterministic algorithms, then let the device load its libraries.

    `num_steps` is the length of a training run: timing the algorithms of convolutions takes seconds (ResNet-50 on an
    H200: 2.2), and makes a step shorter by 0.1 to 1 ms (benchmarks/LOG.md).
    """
    # Steps that are computed again must have the same bits; on a CPU they have them anyway.
    is_deterministic = engine.deterministic or (engine.verify != "off" and device.kind == "cuda")
    if is_deterministic:
        # cuBLAS reads it when it is initialized, and is not deterministic without it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Filling uninitialized memory costs a pass over every tensor, and nothing here reads it before writing.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    pays = (num_steps is None or num_steps >= MIN_BENCHMARKED_STEPS) and not is_deterministic
    tries = engine.cudnn_benchmark == "on" or (engine.cudnn_benchmark == "auto" and pays)
    limit = 0 if engine.cudnn_benchmark_limit == "all" else engine.cudnn_benchmark_limit
    device.set_cudnn_benchmark(limit if tries else None)
    if torch.are_deterministic_algorithms_enabled() != is_deterministic:
        # Only when it changes: the call imports torch's compiler, which takes seconds.
        torch.use_deterministic_algorithms(is_deterministic)
    device.warm_up()


@contextmanager
def without_cudnn_benchmark(device: Device) -> Iterator[None]:
    """Let cuDNN's heuristics choose the algorithms of new shapes inside; what was timed before is still used.

    torch keeps what was chosen: a shape that is new here is not timed outside either.
    """
    limit = device.cudnn_benchmark_limit()
    device.set_cudnn_benchmark(None)
    try:
        yield
    finally:
        device.set_cudnn_benchmark(limit)


def is_out_of_memory(error: BaseException) -> bool:
    """True if an exception means that the host or the device ran out of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # torch's host allocator, cuDNN and mps raise a plain RuntimeError.
    texts = ("can't allocate memory", "out of memory", "CUDNN_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
