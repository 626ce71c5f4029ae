"""On a GPU, the captured network of `Predictor` gives the outputs of eager."""

from __future__ import annotations

import pytest
import torch

from reconv.bench.infer import open_network
from reconv.inference.backends.base import EagerBackend
from reconv.inference.backends.choose import LoadedNetwork, choose_backend
from reconv.inference.backends.precisions import largest_difference

LIMITS = {"fp32": 1e-3, "bf16": 0.1}


@pytest.mark.parametrize("model, mode", [("resnet18", "fp32"), ("resnet18", "bf16"), ("mobilenet_v2", "bf16")])
def test_fused_graphs_equal_eager_at_every_batch_size(model: str, mode: str) -> None:
    overrides = [("model.name", model, "test"), ("precision.mode", mode, "test")]
    recipe, network, device = open_network("resnet50", overrides, "cuda")
    network.model.eval()
    loaded, said = LoadedNetwork(recipe, network, device), list[str]()
    backend = choose_backend(loaded, "auto", "auto", said.append)
    assert backend.name == "fused", said
    eager = EagerBackend(recipe, network)
    for num in (1, 258):
        images = torch.randint(0, 256, (num, *loaded.image_shape), dtype=torch.uint8, device="cuda")
        expected = eager(images)
        assert largest_difference(backend(images), expected) <= LIMITS[mode], (num, backend.describe())
