"""The micro-batch of `batch.micro: auto`: the most samples of a device's share that one forward pass has memory for.

Owns how it is found before the first step. Refuses to know how a step works, and what happens when memory runs out
later (engine). Invariant: the global batch and its groups stay; all processes take the same; a run that goes on keeps
what it had.

Where an error tells that memory is full, steps of a network that is thrown away afterwards are tried, upwards from
what the plan would take. A host ends a process that takes too much: there it is counted what an image keeps, and
nothing above the plan is taken, since larger passes are slower there (measured: ResNet-20 takes 1.8 times as long for
512 images of 32 px at once as in four passes).
"""

from __future__ import annotations

import gc
from dataclasses import replace

from reconv.data.pipeline.buffers import BlockingTransfer
from reconv.data.pipeline.prefetcher import DataContext
from reconv.device import is_out_of_memory
from reconv.distributed.process_group import ProcessGroup
from reconv.environment_checks import Machine, available_memory_bytes
from reconv.errors import ResourceError
from reconv.logging import formatting as fmt
from reconv.logging.run_logger import RunLogger
from reconv.recipe.plan import Plan, with_micro
from reconv.recipe.schema import Recipe
from reconv.trainer.build import loaders as parts
from reconv.trainer.build.network import build_recorder, is_network_compiled, kept_bytes
from reconv.trainer.build.train_state import TrainingRun, build_learner, build_step
from reconv.trainer.oom import largest_that_fits
from reconv.trainer.step import unmarked
from reconv.trainer.trainer import Counters

FULL = 0.9  # of a device's memory: the rest is for fragments, buckets and what evaluations keep
FULL_IF_RECORDED = 0.45  # a recorded step has memory of its own beside that of the steps before it
FREE_SHARE = 0.5  # of a host's free memory: others live there too
BACKWARD = 1.25  # measured: peaks of ResNet-50 and MobileNetV2 grow by 1.2 times what is kept for gradients
COPIES = 4  # of the weights: themselves, gradients, optimizer state, an average


def settle_micro(job: TrainingRun, machine: Machine | None = None) -> TrainingRun:
    """The job with the micro-batch that fits, or that it had before."""
    recipe, plan, state = job.recipe, job.plan, job.point.state
    if not is_open(recipe, plan):
        return job
    if state:
        kept = int(state.get("micro_groups", plan.micro_groups))
        return job if kept == plan.micro_groups else replace(job, plan=_taken(recipe, plan, kept, "kept since before"))
    num_groups = len(plan.device_groups[0])
    choices = [k for k in range(1, num_groups + 1) if num_groups % k == 0]
    if recipe.parallel.reduce == "ordered" or len(choices) == 1:  # ordered: each pass is one group anyway
        return job
    if job.device.raises_oom:
        found, why = _tried(job, choices)
    else:
        found, why = _counted(job, choices, machine or Machine())
    agreed = min(job.process_group.all_gather(found))
    return job if agreed == plan.micro_groups else replace(job, plan=_taken(recipe, plan, agreed, why))


def out_of_memory(job: TrainingRun) -> ResourceError:
    """What to say of a step that does not fit, and the size to type next: whole groups, or what saves memory in one."""
    recipe, plan = job.recipe, job.plan
    is_halved = (
        recipe.batch.micro == "auto" and job.process_group.world_size == 1
    )  # down to one group, before this came
    if plan.micro_groups > 1 and not is_halved:
        why = f"micro-batches of {plan.micro_batch} images do not fit"
        then = f"smaller ones, also with --resume: --set batch.micro={plan.micro_groups // 2 * plan.group}"
    elif recipe.batch.group == "micro":
        why = f"micro-batches of {plan.micro_batch} images do not fit"
        then = (
            f"smaller ones: --set batch.micro={max(1, plan.micro_batch // 2)} (they are groups: it changes batch norm)"
        )
    else:
        why = f"a group of {min(plan.group, plan.micro_batch)} images does not fit, and groups are not cut"
        saving = (
            "" if recipe.memory.activation_checkpointing != "off" else "--set memory.activation_checkpointing=auto, or "
        )
        then = f"{saving}smaller groups: --set batch.group=N (it changes batch norm)"
    return ResourceError("out of memory", where=job.device.describe(), why=why, then=then)


def is_open(recipe: Recipe, plan: Plan) -> bool:
    """Whether another micro-batch is the same run: it is not a group of its own, a part of one or a pipeline's."""
    is_bound = recipe.batch.group == "micro" or recipe.parallel.pipeline_stages > 1 or plan.devices_per_group > 1
    return recipe.batch.micro == "auto" and not is_bound


def _taken(recipe: Recipe, plan: Plan, num_groups: int, why: str) -> Plan:
    samples = min(num_groups, len(plan.device_groups[0])) * plan.group
    return with_micro(recipe, plan, num_groups, f"batch.micro: auto takes {samples} samples at a time: {why}")


def _counted(job: TrainingRun, choices: list[int], machine: Machine) -> tuple[int, str]:
    """The most, up to what is planned, by what an image keeps and the memory that is free; as planned if unknown."""
    plan, free = job.plan, available_memory_bytes(machine)
    known = kept_bytes(job.recipe, plan.num_classes, job.device)
    if free is None or known is None or job.device.kind != "cpu":
        return plan.micro_groups, "as planned"
    each, weights = int(BACKWARD * known[0]), COPIES * known[1]
    room = int(FREE_SHARE * free / job.process_group.launch_env.local_world_size)
    fitting = [k for k in choices if k <= plan.micro_groups and weights + k * plan.group * each <= room]
    why = f"about {fmt.size(each)} each, where {fmt.size(room)} may be taken"
    return max(fitting, default=choices[0]), why


def _tried(job: TrainingRun, choices: list[int]) -> tuple[int, str]:
    """By steps of a network that is thrown away; where there is nothing larger, a process alone can wait and see."""
    start, is_alone = job.plan.micro_groups, job.process_group.world_size == 1
    if is_alone and start == choices[-1]:
        return start, "as planned"
    if is_network_compiled(job.recipe, job.plan.num_classes, job.device):  # anew for each size: minutes
        return start, "as planned"
    return largest_that_fits(choices, start, lambda num_groups: _fits(job, num_groups)), "the most that fitted"


def _fits(job: TrainingRun, num_groups: int) -> bool:
    """Whether one step of this device alone, in passes of so many groups, leaves some memory free."""
    plan = with_micro(job.recipe, job.plan.one_device(), num_groups, "")
    alone = replace(job, plan=plan, process_group=ProcessGroup.single())
    share = FULL if build_recorder(job.recipe, job.device, job.process_group) is None else FULL_IF_RECORDED
    try:
        _step_once(alone)
        return job.device.peak_memory_bytes() <= share * job.device.total_memory_bytes()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    finally:
        gc.collect()  # a network and what runs it refer to each other
        job.device.release_memory()
    return False


def _step_once(job: TrainingRun) -> None:
    """The first step of a job, of which nothing is kept."""
    logger = RunLogger()  # the run itself will log the same
    learner = build_learner(job, logger)
    step = build_step(job, learner, Counters(step=1), logger, unmarked)
    bad_samples = parts.build_bad_samples(job.recipe, {}, logger, job.process_group)
    context = DataContext(BlockingTransfer(job.device.move))
    [batches] = parts.train_loader(job.recipe, job.plan, job.sources.train, context, bad_samples).steps(0, 1)
    step(0, batches)
    job.device.synchronize()
