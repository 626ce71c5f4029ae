"""On a GPU, fused kernels and CUDA graphs train as plain steps do, without waiting for the device, and repeatably.

Networks of torchvision and timm too, where these packages are installed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import pytest
import torch

from reconv.bench.bench_run import bench_args, open_bench_run
from reconv.bench.timing import StepTimer
from reconv.data.pipeline.buffers import BlockingTransfer
from reconv.data.pipeline.prefetcher import DataContext
from reconv.logging.run_logger import RunLogger
from reconv.trainer.build.loaders import build_train_loader
from reconv.trainer.build.train_state import build_train_state, build_train_step

RECIPE, BATCH, STEPS = "resnet50-habana-1card-bf16", 128, 10
WARM_STEPS = 5
# Of a loss within ten steps: the two ways round at other places, and the difference grows.
TOLERANCES = {"bf16": 0.02, "fp32": 0.01}
# A large rate without a warm-up would magnify any difference.
SMALL_LR = {"schedule.name": "constant", "schedule.lr": 0.005, "schedule.milestone_lrs": [], "schedule.milestones": []}


class Trained(NamedTuple):
    losses: list[float]
    digest: str


def train(settings: Mapping[str, object]) -> Trained:
    """Train on images that lie on the device; after the first steps, waiting for the device is an error."""
    given = {"batch.size": BATCH, "batch.group": "all", **settings}
    overrides = [(field, value, "test") for field, value in given.items()]
    with open_bench_run(bench_args(RECIPE, overrides=overrides, device="cuda")) as run:
        train_state = build_train_state(run, RunLogger())
        step = build_train_step(run, train_state, RunLogger(), annotate=StepTimer(run.device).annotate)
        context = DataContext(BlockingTransfer(run.device.move))
        loader = build_train_loader(run.recipe, run.plan, run.datasets.train, context)
        losses = []
        for number, batches in enumerate(loader.steps(0, STEPS)):
            torch.cuda.set_sync_debug_mode("error" if number >= WARM_STEPS else "default")
            losses.append(step(number, batches).loss)
            torch.cuda.set_sync_debug_mode("default")
    digest = hashlib.sha256()
    for tensor in train_state.network.model.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return Trained([float(loss) / BATCH for loss in losses], digest.hexdigest())


@pytest.mark.parametrize("precision", TOLERANCES)
def test_losses_with_fused_kernels_and_graphs_equal_plain_steps(precision: str) -> None:
    settings = {**SMALL_LR, "precision.mode": precision}
    fast, plain = train(settings), train({**settings, "engine.compile": "off"})
    assert fast.losses == pytest.approx(plain.losses, rel=TOLERANCES[precision])


def test_deterministic_runs_end_with_equal_weights() -> None:
    first, second = (train({"engine.deterministic": True}) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    "network",
    [
        "torchvision:regnet_y_400mf",
        "torchvision:mobilenet_v3_large",
        "torchvision:convnext_tiny",
        "timm:resnet50",
        "timm:efficientnet_b0",
    ],
)
def test_losses_of_other_packages_networks_equal_plain_steps(network: str) -> None:
    package = network.partition(":")[0]
    pytest.importorskip(package, reason=f"pip install 'reconv[{package}]'", exc_type=ImportError)
    settings = {**SMALL_LR, "model.name": network, "model.zero_init_last": False, "precision.mode": "fp32"}
    fast, plain = train(settings), train({**settings, "engine.compile": "off"})
    assert fast.losses == pytest.approx(plain.losses, rel=TOLERANCES["fp32"])
