"""Invented run directories for tests, written through the real event log, with curves like those of a real run."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from reconv.data.inspect.contact_sheet import grid
from reconv.logging.event_log import EventLog
from reconv.logging.events import (
    AttemptStarted,
    CheckpointSaved,
    DataFingerprint,
    EvalFinished,
    Event,
    ImageLogged,
    LogMessage,
    NonFiniteStep,
    RunEnded,
    RunPlanned,
    TrainProgress,
)

RECIPE = """\
name: quickstart
description: Handwritten digits on a small ResNet, a minute on two cores
task: classification
seed: {seed}
length: 20ep
model:
  name: resnet8_cifar
data:
  source: digits
batch:
  size: 64
  group: all
schedule:
  kind: cosine
  lr: {lr}
  warmup: 1ep
ema:
  decay: 0.99
expect:
  metric: top1
  value: {expected}
  tolerance: 0.005
  on: 2 CPU cores
  source: measured, 5 seeds
"""

STEPS_PER_EPOCH, BATCH, START_S = 22.0, 64, 1_770_000_000.0


def write_run(
    folder: Path,
    *,
    epochs: int = 20,
    seed: int = 0,
    lr: float = 0.1,
    expected: float = 0.99,
    stop_at: int | None = None,
    resumes: Sequence[int] = (),
    log_every: int = 5,
    mixed: bool = False,
    broken_steps: Sequence[int] = (),
    exit_code: int | None = 0,
    with_images: bool = True,
) -> Path:
    """A run directory of a run that learned digits; `resumes` are steps at which it was killed and resumed."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(RECIPE.format(seed=seed, lr=lr, expected=expected))
    total = int(epochs * STEPS_PER_EPOCH)
    starts = [0, *resumes]
    ends = [*resumes, total if stop_at is None else stop_at]
    with EventLog(folder / "events.jsonl") as log:
        time_s = START_S
        for number, (start, end) in enumerate(zip(starts, ends, strict=True), 1):
            is_last = number == len(starts)
            events = _attempt(folder, number, start, end, total, seed, lr, log_every, mixed, broken_steps, with_images)
            for event in events:
                time_s += 0.25
                log.write(_at(event, time_s))
            if is_last and exit_code is not None:
                log.write(_at(_ended(start, end, exit_code), time_s + 1))
    return folder


def _at(event: Event, time_s: float) -> Event:
    from dataclasses import replace

    return replace(event, time_s=time_s)


def _attempt(
    folder: Path,
    number: int,
    start: int,
    end: int,
    total: int,
    seed: int,
    lr: float,
    log_every: int,
    mixed: bool,
    broken_steps: Sequence[int],
    with_images: bool,
) -> list[Event]:
    noise = random.Random(seed * 1000 + number)
    command = ("reconv", "train", "quickstart", "--lr", str(lr), *(("--resume",) if number > 1 else ()))
    environment = {
        "reconv": "0.2.0",
        "python": "3.13.5",
        "torch": "2.13.0",
        "device": "cpu, 2 threads",
        "threads": 2,
        "host": "workbench",
        "data": "digits, 1,437 train, 360 validation",
    }
    lines = (
        "data: 1,437 training and 360 validation samples, 10 classes",
        "global batch 64 = 1 device x 64 x 1 micro-batch; group 64",
        f"lr {lr} (absolute), cosine over {total} steps after 22 steps of warm-up",
    )
    events: list[Event] = [
        AttemptStarted(number, start, command, environment),
        DataFingerprint("7f3a90c2d1e4b586" * 2, "0d9c51be7a2f4863" * 2),
        RunPlanned(
            "quickstart",
            "classification",
            total,
            STEPS_PER_EPOCH,
            BATCH,
            lines,
            num_parameters=77_850,
            model="resnet8_cifar",
            num_trained=77_850,
            num_classes=10,
            monitored_weights="ema",
            loss_note="training loss includes mixup, validation loss does not: they cannot be compared" * mixed,
        ),
    ]
    if number > 1:
        events.append(LogMessage("info", f"went on from checkpoints/step-{start:09d}", start))
        events.append(LogMessage("warning", "the newest checkpoint was torn (optimizer.safetensors); fell back", start))
    if number == 1 and with_images:
        events.append(_image(folder, "First training batch", "first-batch", seed))
    for step in range(start + 1, end + 1):
        if step in broken_steps:
            events.append(NonFiniteStep(step, math.nan, tuple(range(step, step + BATCH)), "skip"))
        if step % log_every == 0:
            events.append(_progress(step, total, lr, noise, mixed, step - start <= 3, step in broken_steps))
        if step % int(STEPS_PER_EPOCH) == 0:
            events += _evaluations(step, noise)
            events.append(
                CheckpointSaved(
                    step, f"checkpoints/step-{step:09d}", 941_000, 0.021, "end" if step == total else "interval"
                )
            )
    if end == total and with_images:
        events.append(_image(folder, "Worst mistakes", "mistakes", seed + 1, has_long_captions=True))
    return events


