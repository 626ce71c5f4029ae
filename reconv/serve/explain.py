"""What `explain=true` adds to a prediction: the image as the network saw it, and where a classifier looked."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image
from torch import Tensor

from reconv.api import Prediction, Predictor


def explain(predictor: Predictor, sample: Any, prediction: Prediction) -> dict[str, Any]:
    """The additional fields of a prediction. Called in the thread of the device, after the batch."""
    return {"input": png_url(sample.pixels)}


def png_url(pixels: Tensor) -> str:
    """An image [channels, height, width] uint8 as the data URL of a PNG."""
    array = pixels.permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
