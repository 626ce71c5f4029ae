"""The weighted mean of checkpoints."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from reconv.checkpoint.average import average_checkpoints, exponential_weights
from reconv.core.errors import CheckpointError, UsageError


def network(num_classes: int = 4) -> nn.Module:
    return nn.Sequential(OrderedDict(conv1=nn.Conv2d(3, 8, 3), bn1=nn.BatchNorm2d(8), fc=nn.Linear(8, num_classes)))


def weights_of(seed: int = 1, num_classes: int = 4) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(t.shape, generator=draw) if t.is_floating_point() else torch.tensor(seed)
        for name, t in network(num_classes).state_dict().items()
    }


def save_weights(folder: Path, num: int) -> list[Path]:
    paths = [folder / f"{i}.safetensors" for i in range(num)]
    for i, path in enumerate(paths):
        save_file(weights_of(i), path)
    return paths


def test_the_mean_is_computed_in_float64_with_statistics_and_the_last_counter(tmp_path: Path) -> None:
    found = average_checkpoints(save_weights(tmp_path, 3))
    assert found.keys() == weights_of(0).keys()
    for name, tensor in weights_of(0).items():
        stack = torch.stack([weights_of(i)[name] for i in range(3)])
        expected = stack.double().mean(0).float() if stack.is_floating_point() else stack[-1]
        assert found[name].dtype == tensor.dtype
        torch.testing.assert_close(found[name], expected, rtol=1e-7, atol=1e-8)
    assert "bn1.running_var" in found


@pytest.mark.parametrize("decay", [0.5, 0.99, 1.0])
def test_exponential_weights_are_those_of_the_recursion(tmp_path: Path, decay: float) -> None:
    found = average_checkpoints(save_weights(tmp_path, 4), exponential_weights(4, decay))
    for name in ("fc.weight", "bn1.running_var"):
        value = weights_of(0)[name].double()
        for i in range(1, 4):
            value = decay * value + (1 - decay) * weights_of(i)[name].double()
        torch.testing.assert_close(found[name], value.float(), rtol=1e-6, atol=1e-7)
    assert exponential_weights(1, decay) == [1.0]


def test_the_mean_of_equal_half_precision_files_is_that_file(tmp_path: Path) -> None:
    tensor = torch.randn(100).to(torch.bfloat16)
    paths = [tmp_path / f"{i}.safetensors" for i in range(7)]
    for path in paths:
        save_file({"w": tensor}, path)
    assert torch.equal(average_checkpoints(paths)["w"], tensor)


def test_different_models_no_files_and_wrong_weights_are_errors(tmp_path: Path) -> None:
    paths = save_weights(tmp_path, 2)
    save_file(weights_of(1, num_classes=5), paths[1])
    with pytest.raises(CheckpointError, match=r"(?s)different models.*fc\.bias"):
        average_checkpoints(paths)
    with pytest.raises(UsageError, match="no checkpoints to average"):
        average_checkpoints([])
    with pytest.raises(UsageError, match="decay"):
        exponential_weights(3, 0.0)
    with pytest.raises(ValueError, match="sum to 1"):
        average_checkpoints(paths[:1], [0.5])
