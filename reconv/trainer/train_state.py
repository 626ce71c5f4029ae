"""The training state: a model on its device with its task, optimizer and EMA, and how ranks share a step of it.

A resumed run is built from its recipe exactly like a new one, and then loads the tensors of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from reconv.build.data import describe_dropped_boxes
from reconv.build.init_weights import freeze_parameters, init_weights, start_whitening
from reconv.build.model import Network, build_network, uses_fused_kernels
from reconv.build.task import (
    AnyTask,
    build_loss,
    build_task,
    describe_class_weights,
    training_class_weights,
)
from reconv.build.teacher import open_teacher
from reconv.checkpoint.load_weights import load_weights
from reconv.core.errors import CheckpointError
from reconv.data.transforms.train import TrainPreprocess
from reconv.device import Device
from reconv.distributed.process_group import ProcessGroup
from reconv.distributed.strategy import ParallelStrategy, PipelineConfig, StrategyConfig
from reconv.kernels.jit import compile_process as compiler
from reconv.kernels.jit.launch import KernelVariant, trace_launches
from reconv.kernels.trace import trace_kernels
from reconv.logging.events import RunPlanned
from reconv.logging.phases import Phase
from reconv.logging.run_logger import RunLogger
from reconv.models.frozen import FrozenBackbone
from reconv.models.pipeline_split import split_stages
from reconv.optim import (
    ModelEma,
    Optimizer,
    Rounding,
    build_optimizer,
    describe_rate_scales,
    optimizer_groups,
    rate_scales,
)
from reconv.optim.sharded_optimizer import ShardedOptimizer, shard_owners
from reconv.recipe.parts.schedule import LrSchedule
from reconv.recipe.plan_text import loss_note
from reconv.recipe.schema import Recipe
from reconv.trainer.imported_state import ImportedState
from reconv.trainer.prepare import PreparedRun

_SCALER = "precision."  # prefix of the loss scaler's tensors in the optimizer's file


@dataclass(frozen=True, slots=True)
class TrainState:
    """The network and everything that changes with it."""

    network: Network
    task: AnyTask
    optimizer: Optimizer
    ema: ModelEma | None
    lr_schedule: LrSchedule
    teacher_fingerprint: str | None
    loss: nn.Module | None = None  # a custom loss with parameters or buffers
    frozen_backbone: FrozenBackbone | None = None  # None: all parameters are trained, or the same ones all the time

    @property
    def monitored_weights(self) -> str:
        """Whose metric decides which checkpoint is best: ema where there is one, else raw."""
        return "raw" if self.ema is None else "ema"

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Every tensor that a checkpoint needs, by the name of its file."""
        parts = {"model": dict(self.network.model.state_dict())}
        if self.ema is not None:
            parts["ema"] = self.ema.state_dict()
        scaler = {_SCALER + name: value for name, value in self.network.precision.state_dict().items()}
        parts["optimizer"] = {**self.optimizer.state_dict(), **scaler}
        if self.loss is not None:
            parts["loss"] = dict(self.loss.state_dict())
        return parts

    def load_state_dict(self, parts: Mapping[str, Mapping[str, Tensor]], source: str) -> None:
        """Load the tensors of a checkpoint; `source` names it in errors."""
        try:
            self._load_parts(parts, source)
        except CheckpointError as error:
            error.where = error.where or source
            error.hint = error.hint or "move this checkpoint away and use an older one"
            raise

    def load_imported(self, imported: ImportedState) -> None:
        """Continue from the tensors of another program's checkpoint."""
        self.load_state_dict(imported.parts(self.state_dict(), _SCALER), source=str(imported.state.path))

    def _load_parts(self, parts: Mapping[str, Mapping[str, Tensor]], source: str) -> None:
        needed = ("model", *(["ema"] if self.ema is not None else []), "optimizer")
        needed = (*needed, "loss") if self.loss is not None else needed
        if missing := [name for name in needed if name not in parts]:
            raise CheckpointError(f"the checkpoint has no {' and no '.join(missing)}", where=source)
        load_weights(self.network.model, parts["model"], strict=True, source=source)
        if self.loss is not None:
            load_weights(self.loss, parts["loss"], strict=True, source=source)
        if self.ema is not None:
            self.ema.load_state_dict(parts["ema"])
        optimizer = parts["optimizer"]
        self.optimizer.load_state_dict({k: v for k, v in optimizer.items() if not k.startswith(_SCALER)})
        scaler = {k.removeprefix(_SCALER): v for k, v in optimizer.items() if k.startswith(_SCALER)}
        self.network.precision.load_state_dict(scaler)


