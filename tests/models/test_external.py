"""Networks of other packages: initialized from our seed, and without layers that use the global generator."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from reconv.batch import Batch
from reconv.errors import UsageError
from reconv.models import build_model, init_weights
from reconv.models.layers.batch_norm import BatchNorm2d, LayerState
from reconv.models.layers.dropout import DropConnect, Dropout

Create = Callable[..., nn.Module]


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Create], None]]:
    """Install a fake timm and torchvision that builds one network, called tiny."""

    def install(create: Create) -> None:
        timm, torchvision = types.ModuleType("timm"), types.ModuleType("torchvision")
        timm.create_model, timm.list_models = create, lambda: ["tiny"]
        torchvision.models = types.SimpleNamespace(get_model=create, list_models=lambda: ["tiny"])
        monkeypatch.setitem(sys.modules, "timm", timm)
        monkeypatch.setitem(sys.modules, "torchvision", torchvision)

    yield install


class BatchNormAct2d(nn.BatchNorm2d):
    """Named and built like timm's."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.drop, self.act = nn.Dropout(0.25), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))


class StochasticDepth(nn.Module):
    """As torchvision names and builds its own."""

    def __init__(self, p: float, mode: str) -> None:
        super().__init__()
        self.p, self.mode = p, mode

    def forward(self, x: Tensor) -> Tensor:
        size = [x.shape[0] if self.mode == "row" else 1] + [1] * (x.ndim - 1)
        return x * torch.empty(size).bernoulli_(1 - self.p) / (1 - self.p) if self.training else x


class DropPath(nn.Module):
    """Named and built like timm's."""

    def __init__(self, drop_prob: float, scale_by_keep: bool = True) -> None:
        super().__init__()
        self.drop_prob, self.scale_by_keep = drop_prob, scale_by_keep


def layers_with(*more: nn.Module) -> Create:
    def create(name: str, num_classes: int) -> nn.Module:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), *more, nn.Flatten(), nn.Linear(4, num_classes))
        nn.init.normal_(model[-1].weight, 0.0, 50.0)  # unlike any init scheme of ours
        nn.init.zeros_(model[1].weight)
        return model

    return create


def test_dropout_inside_an_external_norm_is_replaced(offer: Callable[[Create], None]) -> None:
    offer(layers_with(BatchNormAct2d(4)))
    model = build_model("timm:tiny", num_classes=5)
    assert isinstance(model[2], BatchNorm2d)
    assert [m.rate for m in model.modules() if isinstance(m, Dropout)] == [0.25]
    assert not any(isinstance(m, nn.Dropout) for m in model.modules())


@pytest.mark.parametrize("package", ["timm", "torchvision"])
def test_external_init_depends_only_on_the_seed(offer: Callable[[Create], None], package: str) -> None:
    offer(layers_with())
    models = []
    for seed, noise in ((4, 1), (4, 2), (5, 1)):
        torch.manual_seed(noise)
        expected_draw = torch.rand(1, generator=torch.Generator().manual_seed(noise))
        models.append(build_model(f"{package}:tiny", num_classes=100))
        init_weights(models[-1], seed)
        assert torch.equal(torch.rand(1), expected_draw), "torch's global generator was advanced"
    one, same, other = (model.state_dict() for model in models)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["0.weight"], other["0.weight"])
    assert one["3.weight"].std().item() == pytest.approx(50.0, rel=0.15)
    assert one["1.weight"].abs().sum() == 0


def test_an_external_network_that_calls_item_builds_on_the_meta_device(
    offer: Callable[[Create], None],
) -> None:
    def create(name: str, num_classes: int) -> nn.Module:
        rates = [x.item() for x in torch.linspace(0, 0.2, 3)]
        return layers_with(*(DropPath(rate) for rate in rates))(name, num_classes)

    offer(create)
    with torch.device("meta"):
        model = build_model("timm:tiny", num_classes=5)
    assert [m.rate for m in model if isinstance(m, DropConnect)] == pytest.approx([0, 0.1, 0.2])


@pytest.mark.parametrize(
    ("theirs", "per"),
    [(StochasticDepth(0.5, "row"), "sample"), (StochasticDepth(0.5, "batch"), "batch"), (DropPath(0.5), "sample")],
)
def test_external_stochastic_depth_depends_only_on_step_and_position(
    offer: Callable[[Create], None], theirs: nn.Module, per: str
) -> None:
    offer(layers_with(theirs))
    model = build_model("torchvision:tiny", num_classes=5)
    drop = model[2]
    assert isinstance(drop, DropConnect) and (drop.rate, drop.per) == (0.5, per)
    layers, images = LayerState(model.train(), seed=3), torch.ones(32, 4, 1, 1)

    def masks(step: int) -> Tensor:
        layers.set_micro_batch(Batch({"images": images}, torch.arange(32), (8, 8, 8, 8)), step)
        out: Tensor = drop(images)
        return out

    first = masks(1)
    torch.manual_seed(99)
    assert torch.equal(first, masks(1))
    assert not all(torch.equal(first, masks(step)) for step in range(2, 6))
    assert set(first.unique().tolist()) <= {0.0, 2.0}


class ShakeDrop(nn.Module):
    """An unknown random layer."""


class DenseLayer(nn.Module):
    """Calls dropout as a function, as DenseNet's layers do."""

    def __init__(self, drop_rate: float) -> None:
        super().__init__()
        self.drop_rate = drop_rate


@pytest.mark.parametrize(
    "layer", [ShakeDrop(), nn.Dropout2d(0.1), nn.RReLU(), nn.AlphaDropout(0.1), DenseLayer(0.2), DropPath(0.1, False)]
)
def test_an_unknown_random_layer_is_rejected(offer: Callable[[Create], None], layer: nn.Module) -> None:
    offer(layers_with(layer))
    with pytest.raises(UsageError, match=f"class {type(layer).__name__}") as caught:
        build_model("torchvision:tiny", num_classes=5)
    assert "generator" in caught.value.why


class GeneralizedMean(nn.Module):
    """A pool that has a number called p."""

    p = 3.0


@pytest.mark.parametrize("layer", [nn.Dropout2d(0.0), DenseLayer(0.0), GeneralizedMean(), nn.ReLU()])
def test_a_layer_without_randomness_is_kept(offer: Callable[[Create], None], layer: nn.Module) -> None:
    offer(layers_with(layer))
    assert build_model("torchvision:tiny", num_classes=5)[2] is not None
