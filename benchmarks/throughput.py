"""Measure every family of networks on one GPU, training and answering, and write the table as JSON and Markdown.

    python -m benchmarks.throughput [RECIPE ...] [--batch 256] [--modes bf16,tf32,fp32] [--answer-modes bf16,tf32]
                               [--batches 1,8,32,64,128,256] [--peer NAME] [--limit 90] [--within SECONDS]
                               [--compile-s 0] [--device cuda] [--set A.B=V ...] [--json FILE] [--markdown FILE]

One process for each network, one after the other on the device; the next one is started early and imports meanwhile. A
process tells each figure as soon as it has it, so a network that runs into its limit (seconds) loses only the rest,
which the table calls not measured. The peaks of the roofline are measured first, on the same device: matrix products
in each precision, and a copy. A recipe may bring settings of its own: `NAME+batch.size=64+precision.mode=bf16`; of
`answers:NAME` only answers are measured.

With `--compile-s` the same measurements are first made side by side, for at most so long, and thrown away: they fill
the caches of the compilers, which takes most of the time. What torch chose by trial meanwhile, beside other processes,
is deleted, so that a peer chooses again when it has the device to itself.
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

from benchmarks.throughput_tables import lines, markdown

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
START_S = 120  # what imports and the first CUDA call of a process may take
TRAINING_BESIDE, ANSWERING_BESIDE = 4, 5  # side by side, the first by the device's memory
PEAK_SIDE, PEAK_BYTES = 8192, 2**30
ROUNDS = 5
ANSWERS = "answers:"
KEY = ("kind", "mode", "batch")  # of a row: what is told again takes its place
WINDOWS = 5  # of half a second: in shorter ones a peer that its host holds back looks slower than it is
ANSWERS_S = 0.3
CACHE = "TORCHINDUCTOR_CACHE_DIR"  # of torch's compiler
CHOICES = "*.best_config"  # where it keeps what it chose by trial


Found = tuple[dict[str, Any], list[str]]  # a row, and what could not be measured


@dataclass(frozen=True, slots=True)
class Task:
    """What one process measures; `peaks` by precision: operations and bytes a second."""

    recipe: str  # with its own settings behind plus signs
    batch: int
    modes: tuple[str, ...]
    answer_modes: tuple[str, ...]
    batches: tuple[int, ...]
    settings: tuple[str, ...]
    device: str
    peer: str  # a part of its name; empty: none
    peaks: dict[str, tuple[float, float]]

    def overrides(self, mode: str) -> list[tuple[str, object, str]]:
        given: list[tuple[str, object, str]] = [("batch.size", self.batch, "tool"), ("batch.group", "all", "tool")]
        pairs = [pair.partition("=") for pair in (*self.recipe.split("+")[1:], *self.settings)]
        given += [(field, value, "tool") for field, _, value in pairs]
        return [*given, ("precision.mode", mode, "tool")]


def measure_peaks(device: str) -> dict[str, tuple[float, float]]:
    """Operations a second of a square matrix product in each precision, and bytes a second of a copy."""
    import torch

    from reconv.device import open_device
    from reconv.precision import build_precision
    from reconv.recipe import schema

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
        build_precision(schema.PrecisionConfig.model_validate({"mode": mode}), opened.kind)  # switches TF32
        dtype = torch.float32 if width == 4 else torch.bfloat16 if mode == "bf16" else torch.float16
        a, b = (torch.randn(side, side, device=opened.torch).to(dtype) for _ in range(2))
        peaks[mode] = 2 * side**3 / best_s(lambda a=a, b=b: a @ b), bytes_per_s  # type: ignore[misc]
    return peaks


def work(task: Task, turn: Any, told: Any) -> None:
    """Import, wait for the device, and tell one figure after the other."""
    import torch

    from reconv.bench.bench_infer import bench_infer  # noqa: F401 (imported before the turn)
    from reconv.bench.bench_train import bench_train  # noqa: F401

    told.put((task.recipe, "ready", None))
    turn.wait()
    for kind, modes in (("train", task.modes[:1]), ("infer", task.answer_modes), ("train", task.modes[1:])):
        for mode in modes:
            try:
                for row, notes in trained(task, mode) if kind == "train" else answered(task, mode):
                    told.put((task.recipe, "row", row))
                    for note in notes:
                        told.put((task.recipe, "failed", note))
            except Exception as error:  # one figure's failure must not lose the others
                told.put((task.recipe, "failed", f"{kind} in {mode}: {repr(error)[:300]}"))
            gc.collect()  # a step and its recording hold each other
            torch.cuda.empty_cache()
    told.put((task.recipe, "done", None))


def trained(task: Task, mode: str, is_measured: bool = True) -> Iterator[Found]:
    """The rate of a training step in short windows; then once more, with the peer's."""
    from reconv.bench.baselines import compare
    from reconv.bench.bench_target import open_subject
    from reconv.bench.bench_train import bench_train, say_nothing
    from reconv.bench.timing import Wish

    name, overrides = task.recipe.split("+")[0], task.overrides(mode)
    wish = Wish(WINDOWS) if is_measured else Wish(1, 1, 0)
    result = bench_train(name, overrides=overrides, device=task.device, wish=wish)
    rates = result["window_images_per_s"]
    row = {"kind": "train", "mode": mode, "batch": result["batch"], "images_per_s": result["images_per_s"]}
    row |= {"lowest": min(rates), "highest": max(rates), "n": len(rates), "step_ms": result["step_ms"]["median"]}
    row |= {"device": result["device"], "model": result["recipe"]["model"]["name"], "image_size": result["image_size"]}
    row |= limits(task, mode, result["batch"], result["step_ms"]["median"] / 1000, training=True)
    yield row, []
    peers = _peers(task, mode, task.modes)
    if peers is not None:
        subject = open_subject(name, input="device", data=None, overrides=overrides, device=task.device)
        theirs, notes = compare(subject, peers, wish, result["images_per_s"], say_nothing)
        for peer_name, peer in theirs.items():
            row |= {"peer": peer["images_per_s"], "peer_name": peer_name}
        yield row, notes


