"""`bench data`: how many training images a second the loader makes, on one core and on all.

Owns the result's fields and the alternation of ours and the ordinary pipeline. Refuses to know how either works.
Invariant: what is compared is measured in turn in one process, on the same images, boxes and flips, from bytes to
mirrored uint8 planes in a batch; nothing trains.
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

from reconv.batch import Batch
from reconv.bench.baseline_pipeline import ordinary_picture
from reconv.bench.bench_target import BenchTarget, about, open_subject
from reconv.bench.data_paths import AS_GIVEN, Way, open_ways
from reconv.bench.timing import percentile
from reconv.data.dataset import select_rows
from reconv.data.decode.simplejpeg import jpeg_decoder
from reconv.data.pipeline.buffers import BlockingTransfer
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.pipeline.workers.process_pool import ProcessPool
from reconv.data.pipeline.workers.thread_pool import InlineWorker, Workers, open_workers
from reconv.data.sampler import Sampler
from reconv.data.transforms.geometry import random_flips
from reconv.data.transforms.params import changes_colors_on_host, effective_augment, host_params
from reconv.errors import UsageError
from reconv.recipe.loader import Override, load
from reconv.recipe.schema import Recipe
from reconv.trainer.build import loaders as parts

DEFAULT_RECIPE = "resnet50"  # RandomResizedCrop to 224 px and a flip
BATCH = 32
_MEASURED_AS = {  # one stream of small batches that never ends, and no threads but the workers
    "batch.size": BATCH,
    "batch.group": "all",
    "batch.micro": "auto",
    "data.drop_last": False,
    "engine.num_threads": 1,
}
_BATCHES_LOOKED_AT = 4  # for the difference between two pipelines' images
_ORDINARY = "ordinary"

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class MeasuredWindow:
    """Images a second of wall clock, and of processor time.

    The second is what a core would do if nobody else used it: on a busy machine only that can be compared.
    """

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

    def spread(self) -> dict[str, Any]:
        """The median with what lies around it."""
        rates = [w.images_per_s for w in self.windows]
        return {
            "images_per_s": self.median,
            "lowest": min(rates),
            "highest": max(rates),
            "p95": percentile(rates, 95),
            "windows": len(rates),
            "images_per_cpu_s": self.median_cpu,
        }

    def over(self, other: DataRates) -> dict[str, Any]:
        """These as multiples of others measured in turn with them: the median over windows, and each window."""
        pairs = list(zip(self.windows, other.windows, strict=True))
        ratios = [mine.images_per_s / theirs.images_per_s for mine, theirs in pairs]
        by_cpu = [mine.images_per_cpu_s / theirs.images_per_cpu_s for mine, theirs in pairs]
        return {
            "ratio": statistics.median(ratios),
            "ratio_cpu": statistics.median(by_cpu),
            "ratio_windows": ratios,
            "ratio_cpu_windows": by_cpu,
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
    tell: Tell = lambda text: None,
) -> dict[str, Any]:
    """Measure the loader on real data and, for comparison, the ordinary pipeline in turn with it."""
    given = [*overrides, *((field, value, "bench") for field, value in _MEASURED_AS.items())]
    given += [("data.num_workers", workers, "--workers")] if workers is not None else []
    _refuse_gpu(load(recipe, given).recipe, recipe)
    subject = open_subject(recipe, input="real", data=data, overrides=given, device="cpu")
    tell(f"{subject.source.origin}: {len(subject.source):,} images to {subject.plan.size_at(0)} px")
    steps = max(1, round(images / BATCH))
    compared: dict[str, Any] = {}
    if compare:
        _refuse_other_than_ordinary(subject)
        with open_ways(subject, steps * BATCH, tell) as ways:
            compared = _compared(ways, steps, windows, tell)
    one_core, in_all = _scaled(subject, steps, windows)
    num_workers = subject.plan.workers or 1
    pairs = in_all.over(one_core)
    return {
        "bench": "data",
        "images_per_s": in_all.median,
        "images_per_s_per_core": one_core.median,
        "workers": num_workers,
        "scaling": pairs["ratio"],
        "scaling_windows": pairs["ratio_windows"],
        "scaling_cpu": num_workers * pairs["ratio_cpu"],
        "all_cores": in_all.spread(),
        "one_core": one_core.spread(),
        "stage_ms": _stage_ms(subject, steps),
        "images_per_window": steps * BATCH,
        "num_pictures": len(subject.source),
        "image_size": subject.plan.size_at(0),
        "jpeg_decoder": "native" if subject.plan.decoder == "native" else jpeg_decoder()[0],
        "peak_memory_bytes": subject.device.peak_memory_bytes(),
        "data": subject.source.origin,
        **compared,
        **about(subject.recipe, subject.device),
    }


def _compared(ways: Sequence[Way], steps: int, windows: int, tell: Tell) -> dict[str, Any]:
    """The ordinary pipeline's rate on the data as they are, each way as a multiple of it, and how far its images are
    from the ordinary pipeline's on the same data, in grey levels."""
    tell(f"the ordinary pipeline and {len(ways)} ways of ours in turn, {windows} windows each")
    pipelines = {_ORDINARY: _ordinary(ways[0].subject)} | {way.name: _ours(way.subject, 0) for way in ways}
    rates = _in_turn({name: _Stream(batches, steps) for name, batches in pipelines.items()}, windows)
    ordinary = rates[_ORDINARY]
    paths = {
        way.name: {
            **rates[way.name].spread(),
            **rates[way.name].over(ordinary),
            "mean_difference": _mean_difference(way.subject),
        }
        for way in ways
    }
    as_given = paths[AS_GIVEN]
    top = {name: as_given[name] for name in ("ratio", "ratio_cpu", "ratio_windows", "mean_difference")}
    return {"ordinary": ordinary.spread(), "paths": paths, **top}


