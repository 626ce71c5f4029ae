"""Measure training and inference of every family of networks on one GPU; write the tables as JSON and Markdown.

    python -m benchmarks.training.throughput [RECIPE ...] [--batch 256] [--train-modes bf16,tf32,fp32]
                                    [--infer-modes bf16,tf32] [--infer-batches 1,8,32,64,128,256] [--baseline NAME]
                                    [--limit 90] [--within SECONDS] [--compile-s 0] [--device cuda] [--set A.B=V ...]
                                    [--json FILE] [--markdown FILE]

Each network is measured in a process of its own, one after the other; the next process starts early and imports
meanwhile. Every figure is sent as soon as it is known, so a network that exceeds its limit (seconds) loses only the
rest, which the table lists as not measured. The roofline's peaks are measured first: matrix products in each
precision, and a copy. A recipe may carry overrides, `NAME+batch.size=64+precision.mode=bf16`; `infer:NAME` measures
inference only.

With `--compile-s` all measurements are first made in parallel, for at most that long, and thrown away: this fills the
compilers' caches, which takes most of the time. What torch autotuned meanwhile, beside other processes, is deleted, so
that a baseline is tuned again when it has the device to itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import os
import queue
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import as_overrides
from benchmarks.training.throughput_tables import markdown, network_lines
from reconv.bench.baselines import compare, find_baselines
from reconv.bench.infer import bench_infer
from reconv.bench.inference_baselines import inference_baselines
from reconv.bench.roofline import Peak, layer_costs, memory_bound_fraction, min_time_s
from reconv.bench.run import bench_args, no_log, num_classes_of, open_bench_run
from reconv.bench.timing import TimingConfig
from reconv.bench.train import bench_train
from reconv.build.model import model_options
from reconv.device import open_device
from reconv.models import build_model
from reconv.precision import build_precision
from reconv.recipe.loader import Override, load
from reconv.recipe.parts.precision import PrecisionConfig

RECIPES = (
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnet50+model.name=resnext50_32x4d",
    "resnext101-habana-1card-bf16-256",
    "se-resnext101-nv-90ep-8gpu-tf32",
    "mobilenet-v2-habana-1card-bf16",
    "googlenet-habana-1card-bf16",
    "efficientnet-b0-nv-400ep-8gpu-tf32",
    "efficientnet-b4-nv-400ep-8gpu-tf32+batch.size=64",
    "ssd-resnet34+batch.size=128+detection.metric=voc10",
)
MODES = {"bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4}  # bytes of a value
START_S = 120  # limit for the imports and the first CUDA call of a process
PARALLEL_TRAINING, PARALLEL_INFERENCE = 4, 5  # processes that fill caches; the device's memory limits the first
PEAK_SIDE, PEAK_BYTES = 8192, 2**30
ROUNDS = 5
INFER_ONLY = "infer:"
KEY = ("kind", "mode", "batch")  # of a row: a later row with the same key replaces it
WINDOWS = 5  # of half a second: in shorter ones a baseline limited by its host looks slower than it is
INFER_S = 0.3
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
AUTOTUNED = "*.best_config"  # files in that cache


Measured = tuple[dict[str, Any], list[str]]  # a row, and notes on what could not be measured


@dataclass(frozen=True, slots=True)
class Task:
    """The measurements of one process; `peaks` by precision: operations and bytes per second."""

    recipe: str  # with its own overrides after plus signs
    batch: int
    train_modes: tuple[str, ...]
    infer_modes: tuple[str, ...]
    infer_batches: tuple[int, ...]
    settings: tuple[str, ...]
    device: str
    baseline: str  # part of its name; empty: none
    peaks: dict[str, tuple[float, float]]

    def overrides(self, mode: str) -> list[Override]:
        options = {"batch.size": self.batch, "batch.group": "all"}
        options |= dict(pair.split("=", 1) for pair in (*self.recipe.split("+")[1:], *self.settings))
        return as_overrides({**options, "precision.mode": mode})


def measure_peaks(device: str) -> dict[str, tuple[float, float]]:
    """Operations per second of a square matrix product in each precision, and bytes per second of a copy."""
    opened = open_device(device)
    is_gpu = opened.kind == "cuda"
    side, num_bytes = (PEAK_SIDE, PEAK_BYTES) if is_gpu else (256, 2**22)

    def best_s(work: Callable[[], object]) -> float:
        def once() -> float:
            began_s = time.perf_counter()
            for _ in range(ROUNDS):
                work()
            opened.synchronize()
            return (time.perf_counter() - began_s) / ROUNDS

        return min(once() for _ in range(ROUNDS))

    source = torch.zeros(num_bytes, dtype=torch.uint8, device=opened.torch)
    target = torch.empty_like(source)
    bytes_per_s = 2 * num_bytes / best_s(lambda: target.copy_(source))
    peaks = {}
    for mode, width in MODES.items():
        if mode == "tf32" and not is_gpu:
            continue
        build_precision(PrecisionConfig.model_validate({"mode": mode}), opened.kind)  # switches TF32
        dtype = torch.float32 if width == 4 else torch.bfloat16 if mode == "bf16" else torch.float16
        a, b = (torch.randn(side, side, device=opened.torch).to(dtype) for _ in range(2))
        peaks[mode] = 2 * side**3 / best_s(lambda a=a, b=b: a @ b), bytes_per_s  # type: ignore[misc]
    return peaks


def measure_in_process(task: Task, turn: Any, messages: Any) -> None:
    """Wait for the device, then send each figure as soon as it is known; the imports are done by now."""
    messages.put(("ready", None))
    turn.wait()
    for kind, modes in (("train", task.train_modes[:1]), ("infer", task.infer_modes), ("train", task.train_modes[1:])):
        for mode in modes:
            try:
                for row, notes in measure_training(task, mode) if kind == "train" else measure_inference(task, mode):
                    messages.put(("row", row))
                    for note in notes:
                        messages.put(("failed", note))
            except Exception as error:  # one failure must not lose the other figures
                messages.put(("failed", f"{kind} in {mode}: {repr(error)[:300]}"))
            gc.collect()  # a step and its CUDA graph reference each other
            torch.cuda.empty_cache()
    messages.put(("done", None))


def measure_training(task: Task, mode: str, is_measured: bool = True) -> Iterator[Measured]:
    """The throughput of a training step; then again, with that of the baseline."""
    name, overrides = task.recipe.split("+")[0], task.overrides(mode)
    config = TimingConfig(WINDOWS) if is_measured else TimingConfig(1, 1, 0)
    result = bench_train(name, overrides=overrides, device=task.device, config=config)
    rates = result["window_images_per_s"]
    row = {"kind": "train", "mode": mode, "batch": result["batch"], "images_per_s": result["images_per_s"]}
    row |= {"lowest": min(rates), "highest": max(rates), "n": len(rates), "step_ms": result["step_ms"]["median"]}
    row |= {"device": result["device"], "model": result["recipe"]["model"]["name"], "image_size": result["image_size"]}
    row |= roofline(task, mode, result["batch"], result["step_ms"]["median"] / 1000, training=True)
    yield row, []
    baselines = find_baseline(task, mode, task.train_modes)
    if baselines is not None:
        with open_bench_run(bench_args(name, overrides=overrides, device=task.device)) as run:
            found, notes = compare(run, baselines, config, result["images_per_s"], no_log)
        for baseline_name, baseline in found.items():
            row |= {"baseline": baseline["images_per_s"], "baseline_name": baseline_name}
        yield row, notes


def measure_inference(task: Task, mode: str, seconds: float = INFER_S) -> Iterator[Measured]:
    """Throughput and latency at each batch size, with cuDNN's heuristics instead of its benchmark mode."""
    overrides = [*task.overrides(mode), *as_overrides({"engine.cudnn_benchmark": "off"})]
    baselines = find_baseline(task, mode, task.infer_modes)
    for batch in task.infer_batches:
        result = bench_infer(
            task.recipe.split("+")[0],
            batches=(batch,),
            overrides=overrides,
            device=task.device,
            seconds=seconds,
            baselines=inference_baselines(baselines, baselines[0].name) if baselines else (),
        )
        (own,) = result["batches"]
        row = {"kind": "infer", "mode": mode, "batch": batch, "images_per_s": own["images_per_s"]}
        row |= {"latency_ms": own["latency_ms"], "n": own["iterations"], "difference": own.get("difference")}
        for baseline in (row for rows in result["baselines"].values() for row in rows):
            row["baseline"] = baseline["images_per_s"]
        row |= roofline(task, mode, batch, batch / own["images_per_s"], training=False)
        yield row, result["notes"]


