"""Split of a global batch into groups, devices and micro-batches.

The groups depend on the recipe alone, unless batch.group is `micro`. They go to the devices in order, an equal number
to each or one more to the first ones. A micro-batch is a whole number of groups; the last one of a device may hold
fewer, and a group that absorbed a remainder of one sample makes its micro-batch one sample larger. With fewer groups
than devices, each group is divided over an equal number of devices.

Batch norm statistics and mixing partners never leave a group (ghost batch norm), and running statistics are updated
once per step, by the sample-weighted mean over its groups. So the result does not depend on the number of
micro-batches and devices (tests/laws/test_law_micro_batches.py). `batch.group: micro` gives this up, and the plan
says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from reconv.core.errors import RecipeError, one_of
from reconv.core.text import count
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
            hint=one_of(
                *([f"--devices {num_devices // each * each}"] if num_devices > each else []),
                f"--devices {math.ceil(num_devices / each) * each}",
                "--set parallel.pipeline_stages=1 --set 'parallel.pipeline_splits=[]'",
            ),
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
            hint=one_of(*(f"--batch-size {size}" for size in _even_sizes(split))),
        )
    if parallel.pipeline_schedule == "1f1b" and split.num_micro < parallel.pipeline_stages:
        raise RecipeError(
            f"parallel.pipeline_schedule: 1f1b needs {parallel.pipeline_stages} micro-batches or more, "
            f"not {split.num_micro}",
            hint=one_of("--set parallel.pipeline_schedule=gpipe", f"--set batch.micro={split.group}"),
        )


def _even_sizes(split: Split) -> list[int]:
    """Batch sizes near this one that give all micro-batches of a step the same groups."""
    each, size = split.micro * len(split.on_devices), sum(split.groups)
    return [multiple for multiple in (size // each * each, (size // each + 1) * each) if multiple > 0]


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
        fewer = max(devices for devices in range(1, min(world_size, size + 1)) if size % devices == 0)
        raise RecipeError(
            f"batch.size {size} is not divisible by {world_size} devices",
            hint=one_of(*(f"--batch-size {fit}" for fit in fitting), f"--devices {fewer}"),
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
    groups_text = f"{count(len(groups), 'group')} of {max(groups)} samples"
    if not _is_divisible(groups, world_size):
        raise RecipeError(
            f"{groups_text} cannot be divided over {world_size} devices",
            why="each device needs whole groups, or an equal number of devices must share each group",
            hint=one_of(*_what_fits(recipe, groups, world_size)),
        )
    reason = _why_whole(recipe)
    if reason is not None:
        raise RecipeError(
            f"{groups_text} for {world_size} devices would have to be shared",
            why=reason,
            hint=one_of(*_what_fits(recipe, groups, world_size)),
        )
    per_group = world_size // len(groups)
    parts: list[tuple[int, ...]] = []
    for group in groups:
        each, more = divmod(group, per_group)
        parts += [(each + (part < more),) for part in range(per_group)]
    return tuple(parts)


def _is_divisible(groups: Sequence[int], world_size: int) -> bool:
    """True if an equal number of devices can share each group."""
    return world_size % len(groups) == 0 and min(groups) >= world_size // len(groups)


def _why_whole(recipe: Recipe) -> str | None:
    """Reason why a device must have whole groups; None if several may share one."""
    options = recipe.model.options
    if recipe.parallel.reduce == "ordered":
        return "parallel.reduce: ordered sums the gradients of whole groups"
    if recipe.augment.mixes:
        return "MixUp and CutMix would need samples of another device"
    if options.get("drop_connect_per") == "batch" and options.get("drop_connect") != 0:
        return "drop_connect_per: batch decides for a whole group, and each device would decide for its part"
    return None


def _what_fits(recipe: Recipe, groups: Sequence[int], world_size: int) -> Iterator[str]:
    """Options with which the devices can share the batch."""
    size, group = recipe.batch.size, recipe.batch.group
    may_share = _why_whole(recipe) is None
    fewer = range(min(world_size - 1, size), 0, -1)  # more devices than samples cannot share them
    fits = (n for n in fewer if n <= len(groups) or (may_share and _is_divisible(groups, n)))
    yield f"--devices {next(fits)}"
    if isinstance(group, int):
        yield f"--batch-size {group * world_size} --set batch.group={group}"
    elif size < world_size and may_share:
        yield f"--batch-size {world_size}"
    smallest = 2 if not recipe.augment.mixes else max(2, recipe.augment.cutmix.roll + 1)
    fitting = [group for group in range(smallest, size + 1) if len(cut_groups(size, group)) >= world_size]
    even = [group for group in fitting if size % (group * world_size) == 0]
    for largest in (even or fitting)[-1:]:  # other batch norm statistics
        yield f"--set batch.group={largest}"


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
            hint=one_of("--set batch.micro=auto", f"--set batch.micro={near}", f"--set batch.group={micro}"),
        )
    return micro // group
