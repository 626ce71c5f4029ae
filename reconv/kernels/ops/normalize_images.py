"""Flipping, scaling, shifting, mixing and casting uint8 images in one kernel.

Each pixel is one multiply-add in float32, two and their weighted sum where images are mixed, cast once; the result may
differ from separate operations by FMA rounding.
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
    """True if the kernels support these images [n, channels, height, width]."""
    return (
        supports_device(images)
        and dtype in DTYPES
        and 0 < images.numel() <= MAX_ELEMENTS
        and len(images) <= MAX_GRID_YZ
    )


def normalize_images(images: Tensor, flips: Tensor | None, factor: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
    """images * factor + shift per channel, flipped where `flips` is true, channels_last."""
    from reconv.kernels.triton.normalize_images import normalize

    out, runs, programs = _output(images, dtype)
    launch(
        normalize, programs,
        images, images if flips is None else flips, factor.view(-1), shift.view(-1), out, *_sizes(images, runs["RUN"]),
        CHANNELS=images.shape[1], FLIPS=flips is not None, **runs,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2)


def normalize_and_mix(
    images: Tensor,
    flips: Tensor | None,
    factor: Tensor,
    shift: Tensor,
    mixup: tuple[Tensor, Tensor] | None,
    cutmix: tuple[Tensor, Tensor] | None,
    dtype: torch.dtype,
) -> Tensor:
    """`normalize_images`, then MixUp, then CutMix.

    `mixup` has each image's partner, relative to its own row, and its own weight; `cutmix` its partner and the box
    (left, top, right, bottom) that the partner fills. Offsets and boxes are int64.
    """
    from reconv.kernels.triton.normalize_images import normalize_and_mix as mix

    out, runs, programs = _output(images, dtype)
    offsets, weights = (images, images) if mixup is None else mixup
    cut_offsets, boxes = (images, images) if cutmix is None else cutmix
    launch(
        mix, programs,
        images, images if flips is None else flips, factor.view(-1), shift.view(-1),
        offsets, weights, cut_offsets, boxes, out, *_sizes(images, runs["RUN"]),
        CHANNELS=images.shape[1], FLIPS=flips is not None, MIXUP=mixup is not None, CUTMIX=cutmix is not None, **runs,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2)


def _output(images: Tensor, dtype: torch.dtype) -> tuple[Tensor, dict[str, int], tuple[int, int]]:
    """The output, the constants of the runs in which it is written, and the launch grid."""
    samples, channels, height, width = images.shape
    out = torch.empty(samples, height, width, channels, dtype=dtype, device=images.device)
    run = math.gcd(width * channels, _RUN_BYTES // out.element_size())
    num_runs = -(-height // _LINES) * (width * channels // run)
    return out, {"RUN": run, "RUNS": _RUNS, "LINES": _LINES}, (-(-num_runs // _RUNS), samples)


def _sizes(images: Tensor, run: int) -> tuple[int, ...]:
    """Height, width, runs per line, and strides."""
    height, width = images.shape[2:]
    return height, width, width * images.shape[1] // run, *images.stride()
