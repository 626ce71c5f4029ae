"""The plan as text: the lines printed before a run starts, with the arithmetic to check."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from reconv.core.text import count
from reconv.recipe.load.unused import unused_options
from reconv.recipe.parts.schedule import schedule_text
from reconv.recipe.schema import Recipe

if TYPE_CHECKING:
    from reconv.recipe.plan import Every, Plan


def plan_lines(recipe: Recipe, plan: Plan) -> tuple[str, ...]:
    """The plan as text, one fact per line; what matters least for the result comes last."""
    lines = [
        *plan.fitted,
        f"{_batch(plan)}; {_rate(recipe, plan)}",
        _samples(recipe, plan),
        *_data(plan),
        *_sampling(recipe, plan),
        _groups(recipe, plan),
        schedule_text(plan.schedule, recipe.schedule),
        _points(recipe, plan),
        *_freezing(recipe, plan),
        *_optimizer(recipe, plan),
        *_clip_grad(recipe),
        *([note] if (note := loss_note(recipe)) else []),
        *_rate_scales(recipe),
        *_memory(recipe, plan),
        *_pipeline(recipe, plan),
        *_ending(recipe, plan),
        *_published(recipe, plan),
        *_hazards(recipe),
        *(f"no effect: {field} ({why})" for field, why in unused_options(recipe, plan.device)),
        _pixels(recipe, plan),
        _host(recipe, plan),
        *_backend(recipe, plan),
        *_decoder(plan),
        *_cache(recipe, plan),
    ]
    return tuple(lines)


def _hazards(recipe: Recipe) -> list[str]:
    """Lines on settings that make results depend on the hardware, or training stall."""
    lines = []
    if recipe.batch.group == "micro":
        lines.append(
            "batch.group: micro makes results depend on the hardware: batch norm and mixing work per micro-batch"
        )
    if recipe.precision.rounding == "nearest":
        lines.append(
            "precision.rounding: nearest loses updates below half a unit of a 16-bit weight; training may stall"
        )
    return lines


def loss_note(recipe: Recipe) -> str:
    """Note on what the training loss includes and the validation loss does not, or an empty text."""
    if recipe.task == "detection":
        return ""
    loss, augment = recipe.loss, recipe.augment
    validation = "binary cross-entropy" if recipe.task == "multilabel" else "cross-entropy"
    parts = {
        "label smoothing": loss.label_smoothing > 0,
        "mixup": augment.mixup.enabled,
        "cutmix": augment.cutmix.enabled,
        "class weights": loss.class_weights != "none",
        "distillation": recipe.distill.teacher is not None,
    }
    included = [name for name, is_used in parts.items() if is_used]
    name = {"auto": validation, "cross_entropy": "cross-entropy", "bce": "binary cross-entropy"}.get(
        loss.name, loss.name
    )
    if name != validation:
        return f"training loss is {name}, validation loss is {validation}: they cannot be compared"
    if not included:
        return ""
    listed = included[0] if len(included) == 1 else f"{', '.join(included[:-1])} and {included[-1]}"
    return f"training loss includes {listed}, validation loss does not: they cannot be compared"


def _batch(plan: Plan) -> str:
    sizes = [sum(groups) for groups in plan.micro_batches()]
    devices = count(plan.world_size, "device")
    totals = [sum(groups) for groups in plan.device_groups]
    if len(set(totals)) > 1:
        return f"global batch {plan.global_batch} = {devices} with {', '.join(map(str, totals))} samples"
    if len(set(sizes)) == 1:
        return f"global batch {plan.global_batch} = {devices} x {sizes[0]} x {count(len(sizes), 'micro-batch')}"
    cut = count(len(sizes), "micro-batch")
    return f"global batch {plan.global_batch} = {devices} x {plan.batch_per_device}, in {cut} of {_sizes(sizes)}"


def _sizes(sizes: list[int]) -> str:
    """Sizes of which only the last differs, `16, the last 9`, or that differ by one, `86 or 85`."""
    first, *middle, last = sizes if len(sizes) > 1 else sizes * 2
    if set(middle) - {first}:
        return f"{first} or {last}"
    return str(first) if first == last else f"{first}, the last {last}"


def _rate(recipe: Recipe, plan: Plan) -> str:
    schedule = recipe.schedule
    typed = [schedule.lr] if schedule.uses_lr else list(schedule.milestone_lrs)
    used = ", ".join(
        f"{rate:g}" for rate in ([plan.schedule.peak_lr] if schedule.uses_lr else plan.schedule.milestone_lrs)
    )
    until = ""
    if schedule.name == "piecewise" and schedule.uses_lr:
        until = f" until {schedule.milestones[0]}" if plan.schedule.milestone_steps[0] > 0 else " after warm-up"
    if schedule.base_batch_size is None:
        return f"lr {used}{until}"
    if schedule.base_batch_size == 1:
        return f"lr {', '.join(map(_power_of_two, typed))} x {plan.global_batch} = {used}{until}"
    rates = ", ".join(f"{rate:g}" for rate in typed)
    return f"lr {rates} x {plan.global_batch}/{schedule.base_batch_size} = {used}{until}"


def _power_of_two(rate: float) -> str:
    """A learning rate per image as it is published, 2^-11 or 2^-9.5; any other as a number."""
    doubled = 2 * math.log2(rate)
    return f"2^{round(doubled) / 2:g}" if abs(doubled - round(doubled)) < 1e-12 else f"{rate:g}"


def _published(recipe: Recipe, plan: Plan) -> list[str]:
    """The batch arithmetic of the published results."""
    batches = dict.fromkeys(claim.batch for claim in recipe.published if claim.batch)
    lines = []
    for batch in batches:
        product = math.prod(batch)
        here = "" if product == plan.global_batch else f"; this run uses {plan.global_batch:,}"
        factors = " x ".join(map(str, batch))
        unit = {2: "samples x devices", 3: "samples x accumulation x devices"}.get(len(batch), "samples")
        lines.append(f"published with a batch of {factors} = {product:,} ({unit}){here}")
    return lines


def _data(plan: Plan) -> list[str]:
    """Line on the data; validation only if it differs from training."""
    titles = ("data", "validation data")
    return [f"{title}: {origin}" for title, origin in zip(titles, dict.fromkeys(plan.data_origins), strict=False)]


def _samples(recipe: Recipe, plan: Plan) -> str:
    steps = int(plan.steps_per_epoch)
    rest = plan.num_train - steps * plan.global_batch
    tail = ""
    if recipe.data.epoch_samples is not None:
        tail = f" of {recipe.data.epoch_samples:,} samples"
    elif rest > 0:
        tail = f" ({count(rest, 'sample')} dropped)"
    elif rest < 0:
        tail = f" (with {count(-rest, 'sample')} of the next)"
    percent = "" if recipe.data.subset_percent == 100 else f" ({recipe.data.subset_percent:g}% of all)"
    epochs = "" if recipe.length.unit == "step" else f"{recipe.length} = "
    return (
        f"{count(plan.num_train, 'training sample')}{percent} = {count(steps, 'step')} per epoch{tail}; "
        f"{epochs}{count(plan.total_steps, 'step')}; {_validation(plan)}"
    )


def _sampling(recipe: Recipe, plan: Plan) -> list[str]:
    """Line on how an epoch differs from each sample once."""
    lines, repeats = [], recipe.augment.repeats
    if recipe.data.sampler == "balanced":
        lines.append("balanced sampling: every class equally often, with the samples of small classes repeated")
    if recipe.data.shuffle_window is not None:
        lines.append(f"shuffled in runs of 256 samples, each spread over {recipe.data.shuffle_window:,} positions")
    if repeats > 1:
        num_images = -(-int(plan.steps_per_epoch * plan.global_batch) // repeats)
        lines.append(f"repeated augmentation: {num_images:,} images per epoch, {repeats} times each")
    return lines


def _validation(plan: Plan) -> str:
    if plan.num_val_left_out == 0:
        return count(plan.num_val, "validation sample")
    return (
        f"{plan.num_val:,} of {count(plan.num_val + plan.num_val_left_out, 'validation sample')} (partial evaluation)"
    )


def _groups(recipe: Recipe, plan: Plan) -> str:
    sizes = list(plan.group_sizes)
    if plan.devices_per_group > 1:
        whole = count(len(sizes), "group")
        return (
            f"{whole} of {_sizes(sizes)} samples, each over {plan.devices_per_group} devices: synchronized batch norm"
        )
    if len(sizes) == 1:
        return f"1 group of {count(sizes[0], 'sample')}: batch norm statistics over the whole batch"
    noun = "sample" if set(sizes) == {1} else "samples"
    return f"{count(len(sizes), 'group')} of {_sizes(sizes)} {noun}: batch norm statistics per group"


def _pixels(recipe: Recipe, plan: Plan) -> str:
    first, *later = plan.sizes
    training = f"{first[1]} px" + "".join(f", {size} px from step {start:,}" for start, size in later)
    return f"image size: {training} in training, {recipe.data.preprocess.size} px in evaluation"


def _points(recipe: Recipe, plan: Plan) -> str:
    evaluate = "off" if plan.evaluate is None else _interval(str(recipe.evaluate.every), plan.evaluate, plan)
    save = "off" if plan.save is None else _interval(str(recipe.save.every), plan.save, plan)
    text = f"evaluation {evaluate}; checkpoints {save}"
    if plan.keep_steps:
        text += f", kept at {', '.join(f'step {s:,}' for s in plan.keep_steps)}"
    ignored = len(recipe.save.keep_at) - len(plan.keep_steps)
    return text + (f" ({ignored} of save.keep_at after the end or repeated)" if ignored else "")


def _freezing(recipe: Recipe, plan: Plan) -> list[str]:
    if recipe.model.freeze_until == "off":
        return []
    until, steps = recipe.model.freeze_until, count(plan.freeze_steps, "step")
    return [f"model.freeze_until {until}: the first {steps} train only the head, then all parameters are trained"]


def _optimizer(recipe: Recipe, plan: Plan) -> list[str]:
    optimizer = recipe.optimizer
    if optimizer.name == "lars":
        return [
            f"lars: trust ratio {optimizer.trust_coefficient:g} |w| / (|g| + {optimizer.weight_decay:g} |w|), "
            + (
                "for all parameters"
                if optimizer.lars_exclude == "none"
                else f"1 and no decay for {optimizer.lars_exclude}"
            )
        ]
    if optimizer.name in ("adamw", "lamb"):
        decay, (beta1, beta2) = optimizer.weight_decay, optimizer.betas
        text = (
            f"{optimizer.name}: betas {beta1:g} and {beta2:g}, eps {optimizer.effective_eps:g}, weight decay {decay:g}"
        )
        no_decay = "" if optimizer.weight_decay_exclude == "none" else f", none for {optimizer.weight_decay_exclude}"
        return [text + no_decay]
    if plan.alpha is not None and optimizer.alpha_exponent is not None:
        return [f"{optimizer.name}: alpha 1 - {plan.global_batch} x 2^{optimizer.alpha_exponent:g} = {plan.alpha:g}"]
    return []


def _clip_grad(recipe: Recipe) -> list[str]:
    value, mode = recipe.optimizer.effective_clip_grad, recipe.optimizer.clip_mode
    if value is None:
        return []
    how = {
        "norm": f"norm at most {value:g}",
        "value": f"each value at most {value:g}",
        "agc": f"norm of each unit at most {value:g} x the norm of its weights, except in the head (AGC)",
    }
    return [f"gradients clipped: {how[mode]}"]


def _rate_scales(recipe: Recipe) -> list[str]:
    optimizer, lines = recipe.optimizer, []
    if optimizer.layer_decay != 1:
        lines.append(f"learning rate x {optimizer.layer_decay:g} for each layer before the last (layer_decay)")
    if optimizer.backbone_lr_scale != 1:
        lines.append(f"learning rate x {optimizer.backbone_lr_scale:g} for all parameters but the head's")
    return lines


def _pipeline(recipe: Recipe, plan: Plan) -> list[str]:
    parallel = recipe.parallel
    if parallel.pipeline_stages == 1:
        return []
    replicas = count(plan.world_size, "model replica")
    lines = [
        f"{replicas}, each a pipeline of {parallel.pipeline_stages} devices split at "
        f"{', '.join(parallel.pipeline_splits)}; {count(plan.num_micro_batches, 'micro-batch')} per step, "
        f"{parallel.pipeline_schedule}"
    ]
    if plan.num_micro_batches < parallel.pipeline_stages:
        lines.append("fewer micro-batches than pipeline devices: most of them will be idle; use a smaller batch.group")
    return lines


def _memory(recipe: Recipe, plan: Plan) -> list[str]:
    lines = []
    if recipe.memory.shard_optimizer:
        devices = plan.world_size * recipe.parallel.pipeline_stages
        sharded = f"optimizer state sharded over {devices} devices"
        lines.append(sharded if devices > 1 else "no effect: memory.shard_optimizer (there is one device)")
    if recipe.memory.offload_optimizer:
        lines.append("optimizer state in host memory, copied for each update")
    return lines


def _ending(recipe: Recipe, plan: Plan) -> list[str]:
    lines = []
    if plan.average is not None:
        kind = (
            "mean"
            if recipe.checkpoint_average.mode == "mean"
            else f"exponential average ({recipe.checkpoint_average.decay:g})"
        )
        steps = count(min(plan.average.steps, plan.total_steps), "step")
        lines.append(f"at the end: {kind} of the checkpoints of the last {steps}")
    early_stopping = recipe.early_stopping
    if early_stopping.target != "off" or early_stopping.patience != "off":
        reasons = [
            *([f"the metric reaches {early_stopping.target:g}"] if early_stopping.target != "off" else []),
            *([_no_better(early_stopping.patience)] if early_stopping.patience != "off" else []),
        ]
        lines.append(f"stops early when {' or '.join(reasons)}")
    return lines


def _no_better(patience: int) -> str:
    return f"{count(patience, 'evaluation')} in a row {'does' if patience == 1 else 'do'} not improve"


def _interval(typed: str, every: Every, plan: Plan) -> str:
    if every.minutes is not None:
        return f"every {typed} and at the end"
    offset = f" from step {every.offset_steps:,}" if every.offset_steps else ""
    return f"every {typed}{offset} ({count(every.count(plan.total_steps), 'time')})"


def _host(recipe: Recipe, plan: Plan) -> str:
    spec = recipe.data.preprocess
    num_bytes = plan.steps_held * plan.batch_per_device * spec.channels * max(size for _, size in plan.sizes) ** 2
    eval_rows = plan.eval_batches_held * min(plan.eval_batch, plan.num_val)
    more = "" if plan.evaluate is None else f", plus {_bytes(eval_rows * spec.channels * spec.size**2)} in evaluation"
    return (
        f"{count(plan.threads, 'torch thread')}, {count(plan.workers, 'decoding worker')}, "
        f"prefetch {count(recipe.data.prefetch, 'step')}: at most {_bytes(num_bytes)} of decoded images{more}"
    )


def _backend(recipe: Recipe, plan: Plan) -> list[str]:
    data, lines = recipe.data, []
    if plan.backend == "caller":
        if data.backend != "auto":
            lines.append("no effect: data.backend (the data needs no decoding workers)")
    elif data.backend == "auto":
        why = {
            "threads": "as fast as processes here, and started at once",
            "processes": "threads would wait for the GIL",
        }[plan.backend]
        evaluated = "" if plan.eval_backend == plan.backend else f", {plan.eval_backend} for validation images"
        lines.append(f"data.backend: {plan.backend} ({why}){evaluated}")
    else:
        lines.append(f"data.backend: {plan.backend}, as set")
    if data.transfer_dtype != "uint8":
        times = {"float32": 4}.get(data.transfer_dtype, 2)
        lines.append(f"data.transfer_dtype: {data.transfer_dtype}, {times} times the bytes of uint8")
    return lines


def _decoder(plan: Plan) -> list[str]:
    if plan.decoder == "pillow":
        return []
    return ["JPEG crops by the native decoder, about 0.3 gray levels away from Pillow"]


def _cache(recipe: Recipe, plan: Plan) -> list[str]:
    if recipe.data.cache == "off":
        return []
    if plan.cache is None:
        return ["no effect: data.cache (the samples are already in memory or synthetic)"]
    needed, available = plan.cache.needed_bytes, plan.cache.available_bytes
    if needed <= available:
        return [f"data.cache: about {_bytes(needed)} of samples in memory, {_bytes(available)} available"]
    return [
        f"data.cache: {_bytes(available)} of about {_bytes(needed)} fit in memory; "
        f"the other {1 - available / needed:.0%} of samples are read in every epoch"
    ]


def _bytes(num_bytes: int) -> str:
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:,.1f} GB"
    return f"{num_bytes / 1e6:,.0f} MB" if num_bytes >= 1e6 else f"{max(1, num_bytes // 1000)} kB"
