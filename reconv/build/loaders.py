"""Data loaders of a run, built from its recipe; training, evaluation and prediction share them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from reconv.build.network import Network
from reconv.data.dataset import Dataset
from reconv.data.pipeline.bad_samples import BadSamples
from reconv.data.pipeline.buffers import with_transfer_dtype
from reconv.data.pipeline.detection import make_detection_pipeline
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.pipeline.row_reader import can_fill_from_files, has_jpeg_files
from reconv.data.pipeline.samples import MakeSamplePipeline, make_sample_pipeline
from reconv.data.pipeline.train_loader import TrainLoader, make_train_loader
from reconv.data.transforms.device import EvalPreprocess
from reconv.data.transforms.params import effective_augment
from reconv.device import Device
from reconv.distributed.process_group import ProcessGroup
from reconv.logging.events import BadImageSkipped
from reconv.logging.run_logger import RunLogger
from reconv.recipe.plan import Plan
from reconv.recipe.schema import Recipe


def build_bad_samples(
    recipe: Recipe, state: Mapping[str, Any], logger: RunLogger, process_group: ProcessGroup
) -> BadSamples:
    """The unreadable images a run tolerates; `state` is the checkpoint it resumes from, or empty."""
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


def fills_from_files(recipe: Recipe, dataset: Dataset) -> bool:
    """Whether the native decoder can crop many training images in one call."""
    augment = effective_augment(recipe.augment).model_copy(update={"decoder": "native"})
    is_plain = recipe.task == "classification" and can_fill_from_files(recipe.data.preprocess, augment)
    return is_plain and has_jpeg_files(dataset)


def build_train_loader(
    recipe: Recipe,
    plan: Plan,
    dataset: Dataset,
    context: DataContext,
    bad_samples: BadSamples | None = None,
    rank: int = 0,
) -> TrainLoader:
    return make_train_loader(dataset, recipe, plan, context, rank, bad_samples, sample_pipeline_maker(recipe))


def build_eval_loader(
    recipe: Recipe,
    dataset: Dataset,
    device: Device,
    batch_size: int,
    num_workers: int = 0,
    bad_samples: BadSamples | None = None,
    process_group: ProcessGroup | None = None,
    context: DataContext | None = None,
    finished: Collection[int] = (),
    keeps_decoded: bool = False,
) -> EvalLoader:
    """The loader of a validation set; it shares the workers of training if given its `context`.

    The ranks share the batches that are not `finished`. `keeps_decoded`: it is used more than once.
    """
    process_group = process_group or ProcessGroup.single()
    eval_context = DataContext(with_transfer_dtype(device, recipe.data.transfer_dtype))
    if context is not None:
        eval_context = replace(eval_context, workers=context.eval_workers or context.workers)
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
        finished,
        keeps_decoded,
    )


def build_eval_preprocess(recipe: Recipe, network: Network) -> EvalPreprocess:
    return EvalPreprocess(recipe.data.preprocess, network.precision.input_dtype, network.channels_last)
