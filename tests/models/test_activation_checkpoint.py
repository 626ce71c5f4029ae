from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from reconv.core.errors import RecipeError
from reconv.models import build_model
from reconv.models.activation_checkpoint import checkpointed_forward, choose_stages, storage_id
from reconv.models.architecture import ReconvModel


def saved_bytes(forward: Any, model: ReconvModel, images: Tensor) -> int:
    """What torch really keeps for the backward pass, weights left out."""
    weights = {storage_id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if storage_id(tensor) not in weights:
            kept[storage_id(tensor)] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward(images)
    return sum(tensor.nbytes for tensor in kept.values())


@pytest.mark.parametrize("name", ["resnet8_cifar", "resnet18", "mobilenet_v2", "googlenet"])
def test_estimated_activation_memory_equals_what_torch_saves(name: str) -> None:
    model = build_model(name, num_classes=10)
    assert isinstance(model, ReconvModel)
    images = torch.randn(2, 3, 64, 64)
    counted = choose_stages(model, "all", (3, 64, 64), torch.float32).plain_bytes
    really = saved_bytes(model, model, images) / 2
    assert counted == pytest.approx(really, rel=0.02)  # what is kept once for all images is not halved evenly


def test_checkpointed_stages_save_memory_and_keep_the_gradients() -> None:
    model = build_model("resnet18", num_classes=10)
    assert isinstance(model, ReconvModel)
    images = torch.randn(2, 3, 64, 64)
    chosen = choose_stages(model, ["layer1", "stem"], (3, 64, 64), torch.float32)
    assert chosen.names == ("stem", "layer1.0", "layer1.1")
    forward = checkpointed_forward(model, chosen.segments)
    assert chosen.kept_bytes < 0.6 * chosen.plain_bytes
    assert saved_bytes(forward, model, images) < 0.6 * saved_bytes(model, model, images)
    gradients = []
    for call in (model, forward):
        model.zero_grad()
        call(images).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_auto_checkpoints_the_largest_stages_until_half_is_saved() -> None:
    with torch.device("meta"):
        model = build_model("resnet50")
    chosen = choose_stages(model, "auto", (3, 224, 224), torch.bfloat16)
    assert chosen.kept_bytes <= chosen.plain_bytes / 2
    everything = choose_stages(model, "all", (3, 224, 224), torch.bfloat16)
    assert 0 < len(chosen.names) < len(everything.names) == everything.num_stages - 1
    assert "head" not in everything.names


def test_an_unknown_stage_is_rejected_with_the_valid_ones() -> None:
    with pytest.raises(RecipeError) as caught:
        choose_stages(build_model("resnet18"), ["layer9"], (3, 64, 64), torch.float32)
    assert "layer4.1, head" in caught.value.hint