def build_train_state(run: PreparedRun, logger: RunLogger) -> TrainState:
    """Build the network with its initial weights, its task and its optimizer, and log the plan."""
    recipe, plan, device = run.recipe, run.plan, run.device
    is_new = recipe.model.init is None and not run.restore_point.is_resumed
    whitening = start_whitening(recipe, run.datasets.train) if is_new else None
    network = build_network(recipe, plan.num_classes, device)
    trained = freeze_parameters(network, recipe)
    logger.log(
        RunPlanned(
            recipe=recipe.name,
            task=recipe.task,
            model=recipe.model.name,
            total_steps=plan.total_steps,
            steps_per_epoch=plan.steps_per_epoch,
            global_batch_size=plan.global_batch,
            lines=plan.lines,
            num_parameters=sum(p.numel() for p in network.model.parameters()),
            num_devices=run.process_group.world_size,
            num_trained=sum(p.numel() for p in network.model.parameters() if p.requires_grad),
            num_classes=plan.num_classes,
            monitored_weights="ema" if recipe.ema.decay > 0 else "raw",
            loss_note=loss_note(recipe),
            few_val_images={} if recipe.evaluate.every == "off" else run.datasets.few_val_images(),
        )
    )
    class_names = tuple(run.datasets.train.class_names)
    teacher = open_teacher(recipe, class_names, device, run.restore_point.state, run.trust_code)
    for text in (
        *_init(run, network, logger),
        *([whitening.result().init(network)] if whitening else []),
        *([str(trained)] if trained else []),
        *([teacher.note] if teacher else []),
    ):
        logger.info(text, run.restore_point.step)
    network.model.train()
    if device.kind == "cuda" and not run.process_group.is_distributed and network.forward is network.model:
        # Not with several ranks: they reduce the gradients of one layer during the backward pass of the next.
        network.precision.cast_weights_once(network.model)
    preprocess = build_train_preprocess(network, recipe, plan.num_classes, device)
    with run.phases.during(Phase.KERNELS):
        compile_ahead(network, preprocess, recipe, device, [size for _, size in plan.sizes], logger.warning)
    class_weights = training_class_weights(recipe, run.datasets.train)
    if class_weights is not None:
        text = describe_class_weights(class_weights, run.datasets.train.class_names)
        logger.info(text, run.restore_point.step)
    teacher_network, custom_loss = teacher.teacher if teacher else None, build_loss(recipe, plan.num_classes, device)
    if custom_loss is not None and custom_loss.note:
        logger.info(custom_loss.note, run.restore_point.step)
    loss = custom_loss.module if custom_loss is not None else None
    task = build_task(recipe, run.datasets.val, device, teacher_network, class_weights, custom_loss)
    optimizer = build_run_optimizer(recipe, plan.alpha, network.model, device, run.process_group, loss)
    if scales := rate_scales(recipe.optimizer, network.model):
        logger.info(describe_rate_scales(scales), run.restore_point.step)
    ema = ModelEma(network.model, recipe.ema.decay, recipe.ema.warmup) if recipe.ema.decay > 0 else None
    # After the optimizer is built: it has state for parameters that are trained later, too.
    frozen_backbone = FrozenBackbone(network.model) if run.restore_point.step < plan.freeze_steps else None
    if frozen_backbone is not None:
        logger.info(f"until step {plan.freeze_steps:,} {frozen_backbone.trained}", run.restore_point.step)
    factor = float(run.restore_point.state.get("divergence", {}).get("lr_factor", 1.0))
    lr_schedule = LrSchedule(plan.schedule, factor)
    fingerprint = teacher.fingerprint if teacher else None
    return TrainState(network, task, optimizer, ema, lr_schedule, fingerprint, loss, frozen_backbone)


def _init(run: PreparedRun, network: Network, logger: RunLogger) -> list[str]:
    """Initialize the weights of the network; returns notes for the log."""
    recipe, is_resumed = run.recipe, run.restore_point.is_resumed
    notes = init_weights(network, recipe, run.plan.num_classes, is_resumed=is_resumed, log=logger.info)
    if note := describe_dropped_boxes(run.datasets.train, recipe.detection.max_gt_boxes):
        notes.append(note)
    if network.recomputed is not None:
        notes.append(network.recomputed.describe(run.plan.micro_batch))
    return notes


