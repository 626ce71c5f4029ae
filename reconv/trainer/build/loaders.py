"""Builders, each named after the part it builds from a recipe.

Owns the wiring of the task, the loaders and the small parts of a run. Refuses to know the order of a run. Invariant:
evaluation and prediction of a saved run are built by the same functions as training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from reconv.data.dataset import Dataset
from reconv.data.pipeline.bad_samples import BadSamples
from reconv.data.pipeline.buffers import with_transfer_dtype
from reconv.data.pipeline.detection_pipeline import make_detection_pipeline
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.pipeline.sample_pipeline import MakeSamplePipeline, make_sample_pipeline
from reconv.data.pipeline.train_loader import TrainLoader, make_train_loader
from reconv.data.transforms.device_transforms import EvalPreprocess
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


def build_bad_samples(
    recipe: Recipe, state: Mapping[str, Any], logger: RunLogger, process_group: ProcessGroup
) -> BadSamples:
    """How many bad images a run tolerates, and those it knows from its checkpoint."""
    bad_samples = BadSamples(
        recipe.data.bad_images.limit,
        lambda f: logger.log(BadImageSkipped(f.step, f.split, f.index, f.path, f.why)),
        all_gather=process_group.all_gather if process_group.world_size > 1 else None,
    )
    if bad_samples.tolerated:  # otherwise those of the checkpoint must be readable by now
        bad_samples.restore(state.get("bad_images", ()))
    return bad_samples


def sample_pipeline_maker(recipe: Recipe) -> MakeSamplePipeline:
    """What makes the sample pipelines of the recipe's task."""
    return make_detection_pipeline(recipe) if recipe.task == "detection" else make_sample_pipeline


def train_loader(
    recipe: Recipe,
    plan: Plan,
    dataset: Dataset,
    context: DataContext,
    bad_samples: BadSamples | None = None,
    rank: int = 0,
) -> TrainLoader:
    return make_train_loader(dataset, recipe, plan, context, rank, bad_samples, sample_pipeline_maker(recipe))


def eval_loader(
    recipe: Recipe,
    dataset: Dataset,
    device: Device,
    batch_size: int,
    num_workers: int = 0,
    bad_samples: BadSamples | None = None,
    process_group: ProcessGroup | None = None,
    context: DataContext | None = None,
) -> EvalLoader:
    """The loader of a validation set; it shares workers and GPU decoder with training if given its `context`."""
    process_group = process_group or ProcessGroup.single()
    eval_context = DataContext(with_transfer_dtype(device, recipe.data.transfer_dtype))
    if context is not None:
        is_bilinear = recipe.data.preprocess.interpolation == "bilinear"
        gpu_decoder = context.gpu_decoder if is_bilinear else None
        eval_context = replace(eval_context, workers=context.workers, gpu_decoder=gpu_decoder)
    return EvalLoader(
        dataset,
        recipe.data.preprocess,
        batch_size,
        eval_context,
        num_workers,
        process_group.rank,
        process_group.world_size,
        bad_samples,
        sample_pipeline_maker(recipe),
    )


def eval_prepare(recipe: Recipe, network: Network) -> EvalPreprocess:
    return EvalPreprocess(recipe.data.preprocess, network.precision.input_dtype, network.channels_last)
