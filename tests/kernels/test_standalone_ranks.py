"""A fused model trains under DistributedDataParallel and FSDP2 as the plain one does, on two ranks."""

from __future__ import annotations

import copy

import pytest
import ranks
import torch
from test_standalone import images, network
from torch import Tensor, nn

TOLERANCE = 2e-3


def train(kind: str) -> dict[str, float]:
    """The largest difference of parameters and buffers after two steps, relative to the largest value; and launches."""
    from torch import distributed
    from triton.runtime import interpreter

    from reconv.core.compat import complete_interpreter
    from reconv.kernels.fused.external import ExternalBlock
    from reconv.kernels.standalone import fuse

    complete_interpreter(interpreter)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    plain = network("user's")
    fused = fuse(copy.deepcopy(plain)).model
    assert isinstance(fused.get_submodule("blocks.0"), ExternalBlock)
    x = images(4)[2 * rank : 2 * rank + 2]
    found, expected = (trained(model, kind, x) for model in (fused, plain))
    distributed.destroy_process_group()
    assert found.keys() == expected.keys()
    return {
        name: float((found[name] - expected[name]).abs().max() / (1 + expected[name].abs().max())) for name in found
    }


def trained(model: nn.Module, kind: str, x: Tensor) -> dict[str, Tensor]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    wrapped: nn.Module = model
    if kind == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (2,))
        for block in model.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    for _ in range(2):
        logits = wrapped(x)
        (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict()
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in state.items()}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_train_a_fused_model_as_a_plain_one(kind: str) -> None:
    for differences in ranks.in_ranks(2, train, kind):
        assert len(differences) > 30 and max(differences.values()) < TOLERANCE
