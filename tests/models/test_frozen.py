"""Frozen parameters and the statistics of frozen norms do not change."""

from __future__ import annotations

import pytest
import torch

from reconv.core.batch import Batch
from reconv.core.errors import UsageError
from reconv.models import build_model, model_names
from reconv.models.frozen import freeze_except, head_patterns
from reconv.models.layers.batch_norm import BatchNorm2d, LayerState


def test_the_head_is_the_classifier_of_every_network() -> None:
    heads = {}
    for name in ("resnet18", "resnet20_cifar", "mobilenet_v2", "googlenet", "efficientnet_b0"):
        model = build_model(name, num_classes=7)
        trained = freeze_except(model, head_patterns(model))
        heads[name] = trained.names
        shapes = {n: p.shape for n, p in model.named_parameters()}
        assert [shapes[n][0] for n in trained.names] == [7, 7]
        assert trained.num_trained + trained.num_frozen == sum(p.numel() for p in model.parameters())
    assert heads == {
        "resnet18": ("fc.weight", "fc.bias"),
        "resnet20_cifar": ("fc.weight", "fc.bias"),
        "mobilenet_v2": ("classifier.1.weight", "classifier.1.bias"),
        "googlenet": ("fc.weight", "fc.bias"),
        "efficientnet_b0": ("classifier.1.weight", "classifier.1.bias"),
    }
    assert set(heads) <= set(model_names())


def test_frozen_norms_use_running_statistics_in_training() -> None:
    model = build_model("resnet8_cifar", num_classes=3)
    for norm in (m for m in model.modules() if isinstance(m, BatchNorm2d)):
        norm.running_mean.normal_()  # type: ignore[union-attr]
        norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    freeze_except(model, ["fc.*"])
    before = {name: t.clone() for name, t in model.state_dict().items()}
    images = torch.randn(6, 3, 16, 16)
    expected = model.eval()(images)
    layers = LayerState(model.train())
    layers.set_micro_batch(Batch({}, torch.arange(6), (2, 4)), step=0)
    outputs = model(images)
    layers.commit(torch.tensor(True))
    assert torch.equal(outputs, expected)
    outputs.sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["fc.weight", "fc.bias"]
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_norms_of_trained_layers_update_their_statistics() -> None:
    model = build_model("resnet8_cifar", num_classes=3)
    trained = freeze_except(model, ["layer3.*", "fc.*"])
    assert trained.num_frozen > 0 and any(name.startswith("layer3.0.bn1") for name in trained.names)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    layers = LayerState(model.train())
    layers.set_micro_batch(Batch({}, torch.arange(6), (6,)), step=0)
    model(torch.randn(6, 3, 16, 16))
    layers.commit(torch.tensor(True))
    changed = {name for name, t in model.state_dict().items() if not torch.equal(t, before[name])}
    statistics = {n for n in before if "running" in n or n.endswith("tracked")}
    assert changed == {name for name in statistics if name.startswith("layer3.")}
    assert len(changed) >= 6


def test_a_pattern_without_a_match_is_rejected_with_the_closest_name() -> None:
    with pytest.raises(UsageError, match=r"(?s)layr3.*layer3"):
        freeze_except(build_model("resnet8_cifar", num_classes=3), ["fc.*", "layr3.*"])
