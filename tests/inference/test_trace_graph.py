"""A traced graph is that of make_fx, without what make_fx imports."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from reconv.inference.backends.fold import fold_batch_norms
from reconv.inference.backends.trace_graph import trace_graph
from reconv.models import SSDOutput, build_model

SSD = {"backbone": "resnet10", "width": 8, "extra_widths": [16, 16, 8], "boxes_per_cell": [4, 6, 6, 4]}
CASES: list[tuple[str, dict[str, Any], int]] = [
    ("resnet10", {"width": 8, "se_units": 4}, 3),
    ("resnet10", {"width": 8, "version": "v2", "in_channels": 1}, 1),  # both memory formats fit the first convolution
    ("ssd_resnet34", SSD, 3),
]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("name", "options", "channels"), CASES)
def test_the_graph_is_that_of_make_fx(
    name: str, options: dict[str, Any], channels: int, memory_format: torch.memory_format
) -> None:
    model = build_model(name, num_classes=4, **options).eval()
    model = model.to(memory_format=memory_format)  # type: ignore[call-overload]
    images = torch.zeros(3, channels, 64, 64).contiguous(memory_format=memory_format)
    with torch.inference_mode():
        traced = trace_graph(model, torch.zeros_like(images))
    with torch.no_grad():
        expected = make_fx(lambda x: model(x))(images)
    expected.graph.eliminate_dead_code()
    ours, theirs = (
        [node.target for node in graph.nodes if node.op == "call_function" and node.target is not SSDOutput]
        for graph in (traced.graph, expected.graph)
    )
    assert ours == theirs
    given = torch.randn(3, channels, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for found, wanted in zip(traced(given), model(given), strict=True):
            assert torch.equal(found, wanted)


class _Branches(nn.Module):
    """What it computes depends on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return self.norm(y) if y.mean() > 0 else y


def test_a_network_that_looks_at_values_is_refused() -> None:
    with pytest.raises(RuntimeError, match="values of a tensor decide"):
        trace_graph(_Branches().eval(), torch.zeros(1, 3, 8, 8))
    with pytest.raises(RuntimeError, match="values of a tensor decide"):
        fold_batch_norms(_Branches(), (3, 8, 8))


SCRIPT = """
import sys, torch
from reconv.inference.backends.compiler import compile_inference
from reconv.inference.backends.fold import fold_batch_norms
from reconv.models import SSDOutput, build_model
model, num_folded = fold_batch_norms(build_model("resnet10", width=8), (3, 32, 32))
images = torch.zeros(1, 3, 32, 32).contiguous(memory_format=torch.channels_last)
_, num_fused = compile_inference(model.to(memory_format=torch.channels_last), images)
assert num_folded > 0 and num_fused > 0
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""


def test_folding_imports_no_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
