"""How a global batch falls into groups, devices and micro-batches.

Owns the cutting. Refuses to know steps and schedules (plan). Invariant: the groups depend on the recipe alone, unless
it says `micro`; every sample is in one group, and rows go to devices in position order.

Groups are dealt to devices in position order, as many to each as to every other or one more to the first ones. A
device takes `micro_batch` samples at a time, which is a whole number of groups: its groups, in position order, are
dealt out so many at a time. The last micro-batch of a device holds the groups that are left, and a group that took in
a remainder of one sample makes its micro-batch one larger. Where there are fewer groups than devices, each group is
spread over as many devices, which then are in the same micro-step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from reconv.errors import RecipeError
from reconv.recipe.plan_text import count
from reconv.recipe.schema import Recipe

# For each device of a pipeline: with m micro-batches p devices stand still for (p - 1) / (m + p - 1) of the passes.
PIPELINE_MICRO_BATCHES = 4
AUTO_MICRO_IMAGES = 256  # the largest automatic micro-batch, unless one group is larger


@dataclass(frozen=True, slots=True)
class Split:
    """How a global batch falls into devices, micro-batches and groups."""

    per_device: int
    micro: int
    num_micro: int
    group: int
    groups: tuple[int, ...]
    on_devices: tuple[tuple[int, ...], ...]


def cut_groups(num_samples: int, group: int) -> tuple[int, ...]:
    """Group sizes of a batch: the last may be shorter, and a remainder of one joins its neighbour."""
    full, rest = divmod(num_samples, group)
    if rest == 0:
        return (group,) * full
    if rest == 1 and full:
        return (*(group,) * (full - 1), group + 1)
    return (*(group,) * full, rest)


def _even(num_samples: int, limit: int) -> tuple[int, ...]:
    """As few parts of at most `limit` as there can be, equal or one apart, larger first.

    Batch norm of one sample is nothing, so that a part has two even where that is one more than the limit.
    """
    num_parts = max(1, min(math.ceil(num_samples / limit), num_samples // 2))
    size, num_larger = divmod(num_samples, num_parts)
    return (size + 1,) * num_larger + (size,) * (num_parts - num_larger)


def num_copies(recipe: Recipe, num_devices: int) -> int:
    """How many copies of the network there are: one for each device, or for each pipeline of devices."""
    each = recipe.parallel.pipeline_stages
    if num_devices % each:
        raise RecipeError(
            f"parallel.pipeline_stages {each}: {count(num_devices, 'device')} cannot be cut into pipelines of {each}",
            then=f"--devices {each}, or a multiple",
        )
    return num_devices // each


def refuse_uneven_pipeline(recipe: Recipe, micro_batches: Sequence[tuple[int, ...]], split: Split) -> None:
    """Refuse micro-batches, given by their groups, that a pipeline cannot take: they must be alike, and enough."""
    parallel, kinds = recipe.parallel, set(micro_batches)
    if parallel.pipeline_stages == 1:
        return
    if len(kinds) > 1 or len(split.groups) < len(split.on_devices):
        raise RecipeError(
            "parallel.pipeline_stages: the micro-batches of a step must have the same groups",
            why=f"batch.size {recipe.batch.size} in groups of {split.group} gives {len(kinds)} kinds of micro-batches",
            then="a batch.size that is a multiple of batch.micro x the copies of the network",
        )
    if parallel.pipeline_schedule == "1f1b" and split.num_micro < parallel.pipeline_stages:
        raise RecipeError(
            f"parallel.pipeline_schedule: 1f1b needs {parallel.pipeline_stages} micro-batches or more, "
            f"not {split.num_micro}",
            then="a smaller batch.micro, or parallel.pipeline_schedule: gpipe",
        )


def split_batch(recipe: Recipe, world_size: int) -> Split:
    """Cut the global batch, or raise RecipeError naming sizes that would fit."""
    size = recipe.batch.size
    if recipe.batch.group == "micro":
        return _split_by_hardware(recipe, size, world_size)
    group = size if recipe.batch.group == "all" else recipe.batch.group
    groups = cut_groups(size, group)
    if len(groups) < world_size:
        parts = _spread(recipe, groups, world_size)
        return Split(parts[0][0], parts[0][0], 1, group, groups, parts)
    on_devices = _dealt(groups, world_size)
    per_device = sum(on_devices[0])
    per_micro = _groups_per_micro(recipe, on_devices[0], group, per_device)
    return Split(per_device, per_micro * group, math.ceil(len(on_devices[0]) / per_micro), group, groups, on_devices)


def _split_by_hardware(recipe: Recipe, size: int, world_size: int) -> Split:
    """Each micro-batch is a group, whatever the devices."""
    if size % world_size:
        fitting = sorted({max(size // world_size, 1) * world_size, (size // world_size + 1) * world_size})
        raise RecipeError(
            f"batch.size {size} does not divide over {world_size} devices",
            then=f"sizes that fit: {_listed(fitting)}, as in --batch-size {fitting[-1]}",
        )
    per_device = size // world_size
    groups = _even(per_device, AUTO_MICRO_IMAGES if recipe.batch.micro == "auto" else recipe.batch.micro)
    return Split(per_device, groups[0], len(groups), groups[0], groups * world_size, (groups,) * world_size)


def _dealt(groups: Sequence[int], world_size: int) -> tuple[tuple[int, ...], ...]:
    """The groups of each device, in position order; the first devices have one more where they do not come out even."""
    each, more = divmod(len(groups), world_size)
    starts = [rank * each + min(rank, more) for rank in range(world_size + 1)]
    return tuple(tuple(groups[start:stop]) for start, stop in pairwise(starts))


def _spread(recipe: Recipe, groups: Sequence[int], world_size: int) -> tuple[tuple[int, ...], ...]:
    """Each device's part of a group, where every group has as many devices."""
    then = _what_fits(recipe.batch.size, world_size)
    if world_size % len(groups) or min(groups) < world_size // len(groups):
        raise RecipeError(
            f"{count(len(groups), 'group')} of {max(groups)} samples cannot be spread over {world_size} devices",
            why="each device takes whole groups, or a part of one group that as many devices share as every other",
            then=then,
        )
    reason = None
    if recipe.parallel.reduce == "ordered":
        reason = "parallel.reduce: ordered adds the gradients of whole groups"
    elif recipe.augment.mixes:
        reason = "the partner of a mixed image would be on another device"
    elif recipe.model.options.get("drop_connect_per") == "batch" and recipe.model.options.get("drop_connect") != 0:
        reason = "drop_connect_per: batch drops a branch for a whole group, and each device would draw for its part"
    if reason is not None:
        raise RecipeError(
            f"{count(len(groups), 'group')} of {max(groups)} samples for {world_size} devices: a group would be spread",
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
    """Sizes of groups of which every device has at least one, largest last; none for more devices than samples."""
    if size < world_size:
        return f"at most {size} devices, or --batch-size {world_size} or more"
    fitting = [group for group in range(2, size + 1) if len(cut_groups(size, group)) >= world_size]
    even = [group for group in fitting if size % (group * world_size) == 0]
    some = (even or fitting or [1])[-6:]
    return f"group sizes that fit: {_listed(some)}, as in --set batch.group={some[-1]} (it changes batch norm)"


def _groups_per_micro(recipe: Recipe, groups: Sequence[int], group: int, per_device: int) -> int:
    """How many groups a device takes at a time."""
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
            f"batch.micro {micro} is not a whole number of groups: batch.group is {recipe.batch.group}"
            + (f" ({group} samples)" if recipe.batch.group == "all" else ""),
            why="batch norm statistics and mixing belong to a group, which cannot be cut in two",
            then=f"sizes that fit: {_listed(fitting[:8])}, as in --set batch.micro={near}; "
            f"or change the groups: --set batch.group={micro}",
        )
    return micro // group


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)
