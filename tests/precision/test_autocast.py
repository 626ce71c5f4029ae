"""Modes that cast every activation, dtypes of single operations, and what always stays float32."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from reconv.core.batch import Batch
from reconv.core.errors import RecipeError, UsageError
from reconv.models import build_model, init_weights
from reconv.models.layers.batch_norm import BatchNorm2d, LayerState
from reconv.precision import OPERATIONS, PrecisionPolicy, build_precision
from reconv.precision.autocast import PARAMETRIC
from reconv.recipe.loader import load
from reconv.recipe.parts.precision import OperationName, PrecisionConfig

LOWER = {"bf16-all": torch.bfloat16, "16.32": torch.float16, "16.16": torch.float16}


def policy_of(mode: str, **fields: Any) -> PrecisionPolicy:
    return build_precision(PrecisionConfig.model_validate({"mode": mode, **fields}), "cpu")


def seen_types(policy: PrecisionPolicy, model: nn.Module, images: Tensor) -> dict[str, torch.dtype]:
    """The type of every module's output."""
    found: dict[str, torch.dtype] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            found[name] = output.dtype

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(note(name))
    with policy.autocast():
        model(images)
    return found


def small_net(norm: str = "batch") -> nn.Module:
    model = build_model("resnet8_cifar", num_classes=10, in_channels=1, norm=norm)
    init_weights(model, 0)
    return model


def images_for(policy: PrecisionPolicy) -> Tensor:
    return torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)).to(policy.input_dtype)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("mode", list(LOWER))
def test_every_layer_computes_in_low_precision(mode: str, norm: str) -> None:
    policy = policy_of(mode)
    model = policy.cast_model(small_net(norm))
    found = seen_types(policy, model, images_for(policy))
    assert len(found) > 20 and set(found.values()) == {LOWER[mode]}


@pytest.mark.parametrize(
    ("mode", "weights"), [("bf16-all", torch.float32), ("16.32", torch.float32), ("16.16", torch.float16)]
)
def test_a_mode_sets_the_dtype_of_weights_and_gradients(mode: str, weights: torch.dtype) -> None:
    policy = policy_of(mode)
    model = policy.cast_model(small_net())
    with policy.autocast():
        outputs = model(images_for(policy))
    outputs.float().square().sum().backward()
    assert {p.dtype for p in model.parameters()} == {weights} == {policy.dtype}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {weights}


