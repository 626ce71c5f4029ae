"""Compiling kernels in parallel ahead of their first launch.

Threads wait for the compiler process, which writes to Triton's cache, and load the kernels from there. This affects
speed only: a variant that the process did not compile is compiled here, and one that fails here is compiled again by
its first launch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from threading import Lock, Thread
from typing import Any

import torch

from reconv.kernels.jit import compile_process as compiler
from reconv.kernels.jit.launch import KernelVariant, register_compilations

_MAX_THREADS = 16
_WARP_THREADS = 32
_triton_lock = Lock()


def compile_ahead(variants: Collection[KernelVariant], device: torch.device, warn: Callable[[str], None]) -> int:
    """Start compiling variants for a CUDA device; their first launches wait for them. Returns how many."""
    major, minor = torch.cuda.get_device_capability(device)
    target = ("cuda", 10 * major + minor, _WARP_THREADS)
    results = compiler.acquire_compiler().compile(target, [variant.spec() for variant in variants])
    threads = max(1, min(len(variants), os.cpu_count() or 1, _MAX_THREADS))
    pool = ThreadPoolExecutor(threads, "compile", torch.cuda.set_device, (device,))
    pending: dict[Any, list[Future[None]]] = {}
    for variant, result in zip(variants, results, strict=True):
        pending.setdefault(variant.kernel, []).append(pool.submit(_load, variant, result))
    register_compilations(pending, warn)
    pool.shutdown(wait=False)  # its threads exit when done
    return len(variants)


def import_triton() -> None:
    """Import Triton in a thread, and compute the hash of its files that every cache key contains.

    Hashing 400 MB takes 0.3 s, in which the rest of a run is set up: it releases the GIL.
    """

    def work() -> None:
        with suppress(Exception):  # raised again where a kernel is needed
            _hash_triton()

    if find_spec("triton") is not None:
        Thread(target=work, name="reconv-triton", daemon=True).start()


def _hash_triton() -> None:
    from triton.runtime.cache import triton_key

    with _triton_lock:
        triton_key()


def _load(variant: KernelVariant, result: Future[None]) -> None:
    """Load a variant and its launcher from the cache, for this thread's device, once it is compiled."""
    kernel = variant.kernel
    _hash_triton()  # else every thread would do it
    with _triton_lock:  # Triton creates its driver and per-device caches without a lock
        kernel.device_caches[torch.cuda.current_device()]
    result.result()
    compiled = kernel.warmup(*variant.arguments(), grid=(1,), **dict(variant.constants))
    compiled.run  # noqa: B018 (a property: builds the launcher with the C compiler on first access)
