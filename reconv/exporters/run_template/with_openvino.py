"""Loads the OpenVINO file, on the CPU and in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def load_model(folder: Path, settings: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    """A function from uint8 images [n, height, width, channels] to the model's outputs by name."""
    import openvino

    # By default OpenVINO computes in bfloat16 where the CPU has it, which moves results by a percent.
    options = {"INFERENCE_PRECISION_HINT": "f32"}
    model = openvino.Core().compile_model(folder / settings["model"], "CPU", options)
    return lambda images: {output.any_name: value.copy() for output, value in model([images]).items()}
