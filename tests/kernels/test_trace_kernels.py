"""Tracing finds exactly the kernels that a training step launches."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from importlib import import_module
from threading import Thread

import pytest
import torch
from torch import Tensor, nn
from triton.runtime.interpreter import InterpretedFunction

from reconv.core.batch import Batch
from reconv.kernels import triton as device_code
from reconv.kernels.fuse import fuse, fuse_max_pools
from reconv.kernels.fused.ssd import SSDFeatureMaps
from reconv.kernels.fused.sums import single
from reconv.kernels.jit.launch import KernelVariant, launch, register_compilations, variant_of
from reconv.kernels.ops.box_losses import AnchorLayout, box_losses, empty_ground_truth
from reconv.kernels.trace import trace_kernels
from reconv.models import build_model
from reconv.models.efficientnet import EfficientNetSpec, MBConv
from reconv.models.googlenet import GoogLeNetSpec, Inception
from reconv.models.layers.batch_norm import BatchNorm2d, LayerState
from reconv.models.mobilenet import InvertedResidual, MobileNetV2Spec


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[KernelVariant]:
    """The variants that the interpreter runs."""
    found: set[KernelVariant] = set()
    run = InterpretedFunction.run

    def noting(self, *args, grid, warmup, **constants):  # type: ignore[no-untyped-def]
        found.add(variant_of(self, args, constants))
        return run(self, *args, grid=grid, warmup=warmup, **constants)

    monkeypatch.setattr(InterpretedFunction, "run", noting)
    return found


def train_once(model: nn.Module, images: Tensor) -> None:
    layers = LayerState(model)
    layers.set_micro_batch(Batch({}, torch.arange(len(images)), (len(images),)), step=0)
    outputs = model(images)
    ends: Sequence[Tensor] = (single(outputs),)
    if isinstance(outputs, SSDFeatureMaps):
        layout = AnchorLayout(outputs.per_cell, outputs.num_classes)
        truth = empty_ground_truth(outputs.maps, layout)
        for tensor in (truth.boxes_xyxy, truth.labels, truth.num_boxes, truth.anchors_cxcywh):
            tensor.zero_()
        ends = box_losses(outputs.maps, outputs.biases, layout, truth)
    sum(end.float().sum() for end in ends).backward()
    layers.commit(torch.tensor(True))


def inverted(activation: str) -> nn.Module:
    spec = MobileNetV2Spec(activation=activation)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False),
        nn.MaxPool2d(3, 1, 1),
        InvertedResidual(spec, 8, 8, 2, 1),
        InvertedResidual(spec, 8, 16, 2, 2),
    )


def inception() -> nn.Module:
    spec = GoogLeNetSpec()
    narrow, wide = Inception(spec, 16, (8, 8, 16, 8, 8, 8)), Inception(spec, 40, (32, 32, 32, 32, 32, 32))
    return nn.Sequential(nn.Conv2d(3, 16, 1), narrow, wide)


def gated() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 1), MBConv(EfficientNetSpec(), 8, 16, expansion=2, kernel=3, stride=1))


NARROW = {
    "backbone": "resnet10",
    "width": 8,
    "depths": [1, 1, 1],
    "extra_widths": [16, 16],
    "boxes_per_cell": [4, 6, 4],
}
NETWORKS = {
    "residual": lambda: build_model("resnet14", num_classes=4, width=8, depths=[2]),
    "sum and convolution": lambda: build_model("resnet14", num_classes=4, width=16, depths=[2]),
    "grouped": lambda: build_model("resnet14", num_classes=4, width=16, depths=[1], groups=8, width_per_group=16),
    "squeezing": lambda: build_model("resnet10", num_classes=4, width=8, depths=[2], se_ratio=4),
    "relu6": lambda: inverted("relu6"),
    "silu": lambda: inverted("silu"),
    "inception": inception,
    "gated": gated,
    "detecting": lambda: build_model("ssd_resnet34", 3, **NARROW),
}


@pytest.mark.parametrize(
    "name, lower",
    [
        ("residual", torch.bfloat16),
        ("sum and convolution", torch.bfloat16),
        ("grouped", torch.bfloat16),
        ("squeezing", None),
        ("relu6", None),
        ("silu", torch.bfloat16),
        ("inception", torch.bfloat16),
        ("gated", torch.bfloat16),
        ("detecting", None),
    ],
)
def test_a_traced_pass_records_exactly_what_a_step_launches(name, lower, launched) -> None:
    torch.manual_seed(0)
    model = NETWORKS[name]().to(memory_format=torch.channels_last).train()
    fuse(model)
    images = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)

    def autocast():  # type: ignore[no-untyped-def]
        return nullcontext() if lower is None else torch.autocast("cpu", lower)

    traced = trace_kernels(model, (3, 8, 8), torch.float32, autocast())
    assert not launched, "tracing launches nothing"
    with autocast():
        train_once(model, images)
    assert len(traced) == len(set(traced)) >= 8
    assert set(traced) == launched


def test_a_traced_pass_records_the_max_pools_of_a_network_with_plain_norms(launched) -> None:
    model = (
        build_model("fastnet_cifar", num_classes=4, widths=[8, 16, 24]).to(memory_format=torch.channels_last).train()
    )
    assert fuse_max_pools(model) == 3
    images = torch.randn(2, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    traced = trace_kernels(model, (3, 32, 32), torch.float32, torch.autocast("cpu", torch.bfloat16))
    assert not launched, "tracing launches nothing"
    with torch.autocast("cpu", torch.bfloat16):
        train_once(model, images)
    assert len(traced) == 5, "two of the three gradients have the same tiles"
    assert set(traced) == launched


def test_tracing_does_not_change_the_model() -> None:
    model = build_model("resnet8_cifar", num_classes=4).to(memory_format=torch.channels_last).eval()
    fuse(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert trace_kernels(model, (3, 16, 16), torch.float32, nullcontext())
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()) and len(before) > 20
    assert all(parameter.grad is None for parameter in model.parameters())
    norms = [module for module in model.modules() if isinstance(module, BatchNorm2d)]
    assert len(norms) > 5 and all(norm.groups is None and not norm.batch_stats for norm in norms)


class Counted:
    """A kernel that counts its launches."""

    def __init__(self) -> None:
        self.launches = 0

    def __getitem__(self, grid: tuple[int, ...]):  # type: ignore[no-untyped-def]
        def run(*args, **constants) -> None:  # type: ignore[no-untyped-def]
            self.launches += 1

        return run


def test_a_launch_waits_for_its_kernel_and_warns_once_of_a_failed_compilation() -> None:
    kernel, other, warnings = Counted(), Counted(), []
    failed: Future[None] = Future()
    never: Future[None] = Future()
    register_compilations({kernel: [failed], other: [never]}, warnings.append)
    thread = Thread(target=launch, args=(kernel, (1,), torch.zeros(1)))
    thread.start()
    assert kernel.launches == 0, "its compilation is under way"
    failed.set_exception(RuntimeError("no compiler"))
    thread.join()
    launch(kernel, (1,), torch.zeros(1))
    assert kernel.launches == 2 and other.launches == 0
    assert len(warnings) == 1 and "no compiler" in warnings[0]
    never.set_exception(RuntimeError("again"))
    launch(other, (1,), torch.zeros(1))
    assert other.launches == 1 and len(warnings) == 1


def test_stages_that_are_called_one_by_one_launch_other_kernels() -> None:
    """As with activation checkpointing: no sum passes from one stage to the next."""
    model = build_model("resnet14", num_classes=4, depths=[2]).to(memory_format=torch.channels_last)
    fuse(model)
    given = (3, 64, 64), torch.bfloat16, nullcontext()
    whole, by_stages = (
        {variant.kernel.__name__ for variant in trace_kernels(model, *given, by_stages=flag)} for flag in (False, True)
    )
    assert "sum_conv" in whole - by_stages and "conv_many_inputs" in by_stages - whole


TRACING = """
import sys
from contextlib import nullcontext
from importlib import import_module
import torch
from reconv.models import build_model
from reconv.models.efficientnet import EfficientNetSpec, MBConv
from reconv.kernels.fuse import fuse, fuse_max_pools
from reconv.kernels.trace import trace_kernels

