"""`bench infer --loadgen`: MLCommons' LoadGen drives a predictor and judges the result.

LoadGen decides when which image is asked for, measures, and writes its own summary and logs. Images are read and
decoded before, as its rules have it, and lie on the model's device. What it calls VALID is no MLPerf result: that needs
MLCommons' data, model, accuracy and review.
"""

from __future__ import annotations

import array
import json
import queue
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from reconv.bench.infer import open_model
from reconv.bench.run import LogFunction, describe_setup, no_log
from reconv.core.custom_code import TrustCode
from reconv.core.errors import DataError, ReconvError, UsageError
from reconv.inference.backends.choose import plain_network_recipe
from reconv.inference.eval_data import open_eval_set
from reconv.inference.predictor import Predictor
from reconv.recipe.loader import Override

Scenario = Literal["offline", "server", "single", "multi"]
SCENARIOS: dict[Scenario, str] = {
    "offline": "Offline",
    "server": "Server",
    "single": "SingleStream",
    "multi": "MultiStream",
}
MAX_SAMPLES = 1024  # different images; LoadGen repeats them
DURATION_S = 60.0
TARGET_LATENCY_MS = 15.0  # of the server scenario: MLPerf's for ResNet-50
MARGIN = 1.2  # an expected rate below the real one makes a test too short
STREAM_MARGIN = 0.5  # as does an expected latency above the real one
MIN_QUERIES = 700  # 662 are the fewest by which LoadGen judges a 99th percentile
MULTI_STREAM_SAMPLES = 8
_EXTRA = "pip install 'reconv[loadgen]'"
_PERCENTILES = re.compile(r"^(\d+\.\d+) percentile latency \(ns\)\s*:\s*(\d+)$", re.MULTILINE)
_FIELD = re.compile(r"^\s*(.+?)\s*:\s*(.+?)\s*$", re.MULTILINE)
_METRICS = ("Samples per second", "Completed samples per second", "Scheduled samples per second")


@dataclass(frozen=True, slots=True)
class LoadGenConfig:
    """The scenario of a test, its least duration and the limits of the server scenario."""

    scenario: Scenario
    folder: Path  # for LoadGen's summary and logs
    duration_s: float = DURATION_S
    target_qps: float | None = None  # server: images per second that are asked for
    target_latency_ms: float = TARGET_LATENCY_MS  # server
    max_batch: int | None = None


@dataclass(frozen=True, slots=True)
class Samples:
    """Images [n, channels, size, size] in uint8 on the model's device, and their classes, if they are known."""

    pixels: Tensor
    targets: tuple[int, ...] | None
    origin: str


class System:
    """The system under test: one thread predicts what LoadGen asks for, in batches of what waits."""

    def __init__(self, loadgen: Any, predictor: Predictor, samples: Samples, max_batch: int) -> None:
        self._loadgen, self._predictor, self._samples = loadgen, predictor, samples
        self._queries: queue.SimpleQueue[Sequence[Any] | None] = queue.SimpleQueue()
        self._sizes = _powers_of_two(max_batch)
        self._thread = threading.Thread(target=self._work, name="loadgen-predict", daemon=True)
        self.error: Exception | None = None

    def __enter__(self) -> System:
        self._predictor.warm_up(self._sizes)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._queries.put(None)
        self._thread.join()

    def issue(self, query: Sequence[Any]) -> None:
        """Take the samples of a query; LoadGen's thread must not wait."""
        self._queries.put(query)

    def _work(self) -> None:
        while (query := self._queries.get()) is not None:
            waiting = list(query)
            while not self._queries.empty():
                if (more := self._queries.get()) is None:
                    self._queries.put(None)
                    break
                waiting += more
            for batch in self._batches(waiting):
                self._complete(batch, self._classes(batch))

    def _batches(self, samples: list[Any]) -> Iterator[list[Any]]:
        """Batches of the sizes that are warmed up, the largest first."""
        start = 0
        for size in reversed(self._sizes):
            while len(samples) - start >= size:
                yield samples[start : start + size]
                start += size

    def _classes(self, batch: Sequence[Any]) -> list[int]:
        """The best class of each sample; -1 after an error, since LoadGen would wait for a missing one without end."""
        if self.error is not None:
            return [-1] * len(batch)
        pixels = self._samples.pixels
        try:
            rows = torch.tensor([sample.index for sample in batch], device=pixels.device)
            predictions = self._predictor.predict_pixels(pixels[rows], top=1, batch_size=len(batch))
            return [int(prediction.classes[0].index) for prediction in predictions]
        except Exception as error:  # raised when the test has ended
            self.error = error
            return [-1] * len(batch)

    def _complete(self, batch: Sequence[Any], classes: Sequence[int]) -> None:
        data = array.array("i", classes)  # alive until QuerySamplesComplete has copied it
        address, size = data.buffer_info()[0], data.itemsize
        responses = [
            self._loadgen.QuerySampleResponse(sample.id, address + number * size, size)
            for number, sample in enumerate(batch)
        ]
        self._loadgen.QuerySamplesComplete(responses)


