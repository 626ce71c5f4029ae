"""`bench infer` without data: throughput and latency of a model's inference, by batch size.

Batch norms are folded, weights have the precision of the recipe, and on CUDA each batch size is one captured graph.
Images are already normalized on the device: reading and decoding are not measured.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reconv.bench.baselines import find_baselines
from reconv.bench.inference_baselines import InferenceBaseline, Run, inference_baselines
from reconv.bench.roofline import layer_costs, utilization
from reconv.bench.run import LogFunction, describe_setup, no_log, num_classes_of
from reconv.bench.timing import percentile
from reconv.build.model import Network, build_network, compile_for, uses_compile
from reconv.build.saved_model import SavedModel, allow_code, build_saved_model, read_saved_model, read_saved_recipe
from reconv.checkpoint.locate import LocatedWeights, locate
from reconv.core.custom_code import CodeConsent, TrustCode
from reconv.core.errors import ResourceError, UsageError
from reconv.core.machine import Machine, usable_cores
from reconv.device import CudaGraph, Device, configure_algorithms, is_out_of_memory, open_device
from reconv.inference.backends.captured_network import FusedInference
from reconv.inference.backends.fold import fold_network
from reconv.inference.backends.precisions import DTYPES, trained_precision
from reconv.recipe.loader import Override, load
from reconv.recipe.parts.code import add_code_path
from reconv.recipe.schema import Recipe

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MIN_ITERATIONS, MAX_ITERATIONS = 20, 500  # of one batch size, where their number is not given
SECONDS_PER_SIZE = 3.0
WARMUP = 3
PERCENTILES = (50, 90, 95, 99)  # of latencies
_NORM_IMAGES = 4


def bench_infer(
    target: str,
    *,
    batches: Sequence[int] = BATCHES,
    concurrency: Sequence[int] = (),
    overrides: Sequence[Override] = (),
    device: str = "auto",
    iterations: int | None = None,
    seconds: float = SECONDS_PER_SIZE,
    baselines: Sequence[InferenceBaseline] = (),
    trust_code: TrustCode = False,
    log: LogFunction = no_log,
) -> dict[str, Any]:
    """Measure inference of the model of a recipe or a run, and of baselines, at each batch size.

    With `concurrency`, also that many clients at once, each of which sends its next batch when the last one is done. A
    CUDA graph has one set of tensors: it takes one batch at a time, and the other clients wait.
    """
    recipe, network, opened = open_network(target, overrides, device, trust_code)
    if recipe.precision.ops.float32 or recipe.precision.ops.low_precision:
        raise UsageError(
            "the recipe sets the dtype of single operations",
            where="precision.ops",
            why="bench infer runs the whole model in one dtype",
            hint="--set precision.ops.float32=[] --set precision.ops.low_precision=[]",
        )
    preprocess = recipe.data.preprocess
    shape = (preprocess.channels, preprocess.size, preprocess.size)
    dtype = DTYPES.get(trained_precision(recipe), torch.float32)
    folded = fold_network(network.model, shape, dtype)
    model, num_folded = folded.model, folded.num_folded
    log(f"{recipe.name}: {recipe.model.name}, {num_folded} norms folded, {opened.describe()}")
    capture = _graph_capture(recipe, opened)
    fused = None if capture is None else FusedInference(model, capture, folded.exact)
    layout = torch.channels_last if network.channels_last else torch.contiguous_format
    config = LatencyConfig(iterations, seconds)
    rows, concurrent, notes = [], [], []
    found: dict[str, list[dict[str, Any]]] = {baseline.name: [] for baseline in baselines}
    for batch in batches:
        try:
            images = _images((batch, *shape), dtype, opened).contiguous(memory_format=layout)
            run, details, note = _prepare(model, images, recipe, fused, opened)
            rows.append(_row(batch, _latencies_s(run, opened, config)) | details)
            notes += [f"batch {batch}: {note}"] if note else []
            concurrent += concurrent_rows(batch, concurrency, synchronized(run, opened, capture is not None), config)
        except Exception as error:
            if is_out_of_memory(error):
                raise _out_of_memory(batch, rows, opened) from error
            raise
        log(f"batch {batch}: {rows[-1]['images_per_s']:,.1f} images/s, p50 {rows[-1]['latency_ms']['p50']:.2f} ms")
        for baseline in baselines:
            log(f"batch {batch}: measuring {baseline.name}")
            measured, why = _measure_baseline(baseline, num_classes_of(recipe), images, opened, config)
            if measured is None:
                notes.append(f"{baseline.name} could not be measured at batch {batch}: {why}")
            else:
                found[baseline.name].append({**measured, "ratio": rows[-1]["images_per_s"] / measured["images_per_s"]})
    return {
        **summarize(recipe, rows),
        "input": "device",
        "concurrent": concurrent,
        "norms_folded": num_folded,
        "compiled": _uses_compile(recipe, opened),
        "cuda_graph": capture is not None,
        "baselines": found,
        "notes": notes,
        "peak_memory_bytes": opened.peak_memory_bytes(),
        **utilization_at_best(recipe, network, rows, opened),
        **describe_setup(recipe, opened),
    }


def find_inference_baselines(
    target: str, overrides: Sequence[Override], named: str
) -> tuple[list[InferenceBaseline], list[str]]:
    """The baselines of installed packages for this model, and why others are missing."""
    is_run = Path(target).is_dir()
    recipe = read_saved_recipe(locate(target)) if is_run else load(target, overrides).recipe
    baselines, missing = find_baselines(recipe.model.name)
    return inference_baselines(baselines, named), missing


def summarize(recipe: Recipe, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The rows of the batch sizes, and the best of them."""
    fastest = max(rows, key=lambda row: row["images_per_s"])
    return {
        "bench": "infer",
        "images_per_s": fastest["images_per_s"],  # of the fastest batch size
        "fastest_batch": fastest["batch"],
        "latency_ms": rows[0]["latency_ms"],  # of the first batch size
        "latency_batch": rows[0]["batch"],
        "batches": list(rows),
        "image_size": recipe.data.preprocess.size,
        "precision": recipe.precision.mode,
    }