def answered(task: Task, mode: str, seconds: float = ANSWERS_S) -> Iterator[Found]:
    """The rate and the latency of answers at each batch size; algorithms by cuDNN's rule, not by trial."""
    from reconv.bench.bench_infer import bench_infer
    from reconv.bench.inference_baselines import others

    overrides = [*task.overrides(mode), ("engine.autotune", "off", "tool")]
    peers = _peers(task, mode, task.answer_modes)
    for batch in task.batches:
        result = bench_infer(
            task.recipe.split("+")[0],
            batches=(batch,),
            overrides=overrides,
            device=task.device,
            seconds=seconds,
            peers=others(peers, peers[0].name) if peers else (),
        )
        (own,) = result["batches"]
        row = {"kind": "infer", "mode": mode, "batch": batch, "images_per_s": own["images_per_s"]}
        row |= {"latency_ms": own["latency_ms"], "n": own["answers"], "difference": own.get("difference")}
        for theirs in (peer for found in result["peers"].values() for peer in found):
            row["peer"] = theirs["images_per_s"]
        row |= limits(task, mode, batch, batch / own["images_per_s"], training=False)
        yield row, result["notes"]


def _peers(task: Task, mode: str, modes: Sequence[str]) -> list[Any] | None:
    """The peer of this network that the table is to have, if there is one; of the first precision alone."""
    from reconv.bench.baselines import find_peers
    from reconv.recipe.loader import load

    recipe = load(task.recipe.split("+")[0], task.overrides(mode)).recipe
    if not task.peer or recipe.task == "detection" or mode != modes[0]:
        return None
    return find_peers(recipe.model.name, task.peer)[0][:1] or None


def fill_caches(tasks: Sequence[Task], until_s: float) -> None:
    """Make every measurement of the first precisions once, side by side; forget the figures and torch's choices."""
    context = multiprocessing.get_context("spawn")
    with (
        context.Pool(TRAINING_BESIDE, maxtasksperchild=1) as training,
        context.Pool(ANSWERING_BESIDE, maxtasksperchild=1) as answering,
    ):
        asked = [(task, training.apply_async(_try_training, (task,))) for task in tasks if task.modes]
        asked += [(task, answering.apply_async(_try_answering, (task,))) for task in tasks if task.answer_modes]
        for task, result in asked:
            try:
                print(f"{task.recipe}: {result.get(max(0.1, until_s - time.monotonic()))}", flush=True)
            except multiprocessing.TimeoutError:
                print(f"{task.recipe}: not compiled in time", flush=True)
    for file in Path(os.environ[CACHE]).rglob(CHOICES):
        file.unlink()


def _try_training(task: Task) -> str:
    return _tried("trained", lambda: trained(task, task.modes[0], is_measured=False))


def _try_answering(task: Task) -> str:
    return _tried("answered", lambda: answered(task, task.answer_modes[0], seconds=0))


def _tried(what: str, work: Callable[[], Iterator[Found]]) -> str:
    began_s = time.monotonic()
    try:
        said = "; ".join(note for _, notes in work() for note in notes)
    except Exception as error:  # it will be said again when it is measured
        said = repr(error)[:300]
    return f"{what} once after {time.monotonic() - began_s:.0f} s {said}"


