"""`bench infer`: how fast a network answers, batch size by batch size.

Owns the network as it would be served (norms folded, weights in the precision of the answer, compiled on CUDA) and the
result's fields. Refuses to know files of pictures: decoding and normalising are not part of an answer here.
Invariant: an answer's latency ends when the device has finished it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reconv.bench.cost import layer_costs, shares
from reconv.bench.subject import about, num_classes_of
from reconv.bench.timing import percentile
from reconv.checkpoint.locate import Located, locate
from reconv.device import Device, choose_algorithms, open_device
from reconv.doctor import Machine, usable_cores
from reconv.errors import UsageError
from reconv.models.fold import folded
from reconv.recipe.load import Override, load
from reconv.recipe.schema import Recipe
from reconv.run.network import Network, build_network, compiled, is_compiled
from reconv.run.saved import build_saved, read_saved

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LEAST_ANSWERS, MOST_ANSWERS = 20, 500  # of one batch size, where their number is not given
SECONDS_PER_SIZE = 3.0
WARMUP = 3
_DTYPES = {  # of weights and images; fp32 in the other modes
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "bf16-all": torch.bfloat16,
    "fp16": torch.float16,
    "16.16": torch.float16,
    "16.32": torch.float16,
}

Tell = Callable[[str], None]


def bench_infer(
    target: str,
    *,
    batches: Sequence[int] = BATCHES,
    overrides: Sequence[Override] = (),
    device: str = "auto",
    answers: int | None = None,
    tell: Tell = lambda text: None,
) -> dict[str, Any]:
    """Measure the answers of a recipe's network, or of a run's."""
    recipe, network, opened = _open(target, overrides, device)
    if recipe.precision.ops.float32 or recipe.precision.ops.lower:
        raise UsageError(
            "the recipe gives single operations a type of their own",
            where="precision.ops",
            why="the network is measured in one type from end to end",
            then="--set precision.ops.float32=[] --set precision.ops.lower=[]",
        )
    preprocess = recipe.data.preprocess
    shape = (preprocess.channels, preprocess.size, preprocess.size)
    model, num_folded = folded(network.model, shape)
    dtype = _DTYPES.get(recipe.precision.mode, torch.float32)
    model = model.to(dtype)
    has_compiler = is_compiled(recipe, opened)
    tell(f"{recipe.name}: {recipe.model.name}, {num_folded} norms folded, {opened.describe()}")
    layout = torch.channels_last if network.channels_last else torch.contiguous_format
    rows = []
    for batch in batches:
        generator = torch.Generator().manual_seed(0)
        images = (
            torch.randn(batch, *shape, generator=generator).to(opened.torch, dtype).contiguous(memory_format=layout)
        )
        seconds = _latencies_s(_ready(model, has_compiler, opened), images, opened, answers)
        rows.append(_row(batch, seconds))
        tell(f"batch {batch}: {rows[-1]['images_per_s']:,.1f} images/s, p50 {rows[-1]['latency_ms']['p50']:.2f} ms")
    fastest = max(rows, key=lambda row: row["images_per_s"])
    costs = layer_costs(network.model, shape, training=False)
    return {
        "bench": "infer",
        "images_per_s": fastest["images_per_s"],  # of the fastest batch size
        "fastest_batch": fastest["batch"],
        "latency_ms": rows[0]["latency_ms"],  # of the first batch size
        "latency_batch": rows[0]["batch"],
        "batches": rows,
        "image_size": preprocess.size,
        "precision": recipe.precision.mode,
        "norms_folded": num_folded,
        "compiled": has_compiler,
        "peak_memory_bytes": opened.peak_memory_bytes(),
        **shares(
            costs,
            fastest["batch"],
            fastest["batch"] / fastest["images_per_s"],
            opened.describe(),
            recipe.precision.mode,
            training=False,
        ),
        **about(recipe, opened),
    }


def _open(target: str, overrides: Sequence[Override], device: str) -> tuple[Recipe, Network, Device]:
    """A run's or checkpoint's network with its weights, or a recipe's with those of its seed; not yet compiled."""
    if Path(target).is_dir():
        located = locate(target)
        saved = read_saved(located, weights="auto", recipe=None)
        recipe = _changed(saved.recipe, located, overrides)
        opened = _open_device(recipe, device)
        return recipe, build_saved(saved, _uncompiled(recipe), opened), opened
    recipe = load(target, overrides).recipe
    opened = _open_device(recipe, device)
    return recipe, build_network(_uncompiled(recipe), num_classes_of(recipe), opened), opened


def _changed(recipe: Recipe, located: Located, overrides: Sequence[Override]) -> Recipe:
    """A saved recipe with what the command line changes in how it computes."""
    if not overrides:
        return recipe
    if located.run is None:
        raise UsageError("--set needs a recipe or a run folder", where=str(located.checkpoint), then="leave --set out")
    return load(str(located.run.recipe), overrides).recipe


def _open_device(recipe: Recipe, name: str) -> Device:
    threads = usable_cores(Machine()) if recipe.engine.threads == "auto" else recipe.engine.threads
    opened = open_device(name, threads=threads)
    choose_algorithms(opened, recipe.engine)
    return opened


def _uncompiled(recipe: Recipe) -> Recipe:
    """The same recipe; what is compiled is the folded network, later."""
    return recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"compile": "off"})})


def _ready(model: nn.Module, is_compiled: bool, device: Device) -> Callable[[Tensor], Any]:
    """The network as it answers one batch size; on CUDA a compiled one is launched as one graph."""
    if not is_compiled:
        return model
    torch.compiler.reset()  # a size is compiled once more after eight others, and then no more
    if device.kind != "cuda":
        return compiled(model, device)
    recorded: Callable[[Tensor], Any] = torch.compile(model, dynamic=False, mode="reduce-overhead")
    return recorded


def _latencies_s(model: Callable[[Tensor], Any], images: Tensor, device: Device, answers: int | None) -> list[float]:
    """The time of each answer, from its call to its end on the device; warm-up left out."""

    def answer() -> float:
        began_s = time.perf_counter()
        model(images)
        device.synchronize()
        return time.perf_counter() - began_s

    with torch.no_grad() if device.kind == "hpu" else torch.inference_mode():
        warm_s = [answer() for _ in range(WARMUP)][-1]
        wanted = round(SECONDS_PER_SIZE / max(warm_s, 1e-9))
        return [answer() for _ in range(answers or max(LEAST_ANSWERS, min(MOST_ANSWERS, wanted)))]


def _row(batch: int, seconds: Sequence[float]) -> dict[str, Any]:
    latency_ms = {f"p{p}": 1000 * percentile(seconds, p) for p in (50, 95, 99)}
    images_per_s = batch * len(seconds) / sum(seconds)
    return {"batch": batch, "images_per_s": images_per_s, "latency_ms": latency_ms, "answers": len(seconds)}