def find_baseline(task: Task, mode: str, modes: Sequence[str]) -> list[Any] | None:
    """The baseline of this network, if there is one; in the first precision only."""
    recipe = load(task.recipe.split("+")[0], task.overrides(mode)).recipe
    if not task.baseline or mode != modes[0]:
        return None
    return find_baselines(recipe.model.name, task.baseline)[0][:1] or None


def fill_caches(tasks: Sequence[Task], until_s: float) -> None:
    """Make every measurement of the first precisions once, in parallel; drop the figures and what torch autotuned."""
    context = multiprocessing.get_context("spawn")
    with (
        context.Pool(PARALLEL_TRAINING, maxtasksperchild=1) as training,
        context.Pool(PARALLEL_INFERENCE, maxtasksperchild=1) as inference,
    ):
        results = [(task, training.apply_async(_warm_up_training, (task,))) for task in tasks if task.train_modes]
        results += [(task, inference.apply_async(_warm_up_inference, (task,))) for task in tasks if task.infer_modes]
        for task, result in results:
            try:
                print(f"{task.recipe}: {result.get(max(0.1, until_s - time.monotonic()))}", flush=True)
            except multiprocessing.TimeoutError:
                print(f"{task.recipe}: not compiled in time", flush=True)
    for file in Path(os.environ[INDUCTOR_CACHE]).rglob(AUTOTUNED):
        file.unlink()


