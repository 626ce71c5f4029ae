"""How a global batch is split into groups, devices and micro-batches.

The groups depend on the recipe alone, unless batch.group is `micro`. They go to the devices in order, an equal number
to each or one more to the first ones. A micro-batch is a whole number of groups; the last one of a device may hold
fewer, and a group that absorbed a remainder of one sample makes its micro-batch one sample larger. With fewer groups
than devices, each group is divided over an equal number of devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from reconv.errors import RecipeError
from reconv.recipe.plan_text import count
from reconv.recipe.schema import Recipe

# Per pipeline device: with m micro-batches, p devices are idle for (p - 1) / (m + p - 1) of the time.
PIPELINE_MICRO_BATCHES = 4
AUTO_MICRO_IMAGES = 256  # the largest automatic micro-batch, unless one group is larger


@dataclass(frozen=True, slots=True)
class Split:
    """A global batch split into devices, micro-batches and groups."""

    per_device: int
    micro: int
    num_micro: int
    group: int
    groups: tuple[int, ...]
    on_devices: tuple[tuple[int, ...], ...]


def cut_groups(num_samples: int, group: int) -> tuple[int, ...]:
    """Group sizes of a batch; the last may be smaller, and a remainder of one sample joins its neighbor."""
    full, rest = divmod(num_samples, group)
    if rest == 0:
        return (group,) * full
    if rest == 1 and full:
        return (*(group,) * (full - 1), group + 1)
    return (*(group,) * full, rest)


def _even(num_samples: int, limit: int) -> tuple[int, ...]:
    """The fewest parts of at most `limit` samples, of equal size or differing by one, larger first.

    Batch norm needs two samples, so a part has at least two even if that exceeds the limit by one.
    """
    num_parts = max(1, min(math.ceil(num_samples / limit), num_samples // 2))
    size, num_larger = divmod(num_samples, num_parts)
    return (size + 1,) * num_larger + (size,) * (num_parts - num_larger)


def num_copies(recipe: Recipe, num_devices: int) -> int:
    """Number of model replicas: one per device, or one per pipeline of devices."""
    each = recipe.parallel.pipeline_stages
    if num_devices % each:
        raise RecipeError(
            f"parallel.pipeline_stages {each}: {count(num_devices, 'device')} cannot form pipelines of {each}",
            then=f"--devices {each}, or a multiple of it",
        )
    return num_devices // each


def refuse_uneven_pipeline(recipe: Recipe, micro_batches: Sequence[tuple[int, ...]], split: Split) -> None:
    """Raise RecipeError unless all micro-batches (given by their group sizes) are alike and numerous enough."""
    parallel, distinct = recipe.parallel, set(micro_batches)
    if parallel.pipeline_stages == 1:
        return
    if len(distinct) > 1 or len(split.groups) < len(split.on_devices):
        raise RecipeError(
            "parallel.pipeline_stages: all micro-batches of a step must have the same group sizes",
            why=f"batch.size {recipe.batch.size} in groups of {split.group} gives {len(distinct)} different ones",
            then="use a batch.size that is a multiple of batch.micro x the number of model replicas",
        )
    if parallel.pipeline_schedule == "1f1b" and split.num_micro < parallel.pipeline_stages:
        raise RecipeError(
            f"parallel.pipeline_schedule: 1f1b needs {parallel.pipeline_stages} micro-batches or more, "
            f"not {split.num_micro}",
            then="use a smaller batch.micro, or --set parallel.pipeline_schedule=gpipe",
        )


def split_batch(recipe: Recipe, world_size: int) -> Split:
    """Split the global batch, or raise RecipeError with sizes that would work."""
    size = recipe.batch.size
    if recipe.batch.group == "micro":
        return _split_by_hardware(recipe, size, world_size)
    group = size if recipe.batch.group == "all" else recipe.batch.group
    groups = cut_groups(size, group)
    if len(groups) < world_size:
        parts = _divide_groups(recipe, groups, world_size)
        return Split(parts[0][0], parts[0][0], 1, group, groups, parts)
    on_devices = _assign_groups(groups, world_size)
    per_device = sum(on_devices[0])
    per_micro = _groups_per_micro(recipe, on_devices[0], group, per_device)
    return Split(per_device, per_micro * group, math.ceil(len(on_devices[0]) / per_micro), group, groups, on_devices)


def _split_by_hardware(recipe: Recipe, size: int, world_size: int) -> Split:
    """batch.group: micro. Each micro-batch is a group."""
    if size % world_size:
        fitting = sorted({max(size // world_size, 1) * world_size, (size // world_size + 1) * world_size})
        raise RecipeError(
            f"batch.size {size} is not divisible by {world_size} devices",
            then=f"sizes that work: {_listed(fitting)}, as in --batch-size {fitting[-1]}",
        )
    per_device = size // world_size
    groups = _even(per_device, AUTO_MICRO_IMAGES if recipe.batch.micro == "auto" else recipe.batch.micro)
    return Split(per_device, groups[0], len(groups), groups[0], groups * world_size, (groups,) * world_size)


def _assign_groups(groups: Sequence[int], world_size: int) -> tuple[tuple[int, ...], ...]:
    """The groups of each device, in order; the first devices have one more if the number is uneven."""
    each, more = divmod(len(groups), world_size)
    starts = [rank * each + min(rank, more) for rank in range(world_size + 1)]
    return tuple(tuple(groups[start:stop]) for start, stop in pairwise(starts))


def _divide_groups(recipe: Recipe, groups: Sequence[int], world_size: int) -> tuple[tuple[int, ...], ...]:
    """Each device's part of a group, with an equal number of devices per group."""
    then = _what_fits(recipe.batch.size, world_size)
    if world_size % len(groups) or min(groups) < world_size // len(groups):
        raise RecipeError(
            f"{count(len(groups), 'group')} of {max(groups)} samples cannot be divided over {world_size} devices",
            why="each device needs whole groups, or an equal number of devices must share each group",
            then=then,
        )
    reason = None
    if recipe.parallel.reduce == "ordered":
        reason = "parallel.reduce: ordered sums the gradients of whole groups"
    elif recipe.augment.mixes:
        reason = "MixUp and CutMix would need samples of another device"
    elif recipe.model.options.get("drop_connect_per") == "batch" and recipe.model.options.get("drop_connect") != 0:
        reason = "drop_connect_per: batch decides for a whole group, and each device would decide for its part"
    if reason is not None:
        raise RecipeError(
            f"{count(len(groups), 'group')} of {max(groups)} samples for {world_size} devices would have to be shared",
            why=reason,
            then=then,
        )
    per_group = world_size // len(groups)
    parts: list[tuple[int, ...]] = []
    for group in groups:
        each, more = divmod(group, per_group)
        parts += [(each + (part < more),) for part in range(per_group)]
    return tuple(parts)


