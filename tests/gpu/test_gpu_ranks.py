"""Ranks on a GPU: NCCL with one rank, and two ranks that share the GPU over gloo, train as a single process does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

STEPS = 22  # an epoch
SETTINGS = (
    *("engine.compile=auto", "length=1ep", "schedule.name=constant", "schedule.lr=0.01"),
    *("schedule.warmup=0ep", "expect=null", "batch.group=16"),
)
TOLERANCE = 2e-4  # of a tensor's largest value: sums are added in another order, for 22 steps


def reconv(*arguments: str, **environment: str) -> str:
    """What the command prints."""
    command = [sys.executable, "-m", "reconv", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(out: Path, *options: str, settings: tuple[str, ...] = (), **environment: str) -> dict[str, torch.Tensor]:
    """The weights of a short run of the quickstart on the GPU, with fused kernels."""
    changes = [part for setting in (*SETTINGS, *settings) for part in ("--set", setting)]
    reconv("train", "quickstart", "--device", "cuda", "--out", str(out), *changes, *options, **environment)
    (checkpoint,) = out.glob(f"checkpoints/step-{STEPS:09d}")
    return load_file(checkpoint / "model.safetensors")


def one_rank() -> dict[str, str]:
    """The variables of a launcher with one rank, connected by NCCL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    names = ("RANK", "LOCAL_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    ranks = {name: str(value) for value, group in enumerate(names) for name in group}
    return {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RECONV_DIST_BACKEND": "nccl"}


def difference(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    pairs = [(first[name].double(), second[name].double()) for name in first]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-12)) for a, b in pairs)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return train(tmp_path_factory.mktemp("single") / "run")


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_one_rank_by_nccl_trains_evaluates_saves_and_resumes(
    graphs: str, single: Mapping[str, torch.Tensor], tmp_path: Path
) -> None:
    settings = (f"engine.cuda_graphs={graphs}",)
    whole = train(tmp_path / "whole", settings=settings, **one_rank())
    assert difference(whole, single) <= TOLERANCE
    changes = [part for setting in (*SETTINGS, *settings) for part in ("--set", setting)]
    run = ("quickstart", "--device", "cuda", "--out", str(tmp_path / "parts"), *changes)
    reconv("train", *run, "--stop-after", "9step", **one_rank())
    resumed = train(tmp_path / "parts", "--resume", settings=settings, **one_rank())
    assert difference(resumed, whole) <= TOLERANCE
    assert "top1" in reconv("eval", str(tmp_path / "parts"), "--device", "cuda", **one_rank())


@pytest.mark.parametrize("settings", [(), ("memory.shard_optimizer=true",)], ids=["ddp", "sharded"])
def test_two_ranks_that_share_the_gpu_over_gloo(
    settings: tuple[str, ...], single: Mapping[str, torch.Tensor], tmp_path: Path
) -> None:
    weights = train(tmp_path / "run", "--devices", "2", settings=settings, RECONV_DIST_BACKEND="gloo")
    assert difference(weights, single) <= TOLERANCE


def test_the_search_for_micro_batches_goes_upwards_while_they_fit(tmp_path: Path) -> None:
    changes = (
        *("batch.size=1024", "batch.group=64", "batch.micro=auto", "engine.compile=off", "length=2step"),
        *("data.source=synthetic-device", "data.num_samples=2048"),
    )
    options = [part for change in (*changes, "expect=null") for part in ("--set", change)]
    printed = reconv("train", "resnet50", "--device", "cuda", "--out", str(tmp_path / "run"), *options)
    assert "batch.micro: auto uses micro-batches of" in printed and "the largest that fits" in printed