def _scaled(subject: BenchTarget, steps: int, windows: int) -> tuple[DataRates, DataRates]:
    """Our loader in the calling thread alone and, in turn with it, with all workers.

    Each window is a stream of its own, from its first image to its last: nothing was read ahead before it began. The
    workers are those of all windows: processes take seconds to start, once in a run.
    """
    num_workers = subject.plan.workers or 1
    workers = open_workers(subject.plan.backend, num_workers)
    context = DataContext(subject.device, workers)
    one = _Whole(lambda: _ours(subject, 0, steps), steps)
    everyone = _Whole(lambda: _ours(subject, num_workers, steps, context), steps, partial(_cpu_s, workers))
    try:
        rates = _in_turn({"one": one, "all": everyone}, windows)
    finally:
        workers.close()
    return rates["one"], rates["all"]


def _cpu_s(workers: Workers) -> float:
    """Processor time of this process and of its workers."""
    ids = workers.process_ids if isinstance(workers, ProcessPool) else []
    ticks = [Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[11:13] for number in ids]
    return time.process_time() + sum(int(tick) for pair in ticks for tick in pair) / os.sysconf("SC_CLK_TCK")


def _in_turn(pipelines: Mapping[str, _Stream | _Whole], windows: int) -> dict[str, DataRates]:
    """A window of each, then again; the first time is the warm-up: files are in the page cache from then on."""
    rounds = [{name: pipeline.window() for name, pipeline in pipelines.items()} for _ in range(windows + 1)]
    return {name: DataRates(tuple(measured[name] for measured in rounds[1:])) for name in pipelines}


@dataclass(frozen=True, slots=True)
class _Stream:
    """A stream of batches that is continued window by window."""

    batches: Iterator[Tensor]
    steps: int

    def window(self) -> MeasuredWindow:
        """The rates over the next steps."""
        return _timed(self.batches, self.steps)


@dataclass(frozen=True, slots=True)
class _Whole:
    """Streams of batches, a new one for each window."""

    begin: Callable[[], Iterator[Tensor]]
    steps: int
    cpu_s: Callable[[], float] = time.process_time

    def window(self) -> MeasuredWindow:
        """The rates over a stream's first steps; nothing is under way when it ends."""
        return _timed(self.begin(), self.steps, self.cpu_s)


