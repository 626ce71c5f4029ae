"""`bench infer`: how fast a network answers, batch size by batch size.

Owns the network as it would be served (norms folded, weights in the precision of the answer; on CUDA one recording of
joint operations for each batch size) and the result's fields. Refuses to know files of images: decoding and
normalising are not part of an answer here.
Invariant: an answer's latency ends when the device has finished it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reconv.bench.baselines import find_peers
from reconv.bench.bench_target import about, num_classes_of
from reconv.bench.inference_baselines import Launch, Other, Serving, others
from reconv.bench.roofline import layer_costs, shares
from reconv.bench.timing import percentile
from reconv.checkpoint.locate import LocatedWeights, locate
from reconv.device import CudaGraph, Device, configure_algorithms, is_out_of_memory, open_device
from reconv.environment_checks import Machine, usable_cores
from reconv.errors import ResourceError, UsageError
from reconv.inference.fold import fold_batch_norms
from reconv.inference.load_model import build_saved_model, read_saved_model
from reconv.recipe.loader import Override, load
from reconv.recipe.schema import Recipe
from reconv.trainer.build.network import Network, build_network, compiled, is_compiled

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LEAST_ANSWERS, MOST_ANSWERS = 20, 500  # of one batch size, where their number is not given
SECONDS_PER_SIZE = 3.0
WARMUP = 3
_SETTLING_IMAGES = 4
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
    seconds: float = SECONDS_PER_SIZE,
    peers: Sequence[Other] = (),
    tell: Tell = lambda text: None,
) -> dict[str, Any]:
    """Measure the answers of a recipe's network, or of a run's, and those of other packages' networks."""
    recipe, network, opened = _open(target, overrides, device)
    if recipe.precision.ops.float32 or recipe.precision.ops.low_precision:
        raise UsageError(
            "the recipe gives single operations a type of their own",
            where="precision.ops",
            why="the network is measured in one type from end to end",
            then="--set precision.ops.float32=[] --set precision.ops.low_precision=[]",
        )
    preprocess = recipe.data.preprocess
    shape = (preprocess.channels, preprocess.size, preprocess.size)
    dtype = _DTYPES.get(recipe.precision.mode, torch.float32)
    model, exact, num_folded = _in_types(network, shape, dtype)
    tell(f"{recipe.name}: {recipe.model.name}, {num_folded} norms folded, {opened.describe()}")
    recorder = _recorder(recipe, opened)
    serving = None if recorder is None else Serving(model, recorder, exact)
    layout = torch.channels_last if network.channels_last else torch.contiguous_format
    wish = _Wish(answers, seconds)
    rows, notes = [], []
    found: dict[str, list[dict[str, Any]]] = {other.name: [] for other in peers}
    for batch in batches:
        try:
            images = _images((batch, *shape), dtype, opened).contiguous(memory_format=layout)
            launch, served, said = _ready(model, images, recipe, serving, opened)
            rows.append(_row(batch, _latencies_s(launch, opened, wish)) | served)
            notes += [f"batch {batch}: {said}"] if said else []
        except Exception as error:
            if is_out_of_memory(error):
                raise _too_large(batch, rows, opened) from error
            raise
        tell(f"batch {batch}: {rows[-1]['images_per_s']:,.1f} images/s, p50 {rows[-1]['latency_ms']['p50']:.2f} ms")
        for other in peers:
            tell(f"batch {batch}: measuring {other.name}")
            theirs, why = _measure_other(other, num_classes_of(recipe), images, opened, wish)
            if theirs is None:
                notes.append(f"{other.name} could not be measured at batch {batch}: {why}")
            else:
                found[other.name].append({**theirs, "ratio": rows[-1]["images_per_s"] / theirs["images_per_s"]})
    return {
        **_summary(recipe, rows),
        "norms_folded": num_folded,
        "compiled": _wants_compiler(recipe, opened),
        "recorded": recorder is not None,
        "peers": found,
        "notes": notes,
        "peak_memory_bytes": opened.peak_memory_bytes(),
        **_shares(recipe, network, shape, rows, opened),
        **about(recipe, opened),
    }


def find_others(target: str, overrides: Sequence[Override], named: str) -> tuple[list[Other], list[str]]:
    """The ways in which other packages run this network, and why some are missing."""
    if Path(target).is_dir():
        recipe = read_saved_model(locate(target), weights="auto", recipe=None).recipe
    else:
        recipe = load(target, overrides).recipe
    peers, missing = find_peers(recipe.model.name)
    return others(peers, named), missing


