"""Instructions that this CPU really has."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_BF16_FLAGS = {"avx512_bf16", "bf16", "asimdbf16"}  # x86 and Arm; AMX alone may be announced and not work (see amx.py)


@cache
def has_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 numbers itself; elsewhere torch converts them, slower than float32."""
    if not _CPUINFO.exists():
        return False
    lines = _CPUINFO.read_text().splitlines()
    flags = next((line.partition(":")[2] for line in lines if line.lower().startswith(("flags", "features"))), "")
    return bool(_BF16_FLAGS & set(flags.split()))
