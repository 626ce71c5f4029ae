"""What `explain=true` adds to a prediction: the image as the network saw it, and where a classifier looked."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image
from torch import Tensor

from reconv.api import ImageSample, Prediction, Predictor
from reconv.errors import UsageError
from reconv.inference.activation_map import activation_image, sample_activation_maps


def explain(predictor: Predictor, sample: ImageSample, prediction: Prediction) -> dict[str, Any]:
    """The additional fields of a prediction. Called in the thread of the device, after the batch."""
    found: dict[str, Any] = {"input": png_url(_to_image(sample.pixels))}
    if prediction.classes:
        best = prediction.classes[0]
        pixels = predictor.device.move(sample.pixels)
        try:
            values = sample_activation_maps(predictor.inference_step, pixels, [best.index])[0]
        except UsageError:  # not every network has one
            return found
        image = activation_image(values, predictor.recipe.data.preprocess.size)
        found["activation_map"] = {"class": best.name, "image": png_url(image)}
    return found


def _to_image(pixels: Tensor) -> Image.Image:
    """An image [channels, height, width] uint8."""
    array = pixels.permute(1, 2, 0).numpy()
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


def png_url(image: Image.Image) -> str:
    """An image as the data URL of a PNG."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
