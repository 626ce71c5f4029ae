"""The compiler of kernels, a process beside this one.

Owns when it is started and how it is asked. Refuses to know torch, so that it can be started before torch is imported:
both take seconds. Invariant: it is a matter of speed alone. What it did not compile is compiled by whoever needs it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

_PROGRAM = "reconv.kernels.jit.compile_variants"
_NVIDIA = Path("/dev/nvidiactl")


class CompilerProcess:
    """The program, started and waiting to be asked once."""

    def __init__(self) -> None:
        # The same modules as here, wherever they were found.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def ask(self, target: Sequence[Any], variants: Sequence[Sequence[Any]]) -> list[Future[None]]:
        """Have variants compiled; each result comes when the program is done with it, also if it failed."""
        answers: list[Future[None]] = [Future() for _ in variants]
        request = json.dumps([target, variants]) + "\n"
        Thread(target=self._hear, args=(request, answers), name="compiler", daemon=True).start()
        return answers

    def _hear(self, request: str, answers: list[Future[None]]) -> None:
        # A broken pipe: it ended before it was asked, so nothing was compiled, and nobody needs to know.
        with suppress(BrokenPipeError), self.process as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(request)
            process.stdin.flush()
            for line in process.stdout:
                answers[int(line)].set_result(None)
        for answer in answers:
            if not answer.done():
                answer.set_result(None)


_started: list[CompilerProcess] = []


def start_compiler(device: str) -> None:
    """Start the compiler where a run on this device may need it; it prepares itself while torch is imported."""
    is_meant = device == "auto" or device.startswith("cuda")
    if not _started and is_meant and sys.executable and _NVIDIA.exists() and find_spec("triton") is not None:
        with suppress(OSError):  # where no process may be started, kernels are compiled in this one
            _started.append(CompilerProcess())


def acquire_compiler() -> CompilerProcess:
    """The compiler that was begun, else a new one."""
    return _started.pop() if _started else CompilerProcess()


def stop_compiler() -> None:
    """Let a compiler that was begun end: there is nothing to compile."""
    if _started:
        _started.pop().ask((), ())
