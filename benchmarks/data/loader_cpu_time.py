"""CPU time per image of the training loader in one thread, inside the compiled decoder and outside it.

What runs outside holds the GIL, so it bounds the images per second of all worker threads together.

    python -m benchmarks.data.loader_cpu_time --data DIR --size 128
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from reconv.bench.run import bench_args, open_bench_run
from reconv.build.data import build_train_loader
from reconv.data.decode import native
from reconv.data.pipeline.buffers import BlockingTransfer
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.pipeline.workers.thread_pool import InlineWorker
from reconv.recipe.loader import Override

P = ParamSpec("P")
R = TypeVar("R")
BATCH = 256


class CallTimer:
    """Adds up the CPU time of calls in this thread."""

    def __init__(self) -> None:
        self.total_s = 0.0

    def timed(self, function: Callable[P, R]) -> Callable[P, R]:
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            began_s = time.thread_time()
            result = function(*args, **kwargs)
            self.total_s += time.thread_time() - began_s
            return result

        return call


def main() -> None:
    """Print the median of the windows and their range."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a dataset of JPEG files")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="batches of 256 per window")
    args = parser.parse_args()
    compiled = CallTimer()
    native.read_files = compiled.timed(native.read_files)
    native.crop_files = compiled.timed(native.crop_files)
    settings = {"data.preprocess.size": args.size, "batch.size": BATCH, "batch.group": "all", "batch.micro": "auto"}
    settings |= {"data.drop_last": False, "engine.num_threads": 1}
    overrides: list[Override] = [(field, value, "benchmark") for field, value in settings.items()]
    with open_bench_run(bench_args("resnet50", input="real", data=args.data, overrides=overrides, device="cpu")) as run:
        context = DataContext(BlockingTransfer(lambda tensor: tensor), InlineWorker())
        loader = build_train_loader(run.recipe, run.plan, run.datasets.train, context, None)
        batches = loader.steps(0, (args.windows + 1) * args.steps)
        windows = []
        for _ in range(args.windows + 1):  # the first one is not counted
            compiled.total_s, began_s = 0.0, time.thread_time()
            for _ in range(args.steps):
                next(batches)
            total_us = (time.thread_time() - began_s) / (args.steps * BATCH) * 1e6
            windows.append((total_us, total_us - compiled.total_s / (args.steps * BATCH) * 1e6))
    for name, values in zip(("all", "outside the decoder"), zip(*windows[1:], strict=True), strict=True):
        print(f"{name}: {statistics.median(values):.1f} us per image ({min(values):.1f} to {max(values):.1f})")


if __name__ == "__main__":
    main()
