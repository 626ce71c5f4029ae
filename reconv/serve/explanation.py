"""The explanation that `explain=true` adds to a prediction: the image as the network saw it, and where a classifier
looked.
"""

from __future__ import annotations

import base64
import io
import time
from typing import Any

from PIL import Image
from torch import Tensor

from reconv.api import ImageSample, Prediction, Predictor
from reconv.core.errors import UsageError
from reconv.inference.activation_map import activation_image

MAX_MAPS = 5


def explain(predictor: Predictor, sample: ImageSample, prediction: Prediction) -> dict[str, Any]:
    """The image as the network saw it and, of classifiers, an activation map for each of the first classes.

    Called in the thread of the device, after the batch. `seconds` is the time it took.
    """
    began_s = time.perf_counter()
    found: dict[str, Any] = {"input": png_url(_to_image(sample.pixels))}
    if classes := prediction.classes[:MAX_MAPS]:
        size = predictor.recipe.data.preprocess.size
        try:
            maps = predictor.activation_maps(sample, [item.index for item in classes])
        except UsageError as error:  # not every network has one
            found["activation_map_error"] = f"{error.what}: {error.why}"
        else:
            found["activation_maps"] = [
                {"index": item.index, "name": item.name, "image": png_url(activation_image(values, size))}
                for item, values in zip(classes, maps, strict=True)
            ]
    return {**found, "seconds": time.perf_counter() - began_s}


def _to_image(pixels: Tensor) -> Image.Image:
    """An image [channels, height, width] uint8."""
    array = pixels.permute(1, 2, 0).numpy()
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


def png_url(image: Image.Image) -> str:
    """An image as the data URL of a PNG."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
