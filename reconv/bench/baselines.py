"""Baselines of `bench train`: models of torchvision and timm, trained as their own scripts train them.

A baseline gets the same batches and the same preprocessing on the device, in the same process. It uses SGD with
momentum and the loss of the task (cross-entropy with label smoothing, or SSD's), whatever the recipe says otherwise.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from reconv.bench import ssd_baseline
from reconv.bench.timing import StepTimer, TimingConfig, measure
from reconv.build.data import build_train_loader
from reconv.build.model import uses_fused_kernels
from reconv.build.task import build_detection
from reconv.core.batch import Batch
from reconv.core.errors import UsageError
from reconv.data.pipeline.buffers import BlockingTransfer
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.transforms.train import TrainPreprocess
from reconv.device import Device, is_out_of_memory
from reconv.tasks.detection import DetectionTask, ssd_losses
from reconv.trainer.prepare import PreparedRun

MOMENTUM, LR, WEIGHT_DECAY = 0.9, 0.1, 1e-4  # of torchvision's reference script; they do not affect the speed
_TIMM_NAMES = {"mobilenet_v2": "mobilenetv2_100", "se_resnext101_32x4d": "seresnext101_32x4d"}
_WITHOUT_AUX_HEADS = ("googlenet", "inception_v3")  # torchvision's script cannot train their auxiliary heads

_DEPTHS = [3, 4, 23, 3]
_SSD = "ssd_resnet34"  # built from torchvision's ResNet-34
_UNNAMED = {"resnext101_32x4d": 4}  # width per group of models without a name in torchvision

Half = Literal["fp16", "bf16"]
Loss = Callable[[Any, Batch], Tensor]  # the mean loss of a model's outputs for a batch
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class _HasName(Protocol):
    @property
    def name(self) -> str: ...


Named = TypeVar("Named", bound=_HasName)


@dataclass(frozen=True, slots=True)
class TrainBaseline:
    """A model of another package and how it is trained; on the CPU always in fp32."""

    name: str
    build: Callable[[int], nn.Module]  # from the number of classes
    half: Half
    channels_last: bool
    compiled: bool = False
    lr: float = LR


def find_baselines(model: str, named: str = "") -> tuple[list[TrainBaseline], list[str]]:
    """The baselines of installed packages for a model, and why others are missing.

    `named` selects the baseline of that name, or those whose names contain it.
    """
    baselines: list[TrainBaseline] = []
    missing: list[str] = []
    for package in ("torchvision", "timm"):
        found, why = _find(package, model)
        baselines += found
        missing += [why] if why else []
    return select_by_name(baselines, named), missing


def select_by_name(baselines: Sequence[Named], named: str) -> list[Named]:
    """The baseline of this name, else those whose names contain it."""
    chosen = [b for b in baselines if b.name == named] or [b for b in baselines if named in b.name]
    if baselines and not chosen:
        names = ", ".join(baseline.name for baseline in baselines)
        raise UsageError(f"no baseline is called {named!r}", hint=f"use one of these names or a part of it: {names}")
    return chosen


def _find(package: str, model: str) -> tuple[list[TrainBaseline], str]:
    if importlib.util.find_spec(package) is None:
        return [], f"{package} is not installed"
    try:
        module = importlib.import_module(package)
    except (ImportError, OSError, RuntimeError) as error:  # a build for another torch fails while it loads
        return [], f"{package} cannot be imported: {str(error).splitlines()[0]}"
    name = _TIMM_NAMES.get(model, model) if package == "timm" else model
    if (package, model) == ("torchvision", _SSD):
        build_ssd = partial(ssd_baseline.build_ssd300, module.models)
        return _both(ssd_baseline.NAME, build_ssd, ssd_baseline.LR), ""
    known = module.list_models() if package == "timm" else [*module.models.list_models(), *_UNNAMED]
    if name not in known:
        return [], f"{package} has no {model}"
    if package == "torchvision":
        build = partial(_torchvision_network, module.models, name)
        return [TrainBaseline("torchvision", build, "fp16", channels_last=False), *_both("torchvision", build)], ""

    def build_timm(num_classes: int) -> nn.Module:
        built: nn.Module = module.create_model(name, num_classes=num_classes)
        return built

    return _both("timm", build_timm), ""


def _torchvision_network(models: Any, name: str, num_classes: int) -> nn.Module:
    if name in _UNNAMED:
        resnet = models.resnet
        network: nn.Module = resnet.ResNet(
            resnet.Bottleneck, _DEPTHS, num_classes, groups=32, width_per_group=_UNNAMED[name]
        )
        return network
    options: dict[str, Any] = {"aux_logits": False} if name in _WITHOUT_AUX_HEADS else {}
    network = models.get_model(name, weights=None, num_classes=num_classes, **options)
    return network


def _both(network: str, build: Callable[[int], nn.Module], lr: float = LR) -> list[TrainBaseline]:
    """The model in channels_last and bf16, eager and compiled."""
    name = f"{network} channels_last"
    return [
        TrainBaseline(name, build, "bf16", channels_last=True, lr=lr),
        TrainBaseline(f"{name} compiled", build, "bf16", channels_last=True, compiled=True, lr=lr),
    ]


def compare(
    run: PreparedRun,
    baselines: Sequence[TrainBaseline],
    config: TimingConfig,
    our_images_per_s: float,
    log: Callable[[str], None],
) -> tuple[dict[str, dict[str, float | str]], list[str]]:
    """The speed of each baseline and our speedup over it; notes on those that could not be measured."""
    precision = "fp32" if run.device.kind == "cpu" else ""
    results: dict[str, dict[str, float | str]] = {}
    notes: list[str] = []
    for baseline in baselines:
        log(f"measuring {baseline.name}")
        try:
            images_per_s = _images_per_s(run, build_baseline_step(run, baseline), config)
        except Exception as error:  # a failing baseline must not lose the results so far
            if not (is_out_of_memory(error) or isinstance(error, RuntimeError | ValueError | TypeError)):
                raise
            why = str(error).splitlines()[0] if str(error) else repr(error)
            notes.append(f"{baseline.name} could not be measured: {why}")
            continue
        results[baseline.name] = {
            "images_per_s": images_per_s,
            "ratio": our_images_per_s / images_per_s,
            "precision": precision or baseline.half,
        }
    return results, notes


def _images_per_s(run: PreparedRun, step: BaselineStep, config: TimingConfig) -> float:
    """Images per second of a baseline's step on the data of the run."""
    plan, device = run.plan, run.device
    context = DataContext(BlockingTransfer(device.move))
    loader = build_train_loader(run.recipe, plan, run.datasets.train, context)
    return plan.global_batch / measure(step, loader, device, config, StepTimer(device)).median_s


