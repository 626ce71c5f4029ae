"""The augmentation parameters of a batch: named arrays with one row per sample, sampled before the samples are read.

`host_params` are used where images are decoded, `device_params` where the batch is normalized; the parameters of
MixUp and CutMix belong to groups of samples and are sampled in `mixup`.

A parameter is a function of (seed, position): nothing that is decoded, and no worker, changes it
(tests/data/transforms/test_params.py).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from reconv.data.dataset import I64, NamedArrays
from reconv.data.transforms.auto_augment import auto_augment_params
from reconv.data.transforms.color import color_params, device_color_params, is_jittered_on_device, is_jittered_on_host
from reconv.data.transforms.custom import extra_host_params
from reconv.data.transforms.geometry import alternating_flips, crop_params, erase_boxes, random_flips
from reconv.recipe.parts.data import AugmentConfig, ZoomOutConfig

FLIPS = "flips"  # bool [n]
COLOR_JITTER = "color_jitter"  # float32 [n, 4], as in `color.device_color_params`
ERASE_BOXES = "erase_boxes"  # int64 [n, 4]: left, top, right, bottom; empty where nothing is erased


def effective_augment(augment: AugmentConfig) -> AugmentConfig:
    """The augmentation that really happens: only mixing if training images are made like those of evaluation."""
    if not augment.train_like_eval:
        return augment
    return augment.model_copy(update={"crop": "none", "hflip": 0.0, "zoom_out": ZoomOutConfig()})


def changes_colors_on_host(augment: AugmentConfig) -> bool:
    """True if color jitter or a policy runs on decoded images."""
    return is_jittered_on_host(augment) or augment.auto_augment != "none"


def changes_images_on_host(augment: AugmentConfig) -> bool:
    """True if anything after the crop runs on decoded images."""
    return changes_colors_on_host(augment) or bool(augment.host_extra)


def host_params(augment: AugmentConfig, seed: int, positions: I64) -> NamedArrays:
    """The parameters of crop, color jitter, policy and the user's own transforms at each position."""
    return {
        **crop_params(augment, seed, positions),
        **color_params(augment, seed, positions),
        **auto_augment_params(augment, seed, positions),
        **extra_host_params(augment, seed, positions),
    }


def device_params(
    augment: AugmentConfig, seed: int, positions: I64, indices: I64, epochs: I64, size: int
) -> dict[str, npt.NDArray[np.generic]]:
    """The parameters of flips, color jitter and erasing at each position, for images of `size`."""
    params: dict[str, npt.NDArray[np.generic]] = {}
    if augment.hflip_mode == "random" or augment.hflip == 0:
        params[FLIPS] = random_flips(augment, seed, positions)
    else:
        params[FLIPS] = alternating_flips(augment, seed, indices, epochs)
    if is_jittered_on_device(augment):
        params[COLOR_JITTER] = device_color_params(augment.color_jitter, seed, positions)
    if augment.random_erasing.probability > 0:
        params[ERASE_BOXES] = erase_boxes(augment.random_erasing, seed, positions, size)
    return params
