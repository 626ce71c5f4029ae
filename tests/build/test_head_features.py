"""The measured input of a pretrained network's last layer, and training at the rate that follows from it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from reconv.build.head_features import head_input, head_layer, second_moment
from reconv.models import build_model
from reconv.recipe.derive import DataFacts, HeadFacts, WeightFacts
from reconv.recipe.derive_rules import derive
from reconv.recipe.loader import load


def derived_rate(head: HeadFacts, batch: int) -> float:
    resolved = load("finetune", [("model.init", "w.pth", ""), ("batch.size", batch, "")])
    found = derive(resolved.recipe, resolved.fixed, DataFacts(480), WeightFacts("w.pth", "resnet18"), lambda _: head)
    return {derivation.name: derivation.value for derivation in found}["schedule.lr"]


@pytest.mark.parametrize("scale", [1.0, 8.0])
@pytest.mark.parametrize("batch", [8, 64])
def test_sgd_at_the_derived_rate_stays_below_its_first_loss_on_features_of_any_scale(scale: float, batch: int) -> None:
    torch.manual_seed(0)
    targets = torch.arange(480) % 3
    features = (torch.randn(3, 64)[targets] + 3 * torch.randn(480, 64)).relu() * scale
    moment = second_moment(features)
    rate = derived_rate(HeadFacts("fc", 480, 96, moment, moment), batch)
    weight = torch.zeros(3, 64, requires_grad=True)
    sgd = torch.optim.SGD([weight], rate, momentum=0.9)
    losses = []
    for _ in range(120):
        rows = torch.randint(480, (batch,))
        loss = F.cross_entropy(features[rows] @ weight.T, targets[rows])
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        losses.append(loss.item())
    later = torch.tensor(losses).unfold(0, 10, 10).mean(1)  # of ten steps each
    assert later[1:].max() < losses[0] and later[-1] < 0.8 * losses[0]


def test_the_second_moment_is_that_of_all_rows() -> None:
    rows = torch.randn(20, 6) + torch.tensor([3.0, 0, 0, 0, 0, 0])
    expected = torch.linalg.eigvalsh(rows.double().T @ rows.double() / 20)
    for wide in (rows, F.pad(rows, (0, 50))):  # fewer columns than rows, and more
        moment = second_moment(wide)
        assert moment.eigenvalue == pytest.approx(float(expected[-1]))
        assert moment.trace == pytest.approx(float(expected.sum()))


@pytest.mark.parametrize(("name", "layer"), [("resnet8_cifar", "fc"), ("mobilenet_v2", "classifier.1")])
def test_the_last_layer_is_found_by_its_name(name: str, layer: str) -> None:
    model = build_model(name, num_classes=5)
    found = head_layer(model)
    assert found is not None and found == (layer, model.get_submodule(layer))


def test_a_network_that_ends_in_a_convolution_has_no_linear_last_layer() -> None:
    assert head_layer(nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (4, 1, 1)), nn.Conv2d(4, 2, 1))) is None


def test_inputs_are_measured_with_the_statistics_of_the_images_and_of_the_weights() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(3, 2)
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(0.9), nn.Flatten(), linear)
    images = torch.randn(16, 3, 1, 1) * 5 + 40
    running, batch = (head_input(model, linear, images, batch_statistics=wish) for wish in (False, True))
    assert torch.allclose(running, images.flatten(1), rtol=1e-4), "no dropout, and the statistics of the new layer"
    assert torch.allclose(batch.mean(0), torch.zeros(3), atol=1e-4)
    assert not linear._forward_pre_hooks