def _progress(
    step: int, total: int, lr: float, noise: random.Random, mixed: bool, warming_up: bool, is_broken: bool
) -> TrainProgress:
    epoch = step / STEPS_PER_EPOCH
    loss = 2.4 * math.exp(-epoch / 2.2) + 0.012 + noise.random() * 0.3 * math.exp(-epoch / 4)
    wait = 0.03 + 0.04 * noise.random()
    rate = 4100 + 200 * noise.random()
    warmup = min(1.0, epoch)
    return TrainProgress(
        step=step,
        epoch=epoch,
        loss=math.nan if is_broken else loss,
        lr=lr * warmup * 0.5 * (1 + math.cos(math.pi * step / total)),
        metrics={
            "top1": max(0.1, min(1.0, 1 - 0.9 * math.exp(-epoch / 1.4) - 0.03 * noise.random())) * (0.8 if mixed else 1)
        },
        metrics_note="on mixed images" if mixed else "",
        grad_norm=0.2 + 2 * math.exp(-epoch / 3) * (0.6 + 0.8 * noise.random()),
        images_per_s=None if warming_up else rate * (1 - wait),
        compute_images_per_s=None if warming_up else rate,
        data_wait_fraction=wait,
        memory_bytes=412_000_000,
        eta_s=(total - step) * BATCH / rate,
    )


def _evaluations(step: int, noise: random.Random) -> list[Event]:
    epoch = step / STEPS_PER_EPOCH
    raw = min(0.9917, 0.992 - 0.75 * math.exp(-epoch / 1.5) - 0.012 * noise.random() * math.exp(-epoch / 8))
    ema = min(0.9944, 0.9945 - 0.85 * math.exp(-epoch / 1.8))
    return [
        EvalFinished(
            step,
            epoch,
            weights,
            {"top1": round(top1 * 360) / 360, "top5": min(1.0, top1 + 0.3), "loss": 0.03 + 1.5 * (1 - top1)},
            360,
            0.05,
            best=weights == "ema" and epoch % 2 == 0,
        )
        for weights, top1 in (("raw", raw), ("ema", ema))
    ]


def _image(folder: Path, title: str, name: str, seed: int, has_long_captions: bool = False) -> ImageLogged:
    num_images = 12 if has_long_captions else 32
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:8, 0:8]
    centers = rng.uniform(2, 6, size=(num_images, 2))
    radii = np.hypot(rows[None] - centers[:, :1, None], columns[None] - centers[:, 1:, None])
    images = (255 * np.exp(-((radii - 2.2) ** 2))).astype(np.uint8)[:, None]
    (folder / "images").mkdir(exist_ok=True)
    (folder / "images" / f"{name}.png").write_bytes(grid(torch.from_numpy(images), 8))
    captions = [
        f"predicted 8 (97 %), target {n % 10} · digits[{5 * n}]" if has_long_captions else str(n % 10)
        for n in range(num_images)
    ]
    return ImageLogged(title, f"images/{name}.png", tuple(captions), columns=8)


def _ended(start: int, end: int, exit_code: int) -> RunEnded:
    images = (end - start) * BATCH
    reason = {0: "finished", 75: "preempted", 5: "diverged"}.get(exit_code, "failed")
    return RunEnded(end, exit_code, reason, images / 3000, images, 430_000_000, images / 4000, images / 80_000, images)
