"""Loads the ONNX file with onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def load_model(folder: Path, settings: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    """A function from uint8 images [n, height, width, channels] to the model's outputs by name."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # leaves the cores to decoding
    path = str(folder / settings["model"])
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda images: dict(zip(names, session.run(names, {"images": images}), strict=True))
