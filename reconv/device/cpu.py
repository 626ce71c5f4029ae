"""The CPU as a device. Its peak memory is that of the whole process, data included."""

from __future__ import annotations

import faulthandler
import os
import resource
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from reconv.core.batch import Batch

ISA_LIMIT = "ONEDNN_MAX_CPU_ISA"
ISA_WITHOUT_AMX = "AVX512_CORE_FP16"
_CPUINFO = Path("/proc/cpuinfo")


class Cpu:
    """The CPU as a device. Nothing is asynchronous, so most methods do nothing."""

    kind = "cpu"
    channels_last = False
    compile_backend: str | None = "inductor"
    raises_oom = False  # the system kills the process instead

    def __init__(self, threads: int | None = None) -> None:
        self.torch = torch.device("cpu")
        disable_broken_amx()
        if threads is not None:
            torch.set_num_threads(threads)

    def move(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.torch)

    def pin(self, memory: Tensor) -> Callable[[], None]:
        return lambda: None

    def send(self, batch: Batch) -> tuple[Batch, None]:
        """The batch itself; nothing is copied."""
        return batch.map(self.move), None

    def set_cudnn_benchmark(self, limit: int | None) -> None:
        """There is nothing to choose from."""

    def cudnn_benchmark_limit(self) -> int | None:
        return None

    def warm_up(self) -> None:
        """There is nothing to load."""

    def copy_to_host(self, value: Tensor) -> Callable[[], Tensor]:
        copied = value.detach().clone()
        return lambda: copied

    def record_event(self) -> None:
        """Work on the host is done when a call returns."""
        return None

    def graph_capture(self) -> None:
        return None

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def step_boundary(self) -> None:
        """Work is launched as it comes."""

    def sgd_implementation(self) -> Literal["fused"]:
        return "fused"

    def release_memory(self) -> None:
        """Freed memory goes back to the system by itself."""

    def peak_memory_bytes(self) -> int:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def total_memory_bytes(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def describe(self) -> str:
        threads = torch.get_num_threads()
        return f"cpu, {threads} thread{'s' if threads != 1 else ''}"

    def pci_address(self) -> str | None:
        return None


@cache
def disable_broken_amx() -> bool:
    """Make oneDNN avoid AMX where using it would kill the process. Returns whether that was necessary."""
    if ISA_LIMIT in os.environ or not reports_amx() or _amx_works():
        return False
    os.environ[ISA_LIMIT] = ISA_WITHOUT_AMX
    return True


def reports_amx() -> bool:
    """True if the CPU says that it has AMX."""
    return _CPUINFO.exists() and "amx_tile" in _CPUINFO.read_text()


def _amx_works() -> bool:
    """Multiply two small bf16 matrices in a child process, and see whether it survives."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # the crash is expected
        square = torch.ones(64, 64, dtype=torch.bfloat16)
        torch.nn.functional.linear(square, square)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0
