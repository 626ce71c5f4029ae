"""The predicted speed, time and cost of a recipe on several numbers of devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from reconv.core.errors import RecipeError
from reconv.planner.device_kinds import DeviceKind
from reconv.planner.model import FITTED, InputLimits, StepBreakdown, Workload, predict_step
from reconv.planner.step_time import StepTime, find_network
from reconv.recipe.plan import Facts, Plan, make_plan
from reconv.recipe.schema import Recipe

# Quantiles (10 % and 90 %) of published / predicted over the rows that were held out of the fit, see
# docs/results/scaling-model.md.
RANGE = (0.89, 1.06)
CHECKED_UP_TO = 256  # devices; one row has 3,584
IMAGES_PER_CORE_PER_S = 900  # JPEG of 110 kB, cropped, flipped; 14,549 images/s with 16 cores, benchmarks/LOG.md
IMAGE_BYTES = 110_000  # mean of ImageNet's training set
_EVAL_SPEEDUP = 3  # evaluation has the forward pass only
_IMAGENET, _COCO, _CIFAR = (1_281_167, 50_000), (117_266, 5_000), (50_000, 10_000)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Cluster on which the recipe would run; None: not a limit, or not known."""

    kind: DeviceKind
    price_per_hour: float | None = None  # of one device
    storage_bytes_per_s: float | None = None  # of the whole cluster
    cores_per_node: int | None = None
    image_bytes: int = IMAGE_BYTES

    def input_limits(self, reads_files: bool) -> InputLimits:
        if not reads_files:
            return InputLimits()
        cores = self.cores_per_node or self.kind.cores_per_node
        storage = None if self.storage_bytes_per_s is None else self.storage_bytes_per_s / self.image_bytes
        return InputLimits(cores * IMAGES_PER_CORE_PER_S, storage)


@dataclass(frozen=True, slots=True)
class ClusterPrediction:
    """Prediction for one number of devices."""

    devices: int
    nodes: int
    batch: int
    batch_per_device: int
    step: StepBreakdown
    images_per_s: float
    images_per_s_range: tuple[float, float]
    efficiency: float  # against as many single devices at their best batch
    input_bytes_per_s: float
    hours: float
    hours_range: tuple[float, float]
    cost: float | None
    save_interval_s: float | None  # None: only the end of the run is saved
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        values = asdict(self)
        values["step"] = {"step_s": self.step.step_s, **{f"{k}_s": v for k, v in self.step.parts_s.items()}}
        return values


@dataclass(frozen=True, slots=True)
class ImpossiblePlan:
    """A number of devices for which the recipe cannot be planned, and why."""

    devices: int
    why: str


def dataset_size(recipe: Recipe) -> tuple[int, int]:
    """Training and validation images of the usual dataset of a recipe."""
    if recipe.data.source.startswith("cifar"):
        return _CIFAR
    return _COCO if recipe.task == "detection" else _IMAGENET


def predict_cluster(
    recipe_for: Callable[[int], Recipe],
    devices: Sequence[int],
    cluster: Cluster,
    step_time: StepTime,
    num_images: tuple[int, int],
    parameters: int | None = None,
) -> list[ClusterPrediction | ImpossiblePlan]:
    """A prediction for each number of devices; `recipe_for` gives the recipe, whose batch may depend on that number."""
    rows: list[ClusterPrediction | ImpossiblePlan] = []
    for count in devices:
        try:
            recipe = recipe_for(count)
            plan = make_plan(recipe, Facts(*num_images, num_classes=1000, world_size=count))
        except RecipeError as error:
            lines = [line.strip() for line in (*error.what.splitlines(), error.hint or "") if line.strip()]
            rows.append(ImpossiblePlan(count, "; ".join(lines)))
            continue
        rows.append(_predict(recipe, plan, cluster, step_time, parameters))
    return rows


def _predict(
    recipe: Recipe, plan: Plan, cluster: Cluster, step_time: StepTime, parameters: int | None
) -> ClusterPrediction:
    kind, count = cluster.kind, plan.world_size
    network = find_network(recipe.model.name, parameters)
    compressed = recipe.parallel.gradient_compression != "off"
    work = Workload(
        step_time.seconds(plan.batch_per_device),
        plan.batch_per_device,
        step_time.gradient_bytes or network.parameters * (2 if compressed else 4),
        recipe.precision.family == "half",
        2 * network.norm_layers,
        plan.devices_per_group,
    )
    fitted = FITTED if step_time.shared_host is None else replace(FITTED, shared_host=step_time.shared_host)
    reads_files = not recipe.data.source.startswith(("synthetic", "cifar", "digits"))
    step = predict_step(work, count, kind, fitted, cluster.input_limits(reads_files))
    images_per_s = plan.global_batch / step.step_s
    low, high = (1 + s * math.hypot(abs(r - 1), step_time.uncertainty) for s, r in zip((-1, 1), RANGE, strict=True))
    if count == 1:
        low, high = 1 - step_time.uncertainty, 1 + step_time.uncertainty
    hours = _run_s(plan, step, images_per_s) / 3600
    return ClusterPrediction(
        devices=count,
        nodes=math.ceil(count / kind.devices_per_node),
        batch=plan.global_batch,
        batch_per_device=plan.batch_per_device,
        step=step,
        images_per_s=images_per_s,
        images_per_s_range=(images_per_s * low, images_per_s * high),
        efficiency=images_per_s / (count * step_time.images_per_s),
        input_bytes_per_s=images_per_s * cluster.image_bytes if reads_files else 0.0,
        hours=hours,
        hours_range=(hours / high, hours / low),
        cost=None if cluster.price_per_hour is None else hours * count * cluster.price_per_hour,
        save_interval_s=_save_interval_s(plan, 3600 * hours),
        notes=tuple(_notes(plan, step, step_time)),
    )


def _run_s(plan: Plan, step: StepBreakdown, images_per_s: float) -> float:
    """Training and evaluations; not the start, and not what is saved meanwhile."""
    num_evaluations = 0 if plan.evaluate is None else plan.evaluate.count(plan.total_steps)
    return plan.total_steps * step.step_s + num_evaluations * plan.num_val / (_EVAL_SPEEDUP * images_per_s)


def _save_interval_s(plan: Plan, run_s: float) -> float | None:
    if plan.save is None:
        return None
    if plan.save.minutes is not None:
        return 60 * plan.save.minutes
    return run_s / max(1, plan.save.count(plan.total_steps))


def _notes(plan: Plan, step: StepBreakdown, step_time: StepTime) -> list[str]:
    notes = []
    if plan.world_size > CHECKED_UP_TO:
        notes.append(f"more than the {CHECKED_UP_TO} devices up to which the model was checked, except for one row")
    if 4 * plan.batch_per_device < step_time.largest_batch:
        notes.append(f"{plan.batch_per_device} images per device: far below the measured {step_time.largest_batch}")
    if step.input_s > 0:
        notes.append(f"limited by input: {100 * step.input_s / step.step_s:.0f} % of the time is waiting for images")
    if plan.devices_per_group > 1:
        notes.append(f"batch norm groups of {plan.group} span {plan.devices_per_group} devices")
    return notes
