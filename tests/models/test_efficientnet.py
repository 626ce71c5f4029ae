from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from reconv.core.batch import Batch
from reconv.core.errors import UsageError
from reconv.models import build_model
from reconv.models.efficientnet import MBConv
from reconv.models.layers.batch_norm import LayerState
from reconv.models.layers.conv import SqueezeExcitation

SMALL = {"width_coefficient": 0.5, "stem": "cifar"}


def blocks_of(model: torch.nn.Module) -> list[MBConv]:
    return [m for m in model.modules() if isinstance(m, MBConv)]


def test_structure_options() -> None:
    plain = build_model("efficientnet_b0")
    middle = "features.4.1.block.1.0"
    assert plain.get_submodule(middle).groups == 480
    grouped = build_model("efficientnet_b0", group_dim=16, expand_ratio=4)
    assert grouped.get_submodule(middle).weight.shape[:2] == (320, 16)
    assert build_model("efficientnet_b0", top_width=640).classifier[1].in_features == 640
    assert build_model("efficientnet_b0", top_width=0).classifier[1].in_features == 320
    assert build_model("efficientnet_b0", depth_divisor=16).features[2][0].block[3][0].out_channels == 32
    assert len(blocks_of(build_model("efficientnet_b0", depth_coefficient=2.0))) == 2 * len(blocks_of(plain)) == 32


def test_squeeze_excitation_width_follows_input_or_expanded_channels() -> None:
    def squeezed(**options: object) -> list[int]:
        model = build_model("efficientnet_b0", **options)
        return [m.fc1.out_channels for m in model.modules() if isinstance(m, SqueezeExcitation)]

    assert squeezed()[:3] == [8, 4, 6]
    assert squeezed(se_base="expanded")[:3] == [8, 24, 36]
    assert squeezed(se=False) == []


def test_relu_replaces_the_activation_everywhere() -> None:
    model = build_model("efficientnet_b0", activation="relu")
    kinds = Counter(type(module) for module in model.modules())
    assert kinds[nn.ReLU] == 1 + 15 + 16 + 1 + 16 and nn.SiLU not in kinds


def test_drop_connect_rate_grows_with_depth() -> None:
    blocks = blocks_of(build_model("efficientnet_b0", drop_connect=0.4, drop_connect_per="batch"))
    assert [round(b.drop_connect.rate, 4) for b in blocks[:3]] == [0.0, 0.025, 0.05]
    assert blocks[-1].drop_connect.rate == pytest.approx(0.4 * 15 / 16)
    assert {b.drop_connect.per for b in blocks} == {"batch"}


def test_dropout_and_drop_connect_do_not_depend_on_micro_batches() -> None:
    x = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    options = {**SMALL, "drop_connect": 0.5, "dropout": 0.5, "norm": "layer"}
    outputs = []
    for sizes in ((6,), (2, 4)):
        model = build_model("efficientnet_b0", num_classes=5, **options).double().train()
        state, rows, start = LayerState(model, seed=3), [], 0
        for size in sizes:
            part = x[start : start + size]
            state.set_micro_batch(Batch({}, torch.arange(start, start + size), (2,) * (size // 2)), step=4)
            rows.append(model(part))
            start += size
        outputs.append(torch.cat(rows))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-9, atol=1e-11)


def test_the_cifar_stem_downsamples_less() -> None:
    model = build_model("efficientnet_cifar", num_classes=10).eval()
    with torch.no_grad():
        assert model.features(torch.zeros(1, 3, 32, 32)).shape == (1, 640, 4, 4)


@pytest.mark.parametrize("options", [{"group_dim": 0}, {"expand_ratio": 0}, {"group_dim": 28}])
def test_invalid_structures_are_rejected(options: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        build_model("efficientnet_b0", **options)


def test_zero_gamma_makes_residual_blocks_the_identity() -> None:
    model = build_model("efficientnet_cifar", num_classes=10, zero_gamma="no-projection").eval()
    block = next(b for b in blocks_of(model) if b.has_shortcut)
    x = torch.randn(1, block.block[0][0].in_channels, 4, 4)
    assert torch.equal(block(x), x)
