"""Works around Intel AMX that a CPU reports but a virtual machine cannot execute.

Seen on a Firecracker guest: /proc/cpuinfo lists amx_tile, the kernel grants the tile state, and oneDNN's first bf16
matrix product kills the process with SIGILL. oneDNN reads its ISA limit once, at its first use in a process.
"""

from __future__ import annotations

import faulthandler
import os
from functools import cache
from pathlib import Path

import torch

ISA_LIMIT = "ONEDNN_MAX_CPU_ISA"
ISA_WITHOUT_AMX = "AVX512_CORE_FP16"
_CPUINFO = Path("/proc/cpuinfo")


@cache
def disable_broken_amx() -> bool:
    """Make oneDNN avoid AMX where using it would kill the process. Returns whether that was necessary."""
    if ISA_LIMIT in os.environ or not reports_amx() or _amx_works():
        return False
    os.environ[ISA_LIMIT] = ISA_WITHOUT_AMX
    return True


def reports_amx() -> bool:
    """True if the CPU says that it has AMX."""
    return _CPUINFO.exists() and "amx_tile" in _CPUINFO.read_text()


def _amx_works() -> bool:
    """Multiply two small bf16 matrices in a child process, and see whether it survives."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # the crash is expected
        square = torch.ones(64, 64, dtype=torch.bfloat16)
        torch.nn.functional.linear(square, square)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0
