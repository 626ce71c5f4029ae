"""Accumulated state of metrics, as named arrays: for the other ranks, and as bytes for a file.

Merging states in any order gives the same bits (tests/metrics/test_metrics_state.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load, save

MetricsState = dict[str, npt.NDArray[Any]]


def encode_state(state: MetricsState) -> bytes:
    """The arrays in the format of safetensors; nothing in them is ever executed."""
    return save({name: np.ascontiguousarray(array) for name, array in state.items()})


def decode_state(content: bytes) -> MetricsState:
    return load(content)
