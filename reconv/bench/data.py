"""`bench data`: how many training pictures a second the loader makes, on one core and on all.

Owns the result's fields and the alternation of ours and the ordinary pipeline. Refuses to know how either works.
Invariant: both are measured in turn in one process, on the same pictures, boxes and flips, from bytes to mirrored
uint8 planes in a batch; nothing trains.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from reconv.batch import Batch
from reconv.bench.ordinary import ordinary_picture
from reconv.bench.subject import Subject, about, open_subject
from reconv.bench.timing import percentile
from reconv.data.augment import draw_flips, draw_host, effective, is_recolouring
from reconv.data.order import Order
from reconv.errors import UsageError
from reconv.recipe.load import Override
from reconv.recipe.plan import Plan
from reconv.run import parts

DEFAULT_RECIPE = "resnet50"  # RandomResizedCrop to 224 px and a flip
BATCH = 32
_MEASURED_AS = {  # one stream of small batches that never ends, and no threads but the workers
    "batch.size": BATCH,
    "batch.group": "all",
    "batch.micro": "auto",
    "data.tail": "wrap",
    "engine.threads": 1,
}

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Window:
    """Images a second of wall clock, and of the calling thread's own processor time.

    The second is what a core would do if nobody else used it: on a busy machine only that can be compared.
    """

    images_per_s: float
    images_per_cpu_s: float


@dataclass(frozen=True, slots=True)
class Rates:
    """The windows of one pipeline."""

    windows: tuple[Window, ...]

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
    given += [("data.workers", workers, "--workers")] if workers is not None else []
    subject = open_subject(recipe, input="real", data=data, overrides=given, device="cpu")
    if compare:
        _refuse_other_than_ordinary(subject)
    tell(f"{subject.source.origin}: {len(subject.source):,} pictures to {subject.plan.size_at(0)} px")
    steps = max(1, round(images / BATCH))
    one_core, ordinary = _on_one_core(subject, steps, windows, compare)
    tell(f"one core: {one_core.median:,.1f} images/s")
    num_workers = subject.plan.workers or 1
    everyone = _Timed(_ours(subject, replace(subject.plan, workers=num_workers)), steps)
    everyone.window()
    in_all = Rates(tuple(everyone.window() for _ in range(windows)))
    return {
        "bench": "data",
        "images_per_s": in_all.median,
        "images_per_s_per_core": one_core.median,
        "workers": num_workers,
        "scaling": in_all.median / one_core.median,
        "all_cores": in_all.spread(),
        "one_core": {**one_core.spread(), "images_per_cpu_s": one_core.median_cpu},
        "images_per_window": steps * BATCH,
        "num_pictures": len(subject.source),
        "image_size": subject.plan.size_at(0),
        "peak_memory_bytes": subject.device.peak_memory_bytes(),
        "data": subject.source.origin,
        **({} if ordinary is None else _compared(subject, one_core, ordinary)),
        **about(subject.recipe, subject.device),
    }


def _on_one_core(subject: Subject, steps: int, windows: int, compare: bool) -> tuple[Rates, Rates | None]:
    """Our loader in the calling thread alone and, in turn with it, the ordinary pipeline."""
    timed = [_Timed(_ours(subject, replace(subject.plan, workers=0)), steps)]
    timed += [_Timed(_ordinary(subject), steps)] if compare else []
    for pipeline in timed:
        pipeline.window()  # warm-up: the files are in the page cache from then on
    rows = [[pipeline.window() for pipeline in timed] for _ in range(windows)]
    ours, *theirs = (Rates(tuple(column)) for column in zip(*rows, strict=True))
    return ours, theirs[0] if theirs else None


def _compared(subject: Subject, ours: Rates, ordinary: Rates) -> dict[str, Any]:
    """The ordinary pipeline's rate, ours as a multiple of it, and how far the pictures are apart in grey levels."""
    pairs = zip(ours.windows, ordinary.windows, strict=True)
    return {
        "ordinary": {**ordinary.spread(), "images_per_cpu_s": ordinary.median_cpu},
        "ratio": ours.median / ordinary.median,
        "ratio_windows": [mine.images_per_s / theirs.images_per_s for mine, theirs in pairs],
        "ratio_cpu": ours.median_cpu / ordinary.median_cpu,
        "mean_difference": _mean_difference(subject),
    }


class _Timed:
    """A pipeline of batches, timed window by window."""

    def __init__(self, batches: Iterator[Tensor], steps: int) -> None:
        self._batches = batches
        self._steps = steps

    def window(self) -> Window:
        """The rates over the next steps."""
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        num_images = sum(len(next(self._batches)) for _ in range(self._steps))
        cpu_s, wall_s = time.thread_time() - began_cpu_s, time.perf_counter() - began_s
        return Window(num_images / wall_s, num_images / cpu_s)


def _ours(subject: Subject, plan: Plan) -> Iterator[Tensor]:
    """The training loader's pictures, mirrored as the device would mirror them."""
    loader = parts.train_loader(subject.recipe, plan, subject.source, subject.device.move)
    for micro_batches in loader.steps(0, sys.maxsize):
        for batch in micro_batches:
            yield _mirrored(batch)


def _mirrored(batch: Batch) -> Tensor:
    images = batch["images"]
    return torch.where(batch["flips"].view(-1, 1, 1, 1), images.flip(-1), images)


def _ordinary(subject: Subject) -> Iterator[Tensor]:
    """The same pictures by the ordinary pipeline, in batches of the same size."""
    recipe, source, plan = subject.recipe, subject.source, subject.plan
    augment, size = effective(recipe.augment), plan.size_at(0)
    order = Order(len(source), plan.global_batch, recipe.data.tail, recipe.seed)
    for step in range(sys.maxsize):
        positions = order.positions(step)
        draws, flips = draw_host(augment, recipe.seed, positions), draw_flips(augment, recipe.seed, positions)
        indices = order.indices_of(positions)
        yield torch.stack(
            [
                ordinary_picture(source.sample(int(index)), size, augment, draws[row], bool(flips[row]))
                for row, index in enumerate(indices)
            ]
        )


def _mean_difference(subject: Subject) -> float:
    """How far the first batch's pictures are apart, in grey levels; computed apart from all timing."""
    ours, theirs = next(_ours(subject, replace(subject.plan, workers=0))), next(_ordinary(subject))
    return float((ours[: len(theirs)].float() - theirs[: len(ours)].float()).abs().mean())


def _refuse_other_than_ordinary(subject: Subject) -> None:
    """Refuse to compare a pipeline that makes other pictures than the ordinary one."""
    augment, preprocess = effective(subject.recipe.augment), subject.recipe.data.preprocess
    others = {
        "augment.crop is not resized": augment.crop != "resized",
        "pictures are recoloured": is_recolouring(augment),
        "images are not resized bilinearly": (augment.interpolation or preprocess.interpolation) != "bilinear",
        "images have one channel": preprocess.channels != 3,
        "flips alternate": augment.flip_form != "random",
    }
    why = next((text for text, is_so in others.items() if is_so), None)
    if why is not None:
        raise UsageError(
            "--compare knows RandomResizedCrop and a flip alone", why=why, then=f"use the recipe {DEFAULT_RECIPE}"
        )
