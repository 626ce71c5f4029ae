"""A program that compiles kernels into Triton's cache, for a GPU architecture given by name.

Each variant is compiled in its own process, since Triton holds the GIL for much of a compilation. The program neither
imports torch nor opens a GPU; it exits when done, when its input closes, or after two idle minutes.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from typing import Any, TextIO

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction, MockTensor

_IDLE_TIMEOUT_S = 120.0
_NUMBERS: dict[str, int | float] = {
    "int": 16,
    "float": 1.0,
}  # any value will do: kernels are not specialized on numbers


class TargetGpu:
    """The driver interface that Triton needs to compile for a GPU that may be elsewhere."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    @property
    def utils(self) -> Any:
        """The driver's C module, built on first access."""
        return import_module("triton.backends.nvidia.driver").CudaUtils()


class NoTorch(MetaPathFinder):
    """Hides torch from imports: Triton 3.6 would import it, which takes seconds in every child."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "torch":
            raise ModuleNotFoundError(fullname)


def resolve_cache_key(kernel: Any) -> None:
    """Compute a kernel's cache key after those of the functions it calls.

    Triton 3.6 omits the constants of a called function whose key is not computed yet, so that the key of a kernel would
    depend on what was compiled before it.
    """
    if not isinstance(kernel, JITFunction):
        return  # interpreted, or not a kernel
    for name in kernel.fn.__code__.co_names:
        resolve_cache_key(kernel.__globals__.get(name))
    kernel.cache_key  # noqa: B018 (a property that is computed once)


def compile_variant(module: str, name: str, types: list[str], constants: dict[str, int]) -> Any:
    """Compile a variant of a kernel, or take it from the cache."""
    kernel = getattr(import_module(module), name)
    resolve_cache_key(kernel)
    arguments = [_NUMBERS[kind] if kind in _NUMBERS else MockTensor(kind) for kind in types]
    return kernel.warmup(*arguments, grid=(1,), **constants)


def _compile(target: list[Any], variant: list[Any]) -> None:
    """Compile a variant and its launcher, which takes as long where it is C code."""
    driver.set_active(TargetGpu(GPUTarget(*target)))
    compiled = compile_variant(*variant)
    import_module("triton.backends.nvidia.driver").CudaLauncher(compiled.src, compiled.metadata)


def _build_driver() -> None:
    import_module("triton.backends.nvidia.driver").CudaUtils()


def _forked(work: Callable[[], object]) -> int:
    """Run `work` in a forked child; returns its pid."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return pid


def main() -> None:
    """Compile the variants listed in one line of input, and print the number of each when it is done or has failed."""
    sys.meta_path.insert(0, NoTorch())
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Triton's own prints must not mix with the results
    _forked(_build_driver)
    triton_key()  # hashes Triton's own 400 MB once instead of in every child
    if not select.select([sys.stdin], [], [], _IDLE_TIMEOUT_S)[0] or not (line := sys.stdin.readline()):
        return
    target, variants = json.loads(line)
    running: dict[int, int] = {}
    for number, variant in enumerate(variants):
        if len(running) >= len(os.sched_getaffinity(0)):
            _report_one(running, results)
        running[_forked(partial(_compile, target, variant))] = number
    while running:
        _report_one(running, results)


def _report_one(running: dict[int, int], results: TextIO) -> None:
    """Wait for a child, and print the number of its variant."""
    pid, _ = os.wait()
    if pid in running:
        print(running.pop(pid), file=results, flush=True)
