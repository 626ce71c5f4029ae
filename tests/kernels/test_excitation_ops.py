"""The gate of squeeze-and-excitation by the kernels equals plain operations, values and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import TOLERANCE, as_float64, assert_near, draw
from torch import Tensor, nn

from reconv.kernels import block_graph
from reconv.kernels.fuse import fuse
from reconv.kernels.jit.launch import trace_launches
from reconv.kernels.ops.excitation import MAX_HIDDEN, excitation_gate, supports
from reconv.kernels.reference import Activation
from reconv.models.layers.conv import SqueezeExcitation
from reconv.models.replace_layers import replace_layers

ACTS = {"relu": F.relu, "silu": F.silu}
NAMES = ("means", "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")


def operands(images: int, channels: int, hidden: int) -> list[Tensor]:
    """Means, weights in half precision and biases in float32."""
    shapes = ((images, channels, 1, 1), (hidden, channels, 1, 1), (hidden,), (channels, hidden, 1, 1), (channels,))
    found = []
    for seed, shape in enumerate(shapes):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        if seed in (1, 3):
            values *= shape[1] ** -0.5  # so that outputs are about as large as inputs
        found.append((values if len(shape) == 1 else values.half()).requires_grad_())
    return found


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("images, channels, hidden", [(3, 32, 8), (17, 136, 6), (70, 40, 20), (1, 264, 96)])
def test_gates_and_all_gradients_equal_plain_operations(
    images: int, channels: int, hidden: int, act: Activation
) -> None:
    given = operands(images, channels, hidden)
    means, weight1, bias1, weight2, bias2 = exact = [as_float64(tensor) for tensor in given]
    gate = excitation_gate(*given, act)
    expected = torch.sigmoid(F.conv2d(ACTS[act](F.conv2d(means, weight1, bias1)), weight2, bias2))
    assert gate.dtype == torch.float16 and gate.shape == given[0].shape
    assert_near(gate, expected, TOLERANCE[torch.float16])
    dgate = draw((images, channels, 1, 1), torch.float16, seed=9).detach()
    gate.backward(dgate)
    expected.backward(dgate.double())
    for name, narrow, wide in zip(NAMES, given, exact, strict=True):
        assert narrow.grad is not None and narrow.grad.dtype == narrow.dtype, name
        assert_near(narrow.grad, wide.grad, TOLERANCE[torch.float16])


def test_an_image_has_the_same_gate_in_any_batch() -> None:
    means, *rest = operands(40, 72, 12)
    whole = excitation_gate(means, *rest, "silu")
    assert torch.equal(whole[19:37], excitation_gate(means[19:37], *rest, "silu"))


@pytest.mark.parametrize(
    "dtype, hidden, is_supported",
    [(torch.float16, 8, True), (torch.float32, 8, False), (torch.float16, MAX_HIDDEN + 1, False)],
)
def test_what_is_supported(dtype: torch.dtype, hidden: int, is_supported: bool) -> None:
    means, weight1, _, weight2, _ = operands(2, 16, hidden)
    assert supports(means.to(dtype), weight1, weight2) is is_supported
    assert not supports(means.to(dtype), weight2, weight1)


@pytest.fixture(autouse=True)
def _known_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of this file stand for those of a package whose code is traced."""
    packages = (*block_graph.TRACED_PACKAGES, __name__.partition(".")[0])
    monkeypatch.setattr(block_graph, "TRACED_PACKAGES", packages)


class OtherPackagesLayer(nn.Module):
    """As torchvision's."""

    def __init__(self, channels: int, hidden: int, gate: nn.Module) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2 = nn.Conv2d(channels, hidden, 1), nn.Conv2d(hidden, channels, 1)
        self.activation, self.scale_activation = nn.SiLU(), gate

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_activation(self.fc2(self.activation(self.fc1(self.avgpool(x)))))


def with_norm(layer: nn.Module) -> nn.Sequential:
    """The batch norm that an external network must have to be fused, and a layer."""
    model = nn.Sequential(nn.BatchNorm2d(24), layer)
    replace_layers(model, "test")
    return model.to(memory_format=torch.channels_last)


def launched(model: nn.Module, x: Tensor) -> list[str]:
    """The kernels of a forward and a backward pass."""
    with trace_launches() as noted:
        model.to("meta")(x.to("meta").contiguous(memory_format=torch.channels_last)).sum().backward()
    return [variant.kernel.__name__ for variant in noted]


def our_layer() -> nn.Module:
    return SqueezeExcitation(24, 6, nn.SiLU())


GATE_KERNELS = {"gate", "hidden_gradient", "gradients"}


@pytest.mark.parametrize(
    "layer",
    [our_layer, lambda: OtherPackagesLayer(24, 6, nn.Sigmoid())],
    ids=["ours", "external"],
)
def test_a_layer_in_half_precision_has_its_gate_by_kernels(layer: Callable[[], nn.Module]) -> None:
    x = draw((3, 24, 5, 5), torch.float16, seed=3)
    model = with_norm(layer())
    model[1].half()
    exact = copy.deepcopy(model).double()
    fuse(model)
    y, expected = model(x), exact(x.double())
    assert_near(y, expected, TOLERANCE[torch.float16])
    y.sum().backward()
    expected.sum().backward()
    for (name, narrow), wide in zip(model[1].named_parameters(), exact[1].parameters(), strict=True):
        assert_near(narrow.grad, wide.grad, 2 * TOLERANCE[torch.float16]), name
    assert set(launched(model, x.detach())) >= GATE_KERNELS


@pytest.mark.parametrize("change", ["hook", "hard sigmoid", "float32", "no bias"])
def test_other_layers_are_called(change: str) -> None:
    layer = OtherPackagesLayer(24, 6, nn.Hardsigmoid() if change == "hard sigmoid" else nn.Sigmoid())
    if change == "no bias":
        layer.fc2 = nn.Conv2d(6, 24, 1, bias=False)
    model = with_norm(layer)
    fuse(model)
    x = torch.randn(3, 24, 5, 5)
    if change != "float32":
        x = x.half()
        model[1].half()
    if change == "hook":
        layer.fc1.register_forward_hook(lambda *_: None)
    assert not set(launched(model, x)) & GATE_KERNELS
