"""Stateless random numbers: each is a hash of (seed, stream, counters).

The same arguments give the same numbers on every machine, in every worker and with every numpy version.

No generator state exists: a checkpoint holds counters and tensors, and seeking to a step is free
(tests/laws/test_law_resume.py).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 0xFFFFFFFFFFFFFFFF

U64 = npt.NDArray[np.uint64]


def _mix(x: int) -> int:
    """The finalizer of splitmix64."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def stream_id(name: str) -> int:
    """The number of a named stream, the same in every process."""
    return zlib.crc32(name.encode())


def key(seed: int, stream: str, *counters: int) -> int:
    """One 64-bit key from a seed, a stream name and any counters."""
    state = _mix((seed + _GOLDEN) & _MASK)
    for part in (stream_id(stream), *counters):
        state = _mix((state + _GOLDEN + _mix((part + _GOLDEN) & _MASK)) & _MASK)
    return state


def hash_array(base: int, counters: npt.NDArray[np.integer]) -> U64:
    """One 64-bit hash per counter, under the key `base`."""
    with np.errstate(over="ignore"):
        x = counters.astype(np.uint64) + np.uint64(_GOLDEN)
        x = _mix_array(x) + np.uint64((base + _GOLDEN) & _MASK)
        return _mix_array(x)


def _mix_array(x: U64) -> U64:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(base: int, counters: npt.NDArray[np.integer], num_draws: int) -> npt.NDArray[np.float64]:
    """`num_draws` numbers in [0, 1) for each counter: shape [len(counters), num_draws]."""
    with np.errstate(over="ignore"):
        rows = hash_array(base, counters)[:, None]
        draws = (np.arange(num_draws, dtype=np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
        bits = _mix_array(rows + draws[None, :])
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(base: int, length: int) -> npt.NDArray[np.int64]:
    """A shuffle of range(length): the order of the indices' hashes."""
    return np.argsort(hash_array(base, np.arange(length, dtype=np.int64)), kind="stable").astype(np.int64)


def generator(base: int) -> np.random.Generator:
    """A numpy generator seeded by a key, for distributions without a closed form (Beta)."""
    return np.random.Generator(np.random.Philox(key=base))


def derive(base: int, names: Sequence[str]) -> list[int]:
    """One key per name, for example per parameter."""
    return [key(base & _MASK, name) for name in names]