def _warm_up_training(task: Task) -> str:
    return _warm_up("training", lambda: measure_training(task, task.train_modes[0], is_measured=False))


def _warm_up_inference(task: Task) -> str:
    return _warm_up("inference", lambda: measure_inference(task, task.infer_modes[0], seconds=0))


def _warm_up(what: str, work: Callable[[], Iterator[Measured]]) -> str:
    began_s = time.monotonic()
    try:
        notes_text = "; ".join(note for _, notes in work() for note in notes)
    except Exception as error:  # raised again in the measurement
        notes_text = repr(error)[:300]
    return f"{what} compiled after {time.monotonic() - began_s:.0f} s {notes_text}"


def roofline(task: Task, mode: str, batch: int, taken_s: float, *, training: bool) -> dict[str, Any]:
    """The fraction of the roofline reached and what limits it, by the peaks measured on this device."""

    if mode not in task.peaks:
        return {}
    recipe = load(task.recipe.split("+")[0], task.overrides(mode)).recipe
    with torch.device("meta"):
        model = build_model(recipe.model.name, **model_options(recipe, num_classes_of(recipe)))
    side = (recipe.augment.size if training else None) or recipe.data.preprocess.size
    costs = layer_costs(model, (recipe.data.preprocess.channels, side, side), training=training)
    peak = Peak(*task.peaks[mode], MODES[mode], "measured in this run")
    by_bytes = memory_bound_fraction(costs, batch, peak, training=training)
    return {
        "roofline_fraction": min_time_s(costs, batch, peak, training=training) / taken_s,
        "limited_by": "bytes" if by_bytes > 0.5 else "operations",
        "bytes_share": by_bytes,
    }


