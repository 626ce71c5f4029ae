"""Loads the torch.export program with torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def load_model(folder: Path, settings: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    """A function from uint8 images [n, height, width, channels] to the model's outputs by name."""
    import torch

    module = torch.export.load(folder / settings["model"]).module()

    def run_model(images: Any) -> dict[str, Any]:
        with torch.no_grad():
            outputs = module(torch.from_numpy(images))
        outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        return {name: output.numpy() for name, output in zip(settings["outputs"], outputs, strict=True)}

    return run_model
