"""Color jitter in two forms: Pillow's on decoded images, and TensorFlow's on the device, unrounded and unclipped."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageEnhance
from torch import Tensor

from reconv.core.batch import Batch
from reconv.core.random import key, uniforms
from reconv.data.dataset import I64, NamedArrays
from reconv.data.transforms.base import DeviceTransform, HostTransform, Rows
from reconv.recipe.parts.data import AugmentConfig, ColorJitterConfig

COLOR_JITTER = "color_jitter"  # float32 [n, 4], as in `device_color_params`

_WHITE = 255
_ENHANCERS = {
    "brightness": ImageEnhance.Brightness,
    "contrast": ImageEnhance.Contrast,
    "saturation": ImageEnhance.Color,
}


class ColorJitter(HostTransform):
    """Brightness, contrast, saturation and hue by Pillow, in this order."""

    @staticmethod
    def is_active(augment: AugmentConfig) -> bool:
        return augment.color_jitter.enabled and augment.color_jitter.implementation == "pillow"

    def sample(self, seed: int, positions: I64) -> NamedArrays:
        """The factors `brightness`, `contrast` and `saturation` and the shift of `hue`, float64 [n] each.

        Only those that the recipe asks for.
        """
        config, values = self.augment.color_jitter, uniforms(key(seed, "jitter"), positions, 4)
        params = {}
        for column, name in enumerate(_ENHANCERS):
            strength = getattr(config, name)
            if strength > 0:
                low = max(0.0, 1 - strength)
                params[name] = low + values[:, column] * (1 + strength - low)
        if config.hue > 0:
            params["hue"] = (2 * values[:, 3] - 1) * config.hue
        return params

    def apply(self, image: Image.Image, params: NamedArrays) -> Image.Image:
        for name, enhancer in _ENHANCERS.items():
            if name in params:
                image = enhancer(image).enhance(float(params[name]))
        return shift_hue(image, float(params["hue"])) if "hue" in params else image


def shift_hue(image: Image.Image, shift: float) -> Image.Image:
    """The hue shifted by a fraction of the color circle."""
    hue, saturation, value = image.convert("HSV").split()
    shifted = Image.fromarray(np.asarray(hue) + np.uint8(round(shift * 255) % 256))
    return Image.merge("HSV", (shifted, saturation, value)).convert("RGB")


class DeviceColorJitter(DeviceTransform):
    """TensorFlow's color jitter of uint8 images, which gives floats of 0 to 255."""

    @staticmethod
    def is_active(augment: AugmentConfig) -> bool:
        return augment.color_jitter.enabled and augment.color_jitter.implementation == "tensorflow"

    def sample(self, rows: Rows) -> NamedArrays:
        return {COLOR_JITTER: device_color_params(self.augment.color_jitter, rows.seed, rows.positions)}

    def apply(self, batch: Batch) -> Batch:
        return batch.replace(images=jitter_on_device(batch["images"], batch[COLOR_JITTER], self.dtype))


def device_color_params(config: ColorJitterConfig, seed: int, positions: I64) -> npt.NDArray[np.float32]:
    """Added brightness, contrast and saturation factors, and hue shift of each position, as `jitter_on_device` takes
    them [n, 4]."""
    values = 2 * uniforms(key(seed, "jitter"), positions, 4) - 1
    strengths = np.array([config.brightness, config.contrast, config.saturation, config.hue])
    # A negative factor would turn an image into its negative.
    lowest = np.array([-np.inf, 0, 0, -np.inf])
    params: npt.NDArray[np.float64] = np.maximum(values * strengths + np.array([0, 1, 1, 0]), lowest)
    return params.astype(np.float32)


def jitter_on_device(images: Tensor, params: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 images [n, channels, h, w] after brightness, contrast, saturation and hue, as floats of 0 to 255.

    `params` [n, 4] as in `device_color_params`; a brightness of 1 is white. Each row depends on its own pixels and
    parameters alone, bit for bit.
    """
    brightness, contrast, saturation, hue = (column.view(-1, 1, 1, 1) for column in params.to(dtype).unbind(1))
    # Integer sums are exact: a float sum would depend on how the reduction is split.
    num_pixels = images.shape[-2] * images.shape[-1]
    means = images.sum((2, 3), keepdim=True, dtype=torch.int64).to(dtype) / (num_pixels * _WHITE)
    pixels = (images.to(dtype) / _WHITE - means) * contrast + means + brightness
    if images.shape[1] == 3:
        pixels = _adjust_saturation_and_hue(pixels, saturation, hue)
    return pixels * _WHITE


def _adjust_saturation_and_hue(pixels: Tensor, factor: Tensor, shift: Tensor) -> Tensor:
    """In HSV: the saturation multiplied and clipped to [0, 1], the hue shifted by a fraction of the circle."""
    value, low = pixels.amax(1, keepdim=True), pixels.amin(1, keepdim=True)
    chroma = value - low
    divisor = torch.where(chroma > 0, chroma, 1)
    red, green, blue = pixels.split(1, dim=1)
    sextant = torch.where(
        value == red,
        (green - blue) / divisor,
        torch.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    hue = torch.where(chroma > 0, sextant, 0) + 6 * shift
    saturation = torch.where(value > 0, chroma / torch.where(value > 0, value, 1), 0) * factor
    saturation = saturation.clamp(0, 1)
    hue = torch.remainder(hue, 6)
    ramps = torch.cat([(hue - 3).abs() - 1, 2 - (hue - 2).abs(), 2 - (hue - 4).abs()], dim=1).clamp(0, 1)
    return ((ramps - 1) * saturation + 1) * value
