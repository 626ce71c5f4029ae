"""`batch.micro: auto`: the largest micro-batch that fits, estimated on CPU and tried on devices that raise OOM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import in_ranks
from torch import Tensor

import reconv
from reconv.bench.run import bench_args
from reconv.checkpoint.store import CheckpointStore
from reconv.core.machine import Machine
from reconv.device import Cpu
from reconv.logging.event_log import read_events
from reconv.logging.events import LogMessage
from reconv.models.resnet import ResNet
from reconv.recipe.loader import Override
from reconv.trainer.micro_batch import choose_micro_batch, largest_that_fits
from reconv.trainer.prepare import PreparedRun, prepare_run
from reconv.trainer.step import MicroBatchSize

LARGE = {"batch.size": "512", "batch.group": "64"}  # 8 groups, of which a plan takes 4 at a time


def given(settings: dict[str, str]) -> list[Override]:
    return [(field, value, "--set") for field, value in settings.items()]


def prepared(settings: dict[str, str]) -> PreparedRun:
    with prepare_run(bench_args("quickstart", input="host", overrides=given(settings), device="cpu")) as run:
        return run


def machine_with(folder: Path, free_bytes: int) -> Machine:
    (folder / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {free_bytes // 1024} kB\n")
    return Machine(proc=folder, sys=folder)


class SmallDevice(Cpu):
    """A device that raises OOM for more than `max_images` images in a pass."""

    raises_oom = True

    def __init__(self, max_images: int) -> None:
        super().__init__()
        self.max_images, self.tried, self.peak = max_images, list[int](), 0

    def hold(self, images: Tensor) -> None:
        self.tried.append(len(images))
        self.peak = len(images)
        if len(images) > self.max_images:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def peak_memory_bytes(self) -> int:
        return self.peak

    def total_memory_bytes(self) -> int:
        return self.max_images


def on_small_device(run: PreparedRun, most: int, monkeypatch: pytest.MonkeyPatch) -> tuple[PreparedRun, SmallDevice]:
    """The same run on a device with little memory."""
    device, plain = SmallDevice(most), ResNet.forward

    def forward(model: ResNet, images: Tensor) -> Tensor:
        device.hold(images)
        return plain(model, images)

    monkeypatch.setattr(ResNet, "forward", forward)
    return replace(run, device=device), device


@pytest.mark.parametrize(("free_bytes", "micro"), [(10**11, 256), (16_000_000, 128), (1000, 64)])
def test_micro_batch_on_cpu_fits_the_available_memory(tmp_path: Path, free_bytes: int, micro: int) -> None:
    run = prepared(LARGE)
    assert run.plan.micro_batch == 256
    found = choose_micro_batch(run, machine_with(tmp_path, free_bytes)).plan
    assert (found.micro_batch, found.num_micro_batches) == (micro, 512 // micro)
    assert sum(map(sum, found.micro_batches())) == 512
    assert (found is run.plan) == (micro == 256)
    assert micro == 256 or any(f"auto uses micro-batches of {micro} samples: about" in line for line in found.lines)


@pytest.mark.parametrize(
    ("most", "micro", "tried"),
    [
        (2000, 512, [256, 256, 512]),
        (550, 256, [256, 256, 512]),  # 512 fits, but leaves less than a tenth free
        (500, 256, [256, 256, 512]),
        (75, 64, [256, 128, *[64] * 8]),
    ],
)
def test_micro_batch_is_tried_on_devices_that_raise_oom(
    most: int, micro: int, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, device = on_small_device(prepared(LARGE), most, monkeypatch)
    assert choose_micro_batch(run).plan.micro_batch == micro
    assert device.tried == tried


@pytest.mark.parametrize(
    "settings",
    [
        {**LARGE, "batch.micro": "128"},
        {**LARGE, "parallel.reduce": "ordered"},
        {**LARGE, "batch.group": "all"},
        {**LARGE, "batch.group": "micro"},
        {"batch.size": "64", "batch.group": "16"},  # already one micro-batch
    ],
)
def test_fixed_micro_batch_is_not_tried(settings: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    run, device = on_small_device(prepared(settings), 10**6, monkeypatch)
    assert choose_micro_batch(run) is run
    assert device.tried == []


def chosen_on_rank(most: int) -> tuple[int, list[int]]:
    """What this rank chooses; the device of rank 1 has half the memory of rank 0."""
    args = bench_args("quickstart", input="host", overrides=given({**LARGE, "batch.size": "1024"}), device="cpu")
    with prepare_run(args) as run, pytest.MonkeyPatch.context() as patch:
        run, device = on_small_device(run, most // (1 + run.process_group.rank), patch)
        return choose_micro_batch(run).plan.micro_batch, sorted(set(device.tried))


def test_all_ranks_use_the_smallest_micro_batch() -> None:
    assert in_ranks(2, chosen_on_rank, 700) == [(256, [256, 512])] * 2


def test_chosen_micro_batch_is_saved_and_can_change_on_resume() -> None:
    settings = {
        "batch.size": "1024",
        "batch.group": "128",
        "length": "2step",
        "schedule.name": "constant",
        "schedule.warmup": "0ep",
        "evaluate.every": "off",
    }
    folder = reconv.train("quickstart", out="found", overrides=given(settings)).folder
    newest = CheckpointStore(folder / "checkpoints").newest().path
    assert newest is not None and CheckpointStore(folder / "checkpoints").load(newest).state["micro_groups"] == 2
    longer = given({**settings, "length": "3step", "batch.micro": "128"})
    reconv.train("quickstart", out="found", overrides=longer, resume=True)
    said = [event.text for event in read_events(folder / "events.jsonl") if isinstance(event, LogMessage)]
    assert "batch.micro: auto -> 128; from here on gradients are added in another order" in said


@pytest.mark.parametrize(
    ("start", "most", "found", "tried"),
    [
        (4, 99, 12, [4, 6, 12]),
        (4, 6, 6, [4, 6, 12]),
        (4, 2, 2, [4, 3, 2]),
        (4, 0, 1, [4, 3, 2, 1]),  # the smallest, even if it does not fit
        (12, 12, 12, [12]),
    ],
)
def test_largest_that_fits_searches_up_and_down(start: int, most: int, found: int, tried: list[int]) -> None:
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= most

    assert largest_that_fits([1, 2, 3, 4, 6, 12], start, fits) == found
    assert asked == tried


@pytest.mark.parametrize(("tried", "left"), [(2, 1), (3, 1), (4, 2), (6, 3), (9, 3), (15, 5), (16, 8)])
def test_halved_micro_batch_divides_the_previous_one(tried: int, left: int) -> None:
    size = MicroBatchSize(tried)
    size.halve(tried)
    assert size.max_groups == left
