"""Apple GPUs. The interface has no events per copy: reading a value waits for the whole queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from reconv.batch import Batch
from reconv.errors import UsageError


class Mps:
    """The GPU of an Apple machine."""

    kind = "mps"
    channels_last = False
    compile_backend: str | None = "inductor"
    raises_oom = False  # it was never tried

    def __init__(self, threads: int | None = None) -> None:
        if not torch.backends.mps.is_available():
            raise UsageError(
                "no Apple GPU can be used",
                why="this machine has none" if torch.backends.mps.is_built() else "this torch is built without mps",
                then="use --device cpu; `reconv doctor` tells what is missing",
            )
        self.torch = torch.device("mps")
        if threads is not None:
            torch.set_num_threads(threads)

    def move(self, tensor: Tensor) -> Tensor:
        """The tensor on this device; float64 does not exist here and becomes float32."""
        dtype = torch.float32 if tensor.dtype == torch.float64 else tensor.dtype
        # It waits: nothing tells when a copy that was left to itself has arrived and its memory may be filled again.
        return tensor.to(self.torch, dtype)

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """There is no such thing here."""
        return lambda: None

    def send(self, batch: Batch) -> tuple[Batch, None]:
        """The batch moved, which is over when this returns."""
        return batch.map(self.move), None

    def set_cudnn_benchmark(self, limit: int | None) -> None:
        """Convolutions have no algorithms to choose from here."""

    def warm_up(self) -> None:
        """Nothing is loaded late here."""

    def copy_to_host(self, value: Tensor) -> Callable[[], Tensor]:
        """Keep the value; the call waits and copies."""
        kept = value.detach().clone()
        return lambda: kept.cpu()

    def graph_capture(self) -> None:
        """Nothing is recorded here: work starts when it is given."""
        return None

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        torch.mps.synchronize()

    def step_boundary(self) -> None:
        """Mark the end of a step, for devices that build graphs."""

    def sgd_implementation(self) -> Literal["fused"]:
        """Torch has a fused kernel for this device."""
        return "fused"

    def release_memory(self) -> None:
        """Give back what torch holds in reserve."""
        torch.mps.empty_cache()

    def peak_memory_bytes(self) -> int:
        """What the driver holds now: torch counts no peak for this device."""
        return torch.mps.driver_allocated_memory()

    def total_memory_bytes(self) -> int:
        """What the system recommends as the most to use."""
        return torch.mps.recommended_max_memory()

    def describe(self) -> str:
        """The device in words."""
        return "mps, Apple GPU"

    def pci_address(self) -> str | None:
        """It hangs on no bus that is known."""
        return None
