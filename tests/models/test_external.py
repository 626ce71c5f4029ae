"""Networks of other packages: initialized from our seed, and without layers that use the global generator."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reconv.core.batch import Batch
from reconv.core.errors import UsageError
from reconv.models import build_model, init_weights
from reconv.models.external import check_image_sizes
from reconv.models.layers.batch_norm import BatchNorm1d, BatchNorm2d, LayerState
from reconv.models.layers.dropout import ChannelDropout, DropConnect, Dropout
from reconv.models.replace_layers import replace_layers

Create = Callable[..., nn.Module]


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Create], None]]:
    """Install a fake timm and torchvision that builds one network, called tiny."""

    def list_models(module: object = None) -> list[str]:
        return ["tiny"] if module is not None else ["tiny", "fasterrcnn_tiny"]

    def install(create: Create) -> None:
        timm, torchvision = types.ModuleType("timm"), types.ModuleType("torchvision")
        timm.create_model, timm.list_models = create, lambda: ["tiny"]
        torchvision.models = types.SimpleNamespace(get_model=create, list_models=list_models)
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
    def create(name: str, num_classes: int, **options: object) -> nn.Module:
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
    def create(name: str, num_classes: int, **options: object) -> nn.Module:
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

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, p=self.drop_rate, training=self.training)


class Stage(nn.Module):
    """Keeps the rate of its layer as an attribute, as timm's stages do."""

    def __init__(self) -> None:
        super().__init__()
        self.drop_rate, self.drop = 0.1, nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x)


@pytest.mark.parametrize(
    "layer",
    [
        ShakeDrop(),
        nn.FractionalMaxPool2d(2, 1),
        nn.RReLU(),
        nn.AlphaDropout(0.1),
        DenseLayer(0.2),
        DropPath(0.1, False),
    ],
)
def test_an_unknown_random_layer_is_rejected(offer: Callable[[Create], None], layer: nn.Module) -> None:
    offer(layers_with(layer))
    with pytest.raises(UsageError, match=f"class {type(layer).__name__}") as caught:
        build_model("torchvision:tiny", num_classes=5)
    assert "generator" in caught.value.why


class GeneralizedMean(nn.Module):
    """A pool that has a number called p."""

    p = 3.0


@pytest.mark.parametrize("layer", [DenseLayer(0.0), Stage(), GeneralizedMean(), nn.ReLU()])
def test_a_layer_without_randomness_is_kept(offer: Callable[[Create], None], layer: nn.Module) -> None:
    offer(layers_with(layer))
    assert build_model("torchvision:tiny", num_classes=5)[2] is not None


def batch_of(num_samples: int, groups: tuple[int, ...] = ()) -> Batch:
    rows = torch.arange(num_samples)
    return Batch({"images": torch.zeros(num_samples)}, rows, groups or (num_samples,))


def test_a_replaced_layer_keeps_its_attributes_and_references() -> None:
    model = nn.Sequential(nn.Dropout(0.25, inplace=True), DropPath(0.5), nn.BatchNorm1d(4, eps=0.5, affine=False))
    parts = list(model)
    replace_layers(model, "mine")
    assert [a is b for a, b in zip(parts, model, strict=True)] == [True] * 3
    assert (model[0].p, model[0].inplace, model[0].rate) == (0.25, True, 0.25)
    assert (model[1].drop_prob, model[1].scale_by_keep, model[1].rate) == (0.5, True, 0.5)
    assert (model[2].num_features, model[2].eps, model[2].affine) == (4, 0.5, False)
    assert [type(part) for part in model] == [Dropout, DropConnect, BatchNorm1d]


class Tokens(nn.Module):
    """A norm over all tokens of all images, as LeViT has, and a drop path over windows, as Swin has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.path = nn.BatchNorm1d(3), nn.Dropout(0.5), DropPath(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, 1)).view_as(x)


def test_rows_of_a_sample_are_normalized_and_dropped_with_it() -> None:
    model = Tokens().train()
    replace_layers(model, "mine")
    layers, x = LayerState(model, seed=3), torch.randn(4, 5, 3)
    layers.set_micro_batch(batch_of(4, (2, 2)), 1)
    whole = model(x)
    kept = model.drop(torch.ones(20, 3)), model.path(torch.ones(20, 3))
    assert torch.equal(model.norm.running_mean, torch.zeros(3)), "statistics change at the end of a step alone"
    torch.testing.assert_close(whole[:2], F.batch_norm(x[:2].flatten(0, 1), None, None, training=True).view(2, 5, 3))
    layers.commit(torch.tensor(True))
    means = torch.stack([x[:2].flatten(0, 1).mean(0), x[2:].flatten(0, 1).mean(0)])
    torch.testing.assert_close(model.norm.running_mean, 0.1 * means.mean(0))
    assert {0.0, 2.0} == {*kept[0].unique().tolist()} == {*kept[1].unique().tolist()}
    assert all(len(mask.view(4, 5, 3)[0].unique(dim=0)) > 1 for mask in kept), "rows of a sample are dropped alike"
    # The second half alone, as its own micro-batch, has the same masks.
    rows = torch.arange(2, 4)
    layers.set_micro_batch(Batch({"images": rows}, rows, (2,)), 1)
    assert torch.equal(model.drop(torch.ones(10, 3)), kept[0][10:])
    assert torch.equal(model.path(torch.ones(10, 3)), kept[1][10:])
    shared = model.drop(torch.ones(11, 3))  # rows of no sample, such as a table of positions: keyed by the step alone
    layers.set_micro_batch(batch_of(4), 1)
    assert torch.equal(model.drop(torch.ones(11, 3)), shared) and {*shared.unique().tolist()} == {0.0, 2.0}


@pytest.mark.parametrize("theirs", [nn.Dropout1d(0.5), nn.Dropout2d(0.5), nn.Dropout3d(0.5)])
def test_channel_dropout_drops_whole_channels_by_step_and_position(theirs: nn.Module) -> None:
    model = nn.Sequential(theirs).train()
    replace_layers(model, "mine")
    assert type(model[0]) is ChannelDropout
    layers, x = LayerState(model, seed=3), torch.ones(16, 8, 4, 4)
    layers.set_micro_batch(batch_of(16), 1)
    first = model(x)
    assert torch.equal(first, model(x))
    assert torch.equal(first, first[:, :, :1, :1].expand_as(first))
    assert {*first.unique().tolist()} == {0.0, 2.0}


class GhostNet(nn.Module):
    """Calls dropout as a function before its classifier, as many of timm's networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.drop_rate, self.classifier = 0.5, nn.Linear(64, 3)

    def get_classifier(self) -> nn.Module:
        return self.classifier

    def forward(self, x: Tensor) -> Tensor:
        if self.drop_rate > 0.0:
            x = F.dropout(x, p=self.drop_rate, training=self.training)
        return self.classifier(x)


