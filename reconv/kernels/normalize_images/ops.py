"""Flipping, scaling, shifting and casting uint8 images in one kernel.

Each pixel is one multiply-add in float32, cast once; the result may differ from separate operations by FMA rounding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from reconv.kernels.dispatch import DTYPES, MAX_ELEMENTS, supports_device
from reconv.kernels.jit.launch import MAX_GRID_YZ, launch

_RUN_BYTES = 16  # that a thread writes at once; fewer where the length of a line is no multiple
_RUNS, _LINES = 128, 4  # runs that a program writes in each line, and lines


def supports(images: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel supports these images [n, channels, height, width]."""
    return (
        supports_device(images)
        and dtype in DTYPES
        and 0 < images.numel() <= MAX_ELEMENTS
        and len(images) <= MAX_GRID_YZ
    )


def normalize_images(images: Tensor, flips: Tensor | None, factor: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
    """images * factor + shift per channel, flipped where `flips` is true, channels_last."""
    from reconv.kernels.normalize_images.triton import normalize

    samples, channels, height, width = images.shape
    out = torch.empty(samples, height, width, channels, dtype=dtype, device=images.device)
    run = math.gcd(width * channels, _RUN_BYTES // out.element_size())
    runs_per_line = width * channels // run
    num_runs = -(-height // _LINES) * runs_per_line
    launch(
        normalize, (-(-num_runs // _RUNS), samples),
        images, images if flips is None else flips, factor.view(-1), shift.view(-1), out, height, width, runs_per_line,
        *images.stride(), CHANNELS=channels, FLIPS=flips is not None, RUN=run, RUNS=_RUNS, LINES=_LINES,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2)