def build_baseline_step(run: PreparedRun, baseline: TrainBaseline) -> BaselineStep:
    """The training step of a baseline on the batches of the run."""
    recipe, plan, device = run.recipe, run.plan, run.device
    if baseline.compiled:
        torch.compiler.reset()  # as in a new process
    with torch.random.fork_rng(devices=[]):
        model = baseline.build(plan.num_classes).to(device.torch).train()
    if baseline.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return BaselineStep(
        model=torch.compile(model) if baseline.compiled else model,
        optimizer=torch.optim.SGD(model.parameters(), baseline.lr, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY),
        loss=_build_loss(run, baseline),
        preprocess=TrainPreprocess(
            recipe.data.preprocess,
            recipe.augment,
            plan.num_classes,
            torch.float32,
            baseline.channels_last,
            uses_fused_kernels(recipe, device),
        ),
        device=device,
        dtype=None if device.kind == "cpu" else _DTYPES[baseline.half],
    )


def _build_loss(run: PreparedRun, baseline: TrainBaseline) -> Loss:
    if run.recipe.task != "detection":
        return classification_loss(run.recipe.loss.label_smoothing)
    task = build_detection(run.recipe, run.datasets.train, run.device)
    return detection_loss(replace(task, loss_fn=torch.compile(ssd_losses) if baseline.compiled else ssd_losses))


def classification_loss(label_smoothing: float) -> Loss:
    """The cross-entropy, also with mixed targets."""
    cross_entropy = nn.CrossEntropyLoss(label_smoothing=label_smoothing)

    def loss(outputs: Any, batch: Batch) -> Tensor:
        found: Tensor = cross_entropy(outputs, batch.tensors.get("soft_targets", batch["targets"]))
        return found

    return loss


def detection_loss(task: DetectionTask) -> Loss:
    """SSD's losses by tensor operations: matching, hard negatives by sorting, cross-entropy and smooth L1."""
    return lambda outputs, batch: task.loss(outputs, batch).loss / len(batch)


class BaselineStep:
    """A plain training step: autocast, loss, backward, optimizer; fp16 with a gradient scaler."""

    def __init__(
        self,
        *,
        model: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        preprocess: TrainPreprocess,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._loss = loss
        self._preprocess = preprocess
        self._device = device
        self._dtype = dtype
        self._scaler = torch.amp.GradScaler(device.kind, enabled=dtype == torch.float16)

    def __call__(self, step: int, micro_batches: Sequence[Batch]) -> None:
        """Train on one global batch."""
        self._optimizer.zero_grad(set_to_none=True)
        for batch in micro_batches:
            prepared = self._preprocess(batch, step)
            with torch.autocast(self._device.kind, self._dtype, enabled=self._dtype is not None):
                loss = self._loss(self._model(prepared["images"]), prepared)
            self._scaler.scale(loss / len(micro_batches)).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._device.step_boundary()