def measure_all(tasks: Sequence[Task], limit_s: float, until_s: float) -> dict[str, dict[str, Any]]:
    """Rows and failures by recipe; while a process measures, the next one imports."""
    context = multiprocessing.get_context("spawn")
    found: dict[str, dict[str, Any]] = {task.recipe: {"rows": [], "failed": []} for task in tasks}
    started: list[tuple[Any, Any, Any]] = []

    def start(number: int) -> None:
        if number == len(started) < len(tasks):
            messages, turn = context.Queue(), context.Event()
            process = context.Process(target=measure_in_process, args=(tasks[number], turn, messages), daemon=True)
            process.start()
            started.append((process, turn, messages))

    start(0)
    for number, task in enumerate(tasks):
        began_s, last = time.monotonic(), found[task.recipe]
        if began_s > until_s:
            last |= {"failed": ["no time was left"], "wall_s": 0.0}
            continue
        process, turn, messages = started[number]
        is_ready = _receive_until(messages, last, "ready", began_s + START_S)
        turn.set()
        start(number + 1)
        began_s = time.monotonic()
        if not (is_ready and _receive_until(messages, last, "done", began_s + limit_s)):
            last["failed"].append(f"the rest: not measured within {limit_s:.0f} s")
        last["wall_s"] = time.monotonic() - began_s
        process.kill()
        process.join()
        print("\n".join(network_lines(task.recipe, last)), flush=True)
    for process, *_ in started:
        process.kill()
    return found


def _receive_until(messages: Any, found: dict[str, Any], wanted: str, until: float) -> bool:
    """Collect the rows a process sends until the wanted message comes; False when time is up."""
    while True:
        try:
            what, value = messages.get(timeout=max(0.01, until - time.monotonic()))
        except queue.Empty:
            return False
        if what == "row":
            key = [value[name] for name in KEY]
            found["rows"] = [row for row in found["rows"] if [row[name] for name in KEY] != key] + [value]
        elif what == "failed":
            found["failed"].append(value)
        elif what == wanted:
            return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--train-modes", default="bf16,tf32,fp32", help="precisions; empty: no training")
    parser.add_argument("--infer-modes", default="bf16,tf32", help="precisions; empty: no inference")
    parser.add_argument("--infer-batches", default="1,8,32,64,128,256")
    parser.add_argument("--baseline", default="channels_last compiled", help="in the first precision; empty: none")
    parser.add_argument("--limit", type=float, default=90, help="seconds per network")
    parser.add_argument("--compile-s", type=float, default=0, help="seconds for compiling in parallel first")
    parser.add_argument("--within", type=float, default=math.inf, help="start no network after this many seconds")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    began_s = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # frees its device memory when it ends
        peaks = pool.apply(measure_peaks, (options.device,))
    print({mode: f"{p[0] / 1e12:.3g} TFLOP/s, {p[1] / 1e12:.3g} TB/s" for mode, p in peaks.items()}, flush=True)
    train_modes, infer_modes = (tuple(filter(None, t.split(","))) for t in (options.train_modes, options.infer_modes))
    tasks = [
        Task(
            recipe=recipe.removeprefix(INFER_ONLY),
            batch=options.batch,
            train_modes=() if recipe.startswith(INFER_ONLY) else train_modes,
            infer_modes=infer_modes,
            infer_batches=tuple(map(int, options.infer_batches.split(","))),
            settings=tuple(options.set),
            device=options.device,
            baseline=options.baseline,
            peaks=peaks,
        )
        for recipe in options.recipes
    ]
    if options.compile_s:
        os.environ.setdefault(INDUCTOR_CACHE, tempfile.mkdtemp())
        fill_caches(tasks, began_s + options.compile_s)
        print(f"caches filled after {time.monotonic() - began_s:.0f} s", flush=True)
    found = measure_all(tasks, options.limit, began_s + options.within)
    text = markdown(found, peaks)
    print(f"{time.monotonic() - began_s:.0f} s in all\n\n{text}")
    if options.json:
        options.json.write_text(json.dumps({"peaks": peaks, "networks": found}, indent=1))
    if options.markdown:
        options.markdown.write_text(text)


if __name__ == "__main__":
    main()
