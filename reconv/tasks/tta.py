"""Test-time augmentation: the logits of several views of an image, averaged with weights that add up to 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def average_views(model: Callable[..., Any], tta: str) -> Callable[..., Any]:
    """A function from images to the mean logits over the views of `evaluate.tta`; the model itself for `none`."""
    if tta == "none":
        return model

    def forward(images: Tensor) -> Tensor:
        total: Tensor | None = None
        for view, weight in views(images, tta):
            logits = model(view)
            weighted = (logits if logits.dtype == torch.float64 else logits.float()) * weight
            total = weighted if total is None else total + weighted
        assert total is not None
        return total

    return forward


def views(images: Tensor, tta: str) -> Iterator[tuple[Tensor, float]]:
    """Each view [n, channels, height, width] and its weight in the mean."""
    if tta == "flip":
        yield from _with_flip(images, 1.0)
    elif tta == "flip-translate":
        yield from _with_flip(images, 0.5)
        height, width = images.shape[-2:]
        padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
        for offset in (0, 2):
            yield from _with_flip(padded[..., offset : offset + height, offset : offset + width], 0.25)
    else:
        raise ValueError(f"unknown test-time augmentation {tta!r}")


def _with_flip(images: Tensor, weight: float) -> Iterator[tuple[Tensor, float]]:
    yield images, weight / 2
    yield images.flip(-1), weight / 2