def bench_loadgen(
    target: str,
    config: LoadGenConfig,
    *,
    data: str | None = None,
    overrides: Sequence[Override] = (),
    device: str = "auto",
    trust_code: TrustCode = False,
    log: LogFunction = no_log,
) -> dict[str, Any]:
    """Run LoadGen's performance test, and its accuracy test where the classes of the images are known."""
    loadgen = _import_loadgen()
    if config.scenario == "server" and config.target_qps is None:
        raise UsageError(
            "--loadgen server needs --target-qps",
            why="it finds out whether a rate can be served within a latency",
            hint="half of what --loadgen offline reaches is a first try",
        )
    saved, network, opened = open_model(target, overrides, device, trust_code, plain_network_recipe)
    if saved.recipe.task != "classification":
        raise UsageError(
            f"--loadgen measures classifiers, and {target} is for {saved.recipe.task}",
            hint="reconv bench infer without --loadgen",
        )
    predictor = Predictor.from_network(saved, network, opened, log=log)
    samples = _samples(predictor, data)
    max_batch = config.max_batch or predictor.batch_size
    config.folder.mkdir(parents=True, exist_ok=True)
    log(f"{saved.recipe.name}: {len(samples.pixels):,} images of {samples.origin}, {opened.describe()}")
    with System(loadgen, predictor, samples, max_batch) as system:
        settings = _settings(loadgen, config, predictor, samples, max_batch)
        log(f"{SCENARIOS[config.scenario]}: at least {config.duration_s:g} s")
        _run_test(loadgen, system, settings, len(samples.pixels), config.folder)
        accuracy = None
        if samples.targets is not None:
            settings.mode = loadgen.TestMode.AccuracyOnly
            _run_test(loadgen, system, settings, len(samples.pixels), config.folder / "accuracy")
            accuracy = read_accuracy(config.folder / "accuracy" / "mlperf_log_accuracy.json", samples.targets)
    return {
        "bench": "loadgen",
        "scenario": config.scenario,
        **read_summary(config.folder / "mlperf_log_summary.txt"),
        "accuracy": accuracy,
        "num_images": len(samples.pixels),
        "data": samples.origin,
        "max_batch": max_batch,
        "duration_s": config.duration_s,
        "backend": predictor.backend.name,
        "inference_precision": predictor.backend.precision,
        "folder": str(config.folder),
        "notes": [
            "images are decoded and on the model's device before the test begins",
            "VALID is LoadGen's word for a test by its rules; this is not an MLPerf result",
        ],
        **describe_setup(saved.recipe, opened),
    }


def _import_loadgen() -> Any:
    try:
        import mlperf_loadgen
    except ImportError as error:
        raise UsageError("--loadgen needs mlcommons-loadgen", why=str(error), hint=_EXTRA) from error
    return mlperf_loadgen


