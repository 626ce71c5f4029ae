"""Builds the network with the package that has it, and loads the weights into it; normalization is done here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load_model(folder: Path, settings: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    """A function from uint8 images [n, height, width, channels] to the model's outputs by name."""
    import torch

    network = load_network(folder, settings).eval()
    std = torch.tensor(settings["std"], dtype=torch.float64)
    shift = -torch.tensor(settings["mean"], dtype=torch.float64) / std
    factor = 1 / (settings["divide_by"] * std)

    def normalize(images: Any) -> Any:
        if not settings["per_image_standardization"]:
            return images.float() * factor.float().view(1, -1, 1, 1) + shift.float().view(1, -1, 1, 1)
        floats = images.double()
        std, mean = torch.std_mean(floats, (1, 2, 3), keepdim=True, correction=0)
        return ((floats - mean) / std.clamp(min=images[0].numel() ** -0.5)).float()

    def run_model(images: Any) -> dict[str, Any]:
        with torch.no_grad():
            prepared = normalize(torch.from_numpy(images).permute(0, 3, 1, 2))
            views = [(prepared, 1.0)]
            if settings["tta"] == "flip-translate":
                height, width = prepared.shape[-2:]
                padded = torch.nn.functional.pad(prepared, (1, 1, 1, 1), mode="reflect")
                views = [(prepared, 0.5)]
                views += [(padded[..., at : at + height, at : at + width], 0.25) for at in (0, 2)]
            if settings["tta"] != "none":
                views = [(image, weight / 2) for view, weight in views for image in (view, view.flip(-1))]
            return {"logits": sum(network(view) * weight for view, weight in views).numpy()}

    return run_model


def load_network(folder: Path, settings: dict[str, Any]) -> Any:
    """The network with its weights, as the package that has it builds it."""
    import torch

    path, origin = folder / settings["model"], settings["network_of"]
    if origin["package"] == "reconv" and path.suffix != ".pth":
        import reconv

        return reconv.load(path, device="cpu", backend="eager").module.float()
    if path.suffix == ".pth":
        tensors = torch.load(path, weights_only=True)
    else:
        from safetensors.torch import load_file

        tensors = load_file(path)
    if origin["package"] == "timm":
        import timm

        network = timm.create_model(origin["name"], **origin["options"])
        names = json.loads((folder / settings["names"]).read_text(encoding="utf-8"))
        tensors = {names[name]: tensor for name, tensor in tensors.items()}
    elif origin["package"] == "reconv":
        import reconv

        network = reconv.build_model(origin["name"], **origin["options"])
    else:
        import torchvision

        network = torchvision.models.get_model(origin["name"], weights=None, **origin["options"])
    network.load_state_dict(tensors, strict=True)
    return network