def limits(task: Task, mode: str, batch: int, taken_s: float, *, training: bool) -> dict[str, Any]:
    """The share of the roofline and what makes it, by the peaks measured on this device."""
    import torch

    from reconv.bench.bench_target import num_classes_of
    from reconv.bench.roofline import Peak, bytes_share, layer_costs, least_s
    from reconv.models import build_model
    from reconv.recipe.loader import load
    from reconv.trainer.build.network import model_options

    if mode not in task.peaks:
        return {}
    recipe = load(task.recipe.split("+")[0], task.overrides(mode)).recipe
    with torch.device("meta"):
        model = build_model(recipe.model.name, **model_options(recipe, num_classes_of(recipe)))
    side = (recipe.augment.size if training else None) or recipe.data.preprocess.size
    costs = layer_costs(model, (recipe.data.preprocess.channels, side, side), training=training)
    peak = Peak(*task.peaks[mode], MODES[mode], "measured in this run")
    by_bytes = bytes_share(costs, batch, peak, training=training)
    return {
        "roofline_fraction": least_s(costs, batch, peak, training=training) / taken_s,
        "limited_by": "bytes" if by_bytes > 0.5 else "operations",
        "bytes_share": by_bytes,
    }


def measure(tasks: Sequence[Task], limit_s: float, until_s: float) -> dict[str, dict[str, Any]]:
    """Rows and failures by recipe, each process in its turn and the next one importing meanwhile."""
    context = multiprocessing.get_context("spawn")
    found: dict[str, dict[str, Any]] = {task.recipe: {"rows": [], "failed": []} for task in tasks}
    started: list[tuple[Any, Any, Any]] = []

    def start(number: int) -> None:
        if number == len(started) < len(tasks):
            told, turn = context.Queue(), context.Event()
            process = context.Process(target=work, args=(tasks[number], turn, told), daemon=True)
            process.start()
            started.append((process, turn, told))

    start(0)
    for number, task in enumerate(tasks):
        began_s, last = time.monotonic(), found[task.recipe]
        if began_s > until_s:
            last |= {"failed": ["no time was left"], "wall_s": 0.0}
            continue
        process, turn, told = started[number]
        is_ready = _heard(told, last, "ready", began_s + START_S)
        turn.set()
        start(number + 1)
        began_s = time.monotonic()
        if not (is_ready and _heard(told, last, "done", began_s + limit_s)):
            last["failed"].append(f"the rest: not measured within {limit_s:.0f} s")
        last["wall_s"] = time.monotonic() - began_s
        process.kill()
        process.join()
        print("\n".join(lines(task.recipe, last)), flush=True)
    for process, *_ in started:
        process.kill()
    return found


def _heard(told: Any, found: dict[str, Any], wanted: str, until: float) -> bool:
    """Take over what a process tells until it tells what is wanted, or time is over."""
    while True:
        try:
            _, what, value = told.get(timeout=max(0.01, until - time.monotonic()))
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
    parser.add_argument(
        "--modes", default="bf16,tf32,fp32", help="of training, the first before the answers; empty: none"
    )
    parser.add_argument("--answer-modes", default="bf16,tf32")
    parser.add_argument("--batches", default="1,8,32,64,128,256")
    parser.add_argument("--peer", default="channels_last compiled", help="of the first precision; empty: none")
    parser.add_argument("--limit", type=float, default=90, help="seconds of one network")
    parser.add_argument("--compile-s", type=float, default=0, help="seconds for compiling side by side; 0: not done")
    parser.add_argument("--within", type=float, default=math.inf, help="seconds in which networks may begin")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    began_s = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # its memory on the device goes with it
        peaks = pool.apply(measure_peaks, (given.device,))
    print({mode: f"{p[0] / 1e12:.3g} TFLOP/s, {p[1] / 1e12:.3g} TB/s" for mode, p in peaks.items()}, flush=True)
    modes, answer_modes = (tuple(filter(None, text.split(","))) for text in (given.modes, given.answer_modes))
    batches = tuple(int(batch) for batch in given.batches.split(","))
    tasks = [
        Task(
            recipe=recipe.removeprefix(ANSWERS),
            batch=given.batch,
            modes=() if recipe.startswith(ANSWERS) else modes,
            answer_modes=answer_modes,
            batches=batches,
            settings=tuple(given.set),
            device=given.device,
            peer=given.peer,
            peaks=peaks,
        )
        for recipe in given.recipes
    ]
    if given.compile_s:
        os.environ.setdefault(CACHE, tempfile.mkdtemp())
        fill_caches(tasks, began_s + given.compile_s)
        print(f"caches filled after {time.monotonic() - began_s:.0f} s", flush=True)
    found = measure(tasks, given.limit, began_s + given.within)
    text = markdown(found, peaks)
    print(f"{time.monotonic() - began_s:.0f} s in all\n\n{text}")
    if given.json:
        given.json.write_text(json.dumps({"peaks": peaks, "networks": found}, indent=1))
    if given.markdown:
        given.markdown.write_text(text)


if __name__ == "__main__":
    main()
