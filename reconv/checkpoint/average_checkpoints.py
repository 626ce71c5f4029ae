"""One set of weights from several: means over checkpoints.

Owns the arithmetic. Refuses to know which checkpoints deserve it. Invariant: sums are in float64 and each file is
read once, so memory stays at two sets of weights whatever the number of files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from reconv.checkpoint.load_weights import read_weights
from reconv.errors import CheckpointError, UsageError


def uniform_weights(num: int) -> list[float]:
    """Equal shares."""
    return [1.0 / num] * num


def exponential_weights(num: int, decay: float) -> list[float]:
    """The shares of the recursion V = c0, then V = decay V + (1 - decay) c for each next file.

    Graphcore's averaging program computes that. The first file so keeps the weight of all that came before it.
    """
    if not 0 < decay <= 1:
        raise UsageError(f"the decay of an exponential average must be in (0, 1], not {decay}")
    later = [(1 - decay) * decay ** (num - 1 - i) for i in range(1, num)]
    return [decay ** (num - 1), *later] if num else []


def average_checkpoints(paths: Sequence[Path], weights: Sequence[float] | None = None) -> dict[str, Tensor]:
    """The weighted mean of several weights files, batch norm statistics included; integers are the last file's."""
    if not paths:
        raise UsageError("nothing to average", then="name a run with checkpoints")
    shares = uniform_weights(len(paths)) if weights is None else list(weights)
    if len(shares) != len(paths) or abs(sum(shares) - 1.0) > 1e-9:
        raise ValueError(f"{len(paths)} files need as many shares that sum to 1, not {shares}")
    sums: dict[str, Tensor] = {}
    shapes: dict[str, torch.Size] = {}
    tensors: dict[str, Tensor] = {}
    for path, share in zip(paths, shares, strict=True):
        tensors = read_weights(path)
        shapes = shapes or {name: tensor.shape for name, tensor in tensors.items()}
        _check_same_model(shapes, tensors, paths[0], path)
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                term = tensor.to(torch.float64) * share
                sums[name] = sums[name].add_(term) if name in sums else term
    return {name: sums[name].to(tensor.dtype) if name in sums else tensor for name, tensor in tensors.items()}


def _check_same_model(shapes: dict[str, torch.Size], other: dict[str, Tensor], first_path: Path, path: Path) -> None:
    for name in sorted(shapes.keys() | other.keys()):
        if name not in shapes or name not in other or shapes[name] != other[name].shape:
            raise CheckpointError(
                "the weights are of another model",
                where=str(path),
                why=f"{name} is not the same as in {first_path}",
                then="average checkpoints of one run",
            )
