"""Apple GPUs. MPS has no event per copy: reading a value waits for the whole queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from reconv.core.batch import Batch
from reconv.core.errors import UsageError


class Mps:
    """The GPU of an Apple machine."""

    kind = "mps"
    channels_last = False
    compile_backend: str | None = "inductor"
    raises_oom = False  # not tested

    def __init__(self, threads: int | None = None) -> None:
        if not torch.backends.mps.is_available():
            raise UsageError(
                "no Apple GPU is available",
                why="this machine has none"
                if torch.backends.mps.is_built()
                else f"torch {torch.__version__} is built without MPS",
                hint="use --device cpu; `reconv doctor` shows what is missing",
            )
        self.torch = torch.device("mps")
        if threads is not None:
            torch.set_num_threads(threads)

    def move(self, tensor: Tensor) -> Tensor:
        """The tensor on this device; float64, which MPS lacks, becomes float32."""
        dtype = torch.float32 if tensor.dtype == torch.float64 else tensor.dtype
        # Blocking: there is no way to know when an asynchronous copy has finished and its host memory may be reused.
        return tensor.to(self.torch, dtype)

    def pin(self, memory: Tensor) -> Callable[[], None]:
        return lambda: None

    def send(self, batch: Batch) -> tuple[Batch, None]:
        return batch.map(self.move), None

    def set_cudnn_benchmark(self, limit: int | None) -> None:
        """There is nothing to choose from."""

    def cudnn_benchmark_limit(self) -> int | None:
        return None

    def warm_up(self) -> None:
        """There is nothing to load."""

    def copy_to_host(self, value: Tensor) -> Callable[[], Tensor]:
        value_then = value.detach().clone()
        return lambda: value_then.cpu()

    def record_event(self) -> None:
        return None

    def graph_capture(self) -> None:
        return None

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def step_boundary(self) -> None:
        """Work is launched as it comes."""

    def sgd_implementation(self) -> Literal["foreach"]:
        """Not fused: until mid-2026 torch's fused kernels for MPS ignored `found_inf`, which gates our steps."""
        return "foreach"

    def release_memory(self) -> None:
        torch.mps.empty_cache()

    def peak_memory_bytes(self) -> int:
        """Bytes that the driver has allocated now: torch counts no peak on MPS."""
        return torch.mps.driver_allocated_memory()

    def total_memory_bytes(self) -> int:
        """Maximum that the system recommends, in bytes."""
        return torch.mps.recommended_max_memory()

    def describe(self) -> str:
        return "mps, Apple GPU"

    def pci_address(self) -> str | None:
        return None
