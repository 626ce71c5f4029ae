from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from reconv.core.errors import UsageError
from reconv.models import build_model, model_names, model_spec
from reconv.models.layers.conv import SameConv2d, SameMaxPool2d, make_activation, same_padding
from reconv.models.layers.norm import ProxyNorm


def test_same_padding_equals_tensorflows() -> None:
    assert same_padding(224, 7, 2) == (2, 3)  # the stem: two before, three after
    assert same_padding(112, 3, 2) == (0, 1)  # the max-pool: only at the end
    assert same_padding(7, 3, 2) == (1, 1)
    assert same_padding(7, 1, 2) == (0, 0)
    assert same_padding(5, 2, 2) == (0, 1)


@pytest.mark.parametrize("side", [5, 6, 7, 8, 33])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 2), (7, 2), (5, 2), (2, 2)])
def test_same_padding_output_side_is_rounded_up(side: int, kernel: int, stride: int) -> None:
    x = torch.randn(1, 2, side, side)
    assert SameConv2d(2, 3, kernel, stride)(x).shape[-1] == math.ceil(side / stride)
    assert SameMaxPool2d(kernel, stride)(x).shape[-1] == math.ceil(side / stride)


def test_same_conv_equals_explicit_padding_and_max_pool_ignores_padding() -> None:
    x = torch.randn(2, 3, 8, 8)
    conv = SameConv2d(3, 4, 3, 2, bias=False)
    assert torch.equal(conv(x), F.conv2d(F.pad(x, (0, 1, 0, 1)), conv.weight, stride=2))
    assert torch.equal(SameMaxPool2d(3, 2)(-x.abs() - 1).amax() <= -1, torch.tensor(True))


def test_same_padding_replaces_only_strided_convolutions() -> None:
    model = build_model("resnet18", padding="same")
    strided = {name for name, m in model.named_modules() if isinstance(m, SameConv2d)}
    assert strided == {"conv1", "layer2.0.conv1", "layer3.0.conv1", "layer4.0.conv1"}
    assert model.eval()(torch.zeros(1, 3, 65, 65)).shape == (1, 1000)


@pytest.mark.parametrize(
    ("norm", "kind", "num_norms"), [("group", nn.GroupNorm, 7), ("layer", nn.GroupNorm, 7), ("proxy", ProxyNorm, 4)]
)
def test_batch_independent_norms_treat_each_sample_separately(norm: str, kind: type[nn.Module], num_norms: int) -> None:
    groups = {} if norm == "layer" else {"norm_groups": 8}
    model = build_model("resnet8_cifar", num_classes=10, norm=norm, **groups).double().train()
    assert sum(type(m) is kind for m in model.modules()) == num_norms
    x = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    torch.testing.assert_close(model(x)[:1], model(x[:1]), rtol=1e-10, atol=1e-10)
    assert {"bn1.weight", "layer1.0.bn2.bias"} <= set(model.state_dict())


def test_layer_norm_is_one_group_and_small_layers_have_one_group_per_channel() -> None:
    assert build_model("resnet8_cifar", norm="layer").bn1.num_groups == 1
    assert build_model("resnet8_cifar", norm="group", norm_groups=32).bn1.num_groups == 16


def test_groups_that_do_not_divide_the_channels_are_rejected() -> None:
    with pytest.raises(UsageError, match="norm_groups: 5") as caught:
        build_model("resnet8_cifar", norm="group", norm_groups=5)
    assert "1, 2, 4, 8, 16" in caught.value.hint


def groups_of(name: str, **options: object) -> set[int]:
    with torch.device("meta"):
        model = build_model(name, **options)
    return {m.num_groups for m in model.modules() if isinstance(m, nn.GroupNorm)}


@pytest.mark.parametrize(
    ("name", "num_groups"),
    [("resnet18", 32), ("resnext50_32x4d", 32), ("efficientnet_b0", 8), ("mobilenet_v2", 8), ("googlenet", 8)],
)
def test_default_groups_are_the_most_that_divide_every_layer(name: str, num_groups: int) -> None:
    for norm in ("group", "proxy"):
        assert groups_of(name, norm=norm) == {num_groups}


def test_every_network_has_group_norm_with_a_default_number_of_groups() -> None:
    assert [name for name in model_names() if not groups_of(name, norm="group")] == []


@pytest.mark.parametrize(
    ("name", "advice"), [("resnet18", (1, 2, 4, 8, 16, 32, 64)), ("efficientnet_b0", (1, 2, 4, 8))]
)
def test_suggested_groups_divide_every_layer(name: str, advice: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="norm_groups: 7 does not divide") as caught:
        groups_of(name, norm="group", norm_groups=7)
    assert caught.value.hint.endswith("this model: " + ", ".join(map(str, advice)))
    for number in advice:
        assert groups_of(name, norm="group", norm_groups=number) == {number}


