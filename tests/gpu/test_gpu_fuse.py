"""On a GPU, `reconv.fuse` in loops that are not ours: the losses of the plain model, whatever wraps it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from gpu_tensors import half_dtypes, random_tensor, relative_error
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from reconv.kernels.ops import depthwise
from reconv.kernels.standalone import fuse, unfuse
from reconv.models import build_model

STEPS = 12
TOLERANCE = 0.05  # between losses in bf16, whose sums are in another order
NETWORKS = ("resnet50", "mobilenet_v2", "googlenet", "efficientnet_b0")
EXTERNAL = ("timm:resnet50d", "timm:regnety_032", "timm:mobilenetv3_large_100", "timm:densenet121", "timm:seresnet50")


def network(name: str = "resnet18") -> nn.Module:
    model = build_model(name, num_classes=16, seed=1)
    return model.to("cuda", memory_format=torch.channels_last).train()  # type: ignore[call-overload, no-any-return]


def batch(size: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(2)
    images = torch.randn(size, 3, 64, 64, generator=generator, device="cuda")
    labels = torch.randint(16, (size,), generator=generator, device="cuda")
    return images.to(memory_format=torch.channels_last), labels


def loss_of(model: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    images, labels = batch()
    with torch.autocast("cuda", dtype):
        logits = model(images)
        return F.cross_entropy(logits if isinstance(logits, Tensor) else logits[0], labels)


def losses(
    model: nn.Module, called: Callable[[Tensor], Tensor] | None = None, dtype: torch.dtype = torch.bfloat16
) -> list[float]:
    """Of some steps; with a gradient scaler in fp16."""
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    found = []
    for _ in range(STEPS):
        loss = loss_of(called or model, dtype)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def assert_alike(found: list[float], expected: list[float]) -> None:
    assert expected[-1] < expected[0]
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < TOLERANCE


@pytest.mark.parametrize("name", NETWORKS + EXTERNAL)
def test_a_fused_network_trains_like_the_plain_one(name: str) -> None:
    if ":" in name:
        pytest.importorskip("timm", reason="pip install 'reconv[timm]'", exc_type=ImportError)
    plain = network(name)
    report = fuse(plain, inplace=False)
    assert report
    assert_alike(losses(report.model), losses(plain))
    running = [buffer for buffer_name, buffer in plain.named_buffers() if buffer_name.endswith("running_var")]
    found = [buffer for buffer_name, buffer in report.model.named_buffers() if buffer_name.endswith("running_var")]
    assert max(relative_error(a, b) for a, b in zip(found, running, strict=True)) < 0.1


def test_with_a_gradient_scaler_in_fp16() -> None:
    plain = network()
    assert_alike(losses(fuse(plain, inplace=False).model, dtype=torch.float16), losses(plain, dtype=torch.float16))


def test_with_kernels_compiled_in_parallel_before() -> None:
    plain = network("resnet50")
    report = fuse(plain, inplace=False, image=(3, 64, 64))
    assert_alike(losses(report.model), losses(plain))
    assert not [note for note in report.notes if "failed" in note]


def test_torch_compile_compiles_what_lies_around_fused_modules() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = network(), nn.Parameter(torch.ones((), device="cuda"))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(torch.tanh(x) * self.scale) * 2  # type: ignore[no-any-return]

    plain = Wrapped()
    model = fuse(plain, inplace=False).model
    assert_alike(losses(model, torch.compile(model)), losses(plain))


def test_a_step_is_captured_as_a_cuda_graph() -> None:
    plain = network()
    model = fuse(plain, inplace=False).model
    expected = losses(plain)
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    found: list[float] = []
    images, labels = batch()

    def step() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            found.append(float(step()))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for _ in range(STEPS - 3):
        graph.replay()
        found.append(float(loss))
    assert_alike(found, expected)


def test_make_graphed_callables_captures_forward_and_backward_pass() -> None:
    plain = network()
    model = fuse(plain, inplace=False).model
    sample = torch.rand_like(batch()[0])
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):  # a graph must not keep cast weights
        torch.cuda.make_graphed_callables(model, (sample,))  # replaces model.forward
        expected, found = losses(plain), losses(model)
    assert_alike(found, expected)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_and_pickles_train_alike(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = fuse(network()).model
    again = copied(model)
    assert_alike(losses(again), losses(model))


def test_checkpointed_blocks_and_hooks_see_what_they_see_without_kernels() -> None:
    plain = network()
    model = fuse(plain, inplace=False).model
    seen: dict[str, list[Tensor]] = {"plain": [], "fused": []}
    for kind, net in (("plain", plain), ("fused", model)):
        net.get_submodule("layer2.0.bn1").register_forward_hook(
            lambda m, i, o, kind=kind: seen[kind].append(o.detach())
        )
    block = model.get_submodule("layer3.0")
    forward = block.forward
    block.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
    assert_alike(losses(model), losses(plain))
    assert relative_error(seen["fused"][0], seen["plain"][0]) < 0.02


def test_evaluation_and_nchw_images_give_the_bits_of_the_plain_model() -> None:
    plain = network()
    model = fuse(plain, inplace=False).model
    images, _ = batch()
    assert torch.equal(model(images.contiguous()), plain(images.contiguous()))
    assert torch.equal(model.eval()(images), plain.eval()(images))
    unfuse(model).train()
    plain.train()
    assert torch.equal(model(images), plain(images))


def test_fully_shard_in_one_process(tmp_path: object) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    plain = network()
    model = fuse(plain, inplace=False).model
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        for name in ("layer1", "layer2", "layer3", "layer4"):
            fully_shard(model.get_submodule(name), mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert_alike(losses(model), losses(plain))
    finally:
        torch.distributed.destroy_process_group()


@half_dtypes
@pytest.mark.parametrize(
    "shape", [(8, 96, 56, 56), (8, 192, 28, 28), (8, 384, 14, 14), (8, 768, 7, 7), (3, 40, 9, 13)], ids=str
)
def test_7x7_depthwise_with_a_bias_equals_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = random_tensor(*shape, dtype=dtype), random_tensor(shape[1], 1, 7, 7, dtype=dtype)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, torch.randn(shape[1], device="cuda").to(dtype))]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    assert depthwise.supports_kernels(x, weight, 1)
    y = depthwise.depthwise_conv(leaves[0], leaves[1], 1, leaves[2])
    expected = F.conv2d(exact[0], exact[1], exact[2], padding=3, groups=shape[1])
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy.double())
    errors = [
        relative_error(y, expected),
        *(relative_error(a.grad, b.grad) for a, b in zip(leaves, exact, strict=True)),
    ]
    assert max(errors) < (2e-3 if dtype == torch.float16 else 1.6e-2)


def test_convnext_with_7x7_kernels_trains_like_the_plain_one() -> None:
    pytest.importorskip("timm", reason="pip install 'reconv[timm]'", exc_type=ImportError)
    plain = network("timm:convnext_atto")
    report = fuse(plain, inplace=False, everything=True)
    assert {row.computes for row in report.fused} == {"DepthwiseConv2d"}
    assert_alike(losses(report.model), losses(plain))
