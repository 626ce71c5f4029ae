"""Options whose parent is off, or that this device does not read: said in the plan, since they look as if they did
something.

Owns which option needs which other. Refuses to know what is wrong (rules): a recipe with such options is valid, and is
often a child of one that uses them. Invariant: only values other than the defaults are named.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from reconv.recipe.data_fields import why_plain
from reconv.recipe.fields import flatten
from reconv.recipe.schema import EngineConfig, Recipe


def unused_options(recipe: Recipe, device: str = "") -> Iterator[tuple[str, str]]:
    """Each option that has no effect, and why; where the kind of device is not known, none is unused because of it."""
    values, defaults = flatten(recipe), _defaults()
    seen: set[str] = set()
    for is_on, why, fields in (*_needs(recipe), *_needs_of_device(recipe.engine, device)):
        for field in () if is_on else fields:
            if field not in seen and values[field] != defaults[field]:
                seen.add(field)
                yield field, why


@cache
def _defaults() -> dict[str, Any]:
    return dict(flatten(Recipe()))


def _needs(recipe: Recipe) -> Iterator[tuple[bool, str, tuple[str, ...]]]:
    """Whether options are used, why not, and which they are."""
    yield from _needs_of_images(recipe)
    schedule, distill, average = recipe.schedule, recipe.distill, recipe.average
    smoothed = recipe.loss.label_smoothing > 0
    yield smoothed, "loss.label_smoothing is 0", ("loss.smoothing_form",)
    yield distill.teacher is not None, "distill.teacher is null", ("distill.alpha", "distill.temperature")
    yield recipe.ema.decay > 0, "ema.decay is 0", ("ema.ramp",)
    yield average.last != "off", "average.last is off", ("average.kind", "average.decay")
    yield average.kind == "exponential", "average.kind is mean", ("average.decay",)
    warms = schedule.warmup.value > 0
    yield warms, "schedule.warmup is 0", ("schedule.warmup_from", "schedule.origin")
    yield warms or schedule.kind != "constant", "schedule.kind is constant, without warm-up", ("schedule.update",)
    from_0 = schedule.kind in ("step", "milestones", "table") and schedule.origin == "start"
    yield not from_0, f"schedule.kind {schedule.kind} counts from step 0 always", ("schedule.origin",)
    fast = recipe.parallel.reduce == "fast"
    yield fast, "parallel.reduce is ordered", ("parallel.bucket_mb", "parallel.compress")
    piped = recipe.parallel.pipeline > 1
    yield piped, "parallel.pipeline is 1", ("parallel.schedule",)
    yield not piped, "parallel.pipeline has its own way", ("parallel.bucket_mb",)
    tries = recipe.engine.autotune != "off" and not recipe.engine.deterministic
    yield tries, "no algorithms are tried", ("engine.autotune_limit",)
    skips = recipe.engine.non_finite.policy == "skip"
    yield skips, "engine.non_finite.policy is stop", ("engine.non_finite.budget",)
    yield recipe.evaluate.every != "off", "evaluate.every is off", ("evaluate.offset", "evaluate.samples")
    yield recipe.save.every != "off", "save.every is off", ("save.keep_last", "save.keep_best", "save.background")


def _needs_of_device(engine: EngineConfig, device: str) -> Iterator[tuple[bool, str, tuple[str, ...]]]:
    """A wish to do without is fulfilled on a device that does without; what cannot be compiled is refused elsewhere."""
    is_known_to_lack = device not in ("", "cuda")
    none = f"no algorithms are tried on {device}"
    yield not (is_known_to_lack and engine.autotune == "on"), none, ("engine.autotune",)
    yield not is_known_to_lack, none, ("engine.autotune_limit",)
    yield not (is_known_to_lack and engine.graph == "on"), f"steps are not recorded on {device}", ("engine.graph",)


def _needs_of_images(recipe: Recipe) -> Iterator[tuple[bool, str, tuple[str, ...]]]:
    augment, cutmix = recipe.augment, recipe.augment.cutmix
    spec, as_is = recipe.data.preprocess, "augment.train_like_eval is true"
    crops = ("pad", "pad_form", "area", "ratio", "attempts", "fallback", "antialias")
    yield not augment.train_like_eval, as_is, _of("augment", "crop", "flip", "flip_form", *crops)
    by_image = "data.preprocess.standardise is true"
    # Grey images cannot have the default means: there is one value for each channel.
    yield not spec.standardise or spec.channels == 1, by_image, _of("data.preprocess", "mean", "std")
    yield not spec.standardise, by_image, ("data.preprocess.scale",)
    crop = f"augment.crop is {augment.crop}"
    yield augment.crop == "pad", crop, _of("augment", "pad", "pad_form")
    yield augment.crop == "resized", crop, _of("augment", "area", "ratio", "attempts", "fallback", "antialias")
    interpolation = augment.interpolation or spec.interpolation
    yield interpolation != "nearest", "training images take the nearest pixel", ("augment.antialias",)
    yield recipe.data.backend == "gpu", f"data.backend is {recipe.data.backend}", ("data.gpu_share",)
    reason = why_plain(augment, spec)
    yield reason is None, reason or "", ("augment.decoder",)
    box_crop = ("whole", "overlaps", "overlap_with", "side", "ratio", "candidates")
    yield augment.crop == "ssd", crop, _of("augment.box_crop", *box_crop)
    yield augment.zoom_out.probability > 0, "augment.zoom_out.probability is 0", ("augment.zoom_out.most",)
    yield augment.jitter.on, "augment.jitter changes nothing", ("augment.jitter.form",)
    boxes = _of("data", "bad_boxes", "empty_images", "difficult_boxes")
    boxes += tuple(name for name in _defaults() if name.startswith("detection."))
    yield recipe.task == "detection", "task is classification", boxes
    yield augment.flip > 0, "augment.flip is 0", ("augment.flip_form",)
    policy = f"augment.policy is {augment.policy}"
    yield augment.policy == "randaugment", policy, _of("augment.randaugment", "n", "magnitude")
    yield augment.policy != "none", policy, ("augment.fill",)
    yield augment.erase.probability > 0, "augment.erase.probability is 0", _of("augment.erase", "area", "ratio")
    yield augment.mixup.on, "augment.mixup.alpha is 0", _of("augment.mixup", "per", "partner", "fold")
    off = "alpha is 0" if cutmix.kind == "beta" else "keep is 1"
    yield cutmix.on, f"augment.cutmix.{off}", _of("augment.cutmix", "kind", "roll")


def _of(section: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names)
