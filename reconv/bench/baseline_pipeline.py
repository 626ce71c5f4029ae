"""The ordinary input pipeline, written plainly: what the loader is compared with.

Owns the baseline: Pillow decodes the whole image, a random part of it is cut out and resized by antialiased bilinear
interpolation, mirrored or not, and becomes uint8 planes, as torchvision's RandomResizedCrop, RandomHorizontalFlip and
PILToTensor do. Refuses to be clever. Invariant: boxes and flips are those of our own loader, so both make the same
images and the ratio compares work alone; drawing the boxes is thus our own code on both sides.
"""

from __future__ import annotations

import io

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from reconv.data.dataset import NamedArrays, Sample
from reconv.data.decode.pillow import to_image
from reconv.data.transforms.geometry import random_resized_crop_box
from reconv.recipe.data_fields import AugmentConfig


def ordinary_picture(
    sample: Sample, size: int, augment: AugmentConfig, params: NamedArrays, is_flipped: bool
) -> Tensor:
    """One training image [3, size, size], uint8."""
    if isinstance(sample.data, bytes):
        image = Image.open(io.BytesIO(sample.data)).convert("RGB")
    else:
        image = to_image(sample.data, 3)
    box = random_resized_crop_box(image.width, image.height, params, augment)
    image = image.crop(box).resize((size, size), Image.Resampling.BILINEAR)
    if is_flipped:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