def build_run_optimizer(
    recipe: Recipe,
    alpha: float | None,
    model: nn.Module,
    device: Device,
    process_group: ProcessGroup,
    loss: nn.Module | None = None,
) -> Optimizer:
    """The optimizer, sharded over the ranks or not, with its state on the device or offloaded to the host."""
    groups = optimizer_groups(recipe.optimizer, model, loss)
    sizes = {name: p.numel() for name, p in groups.all().items()}
    is_sharded = recipe.memory.shard_optimizer and process_group.world_size > 1
    owner = shard_owners(sizes, process_group.world_size) if is_sharded else dict.fromkeys(sizes, process_group.rank)
    optimizer = build_optimizer(
        recipe.optimizer,
        model,
        alpha=alpha,
        rounding=_build_rounding(recipe),
        sgd=device.sgd_implementation(),
        only=[name for name in sizes if owner[name] == process_group.rank],
        loss=loss,
    )
    if recipe.memory.offload_optimizer:
        optimizer.offload()
    if not is_sharded:
        return optimizer
    return ShardedOptimizer(optimizer, groups.all(), owner, process_group.rank)


def _build_rounding(recipe: Recipe) -> Rounding | None:
    """Rounding of updated half-precision weights; None if weights are float32."""
    if recipe.precision.mode != "16.16":
        return None
    return Rounding(is_stochastic=recipe.precision.rounding != "nearest", seed=recipe.seed)


def parallelize(run: PreparedRun, network: Network, loss: nn.Module | None = None) -> ParallelStrategy:
    """Strategy by which the ranks train the network, and the parameters of a loss."""
    parallel, plan = run.recipe.parallel, run.plan
    ordered = parallel.reduce == "ordered"
    ranks = range(plan.world_size)
    passes = tuple(len(plan.device_groups[rank] if ordered else plan.micro_batches(rank)) for rank in ranks)
    config = StrategyConfig(
        ordered, passes, plan.devices_per_group, round(parallel.bucket_cap_mb * 2**20), parallel.gradient_compression
    )
    if parallel.pipeline_stages > 1:
        config = replace(
            config,
            pipeline=PipelineConfig(partial(split_stages, splits=parallel.pipeline_splits), parallel.pipeline_schedule),
        )
    trained = network.model
    if loss is not None and any(p.requires_grad for p in loss.parameters()):
        trained = nn.ModuleList([network.model, loss])
    strategy = run.process_group.parallelize(trained, config)
    group_all_reduce = strategy.group_all_reduce if plan.devices_per_group > 1 else None
    network.layers.connect(strategy.gather_stats, group_all_reduce, strategy.sync_buffers)
    return strategy


def build_train_preprocess(network: Network, recipe: Recipe, num_classes: int, device: Device) -> TrainPreprocess:
    """The preprocessing on the device in training: normalize, flip, mix."""
    return TrainPreprocess(
        recipe.data.preprocess,
        recipe.augment,
        num_classes,
        network.precision.input_dtype,
        network.channels_last,
        uses_fused_kernels(recipe, device),
    )


def compile_ahead(
    network: Network,
    preprocess: TrainPreprocess,
    recipe: Recipe,
    device: Device,
    image_sizes: Sequence[int],
    warn: Callable[[str], None],
) -> None:
    """Start compiling the fused kernels of training steps on images of these sizes in the background."""
    uses_kernels = network.has_kernels or uses_fused_kernels(recipe, device)  # the latter: those of the preprocessing
    if not (uses_kernels and network.channels_last):
        compiler.stop_compiler()
        return
    from reconv.kernels.jit import compile_ahead as warm

    try:
        variants = training_kernels(network, preprocess, recipe, image_sizes)
        warm.compile_ahead(variants, device.torch, warn)
    except Exception as error:  # it costs time alone
        warn(f"kernels could not be compiled ahead and are compiled during the first step: {error!r}")


def training_kernels(
    network: Network, preprocess: TrainPreprocess, recipe: Recipe, image_sizes: Sequence[int]
) -> list[KernelVariant]:
    """The kernel variants that training steps launch.

    `image_sizes` are those of the run, in order: kernels of the preprocessing depend on them, those of the network not.
    """
    images = [(recipe.data.preprocess.channels, size, size) for size in image_sizes]
    with trace_launches() as preprocessing:
        for image in images:
            preprocess.trace_kernels(image, getattr(torch, recipe.data.transfer_dtype))
    policy, by_stages = network.precision, network.recomputed is not None
    of_network = trace_kernels(network.model, images[0], policy.input_dtype, policy.autocast(), by_stages)
    return [*preprocessing, *of_network]