def _summary(recipe: Recipe, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
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


def _shares(
    recipe: Recipe, network: Network, shape: tuple[int, int, int], rows: Sequence[dict[str, Any]], device: Device
) -> dict[str, Any]:
    """What the fastest batch size reached of the device's peak."""
    costs = layer_costs(network.model, shape, training=False)
    fastest = max(rows, key=lambda row: row["images_per_s"])
    taken_s = fastest["batch"] / fastest["images_per_s"]
    return shares(costs, fastest["batch"], taken_s, device.describe(), recipe.precision.mode, training=False)


def _open(target: str, overrides: Sequence[Override], device: str) -> tuple[Recipe, Network, Device]:
    """A run's or checkpoint's network with its weights, or a recipe's with those of its seed; not yet compiled."""
    if Path(target).is_dir():
        located = locate(target)
        saved = read_saved_model(located, weights="auto", recipe=None)
        recipe = _changed(saved.recipe, located, overrides)
        opened = _open_device(recipe, device)
        return recipe, build_saved_model(saved, _uncompiled(recipe), opened), opened
    recipe = load(target, overrides).recipe
    opened = _open_device(recipe, device)
    network = build_network(_uncompiled(recipe), num_classes_of(recipe), opened)
    _settle_norms(network, recipe, opened)
    return recipe, network, opened


def _in_types(
    network: Network, shape: tuple[int, int, int], dtype: torch.dtype
) -> tuple[nn.Module, Callable[[Tensor], Any], int]:
    """The network with its norms folded in the type of its answers, the same in one that rounds less where there is
    one, and how many norms were folded."""
    model, num_folded = fold_batch_norms(network.model, shape)
    wide = torch.promote_types(dtype, torch.float32)
    exact = copy.deepcopy(model).to(wide)
    return model.to(dtype), lambda images: exact(images.to(wide)), num_folded


def _settle_norms(network: Network, recipe: Recipe, device: Device) -> None:
    """Give an untrained network's norms the statistics of some noise.

    With those they begin with, a deep network's answers vanish or explode, and a last bit decides them.
    """
    norms = [module for module in network.model.modules() if isinstance(module, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    preprocess = recipe.data.preprocess
    shape = (_SETTLING_IMAGES, preprocess.channels, preprocess.size, preprocess.size)
    network.model.eval()
    for norm in norms:
        norm.train().momentum = 1.0
    with torch.no_grad(), network.precision.autocast():
        network.model(_images(shape, network.precision.input_dtype, device))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval().momentum = momentum


def _changed(recipe: Recipe, located: LocatedWeights, overrides: Sequence[Override]) -> Recipe:
    """A saved recipe with what the command line changes in how it computes."""
    if not overrides:
        return recipe
    if located.run is None:
        raise UsageError("--set needs a recipe or a run folder", where=str(located.checkpoint), then="leave --set out")
    return load(str(located.run.recipe), overrides).recipe


def _open_device(recipe: Recipe, name: str) -> Device:
    threads = usable_cores(Machine()) if recipe.engine.num_threads == "auto" else recipe.engine.num_threads
    opened = open_device(name, threads=threads)
    configure_algorithms(opened, recipe.engine)
    return opened


def _uncompiled(recipe: Recipe) -> Recipe:
    """The same recipe; what is compiled is the folded network, later."""
    return recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"compile": "off"})})


def _wants_compiler(recipe: Recipe, device: Device) -> bool:
    """Whether torch's compiler makes the answers: where the recipe insists, and on Gaudi."""
    return is_compiled(recipe, device) and (recipe.engine.compile == "on" or device.kind != "cuda")


def _recorder(recipe: Recipe, device: Device) -> CudaGraph | None:
    """What records answers: where the device can, unless the recipe says no or wants a compiler."""
    if recipe.engine.cuda_graphs == "off" or recipe.engine.compile != "auto":
        return None
    return device.graph_capture()


def _ready(
    model: nn.Module, images: Tensor, recipe: Recipe, serving: Serving | None, device: Device
) -> tuple[Launch, dict[str, Any], str]:
    """The network as it answers one batch, what was done to it for that, and what a person should know."""
    if serving is not None:
        served = serving(images)
        return served.launch, {"joined": served.num_joined, "difference": served.difference}, served.given_up
    if not _wants_compiler(recipe, device):
        return lambda: model(images), {}, ""
    torch.compiler.reset()  # a size is compiled once more after eight others, and then no more
    if device.kind == "cuda":
        launched = torch.compile(model, dynamic=False, mode="reduce-overhead")
    else:
        launched = compiled(model, device)
    return lambda: launched(images), {}, ""


@dataclass(frozen=True, slots=True)
class _Wish:
    """How much is measured of one batch size: so many answers, else about so long."""

    answers: int | None
    seconds: float


def _latencies_s(launch: Launch, device: Device, wish: _Wish) -> list[float]:
    """The time of each answer, from its call to its end on the device; warm-up left out."""

    def answer() -> float:
        began_s = time.perf_counter()
        launch()
        device.synchronize()
        return time.perf_counter() - began_s

    with torch.no_grad() if device.kind == "hpu" else torch.inference_mode():
        warm_s = [answer() for _ in range(WARMUP)][-1]
        wanted = round(wish.seconds / max(warm_s, 1e-9))
        return [answer() for _ in range(wish.answers or max(LEAST_ANSWERS, min(MOST_ANSWERS, wanted)))]


def _measure_other(
    other: Other, num_classes: int, images: Tensor, device: Device, wish: _Wish
) -> tuple[dict[str, Any] | None, str]:
    """Another package's network on the same images; or None, and why."""
    try:
        launch = other.ready(num_classes, images.contiguous(memory_format=torch.channels_last), device)
        return _row(len(images), _latencies_s(launch, device, wish)), ""
    except Exception as error:  # another package's failure must not lose what was measured
        if not (is_out_of_memory(error) or isinstance(error, RuntimeError | ValueError | TypeError)):
            raise
        return None, repr(error).splitlines()[0]


def _images(shape: Sequence[int], dtype: torch.dtype, device: Device) -> Tensor:
    """The same noise at every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device.torch, dtype)


def _too_large(batch: int, rows: Sequence[dict[str, Any]], device: Device) -> ResourceError:
    """The error for a batch that does not fit, with the sizes that did."""
    fitting = ",".join(str(row["batch"]) for row in rows)
    return ResourceError(
        "out of memory",
        where=device.describe(),
        why=f"a batch of {batch:,} images does not fit",
        then=f"--batches {fitting}" if fitting else "smaller ones: --batches N,N",
    )


def _row(batch: int, seconds: Sequence[float]) -> dict[str, Any]:
    latency_ms = {f"p{p}": 1000 * percentile(seconds, p) for p in (50, 95, 99)}
    images_per_s = batch * len(seconds) / sum(seconds)
    return {"batch": batch, "images_per_s": images_per_s, "latency_ms": latency_ms, "answers": len(seconds)}
