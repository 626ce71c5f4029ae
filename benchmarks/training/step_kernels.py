"""List the kernels of one training step of a recipe on a CUDA GPU, with their times.

    python -m benchmarks.training.step_kernels RECIPE [--steps 5] [--set A.B=V ...] [--order FILE] [--top 40]

Steps run on synthetic images that stay on the device, captured as a CUDA graph as in training, under torch's profiler.
A row is a kernel by name, with its launches in a step and their time, the median over all profiled steps. `--order`
writes all launches of a step in order, with their median times, as CSV.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.training.variants import parse_set
from reconv.bench.run import bench_args, open_bench_run
from reconv.build.data import build_train_loader, open_data_context
from reconv.data.stage_timing import StageTimes
from reconv.logging.run_logger import RunLogger
from reconv.recipe.loader import Override
from reconv.trainer.step import build_train_step
from reconv.trainer.train_state import build_train_state

WARMUP = 8  # steps: the first three are eager, then the step is captured
Launch = tuple[str, float]  # name, microseconds


def profile_steps(recipe: str, overrides: list[Override], num_steps: int) -> list[list[Launch]]:
    """The launches of each profiled step, in order of their start."""
    args = bench_args(recipe, input="device", overrides=overrides, device="cuda")
    steps = []
    with open_bench_run(args) as run:
        logger = RunLogger(lambda event: None)
        step = build_train_step(run, build_train_state(run, logger), logger)
        with open_data_context(run.recipe, run.plan, run.device, StageTimes()) as context:
            loader = build_train_loader(run.recipe, run.plan, run.datasets.train, context)
            for number, batches in enumerate(islice(loader.steps(0, WARMUP + num_steps), WARMUP + num_steps)):
                if number < WARMUP:
                    step(number, batches)
                    continue
                torch.cuda.synchronize()
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
                    step(number, batches)
                    torch.cuda.synchronize()
                steps.append(launches(profiled))
    return steps


def launches(profiled: Any) -> list[Launch]:
    """Kernels, copies and fills on the device."""
    found = [e for e in profiled.profiler.kineto_results.events() if "CUDA" in str(e.device_type())]
    found.sort(key=lambda event: event.start_ns())
    return [(event.name(), event.duration_ns() / 1000) for event in found]


def in_order(steps: list[list[Launch]]) -> list[Launch]:
    """The launches of a step, each with its median time; all steps replay the same graph."""
    if len({tuple(name for name, _ in step) for step in steps}) != 1:
        raise SystemExit("the profiled steps have different kernels: the step was not captured, or the order varies")
    return [(same[0][0], median(us for _, us in same)) for same in zip(*steps, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], metavar="A.B=V")
    parser.add_argument("--order", type=Path, help="a CSV file for all launches of a step in order")
    parser.add_argument("--top", type=int, default=40)
    options = parser.parse_args()
    steps = profile_steps(options.recipe, parse_set(options.set), options.steps)
    order = in_order(steps)
    if options.order:
        with options.order.open("w", newline="") as file:
            csv.writer(file).writerows([("number", "kernel", "us"), *((i, *launch) for i, launch in enumerate(order))])
    times: dict[str, list[float]] = defaultdict(list)
    for name, us in order:
        times[name].append(us)
    total_us = sum(us for _, us in order)
    print(f"{total_us / 1000:.3f} ms in {len(order)} launches")
    print("     ms  launches  kernel")
    for name, found in sorted(times.items(), key=lambda pair: -sum(pair[1]))[: options.top]:
        print(f"{sum(found) / 1000:7.3f}  {len(found):8}  {name[:110]}")


if __name__ == "__main__":
    main()
