"""Networks that are not ours: blocks are recognized by what they compute, and train fused as they do unfused."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import TOLERANCE, assert_near
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from reconv.core.batch import Batch
from reconv.kernels import block_graph
from reconv.kernels.block_graph import BlockGraph, trace_block
from reconv.kernels.fuse import fuse
from reconv.kernels.jit import launch
from reconv.kernels.ops.batch_norm import ACTIVATION_IDS
from reconv.kernels.trace import trace_kernels
from reconv.models.layers.batch_norm import BatchNorm2d, BatchNormAct2d, LayerState
from reconv.models.mobilenet import InvertedResidual as OurInvertedResidual
from reconv.models.mobilenet import MobileNetV2Spec
from reconv.models.replace_layers import replace_layers

GROUPS = (2, 3)
PACKAGES = block_graph.TRACED_PACKAGES


@pytest.fixture(autouse=True)
def _known_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of this file stand for those of a package whose code is traced."""
    monkeypatch.setattr(block_graph, "TRACED_PACKAGES", (*PACKAGES, __name__.partition(".")[0]))


class ConvNormActivation(nn.Sequential):
    """As torchvision's: a subclass of nn.Sequential."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1, act: type | None = nn.ReLU
    ) -> None:
        conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        super().__init__(conv, nn.BatchNorm2d(outputs), *([] if act is None else [act(inplace=True)]))


class SqueezeExcitationLayer(nn.Module):
    """As torchvision's: the means are a layer's."""

    def __init__(self, channels: int, outputs: int | None = None) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, 4, 1)
        self.fc2 = nn.Conv2d(4, outputs or channels, 1)
        self.activation = nn.ReLU()
        self.scale_activation = nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        scale = self.fc2(self.activation(self.fc1(self.avgpool(x))))
        return self.scale_activation(scale) * x


class SEModule(nn.Module):
    """As timm's: the means are a method's, and a layer is called `gate`."""

    def __init__(self, channels: int, add_maxpool: bool = False) -> None:
        super().__init__()
        self.add_maxpool = add_maxpool
        self.fc1 = nn.Conv2d(channels, 4, 1)
        self.bn = nn.Identity()
        self.act = nn.ReLU(inplace=True)
        self.fc2 = nn.Conv2d(4, channels, 1)
        self.gate = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        means = x.mean((2, 3), keepdim=True)
        if self.add_maxpool:
            means = 0.5 * means + 0.5 * x.amax((2, 3), keepdim=True)
        means = self.act(self.bn(self.fc1(means)))
        return x * self.gate(self.fc2(means))


class Bottleneck(nn.Module):
    """As in torchvision's ResNet: one ReLU for all, and a sum in place."""

    def __init__(self, inputs: int, outputs: int, se: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, 8, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.se = se
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.se is not None:
            out = self.se(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResBottleneckBlock(nn.Module):
    """As in torchvision's RegNet: the sum of two containers."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.proj = ConvNormActivation(inputs, outputs, act=None) if inputs != outputs else None
        se = SqueezeExcitationLayer(outputs)
        last = ConvNormActivation(outputs, outputs, act=None)
        self.f = nn.Sequential(ConvNormActivation(inputs, outputs, 3, groups=inputs // 8), se, last)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x) if self.proj is None else self.proj(x) + self.f(x)
        return self.activation(x)


class MobileBlock(nn.Module):
    """As in torchvision's MobileNetV3."""

    def __init__(self, channels: int, act: type, stride: int = 1) -> None:
        super().__init__()
        self.use_res_connect = stride == 1
        wide = ConvNormActivation(channels, 2 * channels, act=act)
        depthwise = ConvNormActivation(2 * channels, 2 * channels, 3, stride, 2 * channels, act=act)
        self.block = nn.Sequential(wide, depthwise, ConvNormActivation(2 * channels, channels, act=None))

    def forward(self, input: Tensor) -> Tensor:
        result = self.block(input)
        if self.use_res_connect:
            result += input
        return result


class ConvBnAct(nn.Module):
    """As timm's: a container that is not an nn.Sequential, whose norm has the activation."""

    def __init__(self, inputs: int, outputs: int, act: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.bn1 = BatchNormAct2d(outputs, nn.Identity(), act)
        self.aa = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.aa(self.bn1(self.conv(x)))


def stem() -> nn.Module:
    conv = nn.Conv2d(8, 16, 3, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.ReLU(inplace=True))


def acts(*kinds: type) -> nn.Module:
    return nn.Sequential(*(ConvNormActivation(8, 8, act=kind) for kind in kinds))


# Networks on 8 channels, and the launches of each operation's kernels in one training pass in float32.
NETWORKS = {
    "activations": (lambda: acts(nn.ReLU, nn.ReLU6, nn.SiLU, nn.Hardswish), {"batch_norm": 16}),
    "unknown activation": (lambda: acts(nn.ELU), {"batch_norm": 4}),
    "stem": (stem, {"batch_norm": 2, "norm_max_pool": 2}),
    "pool": (lambda: nn.Sequential(ConvNormActivation(8, 8), nn.MaxPool2d(2)), {"batch_norm": 4, "max_pool": 2}),
    "resnet": (lambda: nn.Sequential(Bottleneck(8, 16), Bottleneck(16, 16), Bottleneck(16, 16)), {"batch_norm": 25}),
    "se-resnet": (
        lambda: nn.Sequential(Bottleneck(8, 16, SEModule(16)), Bottleneck(16, 16, SEModule(16))),
        {"batch_norm": 14, "norm_squeeze_excite": 10},
    ),
    "regnet": (
        lambda: nn.Sequential(ResBottleneckBlock(8, 16), ResBottleneckBlock(16, 16)),
        {"batch_norm": 11, "norm_squeeze_excite": 10},
    ),
    "mobilenet": (
        lambda: nn.Sequential(MobileBlock(8, nn.Hardswish), MobileBlock(8, nn.ReLU6, stride=2)),
        {"batch_norm": 24, "depthwise": 1},
    ),
    "norm-act": (
        lambda: nn.Sequential(ConvBnAct(8, 16, nn.SiLU()), SEModule(16), ConvBnAct(16, 8, nn.Identity())),
        {"batch_norm": 5, "norm_squeeze_excite": 5},
    ),
    "lone se": (
        lambda: nn.Sequential(acts(nn.ELU), SqueezeExcitationLayer(8)),
        {"batch_norm": 4, "squeeze_excite": 4},
    ),
}


def build(name: str) -> nn.Module:
    """A network with our norms, without activations at a kink, where a last bit decides the gradient."""
    torch.manual_seed(0)
    model = NETWORKS[name][0]()
    replace_layers(model, name)
    for module in model.modules():
        if isinstance(module, BatchNorm2d):
            nn.init.normal_(module.weight, 1.0, 0.1)
            nn.init.normal_(module.bias, 0.5, 0.1)
    return model.to(memory_format=torch.channels_last).train()


def draw_images(dtype: torch.dtype = torch.float32, channels: int = 8, seed: int = 2) -> Tensor:
    images = torch.randn(5, channels, 6, 6, generator=torch.Generator().manual_seed(seed))
    return images.to(dtype).contiguous(memory_format=torch.channels_last)


def trained(model: nn.Module, images: Tensor, groups: tuple[int, ...] = GROUPS) -> dict[str, Tensor]:
    """The output of one step, gradients of images and parameters, and statistics after it."""
    layers, images = LayerState(model), images.detach().clone().requires_grad_()
    layers.set_micro_batch(Batch({}, torch.arange(sum(groups)), groups), step=0)
    out = model(images)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (out * weights.to(out.dtype)).sum().backward()
    layers.commit(torch.tensor(True))
    found = {"output": out.detach(), "images": images.grad}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    return found | {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


class Launch(NamedTuple):
    operation: str  # of the kernel, as its folder is called
    kernel: str
    constants: dict[str, int]


def trace(model: nn.Module, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float32) -> list[Launch]:
    """The launches of one training pass."""
    launched: list[Launch] = []
    variant_of = launch.variant_of

    def noting(kernel, args, constants):  # type: ignore[no-untyped-def]
        launched.append(Launch(kernel.fn.__module__.rpartition(".")[2], kernel.fn.__name__, constants))
        return variant_of(kernel, args, constants)

    with monkeypatch.context() as patch:
        patch.setattr(launch, "variant_of", noting)
        trace_kernels(model.to(dtype), (8, 16, 16), dtype, nullcontext())
    return launched


def launches(model: nn.Module, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float32) -> dict[str, int]:
    """The number of launches of each operation's kernels in one training pass."""
    return dict(Counter(one.operation for one in trace(model, monkeypatch, dtype)))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_fused_network_trains_like_the_plain_one_in_float64(name: str) -> None:
    model = build(name)
    exact, fused, images = copy.deepcopy(model).double(), copy.deepcopy(model), draw_images()
    assert fuse(fused) > 1
    expected, found = trained(exact, images.double()), trained(fused, images)
    assert found.keys() == expected.keys() and len(found) > 7
    for key, value in expected.items():
        assert_near(found[key], value, 10 * TOLERANCE[torch.float32])


@pytest.mark.parametrize("name", NETWORKS)
def test_each_pattern_launches_its_fused_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    fuse(model)
    assert launches(model, monkeypatch) == NETWORKS[name][1]


def test_an_activation_is_computed_by_the_kernels_of_its_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(build("activations"), ConvBnAct(8, 8, nn.SiLU()), build("unknown activation"))
    fuse(model)
    names = ("relu", "relu6", "silu", "hardswish", "silu", "none")
    expected = [ACTIVATION_IDS[name] for name in names]
    launched = trace(model, monkeypatch)
    assert [one.constants["ACT"] for one in launched if one.kernel == "normalize"] == expected
    assert [one.constants["ACT"] for one in launched if one.kernel == "gradient"] == expected[::-1]


@pytest.mark.parametrize("act", [nn.Hardswish(), nn.ELU()])
def test_a_norm_with_an_activation_is_fused_in_unknown_code(act: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(ConvBnAct):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    plain = Doubled(8, 8, act).to(memory_format=torch.channels_last).train()
    fused = copy.deepcopy(plain)
    assert fuse(fused) == 1
    launched = trace(copy.deepcopy(fused), monkeypatch)
    assert [one.constants["ACT"] for one in launched if one.kernel == "gradient"] == [
        ACTIVATION_IDS["hardswish" if isinstance(act, nn.Hardswish) else "none"]
    ]
    expected, found = trained(copy.deepcopy(plain).double(), draw_images().double()), trained(fused, draw_images())
    for key, value in expected.items():
        assert_near(found[key], value, 10 * TOLERANCE[torch.float32])


def test_the_gradients_of_a_block_that_two_paths_read_are_summed_by_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("resnet")
    fuse(model)
    sums = [one for one in trace(model, monkeypatch) if one.constants.get("TWO_GRADS")]
    assert len(sums) == len(model) - 1  # the last block has one reader


def test_the_1x1_convolutions_of_a_mobile_block_are_fused_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mobilenet").half()
    exact, images = copy.deepcopy(model).double(), draw_images(torch.float16, seed=3)  # no value near a kink
    fuse(model)
    assert launches(copy.deepcopy(model), monkeypatch, torch.float16) == {
        "batch_norm": 8,
        "conv1x1_norm_act": 9,  # the images need no gradient
        "norm_conv1x1": 6,
        "depthwise": 6,
        "partial_sums": 4,
    }
    expected, found = trained(exact, images.double()), trained(model, images)
    for key, value in expected.items():
        assert_near(found[key], value, 5 * TOLERANCE[torch.float16])


def test_an_expansion_is_fused_with_a_norm_that_has_the_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(ConvBnAct(8, 16, nn.SiLU()), ConvBnAct(16, 16, nn.Identity()))
    replace_layers(model, "expansion")
    model = model.to(memory_format=torch.channels_last).half().train()
    exact, images = copy.deepcopy(model).double(), draw_images(torch.float16)
    fuse(model)
    assert launches(copy.deepcopy(model), monkeypatch, torch.float16) == {"conv1x1_norm_act": 4, "batch_norm": 4}
    expected, found = trained(exact, images.double()), trained(model, images)
    for key, value in expected.items():
        assert_near(found[key], value, 5 * TOLERANCE[torch.float16])


def test_a_norm_is_fused_with_squeeze_excite_rather_than_with_its_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("norm-act").half()
    fuse(model)
    assert launches(model, monkeypatch, torch.float16) == {**NETWORKS["norm-act"][1], "excitation": 3}


@pytest.mark.parametrize("name", NETWORKS)
def test_names_state_and_evaluation_stay_and_copies_are_fused(name: str) -> None:
    plain = build(name).eval()
    fused, images = copy.deepcopy(plain), draw_images()
    num_swapped = fuse(fused)
    assert num_swapped > 1 and fuse(fused) == 0
    for other in (fused, copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert [key for key, _ in other.named_modules()] == [key for key, _ in plain.named_modules()]
        assert [vars(m).keys() for m in other.modules()] == [vars(m).keys() for m in plain.modules()]
        assert list(other.state_dict()) == list(plain.state_dict())
        pairs = list(zip(other.modules(), plain.modules(), strict=True))
        assert all(isinstance(ours, type(theirs)) for ours, theirs in pairs)
        assert sum(type(ours) is not type(theirs) for ours, theirs in pairs) == num_swapped
        assert torch.equal(other(images), plain(images))


def test_unsupported_images_run_the_plain_code() -> None:
    plain = build("resnet")
    fused = copy.deepcopy(plain)
    fuse(fused)
    for layout, dtype in ((torch.contiguous_format, torch.float32), (torch.channels_last, torch.float64)):
        images = draw_images(dtype).contiguous(memory_format=layout)
        model, other = (copy.deepcopy(m).to(dtype).to(memory_format=layout) for m in (plain, fused))
        expected, found = trained(model, images), trained(other, images)
        assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


@pytest.mark.parametrize("name", ["activations", "norm-act"])
def test_rows_that_are_not_samples_are_grouped_by_sample(name: str) -> None:
    class Windows(nn.Module):
        def __init__(self, inside: nn.Module) -> None:
            super().__init__()
            self.inside = inside

        def forward(self, x: Tensor) -> Tensor:
            halves = x.unflatten(2, (2, 3)).transpose(1, 2).flatten(0, 1)
            return self.inside(halves.contiguous(memory_format=torch.channels_last))

    plain = Windows(build(name))
    fused = copy.deepcopy(plain)
    assert fuse(fused) > 1
    expected, found = trained(plain, draw_images()), trained(fused, draw_images())
    for key, value in expected.items():
        assert_near(found[key], value.double(), 10 * TOLERANCE[torch.float32])


@pytest.mark.parametrize("where", ["0.0", "0.1", "0.2", "0", "1.0", "1.1", "everywhere"])
def test_hooks_see_what_they_see_without_kernels(where: str) -> None:
    plain = nn.Sequential(ConvNormActivation(8, 8), ConvBnAct(8, 8, nn.ReLU()))
    replace_layers(plain, "plain")
    plain.get_submodule("1").bn1.act.inplace = False
    plain = plain.to(memory_format=torch.channels_last).train()
    fused = copy.deepcopy(plain)
    fuse(fused)
    seen: list[list[tuple[str, Tensor]]] = []
    for model in (plain, fused):
        names = {module: name for name, module in model.named_modules()}
        seen.append([])

        def note(module: nn.Module, args: object, output: Tensor, names=names, calls=seen[-1]) -> None:  # type: ignore[no-untyped-def]
            if module in names:
                calls.append((names[module], output.detach().clone()))

        if where == "everywhere":
            handle = register_module_forward_hook(note)
        else:
            path = {"1.0": "1.bn1", "1.1": "1.bn1.act"}.get(where, where)
            handle = model.get_submodule(path).register_forward_hook(note)
        trained(model, draw_images())
        handle.remove()
    expected, found = seen
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert len(found) == (len(list(plain.modules())) if where == "everywhere" else 1)
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_pre_hook_a_backward_hook_and_a_replaced_forward_are_called() -> None:
    model, images, calls = build("activations"), draw_images(), []
    fuse(model)
    model[0][2].register_forward_pre_hook(lambda *_: calls.append("pre"))
    model[1][2].inplace = False
    model[1][1].register_full_backward_hook(lambda *_: calls.append("backward"))
    model[2][2].forward = lambda x: (calls.append("forward"), F.silu(x))[1]
    trained(model, images)
    assert sorted(calls) == ["backward", "forward", "pre"]


def test_an_activation_may_be_shared_with_code_that_calls_it() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU(inplace=True)
            self.layers = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), self.act, nn.Conv2d(8, 8, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.layers(x) * 2)

    plain = Shared()
    replace_layers(plain, "shared")
    plain = plain.to(memory_format=torch.channels_last).train()
    fused = copy.deepcopy(plain)
    assert fuse(fused) == 2
    expected, found = trained(plain, draw_images()), trained(fused, draw_images())
    for key, value in expected.items():
        assert_near(found[key], value.double(), 10 * TOLERANCE[torch.float32])


def test_a_block_that_was_changed_runs_its_own_code() -> None:
    plain, fused = build("mobilenet"), build("mobilenet")
    fuse(fused)
    for model in (plain, fused):
        model[0].use_res_connect = False
    expected, found = trained(plain, draw_images()), trained(fused, draw_images())
    for key, value in expected.items():
        assert_near(found[key], value.double(), 10 * TOLERANCE[torch.float32])


def test_a_block_may_compute_something_else_in_evaluation() -> None:
    class Head(ConvBnAct):
        def forward(self, x: Tensor) -> Tensor:
            y = self.bn1(self.conv(x))
            return y if self.training else y.softmax(1)

    plain = Head(8, 8, nn.ReLU()).to(memory_format=torch.channels_last)
    fused = copy.deepcopy(plain)
    assert fuse(fused) == 2
    assert torch.equal(fused.eval()(draw_images()), plain.eval()(draw_images()))
    for key, value in trained(plain.train(), draw_images()).items():
        found = trained(copy.deepcopy(fused).train(), draw_images())[key]
        assert_near(found, value.double(), 10 * TOLERANCE[torch.float32])


class Calls(nn.Module):
    """Layers and a function of them and the images."""

    def __init__(self, function, **layers: nn.Module) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.seen: list[object] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        self.last = x
        return self.function(self, x)


LAYERS = {"conv": nn.Conv2d(8, 8, 1), "norm": nn.BatchNorm2d(8), "act": nn.ReLU()}
UNKNOWN = {
    "the norm's output is read twice": lambda m, x: m.act(y := m.norm(m.conv(x))) + y,
    "it is, and as much is dropped": lambda m, x: (m.conv(x), m.conv(x), m.act(y := m.norm(m.conv(x))) + y)[2],
    "a norm in both paths": lambda m, x: m.norm(m.conv(x)) + m.norm(x),
    "values decide": lambda m, x: m.act(m.norm(x)) if x.sum() > 0 else x,
    "another operation": lambda m, x: m.act(m.norm(m.conv(x)) * 2),
    "several outputs": lambda m, x: (m.act(m.norm(x)), x),
    "an argument": lambda m, x: m.norm(m.conv(x)) + m.act(x, x),
    "what is computed is dropped": lambda m, x: (m.conv(x), m.act(m.norm(x)))[1],
    "a sum of other things": lambda m, x: m.norm(m.conv(x)) + 1,
    "a weighted sum": lambda m, x: torch.add(m.norm(m.conv(x)), x, alpha=2),
    "a parameter": lambda m, x: m.norm(m.conv(x)) + m.norm.weight.view(1, -1, 1, 1),
}


@pytest.mark.parametrize("why", UNKNOWN)
def test_other_code_is_left_alone(why: str) -> None:
    module = Calls(UNKNOWN[why], **LAYERS)
    assert trace_block(module) is None
    assert module.seen == [] and not hasattr(module, "last"), "tracing changed the module"


def test_blocks_are_recognized_by_what_they_compute() -> None:
    chain = BlockGraph("chain", ("conv", "norm", "act"))
    residual = BlockGraph("residual", ("conv", "norm"), (), "act")
    known = {
        chain: lambda m, x: m.act(m.norm(m.conv(x))),
        residual: lambda m, x: m.act(x + m.norm(m.conv(x))),
    }
    for graph, function in known.items():
        assert trace_block(Calls(function, **LAYERS)) == graph
    in_place = {**LAYERS, "first": nn.ReLU(inplace=True)}
    assert trace_block(Calls(lambda m, x: x + m.norm(m.conv(m.first(x))), **in_place)) is None


def test_a_gate_of_another_shape_or_statistic_is_not_squeeze_and_excitation() -> None:
    assert trace_block(SEModule(8)) == BlockGraph("gate", ("fc1", "bn", "act", "fc2", "gate"))
    assert trace_block(SEModule(8, add_maxpool=True)) is None
    assert trace_block(SqueezeExcitationLayer(8)) is not None
    assert trace_block(SqueezeExcitationLayer(8, outputs=1)) is None
    larger = SqueezeExcitationLayer(8)
    larger.avgpool = nn.AdaptiveAvgPool2d(2)
    assert trace_block(larger) is None


def test_a_network_without_norms_is_left_to_the_compiler() -> None:
    layers = [nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2), SEModule(8)]
    assert fuse(nn.Sequential(*layers)) == 0


def test_a_convolution_of_one_image_without_a_batch_axis_runs() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), BatchNorm2d(8))
    assert fuse(model) == 3
    assert model[0](torch.randn(3, 8, 8)).shape == (8, 4, 4)


def test_other_paddings_kernels_and_windows_are_left_alone() -> None:
    mirrored = nn.Conv2d(3, 8, 3, 2, 1, bias=False, padding_mode="reflect")
    large = nn.Conv2d(8, 8, 7, 2, 3, groups=8, bias=False)
    model = nn.Sequential(
        mirrored, BatchNorm2d(8), nn.ReLU(), large, nn.MaxPool2d(17, 1, 8), nn.MaxPool2d(2, dilation=2)
    )
    kinds = [type(layer) for layer in model]
    assert fuse(model) == 2
    assert [type(layer) for layer in model][2:] == kinds[2:] and type(model[0]) is nn.Conv2d


def test_a_class_that_cannot_be_extended_is_left_alone() -> None:
    class Sealed(ConvBnAct):
        def __init_subclass__(cls) -> None:
            raise TypeError("no subclasses")

    class Clash(ConvBnAct):
        def __init__(self) -> None:
            super().__init__(8, 8, nn.ReLU())
            self.forward_fused = nn.Conv2d(8, 8, 1)

    for model in (Sealed(8, 8, nn.ReLU()), Clash()):
        kind = type(model)
        assert fuse(model) == 1 and type(model) is kind  # the norm alone


def test_a_container_of_our_own_blocks_keeps_its_code() -> None:
    model = nn.Sequential(BatchNorm2d(8), nn.ReLU(), OurInvertedResidual(MobileNetV2Spec(), 8, 8, 2, 1))
    fuse(model)
    assert type(model) is nn.Sequential


class Counting(nn.Module):
    """A user's block: it counts its passes, draws, and computes a chain otherwise."""

    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.passes.add_(torch.rand(()).ceil())
        return self.act(self.bn(self.conv(x)))  # type: ignore[no-any-return]


def test_code_of_users_is_not_traced_and_runs_in_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_graph, "TRACED_PACKAGES", PACKAGES)
    model = nn.Sequential(Counting(), nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU()))
    replace_layers(model, "a user's network")
    generator_state = torch.get_rng_state()
    assert fuse(model) > 0
    assert torch.equal(torch.get_rng_state(), generator_state)
    block = model[0]
    assert type(block) is Counting and block.passes == 0
    for _ in range(3):
        model(torch.randn(4, 8, 6, 6))
    assert block.passes == 3
    assert type(model[1]) is not nn.Sequential  # what torch's own containers compute is known