def utilization_at_best(
    recipe: Recipe, network: Network, rows: Sequence[dict[str, Any]], device: Device
) -> dict[str, Any]:
    """The utilization of the device at the fastest batch size."""
    preprocess = recipe.data.preprocess
    costs = layer_costs(network.model, (preprocess.channels, preprocess.size, preprocess.size), training=False)
    fastest = max(rows, key=lambda row: row["images_per_s"])
    seconds = fastest["batch"] / fastest["images_per_s"]
    return utilization(costs, fastest["batch"], seconds, device.describe(), recipe.precision.mode, training=False)


def open_network(
    target: str, overrides: Sequence[Override], device: str, trust_code: TrustCode = False
) -> tuple[Recipe, Network, Device]:
    """The model of a run or checkpoint with its weights, or of a recipe with random ones; not yet compiled."""
    saved, network, opened = open_model(target, overrides, device, trust_code)
    return saved.recipe, network, opened


def open_model(
    target: str,
    overrides: Sequence[Override],
    device: str,
    trust_code: TrustCode = False,
    built_as: Callable[[Recipe], Recipe] = lambda recipe: _without_compile(recipe),
) -> tuple[SavedModel, Network, Device]:
    """Load the model of a run or a checkpoint, or build that of a recipe, on its device.

    `built_as` gives the recipe that the model is built from. The weights of a recipe are random.
    """
    if Path(target).is_dir():
        located, consent = locate(target), CodeConsent.of(trust_code)
        saved = read_saved_model(located, weights="auto", recipe=None, trust_code=consent)
        saved = replace(saved, recipe=_with_overrides(saved.recipe, located, overrides, consent))
        opened = _open_device(saved.recipe, device)
        return saved, build_saved_model(saved, built_as(saved.recipe), opened), opened
    recipe = load(target, overrides).recipe
    add_code_path(recipe)
    opened = _open_device(recipe, device)
    network = build_network(built_as(recipe), num_classes_of(recipe), opened)
    _init_norm_statistics(network, recipe, opened)
    names = tuple(map(str, range(num_classes_of(recipe))))
    return SavedModel(recipe, names, False, {}, Path(target), "raw", None), network, opened


