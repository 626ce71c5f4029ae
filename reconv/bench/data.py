"""`bench data`: images per second of the data loader, on one core and on all.

Pipelines that are compared are measured alternately in one process, on the same images, crops and flips, from encoded
bytes to flipped uint8 images in a batch. Nothing is trained.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reconv.bench.data_paths import ORIGINAL, DataPath, baseline_image, open_data_paths
from reconv.bench.run import LogFunction, bench_args, describe_setup, no_log, open_bench_run
from reconv.bench.timing import percentile
from reconv.build.data import build_train_loader
from reconv.core.batch import Batch
from reconv.core.errors import UsageError
from reconv.data.dataset import select_rows
from reconv.data.decode.simplejpeg import jpeg_decoder
from reconv.data.pipeline.buffers import BlockingTransfer
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.pipeline.workers.process_pool import ProcessPool
from reconv.data.pipeline.workers.thread_pool import InlineWorker, Workers, open_workers
from reconv.data.sampler import make_sampler
from reconv.data.transforms.geometry import crop_params, random_flips
from reconv.data.transforms.train import changes_images_on_host
from reconv.recipe.loader import Override
from reconv.recipe.parts.data import effective_augment
from reconv.trainer.prepare import PreparedRun

DEFAULT_RECIPE = "resnet50"  # RandomResizedCrop to 224 px and a flip
BATCH = 32
_OVERRIDES = {  # an endless stream of small batches, and no threads but the workers
    "batch.size": BATCH,
    "batch.group": "all",
    "batch.micro": "auto",
    "data.drop_last": False,
    "engine.num_threads": 1,
}
_COMPARED_BATCHES = 4  # for the difference between the images of two pipelines
_BASELINE = "baseline"


@dataclass(frozen=True, slots=True)
class MeasuredWindow:
    """Images per second of wall time and of CPU time; on a busy machine only CPU time can be compared."""

    images_per_s: float
    images_per_cpu_s: float


@dataclass(frozen=True, slots=True)
class DataRates:
    """The windows of one pipeline."""

    windows: tuple[MeasuredWindow, ...]

    @property
    def median(self) -> float:
        return statistics.median(w.images_per_s for w in self.windows)

    @property
    def median_cpu(self) -> float:
        return statistics.median(w.images_per_cpu_s for w in self.windows)

    def summary(self) -> dict[str, Any]:
        """The median and the range of the windows."""
        rates = [w.images_per_s for w in self.windows]
        return {
            "images_per_s": self.median,
            "lowest": min(rates),
            "highest": max(rates),
            "p95": percentile(rates, 95),
            "windows": len(rates),
            "images_per_cpu_s": self.median_cpu,
        }

    def relative_to(self, other: DataRates) -> dict[str, Any]:
        """The speedup over a pipeline that was measured alternately with this one: median and each window."""
        pairs = list(zip(self.windows, other.windows, strict=True))
        ratios = [own.images_per_s / base.images_per_s for own, base in pairs]
        cpu_ratios = [own.images_per_cpu_s / base.images_per_cpu_s for own, base in pairs]
        return {
            "ratio": statistics.median(ratios),
            "ratio_cpu": statistics.median(cpu_ratios),
            "ratio_windows": ratios,
            "ratio_cpu_windows": cpu_ratios,
        }


def bench_data(
    data: str,
    *,
    recipe: str = DEFAULT_RECIPE,
    overrides: Sequence[Override] = (),
    workers: int | None = None,
    images: int = 256,
    windows: int = 5,
    compare: bool = False,
    log: LogFunction = no_log,
) -> dict[str, Any]:
    """Measure the data loader on real data and, with `compare`, a baseline pipeline alternately with it."""
    overrides = [*overrides, *((field, value, "bench") for field, value in _OVERRIDES.items())]
    overrides += [("data.num_workers", workers, "--workers")] if workers is not None else []
    with open_bench_run(bench_args(recipe, input="real", data=data, overrides=overrides, device="cpu")) as run:
        return _measure(run, max(1, round(images / BATCH)), windows, compare, log)


def _measure(run: PreparedRun, steps: int, windows: int, compare: bool, log: LogFunction) -> dict[str, Any]:
    dataset, plan = run.datasets.train, run.plan
    log(f"{dataset.origin}: {len(dataset):,} images to {plan.size_at(0)} px")
    compared: dict[str, Any] = {}
    if compare:
        _check_comparable(run)
        with open_data_paths(run, steps * BATCH, log) as data_paths:
            compared = _compare(data_paths, steps, windows, log)
    one_core, all_cores = _measure_scaling(run, steps, windows)
    num_workers = plan.workers or 1
    speedup = all_cores.relative_to(one_core)
    return {
        "bench": "data",
        "images_per_s": all_cores.median,
        "images_per_s_per_core": one_core.median,
        "workers": num_workers,
        "scaling": speedup["ratio"],
        "scaling_windows": speedup["ratio_windows"],
        "scaling_cpu": num_workers * speedup["ratio_cpu"],
        "all_cores": all_cores.summary(),
        "one_core": one_core.summary(),
        "stage_ms": _stage_ms(run, steps),
        "images_per_window": steps * BATCH,
        "num_images": len(dataset),
        "image_size": plan.size_at(0),
        "jpeg_decoder": "native" if plan.decoder == "native" else jpeg_decoder()[0],
        "peak_memory_bytes": run.device.peak_memory_bytes(),
        "data": dataset.origin,
        **compared,
        **describe_setup(run.recipe, run.device),
    }


def _compare(data_paths: Sequence[DataPath], steps: int, windows: int, log: LogFunction) -> dict[str, Any]:
    """The baseline's rate, the speedup of each data path over it, and the mean difference of their pixels."""
    log(f"measuring the baseline and {len(data_paths)} data paths alternately, {windows} windows each")
    pipelines = {_BASELINE: _baseline_batches(data_paths[0].run)}
    pipelines |= {path.name: _our_batches(path.run, 0) for path in data_paths}
    rates = _alternate({name: _Stream(batches, steps) for name, batches in pipelines.items()}, windows)
    baseline = rates[_BASELINE]
    paths = {
        path.name: {
            **rates[path.name].summary(),
            **rates[path.name].relative_to(baseline),
            "mean_difference": _mean_difference(path.run),
        }
        for path in data_paths
    }
    original = paths[ORIGINAL]
    top = {name: original[name] for name in ("ratio", "ratio_cpu", "ratio_windows", "mean_difference")}
    return {"baseline": baseline.summary(), "paths": paths, **top}