@pytest.mark.parametrize(
    ("option", "value", "norms"),
    [("norm_groups", 8, ("batch", "layer")), ("proxy_eps", 0.1, ("batch", "layer", "group")),
     ("bn_momentum", 0.2, ("group", "layer", "proxy"))],
)  # fmt: skip
def test_an_option_of_another_norm_is_rejected_and_null_unsets_it(
    option: str, value: float, norms: tuple[str, ...]
) -> None:
    for norm in ("batch", "group", "layer", "proxy"):
        if norm in norms:
            with pytest.raises(UsageError, match=f"{option} has no effect with norm: {norm}"):
                build_model("resnet8_cifar", norm=norm, **{option: value})
        else:
            build_model("resnet8_cifar", norm=norm, **{option: value})
        build_model("resnet8_cifar", norm=norm, **{option: None})


@pytest.mark.parametrize(
    ("name", "option", "value", "message"),
    [
        ("efficientnet_b0", "drop_connect", 1.5, "below 1"),
        ("efficientnet_b0", "drop_connect", -0.1, "at least 0"),
        ("efficientnet_b0", "dropout", -1, "at least 0"),
        ("efficientnet_b0", "width_coefficient", 0.0, "above 0"),
        ("efficientnet_b0", "expand_ratio", 0, "at least 1"),
        ("efficientnet_b0", "top_width", -1, "at least 0"),
        ("mobilenet_v2", "dropout", 1.0, "below 1"),
        ("mobilenet_v2", "depth_divisor", 0, "at least 1"),
        ("googlenet", "aux_dropout", 2, "below 1"),
        ("fastnet_cifar", "widths", [64, 0], "at least 1"),
        ("resnet18", "norm_eps", -1, "above 0"),
        ("resnet18", "norm_eps", float("nan"), "above 0"),
        ("resnet18", "bn_momentum", 2.0, "between 0 and 1"),
        ("resnet18", "bn_momentum", -0.1, "between 0 and 1"),
        ("resnet18", "norm_groups", 0, "at least 1"),
        ("resnet18", "proxy_eps", float("inf"), "above 0"),
        ("resnet18", "se_ratio", -4, "at least 0"),
        ("resnet18", "depths", [2, -1], "at least 1"),
    ],
)
def test_an_option_out_of_range_is_rejected(name: str, option: str, value: object, message: str) -> None:
    with pytest.raises(UsageError, match=f"model option {option}") as caught:
        model_spec(name, **{option: value})
    assert message in caught.value.why


@pytest.mark.parametrize("name", ["relu", "silu"])
def test_proxy_norm_of_gaussian_inputs_has_zero_mean_and_the_expected_variance(name: str) -> None:
    norm = ProxyNorm(1, 4, eps=1e-5, proxy_eps=1e-3, act=make_activation(name)).double()
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 0.5, 2.0, 1.0]))
        norm.bias.copy_(torch.tensor([0.0, 1.0, -1.0, -0.5]))
    gauss = torch.randn(200_000, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    activations = norm.act(gauss * norm.weight + norm.bias)
    variance = activations.var(0)
    output = norm.renormalize(activations.T[None, :, :, None].contiguous())[0, :, :, 0]
    assert output.mean(1).abs().max().item() < 0.02
    torch.testing.assert_close(output.var(1), variance / (variance + 1e-3), rtol=0.04, atol=0.0)


def test_proxy_norm_normalizes_group_norm_activations_and_has_gradients() -> None:
    norm, plain = ProxyNorm(2, 4, 1e-5, 0.03, nn.ReLU()), nn.GroupNorm(2, 4, 1e-5)
    x = torch.randn(2, 4, 3, 3)
    assert torch.equal(norm(x), norm.renormalize(torch.relu(plain(x))))
    norm(x).pow(2).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in norm.parameters())
    assert "quantiles" not in norm.state_dict()


@pytest.mark.parametrize("rule", ["fan_out", "fan_in", "tf_fan_in", "tf_fan_out", "truncated"])
def test_conv_init_of_depthwise_convolutions_has_the_expected_std(rule: str) -> None:
    model = build_model("efficientnet_b0", conv_init=rule)
    weight = model.get_submodule("features.6.1.block.1.0").weight.detach()
    assert weight.shape == (1152, 1, 5, 5)
    expected = {
        "fan_out": math.sqrt(2 / (1152 * 25)),
        "fan_in": math.sqrt(2 / 25),
        "tf_fan_in": math.sqrt(1 / 25),
        "tf_fan_out": math.sqrt(2 / 25),
        "truncated": 0.01 * 0.8796,
    }[rule]
    assert weight.std().item() == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("norm", ["batch", "group", "layer", "proxy"])
def test_every_norm_runs_on_the_meta_device(norm: str) -> None:
    with torch.device("meta"):
        model = build_model("resnet8_cifar", num_classes=4, norm=norm)
        assert model(torch.empty(2, 3, 32, 32)).shape == (2, 4)
