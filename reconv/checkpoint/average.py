"""Averages the weights of several checkpoints, in float64 and with memory for two sets of weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from reconv.checkpoint.load_weights import read_weights
from reconv.core.errors import CheckpointError, UsageError

ALL = slice(None)


def uniform_weights(num: int) -> list[float]:
    """Equal weights."""
    return [1.0 / num] * num


def exponential_weights(num: int, decay: float) -> list[float]:
    """The weights of an exponential average that starts at the first file: v = decay * v + (1 - decay) * file.

    As in Graphcore's averaging script.
    """
    if not 0 < decay <= 1:
        raise UsageError(f"the decay of an exponential average must be above 0 and at most 1, not {decay}")
    later = [(1 - decay) * decay ** (num - 1 - i) for i in range(1, num)]
    return [decay ** (num - 1), *later] if num else []


def average_checkpoints(
    paths: Sequence[Path], weights: Sequence[float] | None = None, share: slice = ALL
) -> dict[str, Tensor]:
    """The weighted mean of weights files, including batch-norm statistics; integers are those of the last file.

    `share` are the tensors to average, in the order of their names.
    """
    if not paths:
        raise UsageError("there are no checkpoints to average", hint="use a run that has checkpoints")
    weights = uniform_weights(len(paths)) if weights is None else weights
    if len(weights) != len(paths) or abs(sum(weights) - 1.0) > 1e-9:
        raise ValueError(f"{len(paths)} files need as many weights that sum to 1, not {list(weights)}")
    sums: dict[str, Tensor] = {}
    shapes: dict[str, torch.Size] = {}
    tensors: dict[str, Tensor] = {}
    for path, weight in zip(paths, weights, strict=True):
        tensors = read_weights(path)
        shapes = shapes or {name: tensor.shape for name, tensor in tensors.items()}
        _check_same_model(shapes, tensors, paths[0], path)
        for name in sorted(tensors)[share]:
            if tensors[name].is_floating_point():
                term = tensors[name].to(torch.float64) * weight
                sums[name] = sums[name].add_(term) if name in sums else term
    own = {name: tensors[name] for name in sorted(tensors)[share]}
    return {name: sums[name].to(tensor.dtype) if name in sums else tensor for name, tensor in own.items()}


def _check_same_model(shapes: dict[str, torch.Size], other: dict[str, Tensor], first_path: Path, path: Path) -> None:
    for name in sorted(shapes.keys() | other.keys()):
        if name not in shapes or name not in other or shapes[name] != other[name].shape:
            raise CheckpointError(
                "the checkpoints are of different models",
                where=str(path),
                why=f"{name} differs from that in {first_path}",
                hint="average checkpoints of one run",
            )