def _init_norm_statistics(network: Network, recipe: Recipe, device: Device) -> None:
    """Give the norms of an untrained model the statistics of random images.

    With their initial statistics the outputs of a deep model vanish or explode, and depend on rounding alone.
    """
    norms = [module for module in network.model.modules() if isinstance(module, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    preprocess = recipe.data.preprocess
    shape = (_NORM_IMAGES, preprocess.channels, preprocess.size, preprocess.size)
    network.model.eval()
    for norm in norms:
        norm.train().momentum = 1.0
    with torch.no_grad(), network.precision.autocast():
        network.model(_images(shape, network.precision.input_dtype, device))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval().momentum = momentum


def _with_overrides(
    recipe: Recipe, located: LocatedWeights, overrides: Sequence[Override], consent: CodeConsent
) -> Recipe:
    """The recipe of a saved model with the overrides of the command line."""
    if not overrides:
        return recipe
    if located.run is None:
        raise UsageError(
            "--set needs a recipe or a run directory", where=str(located.checkpoint), hint="leave --set out"
        )
    file = located.run.recipe
    allow_code(load(str(file)).recipe, consent, file)  # it may name other code than the checkpoint
    return load(str(file), overrides).recipe


def _open_device(recipe: Recipe, name: str) -> Device:
    threads = usable_cores(Machine()) if recipe.engine.num_threads == "auto" else recipe.engine.num_threads
    opened = open_device(name, threads=threads)
    configure_algorithms(opened, recipe.engine)
    return opened


def _without_compile(recipe: Recipe) -> Recipe:
    """The recipe without torch.compile and kernels of training: the folded model is compiled later."""
    engine = recipe.engine.model_copy(update={"compile": "off", "fused_kernels": "off"})
    return recipe.model_copy(update={"engine": engine})


def _uses_compile(recipe: Recipe, device: Device) -> bool:
    """True if the model is compiled by torch.compile: where the recipe insists, and on Gaudi."""
    return uses_compile(recipe, device) and (recipe.engine.compile == "on" or device.kind != "cuda")


def _graph_capture(recipe: Recipe, device: Device) -> CudaGraph | None:
    """Graph capture for inference; None if the recipe or the device has none."""
    if recipe.engine.cuda_graphs == "off" or recipe.engine.compile != "auto":
        return None
    return device.graph_capture()


def _prepare(
    model: nn.Module, images: Tensor, recipe: Recipe, fused: FusedInference | None, device: Device
) -> tuple[Run, dict[str, Any], str]:
    """Inference on one batch, fields for the result, and a note."""
    if fused is not None:
        captured = fused(images)
        return captured.run, {"fused": captured.num_fused, "difference": captured.difference}, captured.note
    if not _uses_compile(recipe, device):
        return lambda: model(images), {}, ""
    torch.compiler.reset()  # torch.compile stops recompiling after eight batch sizes
    if device.kind == "cuda":
        compiled = torch.compile(model, dynamic=False, mode="reduce-overhead")
    else:
        compiled = compile_for(model, device)
    return lambda: compiled(images), {}, ""


@dataclass(frozen=True, slots=True)
class LatencyConfig:
    """Iterations or seconds to measure for each batch size."""

    iterations: int | None
    seconds: float


def _latencies_s(run: Run, device: Device, config: LatencyConfig) -> list[float]:
    """The time of each iteration until the device has finished it, without the warm-up."""

    return measure_latencies_s(synchronized(run, device), config)


def synchronized(run: Run, device: Device, exclusive: bool = False) -> Callable[[], None]:
    """A function for any thread that runs the model until the device has finished; `exclusive`: in turns."""
    turn = threading.Lock() if exclusive else nullcontext()

    def iterate() -> None:
        with torch.no_grad() if device.kind == "hpu" else torch.inference_mode(), turn:
            run()
            device.synchronize()

    return iterate


def measure_latencies_s(iterate: Callable[[], object], config: LatencyConfig) -> list[float]:
    """The time of each iteration, without the warm-up."""

    def timed() -> float:
        start_s = time.perf_counter()
        iterate()
        return time.perf_counter() - start_s

    warm_s = [timed() for _ in range(WARMUP)][-1]
    wanted = round(config.seconds / max(warm_s, 1e-9))
    return [timed() for _ in range(config.iterations or max(MIN_ITERATIONS, min(MAX_ITERATIONS, wanted)))]


def concurrent_rows(
    batch: int, concurrency: Sequence[int], request: Callable[[], object], config: LatencyConfig
) -> list[dict[str, Any]]:
    """Throughput, and percentiles of the time of a request, of several clients at once."""
    rows = []
    for clients in concurrency:
        wall_s, seconds = _measure_clients(clients, request, config)
        rate = batch * len(seconds) / wall_s
        rows.append({"batch": batch, "concurrency": clients, "images_per_s": rate, **summarize_latencies(seconds)})
    return rows


def _measure_clients(clients: int, request: Callable[[], object], config: LatencyConfig) -> tuple[float, list[float]]:
    """The time from the first request to the last answer, and that of each request."""
    barrier, seconds = threading.Barrier(clients), []
    limit = None if config.iterations is None else config.iterations * clients
    numbers = itertools.count()

    def client() -> tuple[float, float]:
        request()  # the first request of a thread allocates what it needs
        barrier.wait()
        start_s = now_s = time.perf_counter()
        while (now_s - start_s < config.seconds) if limit is None else (next(numbers) < limit):
            sent_s = now_s
            request()
            now_s = time.perf_counter()
            seconds.append(now_s - sent_s)
        return start_s, now_s

    with ThreadPoolExecutor(clients, thread_name_prefix="client") as pool:
        times = [future.result() for future in [pool.submit(client) for _ in range(clients)]]
    return max(end for _, end in times) - min(start for start, _ in times), seconds


def _measure_baseline(
    baseline: InferenceBaseline, num_classes: int, images: Tensor, device: Device, config: LatencyConfig
) -> tuple[dict[str, Any] | None, str]:
    """A baseline on the same images; or None, and why it could not be measured."""
    try:
        run = baseline.prepare(num_classes, images.contiguous(memory_format=torch.channels_last), device)
        return _row(len(images), _latencies_s(run, device, config)), ""
    except Exception as error:  # a failing baseline must not lose the results so far
        if not (is_out_of_memory(error) or isinstance(error, RuntimeError | ValueError | TypeError)):
            raise
        return None, repr(error).splitlines()[0]


def _images(shape: Sequence[int], dtype: torch.dtype, device: Device) -> Tensor:
    """Random images, the same at every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device.torch, dtype)


def _out_of_memory(batch: int, rows: Sequence[dict[str, Any]], device: Device) -> ResourceError:
    """The error for a batch that does not fit, with the sizes that do."""
    fitting = ",".join(str(row["batch"]) for row in rows)
    return ResourceError(
        "out of memory",
        where=device.describe(),
        why=f"a batch of {batch:,} images does not fit",
        hint=f"--batches {fitting}" if fitting else "use smaller ones: --batches N,N",
    )


def _row(batch: int, seconds: Sequence[float]) -> dict[str, Any]:
    images_per_s = batch * len(seconds) / sum(seconds)
    return {"batch": batch, "images_per_s": images_per_s, **summarize_latencies(seconds)}


def summarize_latencies(seconds: Sequence[float]) -> dict[str, Any]:
    """Percentiles, mean and maximum of the time of a batch, and how many were measured."""
    latency_ms = {f"p{p}": 1000 * percentile(seconds, p) for p in PERCENTILES}
    latency_ms |= {"mean": 1000 * statistics.mean(seconds), "max": 1000 * max(seconds)}
    return {"latency_ms": latency_ms, "iterations": len(seconds)}
