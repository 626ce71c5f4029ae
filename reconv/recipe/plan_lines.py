"""The plan in words: the lines a run prints before it starts, with the arithmetic a person would check.

Owns the sentences. Refuses to compute what the plan holds. Invariant: every number a line shows is the plan's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reconv.recipe.schema import Recipe

if TYPE_CHECKING:
    from reconv.recipe.plan import Every, Plan


def plan_lines(recipe: Recipe, plan: Plan) -> tuple[str, ...]:
    """What is printed, one fact a line."""
    lines = [
        f"{_batch(plan)}; {_rate(recipe, plan)}",
        _samples(recipe, plan),
        _groups(recipe, plan),
        _curve(recipe, plan),
        _points(recipe, plan),
        _host(recipe, plan),
    ]
    if recipe.batch.group == "micro":
        lines.append(
            "batch.group: micro ties batch norm and mixing to the hardware: another micro-batch or number of devices "
            "gives another result"
        )
    return tuple(lines)


def count(number: int, noun: str) -> str:
    """`1 step`, `1,200 steps`."""
    ending = "" if number == 1 else "es" if noun.endswith(("ch", "s")) else "s"
    return f"{number:,} {noun}{ending}"


def _batch(plan: Plan) -> str:
    sizes = [sum(groups) for groups in plan.micro_batches()]
    devices = count(plan.world_size, "device")
    if len(set(sizes)) == 1:
        return f"global batch {plan.global_batch} = {devices} x {sizes[0]} x {count(len(sizes), 'micro-batch')}"
    cut = count(len(sizes), "micro-batch")
    return f"global batch {plan.global_batch} = {devices} x {plan.batch_per_device}, in {cut} of {_sizes(sizes)}"


def _sizes(sizes: list[int]) -> str:
    """Sizes that differ only at the end: `16, the last 9`."""
    return str(sizes[0]) if len(set(sizes)) == 1 else f"{sizes[0]}, the last {sizes[-1]}"


def _rate(recipe: Recipe, plan: Plan) -> str:
    schedule = recipe.schedule
    if schedule.per is None:
        return f"lr {schedule.lr:g}"
    return f"lr {schedule.lr:g} x {plan.global_batch}/{schedule.per} = {plan.schedule.peak_lr:g}"


def _samples(recipe: Recipe, plan: Plan) -> str:
    steps = int(plan.steps_per_epoch)
    rest = plan.num_train - steps * plan.global_batch
    tail = ""
    if rest > 0:
        tail = f" ({count(rest, 'sample')} left out of each)"
    elif rest < 0:
        tail = f" ({count(-rest, 'sample')} from the next)"
    percent = "" if recipe.data.percent == 100 else f" ({recipe.data.percent:g}% of all)"
    epochs = "" if recipe.length.unit == "step" else f"{recipe.length} = "
    return (
        f"{count(plan.num_train, 'training sample')}{percent} = {count(steps, 'step')} an epoch{tail}; "
        f"{epochs}{count(plan.total_steps, 'step')}; {count(plan.num_val, 'validation sample')}"
    )


def _groups(recipe: Recipe, plan: Plan) -> str:
    sizes = list(plan.group_sizes)
    if len(sizes) == 1:
        return f"1 group of {count(sizes[0], 'sample')}: batch norm and mixing see the whole batch"
    return f"{count(len(sizes), 'group')} of {_sizes(sizes)} samples: batch norm and mixing stay inside a group"


def _curve(recipe: Recipe, plan: Plan) -> str:
    schedule = plan.schedule
    falls = schedule.kind in ("cosine", "linear", "polynomial")
    curve = f"{schedule.kind} to {schedule.end_lr:g}" if falls else schedule.kind
    if schedule.kind == "milestones":
        curve += f": x {schedule.factor:g} after {', '.join(f'{s:,}' for s in schedule.milestone_steps)} steps"
    if schedule.kind == "step" and recipe.schedule.period is not None:
        curve += f": x {schedule.factor:g} every {recipe.schedule.period}"
    if schedule.kind == "exponential":
        curve += f": x {schedule.factor:g} an epoch"
    warmup = f"warm-up over {count(schedule.warmup_steps, 'step')}, then " if schedule.warmup_steps else ""
    return f"schedule: {warmup}{curve}"


def _points(recipe: Recipe, plan: Plan) -> str:
    evaluate = "off" if plan.evaluate is None else _interval(str(recipe.evaluate.every), plan.evaluate, plan)
    save = "off" if plan.save is None else _interval(str(recipe.save.every), plan.save, plan)
    text = f"evaluation {evaluate}; saving {save}"
    if plan.pinned_steps:
        text += f", kept for good: {', '.join(f'step {s:,}' for s in plan.pinned_steps)}"
    late = len(recipe.save.pin) - len(plan.pinned_steps)
    return text + (f" ({count(late, 'pin')} past the end or doubled)" if late else "")


def _interval(typed: str, every: Every, plan: Plan) -> str:
    if every.minutes is not None:
        return f"every {typed} and at the end"
    offset = f" from step {every.offset_steps:,}" if every.offset_steps else ""
    return f"every {typed}{offset} ({count(every.count(plan.total_steps), 'time')})"


def _host(recipe: Recipe, plan: Plan) -> str:
    spec = recipe.data.preprocess
    steps_held = recipe.data.prefetch + 1  # those ahead and the one in use
    num_bytes = steps_held * plan.batch_per_device * spec.channels * spec.size**2
    held = f"{num_bytes / 1e6:,.0f} MB" if num_bytes >= 1e6 else f"{max(1, num_bytes // 1000)} kB"
    return (
        f"{count(plan.threads, 'torch thread')}, {count(plan.workers, 'decoding worker')}, "
        f"{count(recipe.data.prefetch, 'step')} ahead: at most {held} of decoded images"
    )