def _measure_scaling(run: PreparedRun, steps: int, windows: int) -> tuple[DataRates, DataRates]:
    """Our loader without workers, and alternately with all of them.

    Each window is a new stream, so that nothing is prefetched before it starts. The workers serve all windows:
    processes take seconds to start, once per run.
    """
    num_workers = run.plan.workers or 1
    workers = open_workers(run.plan.backend, num_workers)
    context = DataContext(run.device, workers)
    one_core = _NewStreams(lambda: _our_batches(run, 0, steps), steps)
    all_cores = _NewStreams(lambda: _our_batches(run, num_workers, steps, context), steps, partial(_cpu_s, workers))
    try:
        rates = _alternate({"one": one_core, "all": all_cores}, windows)
    finally:
        workers.close()
    return rates["one"], rates["all"]


def _cpu_s(workers: Workers) -> float:
    """CPU time of this process and of its workers."""
    ids = workers.process_ids if isinstance(workers, ProcessPool) else []
    ticks = [Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[11:13] for number in ids]
    return time.process_time() + sum(int(tick) for pair in ticks for tick in pair) / os.sysconf("SC_CLK_TCK")


def _alternate(pipelines: Mapping[str, _Stream | _NewStreams], windows: int) -> dict[str, DataRates]:
    """A window of each pipeline in turn; the first round warms up the page cache and does not count."""
    rounds = [{name: pipeline.window() for name, pipeline in pipelines.items()} for _ in range(windows + 1)]
    return {name: DataRates(tuple(measured[name] for measured in rounds[1:])) for name in pipelines}


@dataclass(frozen=True, slots=True)
class _Stream:
    """A stream of batches that continues from window to window."""

    batches: Iterator[Tensor]
    steps: int

    def window(self) -> MeasuredWindow:
        return _time_batches(self.batches, self.steps)


