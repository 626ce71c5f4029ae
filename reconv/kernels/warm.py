"""Kernels compiled ahead of their first launch, side by side.

Owns the threads: most of a compilation is LLVM, ptxas and the C compiler, none of which holds Python's lock. Refuses to
know which variants are needed (`launch.rehearsed` tells) and what runs meanwhile. Invariant: this is speed alone. A
variant that fails here is compiled again by its first launch, which fails for itself if it must; whether one was
forgotten or is not needed changes no result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any

import torch

from reconv.kernels.launch import Variant, expect

_MOST_THREADS = 16
_binding = Lock()


def compile_ahead(variants: Collection[Variant], device: torch.device, tell: Callable[[str], None]) -> int:
    """Begin to compile variants for a CUDA device, and return how many; their first launches wait for them."""
    threads = max(1, min(len(variants), os.cpu_count() or 1, _MOST_THREADS))
    pool = ThreadPoolExecutor(threads, "compile", torch.cuda.set_device, (device,))
    under_way: dict[Any, list[Future[None]]] = {}
    for variant in variants:
        under_way.setdefault(variant.kernel, []).append(pool.submit(_compile, variant))
    expect(under_way, tell)
    pool.shutdown(wait=False)  # its threads end with their work
    return len(variants)


def _compile(variant: Variant) -> None:
    """Compile a variant for this thread's device, build what launches it, and load it."""
    kernel = variant.kernel
    with _binding:  # Triton makes its driver, and a kernel's cache for a device, without a lock
        kernel.device_caches[torch.cuda.current_device()]
    compiled = kernel.warmup(*variant.arguments(), grid=(1,), **dict(variant.constants))
    compiled.run  # noqa: B018 (a property: the launcher is built, by the C compiler, when it is first asked for)
