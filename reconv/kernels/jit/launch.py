"""The one way in which kernels are launched, and which variants of them a pass would launch.

Owns the moment between a call and its kernel: inside `rehearsed`, calls on tensors without memory (torch's meta device)
are noted and nothing runs; everywhere else a kernel that is being compiled ahead is waited for and then launched.
Refuses to know what a kernel computes. Invariant: what is compiled ahead comes from the very calls that launch, so the
two cannot drift apart; and a kernel is never launched while another thread loads it, which Triton does not guard.
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

MAX_GRID_YZ = 65535  # programs of a grid's second and third axis, on CUDA
_SAMPLES: dict[type, int | float] = {
    int: 16,
    float: 1.0,
}  # a number's value chooses no variant: counts are not specialised


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """What Triton compiles once: a kernel, the types of its arguments, and all that is constant in it."""

    kernel: Any
    types: tuple[torch.dtype | type, ...]
    constants: tuple[tuple[str, int], ...]  # num_warps too

    def arguments(self) -> tuple[torch.dtype | int | float, ...]:
        """One argument of each type; a dtype stands for a tensor that begins at a multiple of 16 bytes."""
        return tuple(_SAMPLES[t] if isinstance(t, type) else t for t in self.types)

    def named(self) -> tuple[str, str, list[str], dict[str, int]]:
        """The same in words, for a process that has no torch: a module and its kernel, types and constants."""
        types = [t.__name__ if isinstance(t, type) else str(t).removeprefix("torch.") for t in self.types]
        return self.kernel.__module__, self.kernel.__name__, types, dict(self.constants)


def variant_of(kernel: Any, args: Sequence[Tensor | float], constants: dict[str, int]) -> KernelVariant:
    """The variant that a call launches."""
    types = tuple(arg.dtype if isinstance(arg, Tensor) else type(arg) for arg in args)
    return KernelVariant(kernel, types, tuple(sorted(constants.items())))


_traced: ContextVar[dict[KernelVariant, None] | None] = ContextVar("noted", default=None)


@contextmanager
def trace_launches() -> Iterator[dict[KernelVariant, None]]:
    """Note the variants of the calls inside, in the order of their first call."""
    noted: dict[KernelVariant, None] = {}
    token = _traced.set(noted)
    try:
        yield noted
    finally:
        _traced.reset(token)


def is_traced(x: Tensor) -> bool:
    """Whether a call with this tensor would be noted instead of launched."""
    return x.is_meta and _traced.get() is not None


@dataclass(slots=True)
class _Compilations:
    """Kernels that other threads are compiling, and who is told if that failed."""

    under_way: dict[Any, list[Future[None]]]
    tell: Callable[[str], None]

    def wait_for(self, kernel: Any) -> None:
        """Return when nobody compiles this kernel any more; a failure is told once, and the call compiles by itself."""
        done = wait(self.under_way.pop(kernel, ())).done
        failures = [failure for future in done if (failure := future.exception()) is not None]
        if failures:
            tell, self.tell = self.tell, lambda text: None
            tell(f"kernels were not compiled ahead of the first step, which is slower for it: {failures[0]!r}")


_compilations = _Compilations({}, lambda text: None)


def register_compilations(under_way: dict[Any, list[Future[None]]], tell: Callable[[str], None]) -> None:
    """Let launches wait for these kernels' compilations, and tell if one failed."""
    for kernel, futures in under_way.items():
        _compilations.under_way.setdefault(kernel, []).extend(futures)
    _compilations.tell = tell


def launch(kernel: Any, grid: tuple[int, ...], *args: Tensor | float, **constants: int) -> None:
    """Run a kernel's programs: tensors and numbers are given in order, constants by name."""
    if max(grid[1:], default=0) > MAX_GRID_YZ:
        raise ValueError(f"a grid of {grid} programs: only the first axis may have more than {MAX_GRID_YZ:,}")
    if isinstance(args[0], Tensor) and is_traced(args[0]):
        from reconv.kernels.jit.compile_variants import resolve_cache_key

        resolve_cache_key(kernel)  # before anybody asks for its hash, which is made of its key
        noted = _traced.get()
        assert noted is not None
        noted[variant_of(kernel, args, constants)] = None
        return
    if _compilations.under_way:
        _compilations.wait_for(kernel)
    kernel[grid](*args, **constants)
