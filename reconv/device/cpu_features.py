"""Instructions that this CPU really has."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_INT8_FLAGS = {"avx512_vnni", "avx_vnni", "asimddp"}  # x86 (every CPU with AMX has the first one) and Arm
_BF16_FLAGS = {"avx512_bf16", "bf16", "asimdbf16"}  # x86 and Arm; AMX alone may be announced and not work (see amx.py)


def has_bf16() -> bool:
    """True if the CPU multiplies bfloat16 numbers itself; elsewhere torch converts them, slower than float32."""
    return bool(_BF16_FLAGS & _flags())


def has_int8() -> bool:
    """True if the CPU sums products of int8 numbers in one instruction; elsewhere int8 gains little."""
    return bool(_INT8_FLAGS & _flags())


@cache
def _flags() -> frozenset[str]:
    if not _CPUINFO.exists():
        return frozenset()
    lines = _CPUINFO.read_text().splitlines()
    flags = next((line.partition(":")[2] for line in lines if line.lower().startswith(("flags", "features"))), "")
    return frozenset(flags.split())