def _samples(predictor: Predictor, data: str | None) -> Samples:
    """Evenly spaced validation images of `data`, else of the run's own data; random ones of a recipe without data."""
    if data is None and predictor.step is None:
        shape = (MAX_SAMPLES, *predictor.read.shape)
        pixels = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        return Samples(predictor.device.move(pixels), None, "random pixels")
    dataset = open_eval_set(predictor.recipe, predictor.model_classes, data, None)
    count = min(MAX_SAMPLES, len(dataset))
    items = [dataset[number * len(dataset) // count] for number in range(count)]
    try:
        pixels = torch.stack([predictor.read(item.data).pixels for item in items])
    except DataError as error:
        raise DataError(error.what, where=error.where, why=error.why, hint="remove this image") from error
    return Samples(predictor.device.move(pixels), tuple(item.target for item in items), dataset.origin)


def _settings(loadgen: Any, config: LoadGenConfig, predictor: Predictor, samples: Samples, max_batch: int) -> Any:
    """LoadGen's settings, with the rates it has to know before: it prepares the queries of the whole test."""
    settings = loadgen.TestSettings()
    settings.scenario = getattr(loadgen.TestScenario, SCENARIOS[config.scenario])
    settings.mode = loadgen.TestMode.PerformanceOnly
    settings.min_duration_ms, settings.max_duration_ms = round(1000 * config.duration_s), 0
    settings.min_query_count = 1 if config.scenario == "offline" else MIN_QUERIES
    settings.use_token_latencies = False
    if config.scenario in ("offline", "server"):
        rate = max_batch / _batch_seconds(predictor, samples, max_batch)
        settings.offline_expected_qps = MARGIN * rate
        settings.server_target_qps = config.target_qps or rate
        settings.server_target_latency_ns = round(1e6 * config.target_latency_ms)
    else:
        size = 1 if config.scenario == "single" else MULTI_STREAM_SAMPLES
        expected_ns = round(1e9 * STREAM_MARGIN * _batch_seconds(predictor, samples, size))
        settings.single_stream_expected_latency_ns = settings.multi_stream_expected_latency_ns = expected_ns
        settings.multi_stream_samples_per_query = MULTI_STREAM_SAMPLES
    return settings


def _batch_seconds(predictor: Predictor, samples: Samples, batch: int) -> float:
    """The shortest time of a batch in half a second of them, at least five."""
    pixels = samples.pixels[torch.arange(batch, device=samples.pixels.device) % len(samples.pixels)]
    seconds: list[float] = []
    while len(seconds) < 5 or sum(seconds) < 0.5:
        start_s = time.perf_counter()
        predictor.predict_pixels(pixels, top=1, batch_size=batch)
        seconds.append(time.perf_counter() - start_s)
    return min(seconds)


def _run_test(loadgen: Any, system: System, settings: Any, num_samples: int, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    log = loadgen.LogSettings()
    log.log_output.outdir = str(folder)
    log.log_output.copy_summary_to_stdout = False
    log.enable_trace = False
    tested = loadgen.ConstructSUT(system.issue, lambda: None)
    library = loadgen.ConstructQSL(num_samples, num_samples, lambda indices: None, lambda indices: None)
    try:
        loadgen.StartTestWithLogSettings(tested, library, settings, log)
    finally:
        loadgen.DestroyQSL(library)
        loadgen.DestroySUT(tested)
    if system.error is not None:
        raise system.error


def read_summary(file: Path) -> dict[str, Any]:
    """Validity, rate and latencies in LoadGen's summary, and its recommendations after an invalid test."""
    text = file.read_text(encoding="utf-8")
    fields = dict(_FIELD.findall(text))
    if "Result is" not in fields:
        raise ReconvError("LoadGen wrote no result", where=str(file), hint="read its logs beside this file")
    rates = [float(fields[name]) for name in _METRICS if name in fields]
    valid = fields["Result is"] == "VALID"
    lines = [] if valid else [line.strip("* ") for line in text.splitlines() if line.startswith(" * ")]
    return {
        "valid": valid,
        "images_per_s": rates[0] if rates else None,
        "latency_ms": {f"p{float(name):g}": int(ns) / 1e6 for name, ns in _PERCENTILES.findall(text)},
        "recommendations": lines,
    }


def read_accuracy(file: Path, targets: Sequence[int]) -> float:
    """The top-1 accuracy of the responses in LoadGen's accuracy log, each of which is an int32 class."""
    entries = json.loads(file.read_text(encoding="utf-8"))
    classes = {entry["qsl_idx"]: int.from_bytes(bytes.fromhex(entry["data"]), "little") for entry in entries}
    if len(classes) != len(targets):
        raise ReconvError(f"LoadGen logged {len(classes)} responses of {len(targets)}", where=str(file))
    return sum(classes[index] == target for index, target in enumerate(targets)) / len(targets)


def _powers_of_two(largest: int) -> list[int]:
    """1, 2, 4, ... and the largest itself."""
    return sorted({*(2**power for power in range(largest.bit_length()) if 2**power <= largest), largest})