def _what_fits(size: int, world_size: int) -> str:
    """A hint with group sizes that give every device at least one group."""
    if size < world_size:
        return f"use at most {size} devices, or --batch-size {world_size} or more"
    fitting = [group for group in range(2, size + 1) if len(cut_groups(size, group)) >= world_size]
    even = [group for group in fitting if size % (group * world_size) == 0]
    some = (even or fitting or [1])[-6:]
    return f"group sizes that work: {_listed(some)}, as in --set batch.group={some[-1]} (this changes batch norm)"


def _groups_per_micro(recipe: Recipe, groups: Sequence[int], group: int, per_device: int) -> int:
    """Number of groups per micro-batch."""
    micro, pipeline = recipe.batch.micro, recipe.parallel.pipeline_stages
    if micro == "auto":
        fewest = 1 if pipeline == 1 else PIPELINE_MICRO_BATCHES * pipeline
        dividing = [k for k in range(1, len(groups) + 1) if len(groups) % k == 0 and k * group <= AUTO_MICRO_IMAGES]
        return max((k for k in dividing if len(groups) // k >= fewest), default=1)
    if micro >= per_device:
        return len(groups)
    if micro % group:
        fitting = [k * group for k in range(1, len(groups) + 1) if len(groups) % k == 0]
        near = min(fitting, key=lambda size: abs(size - micro))
        raise RecipeError(
            f"batch.micro {micro} is not a multiple of batch.group {recipe.batch.group}"
            + (f" ({group} samples)" if recipe.batch.group == "all" else ""),
            why="batch norm, MixUp and CutMix work on a whole group",
            then=f"sizes that work: {_listed(fitting[:8])}, as in --set batch.micro={near}; "
            f"or change the groups: --set batch.group={micro}",
        )
    return micro // group


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)
