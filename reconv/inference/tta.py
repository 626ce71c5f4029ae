"""Several views of an image at evaluation, their logits averaged.

Owns which views there are and what each counts. Refuses to know networks and metrics. Invariant: the weights of the
views add up to 1, and without views the network is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def averaged_views(model: Callable[..., Any], tta: str) -> Callable[..., Any]:
    """The network as a function that answers with the mean over the views that `evaluate.tta` names."""
    if tta == "none":
        return model

    def answer(images: Tensor) -> Tensor:
        total: Tensor | None = None
        for view, weight in views(images, tta):
            logits = model(view)
            share = (logits if logits.dtype == torch.float64 else logits.float()) * weight
            total = share if total is None else total + share
        assert total is not None
        return total

    return answer


def views(images: Tensor, tta: str) -> Iterator[tuple[Tensor, float]]:
    """Each view [n, channels, height, width] and its share in the mean."""
    if tta == "flip":
        yield from _mirrored(images, 1.0)
    elif tta == "flip-translate":
        yield from _mirrored(images, 0.5)
        height, width = images.shape[-2:]
        padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
        for corner in (0, 2):
            yield from _mirrored(padded[..., corner : corner + height, corner : corner + width], 0.25)
    else:
        raise ValueError(f"unknown views {tta!r}")


def _mirrored(images: Tensor, weight: float) -> Iterator[tuple[Tensor, float]]:
    yield images, weight / 2
    yield images.flip(-1), weight / 2
