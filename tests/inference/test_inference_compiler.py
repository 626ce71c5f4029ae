"""A compiled model has the outputs of the original, with fused convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from reconv.inference.backends.compiler import compile_inference
from reconv.inference.backends.fold import fold_batch_norms
from reconv.kernels.ops.conv_bias_act import conv_bias_act
from reconv.kernels.ops.pointwise import concat, gate_add_act, global_avg_pool, max_pool
from reconv.models import build_model, init_weights
from reconv.models.efficientnet import EfficientNetSpec, MBConv
from reconv.models.googlenet import GoogLeNetSpec, Inception
from reconv.models.layers.conv import SqueezeExcitation

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def kernels_of_torch() -> None:
    """Not here: the kernels of a compiled network run in Triton's interpreter."""


def images(size: int, rows: int = 2, channels: int = 3) -> Tensor:
    values = torch.randn(rows, channels, size, size, generator=torch.Generator().manual_seed(0))
    return values.contiguous(memory_format=torch.channels_last)


def fused_convs(compiled: Any) -> list[tuple[bool, str]]:
    """For each fused convolution: whether it adds a residual, and its activation."""
    assert isinstance(compiled, fx.GraphModule)
    nodes = [node for node in compiled.graph.nodes if node.target is conv_bias_act]
    return [(node.args[3] is not None, node.args[5].act) for node in nodes]


def calls(compiled: Any, target: object) -> int:
    """How often the graph calls a function."""
    assert isinstance(compiled, fx.GraphModule)
    return sum(node.target is target for node in compiled.graph.nodes)


@pytest.mark.parametrize(
    ("name", "options", "size", "counts"),
    [
        ("resnet10", {"width": 8}, 32, {(True, "relu"): 4, (False, "relu"): 5, (False, "none"): 3}),
        ("resnet10", {"width": 8, "version": "v2"}, 32, {(False, "relu"): 4}),
        ("mobilenet_v2", {}, 32, {(False, "relu6"): 35, (True, "none"): 10, (False, "none"): 7}),
        ("resnet10", {"width": 8, "se_units": 4}, 32, {(False, "relu"): 9, (False, "none"): 7, (False, "sigmoid"): 4}),
        (
            "efficientnet_cifar",
            {},
            32,
            {(False, "silu"): 49, (True, "none"): 9, (False, "none"): 7, (False, "sigmoid"): 16},
        ),
        ("googlenet", {}, 32, {(False, "relu"): 57}),
        (
            "resnet10",
            {"width": 8, "norm": "group", "stem": "cifar", "se_units": 4},
            8,
            {(False, "relu"): 4, (False, "sigmoid"): 4},
        ),
    ],
)
def test_outputs_equal_the_models(name: str, options: dict[str, Any], size: int, counts: Any) -> None:
    model = build_model(name, num_classes=4, **options)
    init_weights(model, 0)
    # In float64, which kernels do not take: whole networks are slow in Triton's interpreter, which small ones are for.
    model, _ = fold_batch_norms(model.double().to(memory_format=torch.channels_last), (3, size, size))
    compiled, num_fused = compile_inference(model, images(size).double())
    found = fused_convs(compiled)
    assert num_fused == len(found) > 0
    assert {kind: found.count(kind) for kind in set(found)} == counts
    with torch.inference_mode():
        for rows in (1, 2, 5):
            given = images(size, rows).double()
            torch.testing.assert_close(compiled(given), model(given))


def test_a_detector_returns_all_of_its_tensors() -> None:
    options = {"backbone": "resnet10", "width": 8, "extra_widths": [16, 16, 8], "boxes_per_cell": [4, 6, 6, 4]}
    model = build_model("ssd_resnet34", num_classes=3, **options)
    init_weights(model, 0)
    model, _ = fold_batch_norms(model.double(), (3, 64, 64))
    compiled, num_fused = compile_inference(model, images(64, rows=1).double())
    with torch.inference_mode():
        expected, got = model(images(64).double()), compiled(images(64).double())
    assert type(got) is type(expected) and num_fused == 9 + 2 * 3 + 2 * 4
    for a, b in zip(tree_leaves(got), tree_leaves(expected), strict=True):
        torch.testing.assert_close(a, b)


def test_an_inception_block_uses_fused_pool_and_concat() -> None:
    model = Inception(GoogLeNetSpec(), 8, (8, 8, 16, 8, 8, 8)).eval()
    model, _ = fold_batch_norms(model.to(memory_format=torch.channels_last), (8, 7, 7))
    compiled, num_fused = compile_inference(model, images(7, channels=8))
    assert (num_fused, calls(compiled, max_pool), calls(compiled, concat)) == (6, 1, 1)
    with torch.inference_mode():
        given = images(7, rows=5, channels=8)
        torch.testing.assert_close(compiled(given), model(given), rtol=1e-4, atol=1e-5)


def gated_products(compiled: Any) -> int:
    """The number of fused convolutions with a gate."""
    assert isinstance(compiled, fx.GraphModule)
    return sum(node.target is conv_bias_act and node.args[4] is not None for node in compiled.graph.nodes)


