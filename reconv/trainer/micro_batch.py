"""The micro-batch of `batch.micro: auto`: the largest that fits into memory, chosen before the first step.

The global batch and its groups stay as they are, all ranks take the same size, and a resumed run keeps its own.

On devices that raise an error when their memory is full, steps of a temporary network are tried, from the planned size
upwards. A host kills a process that uses too much memory: there the activations are estimated instead, and nothing
above the planned size is used, because larger passes are slower (measured: ResNet-20 takes 1.8 times as long for 512
images of 32 px in one pass as in four).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from reconv.build.checks import memory_estimate
from reconv.build.data import build_bad_samples, build_train_loader
from reconv.build.model import build_graph_capture, compiles_network
from reconv.core.machine import Machine, available_memory_bytes
from reconv.data.pipeline.buffers import BlockingTransfer
from reconv.data.pipeline.prefetcher import DataContext
from reconv.device import is_out_of_memory
from reconv.logging import formatting as fmt
from reconv.logging.run_logger import RunLogger
from reconv.recipe.plan import Plan, with_micro
from reconv.recipe.schema import Recipe
from reconv.trainer.step import build_train_step
from reconv.trainer.train_state import build_train_state

if TYPE_CHECKING:
    from reconv.trainer.prepare import PreparedRun

MAX_MEMORY_FRACTION = 0.9  # of the device: the rest is for fragmentation, gradient buckets and evaluation
MAX_MEMORY_FRACTION_CAPTURED = 0.45  # a CUDA graph has its own memory pool beside that of the eager steps
MAX_HOST_FRACTION = 0.5  # of the available host memory
BACKWARD_FACTOR = 1.25  # measured: peaks of ResNet-50 and MobileNetV2 grow by 1.2 times the saved activations
WEIGHT_COPIES = 4  # weights, gradients, optimizer state, EMA

Run = TypeVar("Run", bound="PreparedRun")


def choose_micro_batch(run: Run, machine: Machine | None = None) -> Run:
    """The run with a plan whose micro-batch fits into memory."""
    recipe, plan, state = run.recipe, run.plan, run.restore_point.state
    if not _can_change(recipe, plan):
        return run
    if state:
        return _with_micro_groups(run, int(state.get("micro_groups", plan.micro_groups)), "as before the resume")
    num_groups = len(plan.device_groups[0])
    choices = [k for k in range(1, num_groups + 1) if num_groups % k == 0]
    if recipe.parallel.reduce == "ordered" or len(choices) == 1:  # ordered: each pass is one group anyway
        return run
    if run.device.raises_oom:
        found, why = _try_sizes(run, choices)
    else:
        found, why = _estimate_size(run, choices, machine or Machine())
    return _with_micro_groups(run, min(run.process_group.all_gather(found)), why)


def largest_that_fits(choices: Sequence[int], start: int, fits: Callable[[int], bool]) -> int:
    """The largest of the ascending choices that fits, tried from `start` upwards, or downwards; else the smallest."""
    index = choices.index(start)
    if not fits(start):
        return next((size for size in reversed(choices[:index]) if fits(size)), choices[0])
    found = start
    for size in choices[index + 1 :]:
        if not fits(size):
            break
        found = size
    return found


def _can_change(recipe: Recipe, plan: Plan) -> bool:
    """True if the micro-batch is free: not a batch norm group, a part of one, or fixed by a pipeline."""
    is_fixed = recipe.batch.group == "micro" or recipe.parallel.pipeline_stages > 1 or plan.devices_per_group > 1
    return recipe.batch.micro == "auto" and not is_fixed


def _with_micro_groups(run: Run, num_groups: int, why: str) -> Run:
    plan = run.plan
    if num_groups == plan.micro_groups:
        return run
    samples = min(num_groups, len(plan.device_groups[0])) * plan.group
    text = f"batch.micro: auto uses micro-batches of {samples} samples: {why}"
    return replace(run, plan=with_micro(run.recipe, plan, num_groups, text))


def _estimate_size(run: PreparedRun, choices: Sequence[int], machine: Machine) -> tuple[int, str]:
    """The largest size up to the planned one whose estimate fits into the available host memory, and why."""
    plan, available = run.plan, available_memory_bytes(machine)
    estimate = memory_estimate(run.recipe, plan.num_classes, run.device)
    if available is None or estimate is None or run.device.kind != "cpu":
        return plan.micro_groups, "as planned"
    image_bytes, weight_bytes = int(BACKWARD_FACTOR * estimate[0]), WEIGHT_COPIES * estimate[1]
    limit = int(MAX_HOST_FRACTION * available / run.process_group.launch_env.local_world_size)
    fitting = [k for k in choices if k <= plan.micro_groups and weight_bytes + k * plan.group * image_bytes <= limit]
    why = f"about {fmt.size(image_bytes)} per image, and {fmt.size(limit)} may be used"
    return max(fitting, default=choices[0]), why


def _try_sizes(run: PreparedRun, choices: Sequence[int]) -> tuple[int, str]:
    """The largest size for which a step of a temporary network fits, and why."""
    start, is_single = run.plan.micro_groups, run.process_group.world_size == 1
    if is_single and start == choices[-1]:  # nothing larger to try, and a step that does not fit is repeated
        return start, "as planned"
    if compiles_network(run.recipe, run.plan.num_classes, run.device):  # every size would compile for minutes
        return start, "as planned"
    return largest_that_fits(choices, start, lambda num_groups: _fits(run, num_groups)), "the largest that fits"


def _fits(run: PreparedRun, num_groups: int) -> bool:
    """True if one step on this device alone, with micro-batches of `num_groups` groups, leaves enough memory free."""
    is_captured = build_graph_capture(run.recipe, run.device, run.process_group) is not None
    limit = MAX_MEMORY_FRACTION_CAPTURED if is_captured else MAX_MEMORY_FRACTION
    single = run.on_one_device()
    # With all parameters trained, which takes more memory than a frozen backbone.
    single = replace(single, plan=replace(with_micro(run.recipe, single.plan, num_groups, ""), freeze_steps=0))
    try:
        _run_one_step(single)
        return run.device.peak_memory_bytes() <= limit * run.device.total_memory_bytes()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    finally:
        gc.collect()  # the temporary network is part of reference cycles
        run.device.release_memory()
    return False


def _run_one_step(run: PreparedRun) -> None:
    logger = RunLogger()  # silent: the run will log the same again
    train_state = build_train_state(run, logger)
    step = build_train_step(run, train_state, logger)
    bad_samples = build_bad_samples(run.recipe, {}, logger, run.process_group)
    context = DataContext(BlockingTransfer(run.device.move))
    loader = build_train_loader(run.recipe, run.plan, run.datasets.train, context, bad_samples)
    [micro_batches] = loader.steps(0, 1)
    step(0, micro_batches)
    run.device.synchronize()
