"""Builders, each named after the part it builds from a recipe.

Owns the wiring of the task, the loaders and the small parts of a run. Refuses to know the order of a run. Invariant:
evaluation and prediction of a saved run are built by the same functions as training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from reconv.data.dataset import Dataset
from reconv.data.pipeline.bad_samples import BadSamples
from reconv.data.pipeline.box_samples import detection_sample_pipeline
from reconv.data.pipeline.buffers import as_type
from reconv.data.pipeline.data_loader import EvalLoader, TrainLoader
from reconv.data.pipeline.sample_pipeline import MakeSamplePipeline, make_sample_pipeline
from reconv.data.transforms.on_device import EvalPreprocess
from reconv.device import Device
from reconv.distributed.process_group import ProcessGroup
from reconv.distributed.sharded_optimizer import ShardedOptimizer, shard_owners
from reconv.logging.events import BadImageSkipped
from reconv.logging.run_logger import RunLogger
from reconv.optim import Optimizer, Rounding, build_optimizer, optimizer_groups
from reconv.recipe.plan import Plan
from reconv.recipe.schema import Recipe
from reconv.tasks.classification import ClassificationTask
from reconv.tasks.detection import DetectionTask
from reconv.tasks.distillation import Teacher
from reconv.trainer.build.data_context import DataContext
from reconv.trainer.build.network import Network, compiled, is_compiled
from reconv.trainer.build.task_builder import (
    build_detection,
)
from reconv.trainer.early_stopping import EarlyStopping

AnyTask = ClassificationTask | DetectionTask


def build_task(recipe: Recipe, source: Dataset, device: Device, teacher: Teacher | None = None) -> AnyTask:
    """The recipe's task; a validation set tells its classes and, for detection, the boxes to score against."""
    if recipe.task == "detection":
        return build_detection(
            recipe, source, device, partial(compiled, device=device) if is_compiled(recipe, device) else None
        )
    loss = recipe.loss
    return ClassificationTask(len(source.class_names), loss.label_smoothing, loss.smooth_over, teacher=teacher)


def build_rounding(recipe: Recipe) -> Rounding | None:
    """How updated weights are rounded where they are halves; None where they are not."""
    if recipe.precision.mode != "16.16":
        return None
    return Rounding(is_stochastic=recipe.precision.rounding != "nearest", seed=recipe.seed)


def build_run_optimizer(
    recipe: Recipe, alpha: float | None, model: nn.Module, device: Device, process_group: ProcessGroup
) -> Optimizer:
    """The recipe's optimizer, sharded over the ranks or not, its state on the device or on the host."""
    is_sharded = recipe.memory.shard_optimizer and process_group.world_size > 1
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    owner = shard_owners(sizes, process_group.world_size) if is_sharded else dict.fromkeys(sizes, process_group.rank)
    optimizer = build_optimizer(
        recipe.optimizer,
        model,
        alpha=alpha,
        rounding=build_rounding(recipe),
        sgd=device.sgd_implementation(),
        only=[name for name in sizes if owner[name] == process_group.rank],
    )
    if recipe.memory.offload_optimizer:
        optimizer.offload()
    if not is_sharded:
        return optimizer
    groups = optimizer_groups(recipe.optimizer, model)
    return ShardedOptimizer(optimizer, groups.all(), owner, process_group.rank)


def build_early_stop(recipe: Recipe) -> EarlyStopping:
    target, patience = recipe.early_stopping.target, recipe.early_stopping.patience
    return EarlyStopping(None if target == "off" else target, None if patience == "off" else patience)


def build_faults(
    recipe: Recipe, state: Mapping[str, Any], logger: RunLogger, process_group: ProcessGroup
) -> BadSamples:
    """The bad files a run bears, and those it knows from its checkpoint."""
    faults = BadSamples(
        recipe.data.bad_images.limit,
        lambda f: logger.log(BadImageSkipped(f.step, f.split, f.index, f.path, f.why)),
        gather=process_group.all_gather if process_group.world_size > 1 else None,
    )
    if faults.borne:  # else what was left out before must be whole by now
        faults.restore(state.get("bad_images", ()))
    return faults


def fetching(recipe: Recipe) -> MakeSamplePipeline:
    """How the batches of the recipe's task are filled."""
    return detection_sample_pipeline(recipe) if recipe.task == "detection" else make_sample_pipeline


def train_loader(
    recipe: Recipe,
    plan: Plan,
    source: Dataset,
    move: Callable[[Tensor], Tensor],
    faults: BadSamples | None = None,
    rank: int = 0,
    feed: DataContext | None = None,
) -> TrainLoader:
    make = fetching(recipe)
    if feed is None:
        return TrainLoader(source, recipe, plan, move, rank, faults, make)
    shared = (feed.workers, feed.carrier, feed.stages, feed.engine)
    return TrainLoader(source, recipe, plan, move, rank, faults, make, *shared)


def eval_loader(
    recipe: Recipe,
    source: Dataset,
    device: Device,
    batch: int,
    workers: int = 0,
    faults: BadSamples | None = None,
    process_group: ProcessGroup | None = None,
    feed: DataContext | None = None,
) -> EvalLoader:
    process_group = process_group or ProcessGroup.single()
    return EvalLoader(
        source,
        recipe.data.preprocess,
        batch,
        device.move,
        workers,
        process_group.rank,
        process_group.world_size,
        faults,
        make=fetching(recipe),
        shared=None if feed is None else feed.workers,
        carrier=as_type(device, recipe.data.transfer_dtype),
        engine=None if feed is None or recipe.data.preprocess.interpolation != "bilinear" else feed.engine,
    )


def eval_prepare(recipe: Recipe, network: Network) -> EvalPreprocess:
    return EvalPreprocess(recipe.data.preprocess, network.precision.input_dtype, network.channels_last)
