"""Nearest neighbors by cosine similarity: exact in blocks, by an index of usearch for more than 100,000 rows."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from reconv.data.dataset import I64

F32 = npt.NDArray[np.float32]
MAX_EXACT = 100_000  # rows: 512 features take 10 s on a GPU, and 15 minutes on two cores
_BLOCK = 2048  # rows that are compared with all others at a time


def nearest_neighbors(
    features: F32, k: int, device: str = "cpu", log: Callable[[str], None] = lambda text: None
) -> tuple[I64, F32]:
    """The k nearest other rows of each row [n, k], nearest first, and their cosine similarities.

    Fewer than k + 1 rows give fewer columns. Equal similarities are in the order of the rows.
    """
    k = min(k, len(features) - 1)
    if k < 1:
        return np.zeros((len(features), 0), np.int64), np.zeros((len(features), 0), np.float32)
    unit = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    unit = unit.astype(np.float32)
    if len(unit) > MAX_EXACT:
        index = _usearch()
        if index is not None:
            return _approximate(index, unit, k)
        log(f"{len(unit):,} images are compared one by one: pip install 'reconv[review]' has an index that is faster")
    return _exact(torch.from_numpy(unit).to(device), k)


def _exact(unit: Tensor, k: int) -> tuple[I64, F32]:
    indices, similarities = [], []
    for start in range(0, len(unit), _BLOCK):
        block = unit[start : start + _BLOCK] @ unit.T
        rows = torch.arange(len(block), device=unit.device)
        block[rows, start + rows] = -2.0  # a row is no neighbor of its own
        best = block.topk(k, dim=1)
        indices.append(best.indices.cpu())
        similarities.append(best.values.cpu())
    return torch.cat(indices).numpy(), torch.cat(similarities).numpy()


def _approximate(index_module: Any, unit: F32, k: int) -> tuple[I64, F32]:
    """Neighbors by an HNSW graph; one thread builds it, so that it is the same every time."""
    index = index_module.Index(ndim=unit.shape[1], metric="ip", dtype="f32")
    index.add(np.arange(len(unit), dtype=np.uint64), unit, threads=1)
    found = index.search(unit, k + 1)
    keys, similarities = np.asarray(found.keys, np.int64), 1 - np.asarray(found.distances, np.float32)
    own = keys == np.arange(len(unit))[:, None]
    own[~own.any(axis=1), -1] = True  # the last one, where the graph has not found the row itself
    return keys[~own].reshape(len(unit), k), similarities[~own].reshape(len(unit), k)


def _usearch() -> Any:
    try:
        return import_module("usearch.index")
    except ModuleNotFoundError:
        return None
