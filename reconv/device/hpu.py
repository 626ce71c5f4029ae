"""Intel Gaudi, by the public interface of habana_frameworks. Written against its documentation; docs/devices.md says
what was never run on the hardware.

Owns the vendor's imports, its two modes and its marks. Refuses to know steps: whoever computes says where one ends.
Invariant: in lazy mode nothing accumulates past a `step_boundary`; in eager mode there is nothing to mark.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from reconv.batch import Batch
from reconv.errors import UsageError

_LAZY = "PT_HPU_LAZY_MODE"
# Keys of samples are 64-bit hashes; without this integers of 64 bits are computed in 32, and draws would differ.
_INT64 = "PT_ENABLE_INT64_SUPPORT"


class Hpu:
    """One Gaudi of this machine."""

    kind = "hpu"
    channels_last = False
    raises_oom = False  # it was never tried

    def __init__(self, index: int = 0, threads: int | None = None) -> None:
        self._core = _vendor("core")
        self._hpu = _vendor("hpu")
        num_devices = count_hpus()
        if index >= num_devices:
            raise UsageError(
                f"there is no hpu:{index}",
                why=f"the driver shows {num_devices} Gaudi devices, counted from 0",
                then="use --device cpu; `hl-smi` lists what the driver sees",
            )
        self.torch = torch.device("hpu", index)
        self._hpu.set_device(index)
        self.is_lazy = os.environ[_LAZY] == "1"
        self.compile_backend: str | None = None if self.is_lazy else "hpu_backend"
        if threads is not None:
            torch.set_num_threads(threads)

    def move(self, tensor: Tensor) -> Tensor:
        """The tensor on this device; float64 does not exist here and becomes float32."""
        dtype = torch.float32 if tensor.dtype == torch.float64 else tensor.dtype
        # It waits: nothing tells when a copy that was left to itself has arrived and its memory may be filled again.
        return tensor.to(self.torch, dtype)

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """Copies wait here, so locked memory would save nothing."""
        return lambda: None

    def send(self, batch: Batch) -> tuple[Batch, None]:
        """The batch moved, which is over when this returns."""
        return batch.map(self.move), None

    def set_cudnn_benchmark(self, limit: int | None) -> None:
        """The graph compiler chooses algorithms by itself."""

    def warm_up(self) -> None:
        """The bridge loads everything with its import."""

    def copy_to_host(self, value: Tensor) -> Callable[[], Tensor]:
        """Keep the value; the call waits and copies."""
        kept = value.detach().clone()
        return lambda: kept.cpu()

    def graph_capture(self) -> None:
        """Whole steps are not recorded here: lazy mode gathers them into graphs by itself."""
        return None

    def synchronize(self) -> None:
        """Launch what was gathered, and wait until the device has done all that it was given."""
        self.step_boundary()
        self._hpu.synchronize()

    def step_boundary(self) -> None:
        """Lazy mode: compile and launch what was gathered so far. Eager mode gathers nothing."""
        if self.is_lazy:
            self._core.mark_step()

    def sgd_implementation(self) -> Literal["foreach"] | Callable[..., torch.optim.Optimizer]:
        """The vendor's fused optimizer where its packages have it; torch's fused kernel does not exist here."""
        try:
            found: Callable[..., torch.optim.Optimizer] = _import("hpex.optimizers").FusedSGD
        except (ImportError, AttributeError):  # it is an extension, and its kinds differ between releases
            return "foreach"
        return found

    def release_memory(self) -> None:
        """The vendor's interface has no such call."""

    def peak_memory_bytes(self) -> int:
        """The most that tensors have held so far."""
        return int(self._hpu.memory_stats(self.torch)["MaxInUse"])

    def total_memory_bytes(self) -> int:
        """The device's memory."""
        return int(self._hpu.memory_stats(self.torch)["Limit"])

    def describe(self) -> str:
        """The device in words."""
        return f"{self.torch}, {self._hpu.get_device_name()}, {'lazy' if self.is_lazy else 'eager'} mode"

    def pci_address(self) -> str | None:
        """The public interface does not tell."""
        return None


def has_hpu() -> bool:
    """Whether the vendor's packages are installed and show a device."""
    return importlib.util.find_spec("habana_frameworks") is not None and count_hpus() > 0


def count_hpus() -> int:
    """How many devices the driver shows."""
    vendor = _vendor("hpu")
    return int(vendor.device_count()) if vendor.is_available() else 0


def load_backend(kind: str) -> None:
    """Make known to torch what processes with this kind of device talk through, where a vendor has it."""
    if kind == "hpu":
        _vendor("distributed.hccl")


def _vendor(name: str) -> Any:
    """A module of the vendor's, or words about how to get it."""
    # Both are read when the package is first loaded. Eager mode is what the vendor recommends now.
    os.environ.setdefault(_LAZY, "0")
    os.environ.setdefault(_INT64, "1")
    try:
        return _import(name)
    except ImportError as error:
        raise UsageError(
            "no Gaudi can be used",
            why=f"{error}; this is Python {sys.version_info.major}.{sys.version_info.minor}",
            then="run in the vendor's container, or install its driver and habana_frameworks; else --device cpu",
        ) from error


def _import(name: str) -> Any:
    return importlib.import_module(f"habana_frameworks.torch.{name}")
