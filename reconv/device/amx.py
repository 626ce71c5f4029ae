"""Matrix tiles (Intel AMX) that a processor announces and a virtual machine does not run.

Owns one probe. Refuses to know who computes. Invariant: after `avoid_broken_tiles` half-precision convolutions do not
die of an illegal instruction, and a machine whose tiles work keeps them.

Seen on a Firecracker guest: /proc/cpuinfo lists amx_tile, the kernel grants the tile state, and the first bf16
matrix product of oneDNN ends the process with SIGILL. oneDNN reads its limit once, at its first use in a process.
"""

from __future__ import annotations

import faulthandler
import os
from functools import cache
from pathlib import Path

import torch

LIMIT = "ONEDNN_MAX_CPU_ISA"
WITHOUT_TILES = "AVX512_CORE_FP16"
_CPUINFO = Path("/proc/cpuinfo")


@cache
def avoid_broken_tiles() -> bool:
    """Tell oneDNN to leave tiles alone where using them kills a process; whether it was told so."""
    if LIMIT in os.environ or not _announces_tiles() or _tiles_work():
        return False
    os.environ[LIMIT] = WITHOUT_TILES
    return True


def _announces_tiles() -> bool:
    return _CPUINFO.exists() and "amx_tile" in _CPUINFO.read_text()


def _tiles_work() -> bool:
    """Multiply two small half-precision matrices in a child process and see whether it lives."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # a death here is an answer, not news
        square = torch.ones(64, 64, dtype=torch.bfloat16)
        torch.nn.functional.linear(square, square)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0
