"""An image as the network sees it, and how it is read: decoded, resized, cropped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from reconv.data.transforms.host_transforms import eval_transform
from reconv.inference.image_input import ImageFile, ImageInput, to_pil
from reconv.recipe.data_fields import PreprocessConfig

DecoderName = Literal["auto", "pillow", "native", "gpu"]
DECODERS: tuple[DecoderName, ...] = ("auto", "pillow", "native", "gpu")


@dataclass(frozen=True, slots=True)
class ImageSample:
    """A decoded image, resized and cropped for the network, and its original size."""

    pixels: Tensor  # [channels, size, size] uint8, on the host
    width: int  # of the upright image, in pixels
    height: int
    image: ImageInput | None = None  # as it was passed
    path: Path | None = None  # None: it was not a file


class ImageReader:
    """Reads images with the preprocessing of evaluation; may be used by several threads."""

    def __init__(self, preprocess: PreprocessConfig, decoder: DecoderName = "auto") -> None:
        self._preprocess = preprocess
        self.decoder = decoder

    def __call__(self, image: ImageInput) -> ImageSample:
        """The image as the network sees it; raises `DataError` where it cannot be read."""
        image = ImageFile(Path(image)) if isinstance(image, str | Path) else image
        path = image.path if isinstance(image, ImageFile) else None
        pil = to_pil(image, self._preprocess.channels)
        return ImageSample(torch.tensor(eval_transform(pil, self._preprocess)), pil.width, pil.height, image, path)
