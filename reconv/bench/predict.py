"""`bench infer --data`: from image files to predictions, by batch size.

Images are read and decoded as `predict` and `serve` do it. The latency is that of one batch alone; for the throughput,
the next batches are read while the model computes.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from reconv.bench.infer import (
    SECONDS_PER_SIZE,
    LatencyConfig,
    concurrent_rows,
    measure_latencies_s,
    open_model,
    summarize,
    summarize_latencies,
    utilization_at_best,
)
from reconv.bench.run import LogFunction, describe_setup, no_log
from reconv.core.custom_code import TrustCode
from reconv.core.errors import DataError
from reconv.data.dataset import Dataset, sample_files
from reconv.data.inspect.lenient_open import find_box_reader
from reconv.data.readers.csv_table import has_several_labels
from reconv.data.readers.dataset_factory import open_dataset
from reconv.data.readers.detect import detect
from reconv.inference.backends.choose import plain_network_recipe
from reconv.inference.image_input import ImageFile, ImageInput, image_files
from reconv.inference.predictor import Predictor
from reconv.recipe.loader import Override
from reconv.recipe.parts.data import DataConfig

MAX_IMAGES = 2048  # different ones; more iterations repeat them
WINDOWS = 5
WINDOW_S = 1.0


@dataclass(frozen=True, slots=True)
class RealImages:
    """The images of a benchmark, and where they are from."""

    images: list[ImageInput]
    origin: str
    read_from: str  # `files`, or `memory` for images that were taken out of shards before

    def batches(self, batch: int) -> Iterator[list[ImageInput]]:
        """Endless batches: the images in order, again and again."""
        stream = cycle(self.images)
        while True:
            yield list(islice(stream, batch))


def bench_predict(
    target: str,
    data: str,
    *,
    batches: Sequence[int] = (),
    concurrency: Sequence[int] = (),
    overrides: Sequence[Override] = (),
    device: str = "auto",
    iterations: int | None = None,
    seconds: float = SECONDS_PER_SIZE,
    windows: int = WINDOWS,
    trust_code: TrustCode = False,
    log: LogFunction = no_log,
) -> dict[str, Any]:
    """Measure the predictions of a recipe or a run for real images, reading and decoding included."""
    real = open_images(data)
    saved, network, opened = open_model(target, overrides, device, trust_code, plain_network_recipe)
    recipe = saved.recipe
    messages: list[str] = []

    def log_and_keep(text: str) -> None:
        messages.append(text)
        log(text)

    predictor = Predictor.from_network(saved, network, opened, log=log_and_keep)  # says why it is not faster
    log(f"{recipe.name}: {recipe.model.name}, {len(real.images):,} images of {real.origin}, {opened.describe()}")
    rows: list[dict[str, Any]] = []
    concurrent: list[dict[str, Any]] = []
    for batch in batches or default_batches(predictor):
        predictor.warm_up([batch])
        config = LatencyConfig(iterations, seconds)
        rows.append(_measure(predictor, real, batch, config, windows))
        concurrent += concurrent_rows(batch, concurrency, _client(predictor, real, batch), config)
        rate, latency = rows[-1]["images_per_s"], rows[-1]["latency_ms"]
        log(f"batch {batch}: {rate:,.1f} images/s, p50 {latency['p50']:.2f} ms")
    fastest = max(rows, key=lambda row: row["images_per_s"])
    return {
        **summarize(recipe, rows),
        "window_images_per_s": fastest["window_images_per_s"],
        "windows": windows,
        "concurrent": concurrent,
        "input": "real",
        "data": real.origin,
        "num_images": len(real.images),
        "read_from": real.read_from,
        "decoder": predictor.read.decoder,
        "backend": predictor.backend.name,
        "inference_precision": predictor.backend.precision,
        "difference": predictor.backend.difference,
        "baselines": {},
        "notes": [*_notes(real, rows), *(text for text in messages if predictor.backend.name == "eager")],
        "peak_memory_bytes": opened.peak_memory_bytes(),
        **utilization_at_best(recipe, network, rows, opened),
        **describe_setup(recipe, opened),
    }


def default_batches(predictor: Predictor) -> list[int]:
    """One image, a few, and the batch size of `predict`."""
    return sorted({1, 8, 64, predictor.batch_size})


def open_images(data: str, limit: int = MAX_IMAGES) -> RealImages:
    """Up to `limit` validation images of a dataset, or of a folder of images that is no dataset."""
    try:
        detected = detect(Path(data))
    except DataError:
        if not os.path.exists(data):
            raise
        files = image_files(Path(data))  # raises where there are none either
        return RealImages(list(files[:limit]), data, "files")
    boxes = find_box_reader(detected) is not None
    multilabel = detected.kind == "csv" and has_several_labels(detected.path)
    dataset = open_dataset(detected.kind, detected.path, "val", DataConfig(), boxes=boxes, multilabel=multilabel)
    images = _inputs(dataset, min(limit, len(dataset)))
    return RealImages(images, dataset.origin, "files" if isinstance(images[0], ImageFile) else "memory")


def _inputs(dataset: Dataset, count: int) -> list[ImageInput]:
    """Evenly spaced images of a dataset: the paths of files, or the bytes or pixels of what lies in shards."""
    indices = np.arange(count) * len(dataset) // count
    files = sample_files(dataset, indices)
    if files is not None:
        return [ImageFile(Path(os.fsdecode(path)), is_named=False) for path in files[0]]
    return [dataset[int(index)].data for index in indices]


def _measure(predictor: Predictor, real: RealImages, batch: int, config: LatencyConfig, windows: int) -> dict[str, Any]:
    """Latency of single batches, then the throughput of windows of batches."""
    stream = real.batches(batch)
    seconds = measure_latencies_s(lambda: predictor.predict(next(stream), batch_size=batch), config)
    num_batches = max(2, round(WINDOW_S / statistics.median(seconds)))
    if config.iterations is not None:
        num_batches = min(num_batches, config.iterations)
    rates = []
    for _ in range(windows):
        images = [image for _ in range(num_batches) for image in next(stream)]
        start_s = time.perf_counter()
        predictor.predict(images, batch_size=batch)
        rates.append(len(images) / (time.perf_counter() - start_s))
    return {
        "batch": batch,
        "images_per_s": statistics.median(rates),
        "window_images_per_s": rates,
        "windows": windows,
        "images_per_window": num_batches * batch,
        **summarize_latencies(seconds),
    }


def _client(predictor: Predictor, real: RealImages, batch: int) -> Callable[[], object]:
    """A request of one batch, for several threads: each takes the next images."""
    numbers = count()

    def request() -> object:
        first = next(numbers) * batch
        return predictor.predict(
            [real.images[n % len(real.images)] for n in range(first, first + batch)], batch_size=batch
        )

    return request


def _notes(real: RealImages, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Notes on what the numbers do not include."""
    notes = ["files are in the page cache after their first read; the first read of a cold disk is slower"]
    if real.read_from == "memory":
        notes = ["images were taken out of their shards before; decoding is measured, reading is not"]
    largest = max(row["batch"] for row in rows)
    if largest > len(real.images):
        notes.append(f"{len(real.images):,} images are fewer than a batch of {largest}: it repeats some")
    return notes
