"""`reconv.fuse` in loops that are not ours: a fused model trains like the plain one, with the same state."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import assert_near
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from reconv.core.compat import release_numbers
from reconv.kernels import standalone
from reconv.kernels.fused.norm import StandaloneBatchNorm2d
from reconv.kernels.jit import launch
from reconv.kernels.pure_code import why_not_traced
from reconv.kernels.standalone import fuse, unfuse
from reconv.models import build_model
from reconv.models.googlenet import GoogLeNetSpec, Inception

TOLERANCE = 2e-4
HISTORY: list[Tensor] = []
PAGE = Path(__file__).parents[2] / "docs/how-to/fuse.md"


class UsersBlock(nn.Module):
    """A residual block with activations as functions, as users write them."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class UsersNetwork(nn.Module):
    """A small ResNet of a user."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.blocks = nn.Sequential(UsersBlock(16, 16), UsersBlock(16, 32, 2))
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return logits


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    return UsersNetwork() if name == "user's" else build_model(name, num_classes=4)


def images(batch: int = 2, side: int = 10) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 3, side, side, generator=generator).contiguous(memory_format=torch.channels_last)


def step(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Logits, gradients and buffers of a training step."""
    logits = model(x)
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    found = {"logits": logits.detach()}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_like(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys() and len(found) > 10
    for name, value in expected.items():
        assert_near(found[name], value.double(), TOLERANCE * 10)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched."""
    names: list[str] = []

    class Recorded(dict):  # type: ignore[type-arg]
        def __bool__(self) -> bool:
            return True

        def pop(self, kernel, default=()):  # type: ignore[no-untyped-def]
            names.append(f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}")
            return default

    monkeypatch.setattr(launch._compilations, "pending", Recorded())
    return names


@pytest.mark.parametrize("name", ["user's", "resnet8_cifar", "resnet11_bottleneck_cifar"])
def test_a_fused_network_trains_like_the_plain_one(name: str, launched: list[str]) -> None:
    plain = network(name)
    model = fuse(plain, inplace=False).model
    for _ in range(2):  # running statistics of the second step depend on those of the first
        found, expected = step(model, images()), step(plain, images())
    assert_like(found, expected)
    assert {"batch_norm.normalize", "batch_norm.gradient_sums", "batch_norm.update_running"} <= set(launched)


def test_blocks_of_our_networks_are_fused_with_their_stem(launched: list[str]) -> None:
    """A fused ResNet passes its blocks what only fused blocks take."""
    plain = network("resnet18")
    for module in plain.modules():
        if isinstance(module, nn.BatchNorm2d):  # no activation at a kink, where a last bit decides the gradient
            nn.init.normal_(module.weight, 1.0, 0.1)
            nn.init.normal_(module.bias, 0.5, 0.1)
    report = fuse(plain, inplace=False)
    assert [row.kind for row in report.fused].count("BasicBlock") == 8
    assert_like(step(report.model, images(4, 32)), step(plain, images(4, 32)))
    assert "norm_max_pool.pool" in launched


def test_sums_of_a_users_block_are_fused_with_its_norms(launched: list[str]) -> None:
    report = fuse(network("user's"))
    assert [row.computes for row in report.fused if row.kind == "UsersBlock"] == ["residual sum and activation"] * 2
    step(report.model, images())
    assert launched.count("batch_norm.normalize") == 5  # two per block, and the stem's: none for a norm of a shortcut


def test_norms_that_share_a_kernel_update_their_running_statistics(launched: list[str]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Inception(GoogLeNetSpec(), 16, (8, 8, 16, 8, 8, 8))).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = fuse(plain, inplace=False).model
    x = torch.randn(4, 16, 5, 5).contiguous(memory_format=torch.channels_last)
    assert_like(step(model, x), step(plain, x))
    assert any(name.startswith("norm_concat.") for name in launched)


class StochasticDepth(nn.Module):
    """A layer that leaves out its input for some images, as timm's DropPath."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(len(x), 1, 1, 1) < 0.5) * 2 if self.training else x


class BlurPool(nn.Module):
    """A low-pass filter before a stride, as timm's BlurPool2d."""

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.ones(x.shape[1], 1, 3, 3) / 9
        return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), weight, stride=2, groups=x.shape[1])


