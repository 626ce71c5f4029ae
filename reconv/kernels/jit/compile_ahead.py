"""Kernels compiled ahead of their first launch, side by side.

Owns the threads that wait for the compiler (a process, which leaves its work in Triton's cache), take from the cache
and load. Refuses to know which variants are needed (`launch.rehearsed` tells) and what runs meanwhile. Invariant: this
is speed alone. A variant that the compiler did not leave is compiled here; one that fails here is compiled again by
its first launch, which fails for itself if it must; whether one was forgotten or is not needed changes no result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any

import torch

from reconv.kernels.jit import compile_process as compiler
from reconv.kernels.jit.launch import KernelVariant, register_compilations

_MOST_THREADS = 16
_WARP_THREADS = 32
_binding = Lock()


def compile_ahead(variants: Collection[KernelVariant], device: torch.device, tell: Callable[[str], None]) -> int:
    """Begin to compile variants for a CUDA device, and return how many; their first launches wait for them."""
    major, minor = torch.cuda.get_device_capability(device)
    target = ("cuda", 10 * major + minor, _WARP_THREADS)
    answers = compiler.acquire_compiler().ask(target, [variant.named() for variant in variants])
    threads = max(1, min(len(variants), os.cpu_count() or 1, _MOST_THREADS))
    pool = ThreadPoolExecutor(threads, "compile", torch.cuda.set_device, (device,))
    under_way: dict[Any, list[Future[None]]] = {}
    for variant, answer in zip(variants, answers, strict=True):
        under_way.setdefault(variant.kernel, []).append(pool.submit(_load, variant, answer))
    register_compilations(under_way, tell)
    pool.shutdown(wait=False)  # its threads end with their work
    return len(variants)


def _load(variant: KernelVariant, answer: Future[None]) -> None:
    """Take a variant from the cache when it is there, for this thread's device, and load it with what launches it."""
    from triton.runtime.cache import triton_key

    kernel = variant.kernel
    with _binding:  # Triton makes its driver, and a kernel's cache for a device, without a lock
        kernel.device_caches[torch.cuda.current_device()]
        triton_key()  # else every thread would compute this digest of Triton's own 400 MB
    answer.result()
    compiled = kernel.warmup(*variant.arguments(), grid=(1,), **dict(variant.constants))
    compiled.run  # noqa: B018 (a property: the launcher is built, by the C compiler, when it is first asked for)
