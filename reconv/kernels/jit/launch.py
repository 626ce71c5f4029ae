"""Launching kernels, and tracing which variants of them a pass would launch.

Inside `trace_launches`, calls on meta tensors are recorded and nothing runs. Elsewhere a launch first waits for a
kernel that is being compiled ahead: Triton does not guard against launching a kernel while another thread loads it.
Traced variants come from the same calls that launch, so the two cannot diverge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAX_GRID_YZ = 65535  # CUDA's limit of a grid's second and third axis
# Any value will do: kernels are not specialized on numbers.
_SAMPLES: dict[type, int | float] = {int: 16, float: 1.0}


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """Unit that Triton compiles once: a kernel, the types of its arguments, and its constants."""

    kernel: Any
    types: tuple[torch.dtype | type, ...]
    constants: tuple[tuple[str, int], ...]  # including num_warps

    def arguments(self) -> tuple[torch.dtype | int | float, ...]:
        """One argument of each type; a dtype stands for a tensor aligned to 16 bytes."""
        return tuple(_SAMPLES[t] if isinstance(t, type) else t for t in self.types)

    def spec(self) -> tuple[str, str, list[str], dict[str, int]]:
        """Module, kernel name, types and constants, for a process without torch."""
        types = [t.__name__ if isinstance(t, type) else str(t).removeprefix("torch.") for t in self.types]
        return self.kernel.__module__, self.kernel.__name__, types, dict(self.constants)


def variant_of(kernel: Any, args: Sequence[Tensor | float], constants: dict[str, int]) -> KernelVariant:
    """The variant that a call launches."""
    types = tuple(arg.dtype if isinstance(arg, Tensor) else type(arg) for arg in args)
    return KernelVariant(kernel, types, tuple(sorted(constants.items())))


_traced: ContextVar[dict[KernelVariant, None] | None] = ContextVar("traced", default=None)


@contextmanager
def trace_launches() -> Iterator[dict[KernelVariant, None]]:
    """Record the variants of the calls inside, in order of first call."""
    traced: dict[KernelVariant, None] = {}
    token = _traced.set(traced)
    try:
        yield traced
    finally:
        _traced.reset(token)


def is_traced(x: Tensor) -> bool:
    """True if a call with this tensor is recorded instead of launched."""
    return x.is_meta and _traced.get() is not None


@dataclass(slots=True)
class _Compilations:
    """Kernels that other threads are compiling, and the callback for a failure."""

    pending: dict[Any, list[Future[None]]]
    warn: Callable[[str], None]

    def wait_for(self, kernel: Any) -> None:
        """Wait until no thread compiles this kernel; warns once on failure, and the launch then compiles it."""
        done = wait(self.pending.pop(kernel, ())).done
        failures = [failure for future in done if (failure := future.exception()) is not None]
        if failures:
            warn, self.warn = self.warn, lambda text: None
            warn(f"compiling kernels ahead of time failed, so the first step takes longer: {failures[0]!r}")


_compilations = _Compilations({}, lambda text: None)


def register_compilations(pending: dict[Any, list[Future[None]]], warn: Callable[[str], None]) -> None:
    """Make launches wait for these kernels' compilations; `warn` is called if one fails."""
    for kernel, futures in pending.items():
        _compilations.pending.setdefault(kernel, []).extend(futures)
    _compilations.warn = warn


def launch(kernel: Any, grid: tuple[int, ...], *args: Tensor | float, **constants: int) -> None:
    """Launch a kernel: tensors and numbers by position, constants by name."""
    if max(grid[1:], default=0) > MAX_GRID_YZ:
        raise ValueError(f"launch grid {grid}: only the first axis may have more than {MAX_GRID_YZ:,}")
    if isinstance(args[0], Tensor) and is_traced(args[0]):
        from reconv.kernels.jit.compile_variants import resolve_cache_key

        resolve_cache_key(kernel)  # before the variant is hashed: a kernel's hash depends on its cache key
        traced = _traced.get()
        assert traced is not None
        traced[variant_of(kernel, args, constants)] = None
        return
    if _compilations.pending:
        _compilations.wait_for(kernel)
    kernel[grid](*args, **constants)