class MBConvBlock(nn.Module):
    """1x1 expansion, depthwise convolution, projection, stochastic depth."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = 2 * channels
        self.expand, self.bn1 = nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.depthwise = nn.Conv2d(inner, inner, 3, 1, 1, groups=inner, bias=False)
        self.bn2, self.act = nn.BatchNorm2d(inner), nn.SiLU()
        self.project, self.bn3 = nn.Conv2d(inner, channels, 1, bias=False), nn.BatchNorm2d(channels)
        self.drop_path = StochasticDepth()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn1(self.expand(x)))
        y = self.act(self.bn2(self.depthwise(y)))
        return self.drop_path(self.bn3(self.project(y))) + x  # type: ignore[no-any-return]


def test_layers_without_kernels_are_called_between_fused_ones(launched: list[str]) -> None:
    """Stems of three convolutions, as in ResNet-D, with BlurPool, before blocks with stochastic depth."""
    torch.manual_seed(0)
    stem: list[nn.Module] = []
    for inputs, outputs, stride in ((3, 16, 2), (16, 16, 1), (16, 16, 1)):
        stem += nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
    plain = nn.Sequential(nn.Sequential(*stem), BlurPool(), MBConvBlock(16), *head)
    report = fuse(plain, inplace=False)
    assert report.plain == []
    assert {(row.name, row.computes) for row in report.fused if row.computes != "batch norm"} == {
        ("", "layers one after another, norms with what follows them"),
        ("0", "layers one after another, norms with what follows them"),
        ("0.0", "StemConv2d"),
        ("2", "residual sum"),
        ("2.depthwise", "DepthwiseConv2d"),
    }
    torch.manual_seed(3)  # of stochastic depth
    found = step(report.model, images(4, 12))
    torch.manual_seed(3)
    assert_like(found, step(plain, images(4, 12)))
    assert launched.count("batch_norm.normalize") == 6  # each norm with its activation, none alone


class ConvNeXtBlock(nn.Module):
    """Depthwise 7x7 with a bias, LayerNorm, two linear layers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv_dw = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.mlp = nn.Sequential(nn.Linear(channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(self.conv_dw(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)  # type: ignore[no-any-return]


def test_patterns_that_were_not_measured_are_fused_on_request(launched: list[str]) -> None:
    torch.manual_seed(0)
    plain = ConvNeXtBlock(16)
    assert [(row.name, row.why) for row in fuse(copy.deepcopy(plain)).plain] == [
        ("conv_dw", "its kernels were not measured yet"),
        ("norm", "there are no kernels for LayerNorm"),
    ]
    report = fuse(copy.deepcopy(plain), everything=True)
    assert [(row.name, row.computes) for row in report.fused] == [("conv_dw", "DepthwiseConv2d")]
    x = torch.randn(2, 16, 5, 7).contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.float16):
        found, expected = step(report.model, x), step(plain, x)
    for name, value in expected.items():
        assert_near(found[name], value.double(), 1e-2)
    assert {"depthwise.conv", "depthwise.weight_gradient"} <= set(launched)
    assert type(unfuse(report.model).get_submodule("conv_dw")) is nn.Conv2d


def test_names_classes_and_state_are_those_of_the_plain_model() -> None:
    plain = network("user's")
    model = copy.deepcopy(plain)
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    assert fuse(model)
    assert isinstance(model.get_submodule("blocks.0.bn1"), nn.BatchNorm2d) and isinstance(model, UsersNetwork)
    assert model.state_dict().keys() == plain.state_dict().keys()
    step(model, images())
    assert unfuse(model) is model
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    assert attributes == {name: set(vars(module)) for name, module in model.named_modules()}
    assert not fuse(unfuse(nn.Sequential(nn.Linear(2, 2))))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles_are_fused_and_train_alike(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = fuse(network("user's")).model
    again = copied(model)
    assert [type(module) for module in again.modules()] == [type(module) for module in model.modules()]
    found, expected = step(again, images()), step(model, images())
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("case", ["evaluation", "norms in evaluation", "NCHW", "CPU", "one value per channel"])
def test_where_kernels_do_not_apply_the_model_runs_its_own_code(
    case: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, x = network("user's"), images()
    if case == "evaluation":
        plain.eval()
    if case == "norms in evaluation":  # as those of a backbone that is fine-tuned
        for module in plain.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
    if case == "NCHW":
        x = x.contiguous()
    if case == "CPU":
        monkeypatch.setenv("TRITON_INTERPRET", "0")
    model = fuse(plain, inplace=False).model
    if case == "one value per channel":
        x = images(1, 1)
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            model(x)
        assert launched == []
        return
    found, expected = step(model, x), step(plain, x)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert launched == []


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_blocks_recompute_the_same(use_reentrant: bool) -> None:
    model = fuse(network("user's")).model
    expected = step(copy.deepcopy(model), images())
    blocks = model.get_submodule("blocks")
    for block in blocks.children():
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=use_reentrant)  # type: ignore[method-assign]
    found = step(model, images())
    parameters = {name for name in expected if "gradient" in name or name == "logits"}  # running ones change twice
    assert all(torch.equal(found[name], expected[name]) for name in parameters)


def test_under_autocast_activations_are_half_and_parameters_are_not(launched: list[str]) -> None:
    plain = network("user's")
    model = fuse(plain, inplace=False).model
    with torch.autocast("cpu", torch.float16):
        found, expected = step(model, images()), step(plain, images())
    assert found["logits"].dtype == torch.float16 and found["gradient of head.weight"].dtype == torch.float32
    for name in expected:
        assert_near(found[name], expected[name].double(), 3e-2)
    assert "batch_norm.normalize" in launched


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of what overflows
def test_a_gradient_scaler_skips_the_step_that_overflows() -> None:
    plain = network("user's")
    model = fuse(plain, inplace=False).model
    start = plain.get_parameter("head.weight").detach().clone()
    for net in (model, plain):
        optimizer, scaler = torch.optim.SGD(net.parameters(), 0.05), torch.amp.GradScaler("cpu", init_scale=2.0**4)
        for factor in (float("inf"), 1.0):
            with torch.autocast("cpu", torch.float16):
                loss = net(images(2, 6)).float().square().mean() * factor
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert scaler.get_scale() == 2.0**3
            assert torch.equal(net.get_parameter("head.weight"), start) == (factor > 1)
    for name, weight in plain.named_parameters():
        assert_near(model.get_parameter(name), weight.detach().double(), 1e-2)


def test_a_hook_of_a_layer_sees_what_it_sees_without_kernels() -> None:
    plain = network("user's")
    model = fuse(plain, inplace=False).model
    seen: dict[str, list[Tensor]] = {"plain": [], "fused": []}
    for name, net in (("plain", plain), ("fused", model)):
        net.get_submodule("blocks.1.bn2").register_forward_hook(lambda m, i, o, name=name: seen[name].append(o.clone()))
        step(net, images())
    assert_near(seen["fused"][0], seen["plain"][0].double(), TOLERANCE)


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize("layer", ["blocks.1.bn1", "blocks.0"])
def test_backward_hooks_see_the_gradients_that_they_see_without_kernels(register: str, layer: str) -> None:
    plain = network("user's")
    model = fuse(plain, inplace=False).model
    seen: dict[str, list[Tensor]] = {"plain": [], "fused": []}
    for name, net in (("plain", plain), ("fused", model)):
        hook = lambda module, *gradients, name=name: seen[name].append(gradients[-1][0].clone())  # noqa: E731
        getattr(net.get_submodule(layer), register)(hook)
        step(net, images())
    assert len(seen["plain"]) == 1
    assert_near(seen["fused"][0], seen["plain"][0].double(), TOLERANCE * 10)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo's, between its graphs
def test_a_compiled_fused_network_gives_the_same_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    plain = network("user's")
    model = fuse(plain, inplace=False).model
    # Until torch 2.13: before, Dynamo cannot trace vars(module) and goes on in a second graph.
    is_traced_whole = release_numbers(torch.__version__) >= (2, 13)
    compiled = torch.compile(model, backend="eager", fullgraph=is_traced_whole)
    torch.testing.assert_close(compiled(images()), plain(images()))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo's, between its graphs
def test_torch_compile_calls_fused_modules_between_its_graphs(
    launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in standalone._classes_with_a_forward():
        monkeypatch.setattr(kind, "forward", kind.forward)  # restored afterwards
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        standalone._keep_out_of_compiled_graphs.__wrapped__()
    plain = Wrapped(network("user's"))
    model = fuse(plain, inplace=False).model
    calls: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        calls.extend(str(node.target) for node in graph.graph.nodes if node.op.startswith("call"))
        return graph.forward

    found = step(torch.compile(model, backend=backend), images())  # type: ignore[arg-type]
    expected = step(plain, images())
    assert_like({name.replace("_orig_mod.", ""): value for name, value in found.items()}, expected)
    assert any("tanh" in call for call in calls) and not any("batch_norm" in call for call in calls)
    assert "batch_norm.normalize" in launched


class Wrapped(nn.Module):
    """A network between operations that torch.compile compiles."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.inner(torch.tanh(x)))


def test_the_code_of_the_page_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(blocks[0], PAGE.name, "exec"), names)
    assert len(blocks) == 2 and isinstance(names["loss"], Tensor) and names["loss"].isfinite()


def test_the_report_says_what_was_fused_what_not_and_why() -> None:
    norm = nn.BatchNorm2d(16, affine=False)
    model = nn.Sequential(
        network("user's"), nn.Sequential(nn.Conv2d(8, 16, 1), norm, nn.ReLU()), Counting(), nn.GroupNorm(2, 8)
    )
    report = fuse(model)
    text = str(report)
    assert report.model is model and isinstance(model[0].blocks[0].bn1, StandaloneBatchNorm2d)  # type: ignore[index, union-attr]
    assert {row.name: row.why for row in report.plain} == {
        "1.1": "it has no weight and bias",
        "2": "its forward sets self.calls",
        "3": "there are no kernels for GroupNorm",
    }
    assert text.startswith("reconv.fuse: 13 modules of Sequential compute with fused kernels\n")
    assert "  2  UsersBlock   residual sum and activation\n" in text and "its forward sets self.calls (2)\n" in text
    assert "there is no CUDA GPU here" in text or torch.cuda.is_available()


def test_a_model_that_cannot_be_traced_is_compiled_in_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network("user's")

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) if float(x.mean()) < 1 else x  # type: ignore[no-any-return]

    report = fuse(Reading())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    standalone._compile_now(report.model, (3, 32, 32), torch.float16, report)
    assert "compiled in the first step" in report.notes[-1] and "meta" in report.notes[-1]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.calls = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.bn(self.conv(x))
        return out


class Pure(nn.Module):
    """Base of modules whose code is checked."""

    scale = 2

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.flag, self.seen = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), True, []  # type: ignore[var-annotated]


class WithMethod(Pure):
    def forward(self, x: Tensor) -> Tensor:
        """A docstring."""
        y: Tensor = self.body(x) if self.flag else x
        return y + x

    def body(self, x: Tensor) -> Tensor:
        for layer in (self.conv, self.norm):
            x = layer(x)
        return x


class Printing(Pure):
    def forward(self, x: Tensor) -> Tensor:
        print(x.shape)
        return self.conv(x)  # type: ignore[no-any-return]


class PrintingInMethod(Pure):
    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def body(self, x: Tensor) -> Tensor:
        print(x.shape)
        return x


class Storing(Pure):
    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return x


class StoringOutside(Pure):
    def forward(self, x: Tensor) -> Tensor:
        HISTORY.append(x)
        return x


class Drawing(Pure):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return x


class Changing(Pure):
    def forward(self, x: Tensor) -> Tensor:
        x[0] = 0
        with torch.no_grad():
            return x


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (WithMethod, ""),
        (Printing, "its forward calls print"),
        (PrintingInMethod, "its body calls print"),
        (Storing, "its forward calls self.seen.append"),
        (StoringOutside, "its forward calls HISTORY.append"),
        (Drawing, "its forward calls torch.manual_seed"),
        (Changing, "its forward has an expression that is not traced (Subscript)"),
    ],
)
def test_code_that_does_more_than_compute_is_not_traced(kind: type[nn.Module], why: str) -> None:
    assert why_not_traced(kind()) == why