def test_a_gate_is_fused_with_the_sum_and_activation_after_it() -> None:
    model = build_model("resnet10", num_classes=4, width=8, se_units=4)
    init_weights(model, 0)
    model, _ = fold_batch_norms(model.to(memory_format=torch.channels_last), (3, 16, 16))
    compiled, _ = compile_inference(model, images(16))
    assert (calls(compiled, gate_add_act), calls(compiled, global_avg_pool), gated_products(compiled)) == (4, 5, 0)
    assert calls(compiled, aten.mul.Tensor) == calls(compiled, aten.add.Tensor) == calls(compiled, aten.mean.dim) == 0
    with torch.inference_mode():
        given = images(16, rows=3)
        torch.testing.assert_close(compiled(given), model(given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("in_channels", [8, 16])  # the second has a shortcut
def test_a_gate_is_fused_into_its_only_consumer_a_1x1_conv(in_channels: int) -> None:
    model: nn.Module = MBConv(EfficientNetSpec(), in_channels, 16, expansion=2, kernel=3, stride=1).eval()
    model, _ = fold_batch_norms(model.to(memory_format=torch.channels_last), (in_channels, 6, 6))
    compiled, num_fused = compile_inference(model, images(6, channels=in_channels))
    assert (num_fused, gated_products(compiled), calls(compiled, global_avg_pool), calls(compiled, gate_add_act)) == (
        5,
        1,
        1,
        0,
    )
    with torch.inference_mode():
        given = images(6, rows=3, channels=in_channels)
        torch.testing.assert_close(compiled(given), model(given), rtol=1e-4, atol=1e-5)


class Shared(nn.Module):
    """Gated images with two convolutions as consumers."""

    def __init__(self) -> None:
        super().__init__()
        self.se = SqueezeExcitation(8, 4, nn.ReLU())
        self.a, self.b = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.se(x)
        total: Tensor = self.a(y) + self.b(y)
        return total


def test_a_gate_with_two_consumers_is_multiplied_once() -> None:
    model = Shared().eval()
    compiled, num_fused = compile_inference(model, images(5, channels=8))
    assert (num_fused, gated_products(compiled), calls(compiled, gate_add_act)) == (4, 0, 1)
    with torch.inference_mode():
        given = images(5, channels=8)
        torch.testing.assert_close(compiled(given), model(given), rtol=1e-4, atol=1e-5)


class Gated(nn.Module):
    """Images times something of another shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x * self.gate) + 2 * x.mean((2, 3), keepdim=True) + x.mean((1, 2), keepdim=True)


@pytest.mark.parametrize("shape", [(1, 8, 1, 1), (8, 1, 1), (), (8, 5, 5)], ids=str)
def test_other_products_are_not_fused(shape: tuple[int, ...]) -> None:
    model = Gated(shape).eval()
    compiled, _ = compile_inference(model, images(5, channels=8))
    assert (calls(compiled, gate_add_act), calls(compiled, global_avg_pool)) == (0, 1)
    with torch.inference_mode():
        given = images(5, channels=8)
        torch.testing.assert_close(compiled(given), model(given), rtol=1e-4, atol=1e-5)


class TwoConsumers(nn.Module):
    """A convolution output with two consumers, so nothing may be fused with it."""

    def __init__(self, in_place: bool, act_first: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.act = nn.ReLU(in_place)
        self.act_first = act_first  # the activation runs before the other consumer

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        total: Tensor = self.act(y) + 2 * y if self.act_first else 2 * y + self.act(y)
        return total


@pytest.mark.parametrize(
    ("in_place", "act_first", "kinds"),
    [
        (False, False, [(False, "none")]),
        (False, True, [(False, "none")]),
        (True, False, []),  # the other consumer needs the value before the activation
        (True, True, [(False, "relu")]),  # both consumers need the value after the activation
    ],
)
def test_a_conv_with_two_consumers_keeps_its_output(
    in_place: bool, act_first: bool, kinds: list[tuple[bool, str]]
) -> None:
    model = TwoConsumers(in_place, act_first).eval()
    compiled, num_fused = compile_inference(model, images(8))
    assert fused_convs(compiled) == kinds and num_fused == len(kinds)
    with torch.inference_mode():
        assert torch.equal(compiled(images(8)), model(images(8)))


class ConvThen(nn.Module):
    """A convolution followed by operations that look fusible."""

    def __init__(self, conv: nn.Module, end: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.end = conv, end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.conv(x), x)


@pytest.mark.parametrize(
    ("conv", "end", "kinds"),
    [
        (nn.Conv2d(8, 8, 1), lambda y, x: torch.relu(y + y), [(False, "none")]),
        (nn.Conv2d(8, 8, 1), lambda y, x: torch.relu(torch.add(y, x, alpha=2)), [(False, "none")]),
        (nn.Conv2d(8, 8, 1), lambda y, x: torch.relu(y + x[:, :1]), [(False, "none")]),
        (nn.Conv2d(8, 8, 1), lambda y, x: torch.relu(y + x.double()), [(False, "none")]),
        (nn.ConvTranspose2d(8, 8, 3, padding=1), lambda y, x: torch.relu(y + x), []),
        (nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4), lambda y, x: torch.relu(x + y), [(True, "relu")]),
    ],
)
def test_only_sums_of_equal_shape_and_dtype_are_fused(
    conv: nn.Module, end: Callable[[Tensor, Tensor], Tensor], kinds: list[tuple[bool, str]]
) -> None:
    model = ConvThen(conv, end).eval()
    compiled, _ = compile_inference(model, images(5, channels=8))
    assert fused_convs(compiled) == kinds
    with torch.inference_mode():
        given = images(5, channels=8)
        torch.testing.assert_close(compiled(given), model(given))


class GatedConv(nn.Module):
    """A convolution of images times a gate of a given dtype."""

    def __init__(self, dtype: torch.dtype, **options: Any) -> None:
        super().__init__()
        self.conv, self.dtype = nn.Conv2d(8, 8, 1, **options).to(torch.promote_types(dtype, torch.float32)), dtype

    def forward(self, x: Tensor) -> Tensor:
        gated: Tensor = self.conv(x * x.mean((2, 3), keepdim=True, dtype=self.dtype))
        return gated


@pytest.mark.parametrize(
    ("dtype", "options", "counts"),
    [
        (torch.float32, {}, (1, 0)),
        (torch.float32, {"padding": 1}, (0, 1)),
        (torch.float32, {"stride": 2}, (0, 1)),
        (torch.float32, {"groups": 2}, (0, 1)),
        (torch.float32, {"bias": False}, (0, 1)),
        (torch.float64, {}, (0, 0)),
    ],
)
def test_a_gate_is_fused_only_into_a_plain_1x1_conv_of_its_dtype(
    dtype: torch.dtype, options: dict[str, Any], counts: tuple[int, int]
) -> None:
    model = GatedConv(dtype, **options).eval()
    compiled, _ = compile_inference(model, images(5, channels=8))
    assert (gated_products(compiled), calls(compiled, gate_add_act)) == counts
    assert calls(compiled, global_avg_pool) == 0  # the mean has an explicit dtype
    with torch.inference_mode():
        given = images(5, channels=8)
        torch.testing.assert_close(compiled(given), model(given), rtol=1e-4, atol=1e-5)


class Overwritten(nn.Module):
    """The convolution's input is modified in place through an alias, after the convolution and before its sum."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.how = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), how
        assert self.second.bias is not None
        self.register_buffer("bias", self.second.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = self.second(y)
        if self.how == "view":
            y.flatten(2).add_(1)
        elif self.how == "part":
            y.chunk(3, 1)[1].mul_(2)
        elif self.how == "list":
            torch._foreach_add_([y], 1)
        elif self.how == "kept":
            self.get_buffer("bias").fill_(1)
        else:
            torch.add(x, 1, out=y)
        return torch.relu(z + x)


@pytest.mark.parametrize("how", ["view", "part", "list", "kept", "named"])
def test_nothing_is_fused_if_shared_memory_is_modified_in_place(how: str) -> None:
    model = Overwritten(how).eval()
    compiled, num_fused = compile_inference(model, images(4))
    assert num_fused == 0
    with torch.inference_mode():
        for rows in (3, 1):
            outputs = []
            for network in (compiled, model):
                model.get_buffer("bias").zero_()
                outputs.append(network(images(4, rows)))
            assert torch.equal(*outputs)


def test_a_clamp_other_than_relu6_is_not_fused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Hardtanh(0, 5)).eval()
    compiled, _ = compile_inference(model, images(8))
    assert fused_convs(compiled) == [(False, "none")]
    with torch.inference_mode():
        torch.testing.assert_close(compiled(images(8)), model(images(8)))


class Pools(nn.Module):
    """Two max-pools; the indices of the second are used."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values = nn.functional.max_pool2d(x, 3, 2, 1)
        again, indices = nn.functional.max_pool2d(values, 2, return_indices=True)
        return again, indices


def test_a_max_pool_is_replaced_if_its_indices_are_unused() -> None:
    compiled, _ = compile_inference(Pools().eval(), images(16))
    assert calls(compiled, max_pool) == 1
    with torch.inference_mode():
        for a, b in zip(compiled(images(16)), Pools()(images(16)), strict=True):
            assert torch.equal(a, b)


def test_non_square_or_dilated_max_pools_are_not_replaced() -> None:
    model = nn.Sequential(nn.MaxPool2d((2, 3)), nn.MaxPool2d(3, dilation=2, stride=1), nn.MaxPool2d(2)).eval()
    compiled, _ = compile_inference(model, images(24))
    assert calls(compiled, max_pool) == 1
    with torch.inference_mode():
        assert torch.equal(compiled(images(24)), model(images(24)))
