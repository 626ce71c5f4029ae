"""Builders, each named after the part it builds from a recipe.

Owns the wiring of one part each. Refuses to know the order of a run. Invariant: evaluation and prediction of a saved
run are built by the same functions as training.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from reconv import __version__
from reconv.batch import Batch
from reconv.checkpoint import weights as saved_weights
from reconv.checkpoint.runfolder import Best, RunFolder
from reconv.checkpoint.store import Store
from reconv.data.annotation import DetectionSource
from reconv.data.box_fetch import detection_fetch
from reconv.data.buffers import as_type
from reconv.data.cached import Cached, Room, cached
from reconv.data.faults import Faults
from reconv.data.fetch import MakeFetch, make_fetch
from reconv.data.loader import EvalLoader, TrainLoader
from reconv.data.open import NEED_NO_PATH, open_source, taken, thinned
from reconv.data.pictures import grid
from reconv.data.prepare import EvalPrepare, TrainPrepare, unprepare
from reconv.data.source import Source, Split
from reconv.data.workers import Workers
from reconv.device import Device, Recorder
from reconv.engine.early import EarlyStop
from reconv.engine.evaluate import EvaluationStopped, evaluate
from reconv.engine.loop import Counters
from reconv.engine.protocols import Emit, Evaluator, Prepare
from reconv.errors import DataError, RecipeError, ResourceError, UsageError
from reconv.kernels import fused
from reconv.models import build_model, initialise
from reconv.models.fastnet import FastNet
from reconv.models.fuse import use_kernels
from reconv.models.layers import LayerState
from reconv.models.ssd import SSD
from reconv.optim import Ema, Rounding
from reconv.optim.decay import decay_groups
from reconv.parallel.world import World
from reconv.precision import Policy, build_precision
from reconv.recipe.plan import IN_MEMORY, CacheSize, Plan
from reconv.recipe.schema import Recipe
from reconv.report.events import BadImage, Evaluated, Pictured, Saved
from reconv.run.detection import (
    build_detection,
    check_detector,
    detector_options,
    refuse_nothing_to_find,
    with_boxes,
)
from reconv.run.feed import Feed
from reconv.tasks.classification import Classification, ClassificationEvaluator
from reconv.tasks.detection import Detection
from reconv.tasks.detection_scores import DetectionEvaluator
from reconv.tasks.distillation import Teacher
from reconv.tasks.views import averaged_views

NUM_PICTURED = 32
PICTURE_COLUMNS = 8
NUM_WHITENED = 2000


@dataclass(frozen=True, slots=True)
class Sources:
    train: Source
    val: Source
    num_val_left_out: int = 0  # by evaluate.samples

    def fingerprint(self) -> dict[str, str]:
        return {"train": self.train.fingerprint(), "val": self.val.fingerprint()}


def open_split(recipe: Recipe, path: Path | None, split: Split) -> Source:
    """One split of the data at a path, of the kind and for the task the recipe names."""
    wants_boxes = recipe.task == "detection"
    source = open_source(recipe.data.source, path, split, recipe.data, boxes=wants_boxes)
    return with_boxes(source) if wants_boxes else source


def open_sources(recipe: Recipe) -> Sources:
    """The training and validation sets the recipe names, at its path or else at $DATA_DIR."""
    path = data_path(recipe)
    train, val = (open_split(recipe, path, split) for split in ("train", "val"))
    if len(train) == 0 or len(val) == 0:
        raise DataError(f"the {'training' if len(train) == 0 else 'validation'} set is empty", where=str(path))
    some = part_of(val, recipe.evaluate.samples)
    if recipe.task == "detection" and recipe.evaluate.every != "off":
        refuse_nothing_to_find(with_boxes(some))
    return Sources(train, some, len(val) - len(some))


def part_of(source: Source, num_samples: int | None) -> Source:
    """So many samples of a source, evenly spread; all of it where there are no more."""
    if num_samples is None or num_samples >= len(source):
        return source
    return thinned(source, 100 * num_samples / len(source))


def with_cache(recipe: Recipe, sources: Sources, available_bytes: int | None, num_ranks: int) -> Sources:
    """The same sets, their samples kept in memory as far as this rank's share of half of what is free goes."""
    if recipe.data.cache == "off" or sources.train.kind in IN_MEMORY:
        return sources
    if available_bytes is None:
        raise ResourceError(
            "how much memory is free cannot be told here, so nothing limits a cache",
            where="data.cache",
            then="--set data.cache=off",
        )
    room = Room(available_bytes // 2 // num_ranks)
    return Sources(cached(sources.train, room), cached(sources.val, room), sources.num_val_left_out)


def cache_size(sources: Sources) -> CacheSize | None:
    """What a cache of these sets would hold and may hold; None where they have none."""
    kept = [source for source in (sources.train, sources.val) if isinstance(source, Cached)]
    return CacheSize(sum(source.estimated_bytes for source in kept), kept[0].room_bytes) if kept else None


def data_path(recipe: Recipe) -> Path | None:
    """Where the data lies: the recipe's path, else $DATA_DIR."""
    text = recipe.data.path or os.environ.get("DATA_DIR")
    return Path(text).expanduser() if text else None


def with_data_path(recipe: Recipe, known: str | None) -> Recipe:
    """The recipe with the place of its data filled in, so that the run's own copy of it says where that was."""
    if recipe.data.path is not None or recipe.data.source in NEED_NO_PATH:
        return recipe
    path = os.environ.get("DATA_DIR") or known
    if path is None:
        return recipe
    data = recipe.data.model_copy(update={"path": str(Path(path).expanduser().absolute())})
    return recipe.model_copy(update={"data": data})


def check_model(recipe: Recipe, num_classes: int) -> None:
    """Refuse a network that cannot be built or decayed as told, before anything is written for it."""
    if recipe.task == "detection":
        check_detector(recipe)
    with torch.device("meta"):
        model = build_model(recipe.model.name, **model_options(recipe, num_classes))
    if isinstance(model, SSD) and recipe.task != "detection":
        raise RecipeError(f"{recipe.model.name} finds boxes, and the task is {recipe.task}", where="model.name")
    decay_groups(model, recipe.optimizer.decay)


def model_options(recipe: Recipe, num_classes: int) -> dict[str, Any]:
    """The keyword arguments of the recipe's network."""
    options = dict(recipe.model.options)
    if "num_classes" in options:
        raise RecipeError("model.options.num_classes: the number of classes follows from the data", then="leave it out")
    if recipe.data.preprocess.channels != 3:
        options.setdefault("in_channels", recipe.data.preprocess.channels)
    if recipe.task == "detection":  # the background is a class of the network, not of the data
        return {**options, **detector_options(recipe), "num_classes": num_classes + 1}
    return {**options, "num_classes": num_classes}


@dataclass(frozen=True, slots=True)
class Network:
    """A model on its device with everything that runs it."""

    model: nn.Module
    forward: Callable[..., Any]
    layers: LayerState
    precision: Policy
    channels_last: bool


def is_compiled(recipe: Recipe, device: Device) -> bool:
    """Whether networks and losses are compiled: where the recipe says so, else on cuda and by Gaudi's compiler."""
    if recipe.engine.compile == "on" and device.compiler is None:
        raise UsageError(
            f"engine.compile: nothing is compiled on {device.describe()}",
            why="lazy mode gathers whole graphs by itself",
            then="leave it at auto, or set PT_HPU_LAZY_MODE=0 in the environment",
        )
    is_usual = device.kind == "cuda" or device.compiler == "hpu_backend"
    return recipe.engine.compile == "on" or (recipe.engine.compile == "auto" and is_usual)


def compiled(function: Callable[..., Any], device: Device) -> Callable[..., Any]:
    """The function, compiled by what the device has."""
    assert device.compiler is not None
    found: Callable[..., Any] = torch.compile(function, dynamic=False, backend=device.compiler)
    return found


def wants_kernels(recipe: Recipe, device: Device) -> bool:
    """Whether kernels may compute what they can of a network in training."""
    engine = recipe.engine
    is_wanted = engine.kernels == "on" or (engine.kernels == "auto" and engine.compile == "auto")
    return is_wanted and device.kind == "cuda" and recipe.precision.is_plain and fused.has_triton()


def build_network(recipe: Recipe, num_classes: int, device: Device) -> Network:
    """The recipe's model, initialised from its seed, on the device."""
    model = build_model(recipe.model.name, **model_options(recipe, num_classes))
    initialise(model, recipe.seed)
    precision = build_precision(recipe.precision, device.kind)
    wish = recipe.engine.channels_last
    channels_last = device.channels_last if wish == "auto" else wish == "on"
    model = precision.model(model).to(device.torch)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    has_kernels = wants_kernels(recipe, device) and use_kernels(model) > 0
    if recipe.engine.kernels == "on" and not has_kernels:
        raise UsageError(
            f"engine.kernels: nothing of {recipe.model.name} is computed by kernels on {device.kind}",
            then="leave it at auto",
        )
    forward = compiled(model, device) if is_compiled(recipe, device) and not has_kernels else model
    return Network(model, forward, LayerState(model, recipe.seed), precision, channels_last)


def build_recorder(recipe: Recipe, device: Device, world: World) -> Recorder | None:
    """What records whole steps, where the device can and the recipe lets it; None: each operation is launched."""
    wish, engine = recipe.engine.graph, recipe.engine
    if wish == "off" or (wish == "auto" and (engine.compile == "off" or world.size > 1)):
        return None
    recorder = device.recorder()
    if recorder is None and wish == "on":
        raise UsageError(f"engine.graph: {device.kind} does not record steps", then="leave it at auto, or use cuda")
    return recorder


AnyTask = Classification | Detection


def build_task(recipe: Recipe, source: Source, device: Device, teacher: Teacher | None = None) -> AnyTask:
    """The recipe's task; a validation set tells its classes and, for detection, the boxes to score against."""
    if recipe.task == "detection":
        return build_detection(
            recipe, source, device, partial(compiled, device=device) if is_compiled(recipe, device) else None
        )
    loss = recipe.loss
    return Classification(len(source.class_names), loss.label_smoothing, loss.smoothing_form, teacher=teacher)


def whiten(network: Network, recipe: Recipe, source: Source) -> str:
    """Give a network that begins with a whitening layer its filters; what a person should know of that."""
    if not isinstance(network.model, FastNet):
        return ""
    some = thinned(source, min(100.0, 100 * NUM_WHITENED / len(source)))
    bearing = Faults(recipe.data.bad_images.limit)  # they are told when training meets them
    [batch] = EvalLoader(some, recipe.data.preprocess, len(some), lambda tensor: tensor, workers=0, faults=bearing)
    network.model.whiten(EvalPrepare(recipe.data.preprocess, torch.float32)(batch)["images"])
    return f"the first layer whitens patches of {len(some):,} training images, and is not trained"


def build_rounding(recipe: Recipe) -> Rounding | None:
    """How updated weights are rounded where they are halves; None where they are not."""
    if recipe.precision.mode != "16.16":
        return None
    return Rounding(is_stochastic=recipe.precision.rounding != "nearest", seed=recipe.seed)


def build_early_stop(recipe: Recipe) -> EarlyStop:
    stop = recipe.stop
    return EarlyStop(None if stop.target == "off" else stop.target, None if stop.patience == "off" else stop.patience)


def build_faults(recipe: Recipe, state: Mapping[str, Any], emit: Emit, world: World) -> Faults:
    """The bad files a run bears, and those it knows from its checkpoint."""
    faults = Faults(
        recipe.data.bad_images.limit,
        lambda f: emit(BadImage(f.step, f.split, f.index, f.path, f.why)),
        gather=world.gather if world.size > 1 else None,
    )
    if faults.borne:  # else what was left out before must be whole by now
        faults.restore(state.get("bad_images", ()))
    return faults


def fetching(recipe: Recipe) -> MakeFetch:
    """How the batches of the recipe's task are filled."""
    return detection_fetch(recipe) if recipe.task == "detection" else make_fetch


def train_loader(
    recipe: Recipe,
    plan: Plan,
    source: Source,
    move: Callable[[Tensor], Tensor],
    faults: Faults | None = None,
    rank: int = 0,
    feed: Feed | None = None,
) -> TrainLoader:
    make = fetching(recipe)
    if feed is None:
        return TrainLoader(source, recipe, plan, move, rank, faults, make)
    return TrainLoader(source, recipe, plan, move, rank, faults, make, feed.workers, feed.carrier, feed.stages)


def eval_loader(
    recipe: Recipe,
    source: Source,
    device: Device,
    batch: int,
    workers: int = 0,
    faults: Faults | None = None,
    world: World | None = None,
    shared: Workers | None = None,
) -> EvalLoader:
    world = world or World.single()
    return EvalLoader(
        source,
        recipe.data.preprocess,
        batch,
        device.move,
        workers,
        world.rank,
        world.size,
        faults,
        make=fetching(recipe),
        shared=shared,
        carrier=as_type(device, recipe.data.transfer),
    )


def eval_prepare(recipe: Recipe, network: Network) -> EvalPrepare:
    return EvalPrepare(recipe.data.preprocess, network.precision.input_dtype, network.channels_last)


@dataclass(slots=True)
class Evaluation:
    """Scores the raw weights, and the averaged ones where there are some."""

    network: Network
    average: Ema | None
    task: AnyTask
    loader: EvalLoader
    prepare: Prepare
    num_samples: int
    faults: Faults
    world: World
    tta: str = "none"  # the views of an image whose answers are averaged
    is_partial: bool = False  # not all of the validation set is scored
    boundary: Callable[[], None] = lambda: None  # of the device
    last: ClassificationEvaluator | DetectionEvaluator | None = None
    last_weights: str = ""  # whose it is

    @property
    def chosen_weights(self) -> str:
        return "raw" if self.average is None else "ema"

    def __call__(self, done: int, epoch: float, stop_requested: Callable[[], bool]) -> list[Evaluated]:
        results = [self._score("raw", self.network.model, done, epoch, stop_requested)]
        if self.average is not None:
            results.append(self._score("ema", self.average.model, done, epoch, stop_requested))
        return results

    def score_file(self, weights: str, path: Path, done: int, epoch: float) -> Evaluated:
        """Score other weights of this network, under the name they go by."""
        model = copy.deepcopy(self.network.model).requires_grad_(False)
        tensors = self.world.from_first(lambda: saved_weights.read_weights(path))
        saved_weights.apply(model, tensors, strict=True, source=str(path))
        return self._score(weights, model, done, epoch, lambda: False)

    def _score(
        self, weights: str, model: nn.Module, done: int, epoch: float, stop_requested: Callable[[], bool]
    ) -> Evaluated:
        start_s = time.perf_counter()
        evaluator = self.task.evaluator()
        was_stopped = False
        try:
            evaluate(
                model,
                self.task,
                evaluator,
                self.loader.after(done),
                self.prepare,
                self.network.precision,
                stop_requested,
                averaged_views(model, self.tta),
                self.boundary,
            )
        except EvaluationStopped:
            was_stopped = True
        self._meet(evaluator, was_stopped)
        skipped = len(self.faults.known("val"))
        if evaluator.num_samples + skipped != self.num_samples:
            raise AssertionError(f"evaluated {evaluator.num_samples} of {self.num_samples} samples")
        self.last, self.last_weights = evaluator, weights
        metrics = evaluator.result()
        wall_s = time.perf_counter() - start_s
        return Evaluated(
            done,
            epoch,
            weights,
            metrics,
            evaluator.num_samples,
            wall_s,
            best=False,
            partial=self.is_partial,
            skipped=skipped,
        )

    def _meet(self, evaluator: Evaluator, was_stopped: bool) -> None:
        """Put together what all processes have found; if one was asked to stop, all have stopped."""
        if any(self.world.gather(was_stopped)):
            raise EvaluationStopped
        self.faults.settle()
        if self.world.size > 1:
            evaluator.take(self.world.gather(evaluator.share()))


@dataclass(frozen=True, slots=True)
class Saver:
    """Writes a checkpoint, keeps the ones the recipe wants, and says so."""

    folder: RunFolder
    store: Store
    recipe: Recipe
    plan: Plan
    network: Network
    optimizer: Any
    average: Ema | None
    about: Mapping[str, Any]  # what a checkpoint says of itself: classes, data, versions
    metric: str
    chosen_weights: str
    emit: Emit
    faults: Faults

    def __call__(self, counters: Counters, reason: str) -> None:
        start_s = time.perf_counter()
        state = {
            **self.about,
            "step": counters.step,
            "history": counters.history,
            "skipped": counters.skipped,
            "bad_images": self.faults.state(counters.step),
        }
        saved = self.store.save(counters.step, self.parts(), state)
        best = counters.best(self.metric, self.chosen_weights)
        if best is not None:
            self.folder.write_best(Best(best[0], self.metric, best[1], self.chosen_weights))
        keep_best = best[0] if best is not None and self.recipe.save.keep_best else None
        self.store.retain(self.recipe.save.keep_last, keep_best, self._pinned(counters.step))
        relative = str(saved.path.relative_to(self.folder.path))
        self.emit(Saved(counters.step, relative, saved.num_bytes, time.perf_counter() - start_s, reason))

    def _pinned(self, done: int) -> list[int]:
        """The steps that must not be deleted: those the recipe pins, and those an average may still need."""
        window = self.plan.average
        averaged = [] if window is None else [s for s in self.store.steps() if window.holds(s, done)]
        return [*self.plan.pinned_steps, *averaged]

    def parts(self) -> dict[str, dict[str, Tensor]]:
        """Every stateful part of a run by the name of its file; the one list of them."""
        parts = {"model": dict(self.network.model.state_dict())}
        if self.average is not None:
            parts["ema"] = self.average.state()
        scaler = {f"precision.{name}": value for name, value in self.network.precision.state().items()}
        parts["optimizer"] = {**self.optimizer.state(), **scaler}
        return parts

    def restore(self, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Put a checkpoint's tensors back where `parts` took them from."""
        saved_weights.apply(self.network.model, parts["model"], strict=True, source=str(self.store.folder))
        if self.average is not None:
            self.average.restore(parts["ema"])
        prefix = "precision."
        optimizer = {k: v for k, v in parts["optimizer"].items() if not k.startswith(prefix)}
        self.optimizer.restore(optimizer)
        self.network.precision.restore(
            {k.removeprefix(prefix): v for k, v in parts["optimizer"].items() if k.startswith(prefix)}
        )


def about_checkpoint(
    recipe: Recipe, plan: Plan, sources: Sources, device: Device, teacher: str | None = None
) -> dict[str, Any]:
    """What a checkpoint says of itself besides counters: enough to evaluate and predict without its run folder."""
    return {
        "format": 1,
        "recipe": recipe.model_dump(mode="json"),
        "class_names": list(sources.train.class_names),
        **({"class_ids": list(sources.train.class_ids)} if isinstance(sources.train, DetectionSource) else {}),
        "data_fingerprint": sources.fingerprint(),
        "total_steps": plan.total_steps,
        "threads": plan.threads,
        "decoder": plan.decoder,
        "device": device.kind,
        "teacher": teacher,  # what identifies the weights that were learned from
        "versions": {"reconv": __version__, "torch": torch.__version__},
    }


@dataclass(slots=True)
class PicturedFirstBatch:
    """A `Prepare` that also keeps a picture of the first batch as the network sees it."""

    prepare: TrainPrepare
    recipe: Recipe
    folder: RunFolder
    class_names: tuple[str, ...]
    emit: Emit
    done: bool = False

    def __call__(self, batch: Batch, step: int | Tensor) -> Batch:
        prepared = self.prepare(batch, step)
        if not self.done:
            self.done = True
            self._picture(prepared, int(step))
        return prepared

    def _picture(self, batch: Batch, step: int) -> None:
        images = unprepare(batch["images"][:NUM_PICTURED].detach(), self.recipe.data.preprocess)
        names = tuple(_caption(self.class_names, batch, row) for row in range(len(images)))
        save_picture(
            self.folder, "first-batch.png", images, self.emit, "The first batch as the network saw it", names, step
        )


def _caption(class_names: tuple[str, ...], batch: Batch, row: int) -> str:
    """What a picture shows: its class, or the classes of its boxes."""
    if "targets" in batch.tensors:
        return class_names[int(batch["targets"][row])]
    labels = batch["labels"][row, : int(batch["num_boxes"][row])].tolist()
    return ", ".join(class_names[label - 1] for label in labels)


def save_picture(
    folder: RunFolder, name: str, images: Tensor, emit: Emit, title: str, captions: tuple[str, ...], step: int
) -> None:
    """Write a grid of images to the run folder and tell the report."""
    folder.pictures.mkdir(parents=True, exist_ok=True)
    (folder.pictures / name).write_bytes(grid(images, PICTURE_COLUMNS))
    emit(Pictured(title, f"{folder.pictures.name}/{name}", captions, step, PICTURE_COLUMNS))


def picture_mistakes(
    evaluation: Evaluation, sources: Sources, folder: RunFolder, recipe: Recipe, step: int, emit: Emit
) -> None:
    """Picture the validation images the network got most wrong."""
    mistakes = evaluation.last.mistakes() if isinstance(evaluation.last, ClassificationEvaluator) else []
    if not mistakes:
        return
    wrong = taken(sources.val, np.array([m.index for m in mistakes], dtype=np.int64))
    [batch] = EvalLoader(wrong, recipe.data.preprocess, len(mistakes), lambda tensor: tensor, workers=0)
    names = sources.train.class_names
    captions = tuple(
        f"said {names[m.predicted]} ({m.confidence:.0%}), really {names[m.target]} · {sources.val.sample(m.index).name}"
        for m in mistakes
    )
    save_picture(folder, "mistakes.png", batch["images"], emit, "Worst mistakes", captions, step)
