"""Intel Gaudi, by the public interface of habana_frameworks.

Written against its documentation; docs/reference/devices.md lists what was never run on the hardware.
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

from reconv.core.batch import Batch
from reconv.core.errors import UsageError

_LAZY = "PT_HPU_LAZY_MODE"
# Random keys of samples are 64-bit hashes; without this, 64-bit integers are computed in 32 bits.
_INT64 = "PT_ENABLE_INT64_SUPPORT"


class Hpu:
    """One Gaudi device of this machine."""

    kind = "hpu"
    channels_last = False
    raises_oom = False  # not tested

    def __init__(self, index: int = 0, threads: int | None = None) -> None:
        self._core = _vendor("core")
        self._hpu = _vendor("hpu")
        num_devices = count_hpus()
        if index >= num_devices:
            raise UsageError(
                f"there is no hpu:{index}",
                why=f"the driver reports {num_devices} Gaudi devices, counted from 0",
                hint="use --device cpu; `hl-smi` lists the devices",
            )
        self.torch = torch.device("hpu", index)
        self._hpu.set_device(index)
        self.is_lazy = os.environ[_LAZY] == "1"
        self.compile_backend: str | None = None if self.is_lazy else "hpu_backend"
        if threads is not None:
            torch.set_num_threads(threads)

    def move(self, tensor: Tensor) -> Tensor:
        """The tensor on this device; float64, which Gaudi lacks, becomes float32."""
        dtype = torch.float32 if tensor.dtype == torch.float64 else tensor.dtype
        # Blocking: there is no way to know when an asynchronous copy has finished and its host memory may be reused.
        return tensor.to(self.torch, dtype)

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """Copies are blocking, so pinned memory would save nothing."""
        return lambda: None

    def send(self, batch: Batch) -> tuple[Batch, None]:
        return batch.map(self.move), None

    def set_cudnn_benchmark(self, limit: int | None) -> None:
        """The graph compiler chooses algorithms by itself."""

    def cudnn_benchmark_limit(self) -> int | None:
        return None

    def warm_up(self) -> None:
        """The vendor's package loads everything when it is imported."""

    def copy_to_host(self, value: Tensor) -> Callable[[], Tensor]:
        value_then = value.detach().clone()
        return lambda: value_then.cpu()

    def record_event(self) -> None:
        return None

    def graph_capture(self) -> None:
        """Steps are not captured: lazy mode collects them into graphs by itself."""
        return None

    def synchronize(self) -> None:
        """Launch the collected work and wait for it."""
        self.step_boundary()
        self._hpu.synchronize()

    def step_boundary(self) -> None:
        """Lazy mode: compile and launch the work collected so far. Eager mode collects nothing."""
        if self.is_lazy:
            self._core.mark_step()

    def sgd_implementation(self) -> Literal["foreach"] | Callable[..., torch.optim.Optimizer]:
        """The vendor's FusedSGD if installed; torch has no fused kernel for this device."""
        try:
            fused: Callable[..., torch.optim.Optimizer] = _import("hpex.optimizers").FusedSGD
        except (ImportError, AttributeError):  # an extension that differs between releases
            return "foreach"
        return fused

    def release_memory(self) -> None:
        """The vendor has no such call."""

    def peak_memory_bytes(self) -> int:
        """The peak of allocated tensors."""
        return int(self._hpu.memory_stats(self.torch)["MaxInUse"])

    def total_memory_bytes(self) -> int:
        return int(self._hpu.memory_stats(self.torch)["Limit"])

    def describe(self) -> str:
        return f"{self.torch}, {self._hpu.get_device_name()}, {'lazy' if self.is_lazy else 'eager'} mode"

    def pci_address(self) -> str | None:
        """The vendor has no such call."""
        return None


def has_hpu() -> bool:
    """True if the vendor's packages are installed and report a device."""
    return importlib.util.find_spec("habana_frameworks") is not None and count_hpus() > 0


def count_hpus() -> int:
    vendor = _vendor("hpu")
    return int(vendor.device_count()) if vendor.is_available() else 0


def load_backend(kind: str) -> None:
    """Register the vendor's torch.distributed backend for a kind of device, if it has one."""
    if kind == "hpu":
        _vendor("distributed.hccl")


def _vendor(name: str) -> Any:
    """Import a module of habana_frameworks.torch."""
    # Both are read when the package is first imported. The vendor recommends eager mode.
    os.environ.setdefault(_LAZY, "0")
    os.environ.setdefault(_INT64, "1")
    try:
        return _import(name)
    except ImportError as error:
        raise UsageError(
            "no Gaudi device is available",
            why=f"{error}; this is Python {sys.version_info.major}.{sys.version_info.minor}",
            hint="run in the vendor's container, install its driver and habana_frameworks, or use --device cpu",
        ) from error


def _import(name: str) -> Any:
    return importlib.import_module(f"habana_frameworks.torch.{name}")
