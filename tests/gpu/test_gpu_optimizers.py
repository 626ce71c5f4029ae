"""On a GPU, a captured update equals the eager one bitwise, and fused AdamW equals foreach operations."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from reconv.models import build_model
from reconv.optim import ClipGrad, Optimizer, build_clip_grad, build_optimizer
from reconv.recipe.parts.optimizer import OptimizerConfig

OPTIMIZERS = {
    "adamw": OptimizerConfig(name="adamw", weight_decay=0.05, weight_decay_exclude="norm-bias"),
    "adamw-foreach": OptimizerConfig(name="adamw", weight_decay=0.05, implementation="foreach"),
    "adamw-rates": OptimizerConfig(name="adamw", layer_decay=0.7, backbone_lr_scale=0.1),
    "lamb": OptimizerConfig(name="lamb", weight_decay=0.02, weight_decay_exclude="norm-bias"),
    "lamb-agc": OptimizerConfig(name="lamb", weight_decay=0.02, clip_grad=0.01, clip_mode="agc"),
    "adamw-norm": OptimizerConfig(name="adamw", clip_grad=0.5),
    "adamw-value": OptimizerConfig(name="adamw", clip_grad=0.01, clip_mode="value"),
}
SKIPPED = 3  # a step that is not ok
NUM_STEPS = 6


class Update:
    """The part of a training step that follows the backward pass, with its inputs in fixed tensors."""

    def __init__(self, section: OptimizerConfig) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = build_model("resnet20_cifar", num_classes=10).cuda()
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer: Optimizer = build_optimizer(section, self.model)
        self.clip: ClipGrad | None = build_clip_grad(section, self.model)
        self.grads = [torch.zeros_like(p) for p in self.model.parameters()]
        self.lr = torch.zeros((), dtype=torch.float64, device="cuda")
        self.ok = torch.ones((), dtype=torch.bool, device="cuda")

    def run(self, lr: float | Tensor) -> None:
        for parameter, grad in zip(self.model.parameters(), self.grads, strict=True):
            parameter.grad = grad.clone()
        grads = self.optimizer.grads()
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        if self.clip is not None:
            self.clip(self.optimizer.params_with_grad(), norm)
        self.optimizer.step(lr, self.ok)

    def set_inputs(self, step: int) -> float:
        generator = torch.Generator("cuda").manual_seed(step)
        for grad in self.grads:
            grad.normal_(generator=generator)
        self.ok.fill_(step != SKIPPED)
        lr = 0.01 / (1 + step)
        self.lr.fill_(lr)
        return lr

    def tensors(self) -> dict[str, Tensor]:
        return {**dict(self.model.named_parameters()), **self.optimizer.state_dict()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_captured_update_equals_the_eager_one_bitwise(name: str) -> None:
    eager, captured = Update(OPTIMIZERS[name]), Update(OPTIMIZERS[name])
    lr = captured.set_inputs(0)
    eager.set_inputs(0)
    eager.run(lr)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        captured.run(lr)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured.run(captured.lr)
    for step in range(1, NUM_STEPS):
        captured.set_inputs(step)
        graph.replay()
        eager.run(eager.set_inputs(step))
    ours, theirs = captured.tensors(), eager.tensors()
    assert len(ours) == 4 * len(eager.grads)
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []
    assert {float(t) for key, t in ours.items() if key.startswith("step.")} == {NUM_STEPS - 1}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_does_not_wait_for_the_device(name: str) -> None:
    update = Update(OPTIMIZERS[name])
    update.run(update.set_inputs(0))
    torch.cuda.set_sync_debug_mode("error")
    try:
        update.run(0.01)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(p.isfinite().all() for p in update.model.parameters())


@pytest.mark.parametrize("name", [*OPTIMIZERS, "sgd", "lars", "rmsprop", "rmsprop-tf"])
def test_a_step_that_is_not_ok_changes_neither_weights_nor_state(name: str) -> None:
    update = Update(OPTIMIZERS[name] if name in OPTIMIZERS else OptimizerConfig.model_validate({"name": name}))
    for step in range(2):
        update.run(update.set_inputs(step))
    before = {key: tensor.detach().clone() for key, tensor in update.tensors().items()}
    lr = update.set_inputs(SKIPPED)
    update.grads[0].fill_(float("inf"))
    update.run(lr)
    after = update.tensors()
    assert [key for key in before if not torch.equal(before[key], after[key])] == []


def test_fused_adamw_equals_foreach_and_torchs() -> None:
    fused, foreach = (
        Update(OPTIMIZERS["adamw"]),
        Update(OPTIMIZERS["adamw"].model_copy(update={"implementation": "foreach"})),
    )
    twin = copy.deepcopy(fused.model)
    decayed = [p for p in twin.parameters() if p.ndim > 1]
    others = [p for p in twin.parameters() if p.ndim <= 1]
    theirs = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}])
    for step in range(NUM_STEPS):
        lr = fused.set_inputs(step)
        foreach.set_inputs(step)
        for update in (fused, foreach):
            update.run(lr)
        if step == SKIPPED:
            continue
        for parameter, grad in zip(twin.parameters(), fused.grads, strict=True):
            parameter.grad = grad.clone()
        for group in theirs.param_groups:
            group["lr"] = lr
        theirs.step()
    for a, b, c in zip(fused.model.parameters(), foreach.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-6)
