"""The kernel compiler, a separate process.

This module does not import torch, so that the process can be started while torch is being imported: both take seconds.
It affects speed only; what it did not compile is compiled at first launch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib.util import find_spec
from threading import Thread
from typing import Any

from reconv.core.cuda_context import NVIDIA_DRIVER
from reconv.core.python_child import python_command

_PROGRAM = "from reconv.kernels.jit.compile_variants import main; main()"


class CompilerProcess:
    """The compiler process, started and waiting for one request."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            python_command(_PROGRAM),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def compile(self, target: Sequence[Any], variants: Sequence[Sequence[Any]]) -> list[Future[None]]:
        """Compile variants; each future is done when the process has finished with its variant, also if it failed."""
        results: list[Future[None]] = [Future() for _ in variants]
        request = json.dumps([target, variants]) + "\n"
        Thread(target=self._read_results, args=(request, results), name="compiler", daemon=True).start()
        return results

    def _read_results(self, request: str, results: list[Future[None]]) -> None:
        # A broken pipe: the process has exited, so nothing is compiled ahead.
        with suppress(BrokenPipeError), self.process as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(request)
            process.stdin.flush()
            for line in process.stdout:
                results[int(line)].set_result(None)
        for result in results:
            if not result.done():
                result.set_result(None)


_started: list[CompilerProcess] = []


def start_compiler(device: str) -> None:
    """Start the compiler if a run on this device may need it; it initializes while torch is imported."""
    is_wanted = device == "auto" or device.startswith("cuda")
    if not _started and is_wanted and sys.executable and NVIDIA_DRIVER.exists() and find_spec("triton") is not None:
        with suppress(OSError):  # if no process can be started, kernels are compiled at first launch
            _started.append(CompilerProcess())


def acquire_compiler() -> CompilerProcess:
    """The compiler that was started, else a new one."""
    return _started.pop() if _started else CompilerProcess()


def stop_compiler() -> None:
    """Let a started compiler exit without work."""
    if _started:
        _started.pop().compile((), ())