def _timed(batches: Iterator[Tensor], steps: int, clock_s: Callable[[], float] = time.process_time) -> MeasuredWindow:
    began_s, began_cpu_s = time.perf_counter(), clock_s()
    num_images = sum(len(images) for images in islice(batches, steps))
    cpu_s, wall_s = clock_s() - began_cpu_s, time.perf_counter() - began_s
    return MeasuredWindow(num_images / wall_s, num_images / cpu_s)


def _stage_ms(subject: BenchTarget, steps: int) -> dict[str, float]:
    """Where the time of one image goes on one core, in a pass apart from all timing of rates."""
    plan, context = replace(subject.plan, workers=0), DataContext(subject.device, InlineWorker())
    loader = parts.train_loader(subject.recipe, plan, subject.source, context)
    num_images = sum(len(batch) for micro_batches in loader.steps(0, steps) for batch in micro_batches)
    return {stage: 1000 * seconds / num_images for stage, seconds in context.stage_times.seconds.items()}


def _ours(
    subject: BenchTarget, workers: int, steps: int = sys.maxsize, context: DataContext | None = None
) -> Iterator[Tensor]:
    """The training loader's images, mirrored as the device would mirror them."""
    plan = replace(subject.plan, workers=workers)
    context = context or DataContext(BlockingTransfer(subject.device.move))
    loader = parts.train_loader(subject.recipe, plan, subject.source, context)
    for micro_batches in loader.steps(0, steps):
        for batch in micro_batches:
            yield _mirrored(batch)


def _mirrored(batch: Batch) -> Tensor:
    images = batch["images"]
    for row in batch["flips"].nonzero().flatten().tolist():
        images[row] = images[row].flip(-1)
    return images


def _ordinary(subject: BenchTarget) -> Iterator[Tensor]:
    """The same images by the ordinary pipeline, in batches of the same size."""
    recipe, source, plan = subject.recipe, subject.source, subject.plan
    augment, size = effective_augment(recipe.augment), plan.size_at(0)
    order = Sampler(len(source), plan.global_batch, recipe.data.drop_last, recipe.seed)
    for step in range(sys.maxsize):
        positions = order.positions(step)
        params, flips = host_params(augment, recipe.seed, positions), random_flips(augment, recipe.seed, positions)
        indices = order.indices_of(positions)
        yield torch.stack(
            [
                ordinary_picture(source[int(index)], size, augment, select_rows(params, row), bool(flips[row]))
                for row, index in enumerate(indices)
            ]
        )


def _mean_difference(subject: BenchTarget) -> float:
    """How far the first batches' images are apart, in grey levels; computed apart from all timing."""
    both = zip(_ours(subject, 0), _ordinary(subject), strict=True)
    apart = [(ours.float() - theirs.float()).abs().mean() for ours, theirs in islice(both, _BATCHES_LOOKED_AT)]
    return float(torch.stack(apart).mean())


def _refuse_gpu(recipe: Recipe, name: str) -> None:
    """Refuse what only a GPU can tell: this bench is the host's."""
    if recipe.data.backend == "gpu":
        raise UsageError(
            "bench data measures the host's loader, and data.backend is gpu",
            then=f"reconv bench train {name} --input real --data DIR --set data.backend=gpu",
        )


def _refuse_other_than_ordinary(subject: BenchTarget) -> None:
    """Refuse to compare a pipeline that makes other images than the ordinary one."""
    augment, preprocess = effective_augment(subject.recipe.augment), subject.recipe.data.preprocess
    others = {
        "augment.crop is not random_resized": augment.crop != "random_resized",
        "images are recoloured": changes_colors_on_host(augment),
        "images are not resized bilinearly": (augment.interpolation or preprocess.interpolation) != "bilinear",
        "images have one channel": preprocess.channels != 3,
        "flips alternate": augment.hflip_mode != "random",
    }
    why = next((text for text, is_so in others.items() if is_so), None)
    if why is not None:
        raise UsageError(
            "--compare knows RandomResizedCrop and a flip alone", why=why, then=f"use the recipe {DEFAULT_RECIPE}"
        )