@pytest.mark.parametrize("mode", ["bf16", "fp16", *LOWER])
def test_batch_norm_statistics_stay_float32_and_are_those_of_the_activations(mode: str) -> None:
    policy = policy_of(mode)
    norm = BatchNorm2d(3, momentum=1.0)
    policy.cast_model(norm)
    layers = LayerState(norm)
    images = (torch.randn(64, 3, 4, 4, generator=torch.Generator().manual_seed(0)) * 3 + 50).to(
        LOWER.get(mode, torch.float32)
    )
    layers.set_micro_batch(Batch({"images": images}, torch.arange(64), (32, 32)), 0)
    with policy.autocast():
        norm(images)
    layers.commit(torch.tensor(True))
    assert norm.running_mean is not None and norm.running_var is not None
    assert norm.running_mean.dtype == norm.running_var.dtype == torch.float32
    exact = images.double()
    halves = [half.transpose(0, 1).flatten(1) for half in exact.split(32)]
    mean = torch.stack([h.mean(1) for h in halves]).mean(0)
    variance = torch.stack([h.var(1) for h in halves]).mean(0)
    # A half would hold a mean of 50 to 0.03 (float16) or 0.25 (bfloat16).
    torch.testing.assert_close(norm.running_mean.double(), mean, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(norm.running_var.double(), variance, rtol=1e-3, atol=1e-3)


def test_32_32_is_fp32_bit_for_bit() -> None:
    outputs = []
    for mode in ("fp32", "32.32"):
        policy = policy_of(mode)
        model = policy.cast_model(small_net()).eval()
        with policy.autocast():
            outputs.append(model(images_for(policy)))
    assert torch.equal(*outputs) and outputs[0].dtype == torch.float32


def output_types(policy: PrecisionPolicy) -> dict[str, torch.dtype]:
    x, weight = torch.ones(2, 4, 4, 4), torch.ones(4, 4, 1, 1)
    with policy.autocast():
        return {
            "conv2d": F.conv2d(x, weight).dtype,
            "linear": F.linear(x, torch.ones(4, 4)).dtype,
            "max_pool2d": F.max_pool2d(x, 2).dtype,
            "relu": F.relu(x).dtype,
            "add": (x + x).dtype,
            "cat": torch.cat([x, x]).dtype,
            "softmax": x.softmax(1).dtype,
        }


def test_listed_operations_compute_in_their_dtype() -> None:
    plain = output_types(policy_of("bf16"))
    listed = output_types(
        policy_of("bf16", ops={"float32": ["conv2d"], "low_precision": ["relu", "cat", "max_pool2d", "add"]})
    )
    assert plain["conv2d"] == torch.bfloat16 and plain["relu"] == torch.float32
    assert listed["conv2d"] == torch.float32
    assert {listed[name] for name in ("relu", "cat", "max_pool2d", "add")} == {torch.bfloat16}
    assert listed["linear"] == plain["linear"] and listed["softmax"] == plain["softmax"]


def test_listed_operations_override_the_mode() -> None:
    policy = policy_of("bf16-all", ops={"float32": ["linear"]})
    found = seen_types(policy, policy.cast_model(small_net()), images_for(policy))
    assert found["fc"] == torch.float32 and found["conv1"] == torch.bfloat16


def test_without_lists_no_function_mode_is_used() -> None:
    with policy_of("bf16").autocast():
        assert torch._C._len_torch_function_stack() == 0
    with policy_of("bf16", ops={"float32": ["softmax"]}).autocast():
        assert torch._C._len_torch_function_stack() == 1


def test_the_recipe_accepts_exactly_the_known_operations() -> None:
    assert set(get_args(OperationName)) == set(OPERATIONS)
    assert set(PARAMETRIC) <= set(OPERATIONS)


@pytest.mark.parametrize("mode", ["bf16-all", "16.16"])
def test_a_compiled_model_is_one_graph_and_equals_eager_bitwise(mode: str) -> None:
    policy = policy_of(mode)
    model = policy.cast_model(small_net()).eval()
    graphs = CompileCounter()
    compiled = torch.compile(copy.deepcopy(model), backend=graphs, fullgraph=True)
    for _ in range(2):
        with torch.no_grad(), policy.autocast():
            assert torch.equal(compiled(images_for(policy)), model(images_for(policy)))
    assert graphs.frame_count == 1


def problems(fields: Mapping[str, object]) -> str:
    with pytest.raises(RecipeError) as exc_info:
        load("quickstart", [(f"precision.{name}", value, "--set") for name, value in fields.items()])
    return str(exc_info.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "bf16", "loss_scale": "128.0"}, "precision.loss_scale"),
        ({"mode": "bf16-all", "loss_scale": "128.0"}, "precision.loss_scale"),
        ({"mode": "16.32", "rounding": "stochastic"}, "precision.rounding"),
        ({"mode": "fp32", "ops.float32": "[softmax]"}, "precision.ops"),
        ({"mode": "tf32", "reduced_precision_reduction": "on"}, "precision.reduced_precision_reduction"),
        ({"mode": "bf16", "ops.low_precision": "[conv3d]"}, "batch_norm, group_norm"),
        ({"mode": "16.17"}, "16.16, 16.32"),
        ({"mode": "16.161"}, "16.16, 16.32"),
    ],
)
def test_contradictions_and_unknown_names_are_errors(fields: dict[str, object], message: str) -> None:
    assert message in problems(fields)


@pytest.mark.parametrize("mode", ["16.16", "16.32", "32.32"])
def test_a_mode_that_looks_like_a_number_is_accepted(mode: str) -> None:
    assert load("quickstart", [("precision.mode", mode, "--set")]).recipe.precision.mode == mode


def test_reduced_precision_reduction_is_rejected_off_cuda() -> None:
    with pytest.raises(UsageError, match="reduced"):
        policy_of("bf16", reduced_precision_reduction="on")
    assert policy_of("bf16", reduced_precision_reduction="off").mode == "bf16"


@pytest.mark.parametrize(("partials", "allowed"), [("auto", True), ("on", True), ("off", False)])
def test_reduced_precision_reduction_and_tf32_set_torchs_switches(partials: str, allowed: bool, switches: None) -> None:
    matmul = torch.backends.cuda.matmul
    build_precision(PrecisionConfig.model_validate({"mode": "bf16", "reduced_precision_reduction": partials}), "cuda")
    assert matmul.allow_bf16_reduced_precision_reduction is allowed
    assert matmul.allow_fp16_reduced_precision_reduction is allowed
    assert matmul.fp32_precision == "ieee"
    build_precision(PrecisionConfig(mode="tf32"), "cuda")
    assert matmul.fp32_precision == "tf32"


@pytest.fixture
def switches() -> Iterator[None]:
    """Torch's switches for cuda, which exist without it, left as they were found."""
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    halves = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    singles = matmul.fp32_precision, conv.fp32_precision
    yield
    matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = halves
    matmul.fp32_precision, conv.fp32_precision = singles