def test_dropout_before_a_classifier_becomes_a_keyed_layer() -> None:
    model, x = GhostNet().train(), torch.ones(4, 64)
    keys, plain = list(model.state_dict()), model.eval()(x)
    replace_layers(model.train(), "mine")
    assert list(model.state_dict()) == keys and torch.equal(model.eval()(x), plain)
    layers, before = LayerState(model.train(), seed=3), torch.get_rng_state()
    layers.set_micro_batch(batch_of(4), 1)
    first = model(x)
    assert not torch.equal(first, plain) and torch.equal(first, model(x))
    assert torch.equal(torch.get_rng_state(), before)


class Attention(nn.Module):
    """Gives the rate of its dropout to torch's fused attention, as timm's does."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.attn_drop, self.fused_attn = nn.Dropout(rate), True

    def forward(self, x: Tensor) -> Tensor:
        if self.fused_attn:
            return F.scaled_dot_product_attention(x, x, x, dropout_p=self.attn_drop.p if self.training else 0.0)
        return self.attn_drop((x @ x.mT).softmax(-1)) @ x


@pytest.mark.parametrize(("rate", "is_fused"), [(0.0, True), (0.1, False)])
def test_fused_attention_is_used_only_without_dropout(rate: float, is_fused: bool) -> None:
    model = nn.Sequential(Attention(rate)).train()
    replace_layers(model, "mine")
    layers, before = LayerState(model, seed=3), torch.get_rng_state()
    layers.set_micro_batch(batch_of(2), 1)
    model(torch.randn(2, 1, 5, 8, generator=torch.Generator().manual_seed(1)))
    assert model[0].fused_attn is is_fused
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.BatchNorm2d(4, momentum=None),
        nn.InstanceNorm2d(4, track_running_stats=True),
    ],
)
def test_a_norm_whose_statistics_cannot_be_kept_exact_is_rejected(layer: nn.Module) -> None:
    with pytest.raises(UsageError, match="not supported"):
        replace_layers(nn.Sequential(layer), "mine")


def test_only_classifiers_are_built_and_no_weights_are_requested(offer: Callable[[Create], None]) -> None:
    calls = []

    def create(name: str, num_classes: int, **options: object) -> nn.Module:
        calls.append(options)
        return layers_with()(name, num_classes)

    offer(create)
    with pytest.raises(UsageError, match="fasterrcnn_tiny is not an image classifier"):
        build_model("torchvision:fasterrcnn_tiny")
    with pytest.raises(UsageError, match="without pretrained weights") as caught:
        build_model("torchvision:tiny", weights="DEFAULT")
    assert "--init torchvision:tiny" in caught.value.hint
    assert calls == []
    build_model("torchvision:tiny")
    build_model("timm:tiny.some_tag", in_channels=1)
    assert calls == [{"weights": None}, {"in_chans": 1}]


class FixedSize(nn.Module):
    """Takes one image size, as ViT does."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.default_cfg = {"input_size": (3, 24, 24)}
        self.head = nn.Linear(3 * 24 * 24, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[-1] == 24, f"Input height ({x.shape[-1]}) doesn't match model (24)."
        return self.head(x.flatten(1))


def test_the_error_of_a_wrong_image_size_names_the_right_one(offer: Callable[[Create], None]) -> None:
    offer(lambda name, num_classes, **options: FixedSize(num_classes))
    with torch.device("meta"):
        model = build_model("timm:tiny", num_classes=5)
    check_image_sizes(model, 3, [24])
    with pytest.raises(UsageError, match="32 x 32") as caught:
        check_image_sizes(model, 3, [24, 32])
    assert "--set data.preprocess.size=24" in caught.value.hint
    assert "doesn't match" in caught.value.why
