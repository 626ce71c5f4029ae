"""Networks of timm and torchvision train with fused kernels as they do without, in Triton's interpreter.

Needs both packages in versions that fit torch: pip install 'reconv[timm]'; beside a CPU torch see
`test_model_packages`. Takes about six minutes.
"""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from reconv.core.batch import Batch
from reconv.kernels.fuse import fuse
from reconv.kernels.jit import launch
from reconv.kernels.trace import trace_kernels
from reconv.models import build_model
from reconv.models.layers.batch_norm import BatchNorm2d, LayerState

pytest.importorskip("timm", reason="pip install 'reconv[timm]'", exc_type=ImportError)
pytest.importorskip("torchvision", reason="pip install 'reconv[torchvision]'", exc_type=ImportError)
pytest.importorskip("triton", reason="pip install 'triton>=3.7,<3.10'")

pytestmark = pytest.mark.filterwarnings("default")
NUM_SAMPLES, SIDE = 4, 32
# Launches of each operation's kernels in one training pass in bf16 at 224 pixels. Those of ResNet-50, MobileNetV2 and
# EfficientNet-B0 are those of our own networks.
LAUNCHES = {
    "timm:resnet50": {"batch_norm": 198, "norm_max_pool": 2, "stem": 1},
    "torchvision:mobilenet_v2": {
        "batch_norm": 138,
        "conv1x1_norm_act": 50,
        "norm_conv1x1": 30,
        "depthwise": 4,
        "stem": 1,
    },
    "torchvision:efficientnet_b0": {
        "batch_norm": 128,
        "conv1x1_norm_act": 25,
        "norm_squeeze_excite": 80,
        "depthwise": 4,
        "stem": 1,
    },
    "timm:efficientnet_b0": {
        "batch_norm": 128,
        "conv1x1_norm_act": 25,
        "norm_squeeze_excite": 80,
        "depthwise": 4,
        "stem": 1,
    },
    "torchvision:resnet50": {"batch_norm": 200, "max_pool": 2, "stem": 1},
    "torchvision:regnet_y_400mf": {
        "batch_norm": 148,
        "conv1x1_norm_act": 5,
        "grouped_conv": 15,
        "norm_squeeze_excite": 80,
        "stem": 1,
    },
    "torchvision:mobilenet_v3_large": {
        "batch_norm": 127,
        "conv1x1_norm_act": 30,
        "norm_conv1x1": 9,
        "norm_squeeze_excite": 40,
        "depthwise": 4,
        "stem": 1,
    },
    "torchvision:convnext_tiny": {},
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_network_launches_fused_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: Counter[str] = Counter()
    variant_of = launch.variant_of

    def counting(kernel, args, constants):  # type: ignore[no-untyped-def]
        launched[kernel.fn.__module__.rpartition(".")[2]] += 1
        return variant_of(kernel, args, constants)

    monkeypatch.setattr(launch, "variant_of", counting)
    with torch.device("meta"):
        model = build_model(name, num_classes=5).to(torch.bfloat16)
    assert (fuse(model.to(memory_format=torch.channels_last)) > 0) == bool(LAUNCHES[name])
    trace_kernels(model, (3, 224, 224), torch.bfloat16, nullcontext())
    assert dict(launched) == LAUNCHES[name]


def trained(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Logits, gradients and running statistics of one step."""
    layers = LayerState(model)
    layers.set_micro_batch(Batch({}, torch.arange(NUM_SAMPLES), (NUM_SAMPLES,)), step=0)
    logits = model(images)
    logits.logsumexp(1).sum().backward()
    layers.commit(torch.tensor(True))
    found = {"logits": logits.detach()}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def worst_error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The largest norm of a difference, as a fraction of the exact values'."""
    assert found.keys() == exact.keys() and len(found) > 40
    pairs = [(found[key].double(), exact[key].double()) for key in exact]
    return max(float((ours - theirs).norm() / (theirs.norm() + 1e-3)) for ours, theirs in pairs)


@pytest.mark.parametrize(
    "name",
    [
        "torchvision:regnet_y_400mf",
        "torchvision:mobilenet_v3_small",
        "torchvision:resnet18",
        "timm:resnet18",
        "timm:test_efficientnet",
    ],
)
def test_a_fused_step_is_as_exact_as_a_plain_one(name: str) -> None:
    plain = build_model(name, num_classes=8, seed=1).to(memory_format=torch.channels_last).train()
    torch.manual_seed(0)
    for module in plain.modules():
        if isinstance(module, BatchNorm2d):  # no activation at a kink, where a last bit decides the gradient
            nn.init.normal_(module.weight, 1.0, 0.1)
            nn.init.normal_(module.bias, 0.5, 0.1)
    double, fused = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    assert fuse(fused) > 20
    images = torch.randn(NUM_SAMPLES, 3, SIDE, SIDE).contiguous(memory_format=torch.channels_last)
    exact = trained(double, images.double())
    assert worst_error(trained(fused, images), exact) <= 5 * worst_error(trained(plain, images), exact) + 1e-4
    plain.eval()
    fused.eval()
    fused.load_state_dict(plain.state_dict())
    assert [key for key, _ in fused.named_modules()] == [key for key, _ in plain.named_modules()]
    for other in (fused, pickle.loads(pickle.dumps(fused))):
        assert torch.equal(other(images), plain(images))
