"""A network with its batch norms folded, in the dtype of inference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from reconv.inference.backends.fold import fold_batch_norms


@dataclass(frozen=True, slots=True)
class FoldedNetwork:
    """A copy of a network with folded norms."""

    model: nn.Module
    exact: Callable[[Tensor], Any]  # the same in at least float32, for images of any dtype
    num_folded: int
    dtype: torch.dtype


def fold_network(model: nn.Module, shape: Sequence[int], dtype: torch.dtype) -> FoldedNetwork:
    """The network with folded norms in `dtype`; `shape` is that of one image."""
    folded, num_folded = fold_batch_norms(model, shape)
    wide = torch.promote_types(dtype, torch.float32)
    exact = folded if dtype == wide else copy.deepcopy(folded).to(wide)
    return FoldedNetwork(folded.to(dtype), lambda images: exact(images.to(wide)), num_folded, dtype)