@dataclass(frozen=True, slots=True)
class _NewStreams:
    """A new stream of batches for each window."""

    open: Callable[[], Iterator[Tensor]]
    steps: int
    cpu_s: Callable[[], float] = time.process_time

    def window(self) -> MeasuredWindow:
        return _time_batches(self.open(), self.steps, self.cpu_s)


def _time_batches(
    batches: Iterator[Tensor], steps: int, cpu_clock_s: Callable[[], float] = time.process_time
) -> MeasuredWindow:
    start_s, start_cpu_s = time.perf_counter(), cpu_clock_s()
    num_images = sum(len(images) for images in islice(batches, steps))
    cpu_s, wall_s = cpu_clock_s() - start_cpu_s, time.perf_counter() - start_s
    return MeasuredWindow(num_images / wall_s, num_images / cpu_s)


def _stage_ms(run: PreparedRun, steps: int) -> dict[str, float]:
    """The time of one image on one core by stage, from separate batches."""
    plan, context = replace(run.plan, workers=0), DataContext(run.device, InlineWorker())
    loader = build_train_loader(run.recipe, plan, run.datasets.train, context)
    num_images = sum(len(batch) for micro_batches in loader.steps(0, steps) for batch in micro_batches)
    return {stage: 1000 * seconds / num_images for stage, seconds in context.stage_times.seconds.items()}


def _our_batches(
    run: PreparedRun, workers: int, steps: int = sys.maxsize, context: DataContext | None = None
) -> Iterator[Tensor]:
    """The images of the training loader, flipped as on the device."""
    plan, context = replace(run.plan, workers=workers), context or DataContext(BlockingTransfer(run.device.move))
    loader = build_train_loader(run.recipe, plan, run.datasets.train, context)
    for micro_batches in loader.steps(0, steps):
        for batch in micro_batches:
            yield _flip(batch)


def _flip(batch: Batch) -> Tensor:
    images = batch["images"]
    for row in batch["flips"].nonzero().flatten().tolist():
        images[row] = images[row].flip(-1)
    return images


def _baseline_batches(run: PreparedRun) -> Iterator[Tensor]:
    """The same images from the baseline pipeline, in batches of the same size."""
    recipe, dataset, plan = run.recipe, run.datasets.train, run.plan
    augment, size = effective_augment(recipe.augment), plan.size_at(0)
    sampler = make_sampler(dataset, recipe, plan.global_batch)
    for step in range(sys.maxsize):
        positions = sampler.positions(step)
        params, flips = crop_params(augment, recipe.seed, positions), random_flips(augment, recipe.seed, positions)
        indices = sampler.indices_of(positions)
        yield torch.stack(
            [
                baseline_image(dataset[int(index)], size, augment, select_rows(params, row), bool(flips[row]))
                for row, index in enumerate(indices)
            ]
        )


def _mean_difference(run: PreparedRun) -> float:
    """The mean absolute difference of our images from the baseline's in the first batches, of 255."""
    both = zip(_our_batches(run, 0), _baseline_batches(run), strict=True)
    differences = [(ours.float() - base.float()).abs().mean() for ours, base in islice(both, _COMPARED_BATCHES)]
    return float(torch.stack(differences).mean())


def _check_comparable(run: PreparedRun) -> None:
    """Refuse to compare with a pipeline that makes other images than the baseline."""
    augment, preprocess = effective_augment(run.recipe.augment), run.recipe.data.preprocess
    differences = {
        "augment.crop is not random_resized": augment.crop != "random_resized",
        "images are changed after their crop": changes_images_on_host(augment),
        "images are not resized bilinearly": (augment.interpolation or preprocess.interpolation) != "bilinear",
        "images have one channel": preprocess.channels != 3,
        "flips alternate": augment.hflip_mode != "random",
    }
    why = next((text for text, is_so in differences.items() if is_so), None)
    if why is not None:
        raise UsageError(
            "--compare supports only RandomResizedCrop and horizontal flips",
            why=why,
            hint=f"use the recipe {DEFAULT_RECIPE}",
        )
