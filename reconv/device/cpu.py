"""The host processor as a device. Its memory figure is the whole process's peak, data included."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from reconv.batch import Batch
from reconv.device.amx import avoid_broken_tiles


class Cpu:
    """Nothing is asynchronous here, so most of the protocol is empty."""

    kind = "cpu"
    channels_last = False
    compile_backend: str | None = "inductor"
    raises_oom = False  # the system ends the process instead

    def __init__(self, threads: int | None = None) -> None:
        self.torch = torch.device("cpu")
        avoid_broken_tiles()
        if threads is not None:
            torch.set_num_threads(threads)

    def move(self, tensor: Tensor) -> Tensor:
        """The tensor on this device."""
        return tensor.to(self.torch)

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """Memory is memory here."""
        return lambda: None

    def send(self, batch: Batch) -> tuple[Batch, None]:
        """The batch itself: its memory is the host's, and nothing is copied."""
        return batch.map(self.move), None

    def set_cudnn_benchmark(self, limit: int | None) -> None:
        """Convolutions have no algorithms to choose from here."""

    def warm_up(self) -> None:
        """Nothing is loaded late here."""

    def copy_to_host(self, value: Tensor) -> Callable[[], Tensor]:
        """A copy, taken now."""
        copied = value.detach().clone()
        return lambda: copied

    def graph_capture(self) -> None:
        """Nothing is recorded here: work starts when it is given."""
        return None

    def synchronize(self) -> None:
        """Wait for the device: never needed here."""

    def step_boundary(self) -> None:
        """Mark the end of a step, for devices that build graphs."""

    def sgd_implementation(self) -> Literal["fused"]:
        """Torch has a fused kernel for this device."""
        return "fused"

    def release_memory(self) -> None:
        """The system takes back what is freed."""

    def peak_memory_bytes(self) -> int:
        """The largest resident size of the process so far."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def total_memory_bytes(self) -> int:
        """The machine's memory."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def describe(self) -> str:
        """The device in words."""
        threads = torch.get_num_threads()
        return f"cpu, {threads} thread{'s' if threads != 1 else ''}"

    def pci_address(self) -> str | None:
        """It hangs on no bus that is known."""
        return None
