"""A program that compiles kernels into Triton's cache, for a GPU that it knows by name alone.

Owns the processes in which that happens: Triton holds Python's lock for a large part of a compilation, so that threads
wait for each other. Refuses to know torch, and opens no GPU. Invariant: it leaves files in Triton's cache and nothing
else; it ends with its work, with its input, or after a while in which nobody gave it any.
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
_NUMBERS: dict[str, int | float] = {"int": 16, "float": 1.0}  # counts are not specialised


class TargetGpu:
    """What Triton asks of a driver while it compiles, told of a GPU that may be elsewhere."""

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
        """The driver's C module, built by the first who asks."""
        return import_module("triton.backends.nvidia.driver").CudaUtils()


class NoTorch(MetaPathFinder):
    """Finds torch nowhere: Triton 3.6 would import it where it is, to know its tensors, for seconds in every child."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "torch":
            raise ModuleNotFoundError(fullname)


def resolve_cache_key(kernel: Any) -> None:
    """Give a kernel its key in the cache after those that it calls have theirs.

    Triton 3.6 leaves out of a key the constants of a called function that has none yet, so that a kernel has another
    key, and is compiled again, when something else was compiled before it.
    """
    if not isinstance(kernel, JITFunction):
        return  # interpreted, or not a kernel
    for name in kernel.fn.__code__.co_names:
        resolve_cache_key(kernel.__globals__.get(name))
    kernel.cache_key  # noqa: B018 (a property that is computed once)


def compile_variant(module: str, name: str, types: list[str], constants: dict[str, int]) -> Any:
    """The variant of a kernel, from the cache or left in it."""
    kernel = getattr(import_module(module), name)
    resolve_cache_key(kernel)
    arguments = [_NUMBERS[kind] if kind in _NUMBERS else MockTensor(kind) for kind in types]
    return kernel.warmup(*arguments, grid=(1,), **constants)


def _compile(target: list[Any], variant: list[Any]) -> None:
    """Compile a variant, and what launches it: where that is C code of its own, it takes as long."""
    driver.set_active(TargetGpu(GPUTarget(*target)))
    found = compile_variant(*variant)
    import_module("triton.backends.nvidia.driver").CudaLauncher(found.src, found.metadata)


def _build_driver() -> None:
    import_module("triton.backends.nvidia.driver").CudaUtils()


def _forked(work: Callable[[], object]) -> int:
    """Do work in a child, whose number is the result."""
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
    """Compile the variants that one line of input lists, and tell the number of each that is done, well or not."""
    sys.meta_path.insert(0, NoTorch())
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what Triton prints where its dumps are wanted is no answer
    _forked(_build_driver)
    triton_key()  # a digest of Triton's own 400 MB, which the children would each compute
    if not select.select([sys.stdin], [], [], _IDLE_TIMEOUT_S)[0] or not (line := sys.stdin.readline()):
        return
    target, variants = json.loads(line)
    running: dict[int, int] = {}
    for number, variant in enumerate(variants):
        if len(running) >= len(os.sched_getaffinity(0)):
            _report_one(running, answers)
        running[_forked(partial(_compile, target, variant))] = number
    while running:
        _report_one(running, answers)


def _report_one(running: dict[int, int], answers: TextIO) -> None:
    """Wait for a child; what it was to compile is told."""
    pid, _ = os.wait()
    if pid in running:
        print(running.pop(pid), file=answers, flush=True)


if __name__ == "__main__":
    main()