fastnet = build_model("fastnet_cifar", num_classes=4).to(memory_format=torch.channels_last)
fuse_max_pools(fastnet)
assert trace_kernels(fastnet, (3, 32, 32), torch.float16, nullcontext())
for name, options in (("resnet14", {}), ("ssd_resnet34", {"backbone": "resnet10"})):
    model = build_model(name, num_classes=4, **options).to(memory_format=torch.channels_last)
    fuse(model)
    assert trace_kernels(model, (3, 300, 300), torch.bfloat16, nullcontext())
print(*(name for name in ("sympy", "torch._dynamo") if name in sys.modules))
"""


def test_tracing_does_not_import_torchs_compiler() -> None:
    found = subprocess.run([sys.executable, "-c", TRACING], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


def test_no_kernel_has_an_argument_that_hides_a_name_in_tritons_launcher() -> None:
    """The interpreter accepts these names; a compiled kernel fails at its first launch."""
    reserved = {"params", "specialization", "options", "backend", "specialize_impl", "grid", "warmup"}
    names = [module.name for module in pkgutil.iter_modules(device_code.__path__, "reconv.kernels.triton.")]
    found = [f for name in names for f in vars(import_module(name)).values() if isinstance(f, InterpretedFunction)]
    assert len(names) > 15 and len(found) > 50
    assert not [f"{f.__name__}({arg})" for f in found for arg in f.arg_names if arg in reserved]
