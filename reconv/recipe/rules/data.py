"""Rules between the fields of data and augmentation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from reconv.recipe.parts.code import names_code
from reconv.recipe.rules.contradiction import Contradiction

if TYPE_CHECKING:
    from reconv.recipe.schema import Recipe


def data_rules(recipe: Recipe) -> Iterator[Contradiction]:
    data, preprocess = recipe.data, recipe.data.preprocess
    if data.background_class and data.source == "synthetic-device":
        text = "is not supported for data.source synthetic-device"
        yield Contradiction(("data.background_class", "data.source"), text)
    for name, values in (("mean", preprocess.mean), ("std", preprocess.std)):
        if len(values) != preprocess.channels:
            yield Contradiction(
                (f"data.preprocess.{name}", "data.preprocess.channels"),
                f"has {len(values)} {'value' if len(values) == 1 else 'values'}, "
                f"but data.preprocess.channels is {preprocess.channels}",
            )
    if isinstance(preprocess.resize, int) and preprocess.resize < preprocess.size:
        yield Contradiction(
            ("data.preprocess.resize", "data.preprocess.size"),
            f"{preprocess.resize} is too small for a crop of data.preprocess.size {preprocess.size}",
        )
    if data.fold is not None:
        number, folds = map(int, data.fold.split("/"))
        if number > folds or folds < 2:
            yield Contradiction(("data.fold", "data.validation_split"), "is no fold; for example 1/5 of five folds")
    if data.options and not names_code(data.source):
        text = f"is for a custom dataset, by import path, but data.source is {data.source}"
        yield Contradiction(("data.options", "data.source"), text)
    if data.shuffle_window is not None and data.sampler != "random":
        text = f"is for data.sampler random, but it is {data.sampler}"
        yield Contradiction(("data.shuffle_window", "data.sampler"), text)
    yield from _mean(recipe)
    yield from _backend(recipe)
    is_synthetic = data.source.startswith("synthetic")
    if data.num_samples is not None and not is_synthetic and data.source != "scattered-digits":
        text = f"is for synthetic data and scattered-digits, but data.source is {data.source}"
        yield Contradiction(("data.num_samples", "data.source"), text)
    if data.num_classes is not None and not is_synthetic:
        text = f"is for synthetic data, but data.source is {data.source}"
        yield Contradiction(("data.num_classes", "data.source"), text)


def _backend(recipe: Recipe) -> Iterator[Contradiction]:
    data = recipe.data
    if data.backend == "dali":
        text = "dali is not supported: it takes 0.7 GB of packages and is no faster on the CPU than threads; use auto"
        yield Contradiction(("data.backend",), text)
    uses_processes = data.backend == "processes"
    if uses_processes and data.num_workers == 0:
        yield Contradiction(("data.backend", "data.num_workers"), f"{data.backend} needs data.num_workers above 0")
    if uses_processes and data.cache == "ram":
        text = f"ram is a cache within one process, but data.backend {data.backend} reads in several"
        yield Contradiction(("data.cache", "data.backend"), text)
    if data.transfer_dtype != "uint8" and data.preload == "device":
        text = "has no effect with data.preload: device, which copies the images once"
        yield Contradiction(("data.transfer_dtype", "data.preload"), text)


def _mean(recipe: Recipe) -> Iterator[Contradiction]:
    preprocess = recipe.data.preprocess
    fields = ("data.preprocess.mean", "data.preprocess.divide_by")
    largest, limit = max(preprocess.mean, default=0), 255 / preprocess.divide_by
    if preprocess.per_image_standardization:
        return
    if largest > limit:
        text = f"{largest:g} is above {limit:g}, the largest pixel value after data.preprocess.divide_by"
        yield Contradiction(fields, text)
    elif preprocess.divide_by == 1 and 0 < largest <= 1:
        text = f"{largest:g} is a mean of pixels from 0 to 1, but data.preprocess.divide_by 1 keeps them at 0 to 255"
        yield Contradiction(fields, text)


def augment_rules(recipe: Recipe) -> Iterator[Contradiction]:
    augment = recipe.augment
    ranges = {
        "scale": augment.scale,
        "ratio": augment.ratio,
        "random_erasing.scale": augment.random_erasing.scale,
        "random_erasing.ratio": augment.random_erasing.ratio,
        "ssd_crop.scale": augment.ssd_crop.scale,
    }
    for name, (low, high) in ranges.items():
        if low > high:
            yield Contradiction((f"augment.{name}",), f"must be [smallest, largest], not [{low}, {high}]")
    for (before, _), (after, _) in pairwise(augment.progressive_resizing):
        if before.unit == after.unit and before.value >= after.value:
            yield Contradiction(("augment.progressive_resizing",), f"must increase, but {after} follows {before}")
    if augment.crop == "random" and augment.padding_mode == "reflect":
        sizes = [augment.size or recipe.data.preprocess.size, *(size for _, size in augment.progressive_resizing)]
        if augment.padding >= min(sizes):
            yield Contradiction(
                ("augment.padding", "augment.padding_mode"),
                f"{augment.padding} must be smaller than the image ({min(sizes)} px) for augment.padding_mode reflect",
            )
    if augment.train_like_eval:
        excluded = {
            "auto_augment": augment.auto_augment != "none",
            "color_jitter": augment.color_jitter.enabled,
            "random_erasing.probability": augment.random_erasing.probability > 0,
            "zoom_out.probability": augment.zoom_out.probability > 0,
            "repeats": augment.repeats > 1,
            "extra": bool(augment.extra),
        }
        text = "changes training images, but augment.train_like_eval prepares them like evaluation images"
        for name in (name for name, is_on in excluded.items() if is_on):
            yield Contradiction((f"augment.{name}", "augment.train_like_eval"), text)
    rand = augment.randaugment
    if rand.implementation == "timm" and rand.magnitude > 10:
        text = f"{rand.magnitude} is above 10, the largest magnitude of timm"
        yield Contradiction(("augment.randaugment.magnitude", "augment.randaugment.implementation"), text)
    if rand.implementation != "timm" and rand.magnitude_std > 0:
        text = f"is for timm, but augment.randaugment.implementation is {rand.implementation}"
        yield Contradiction(("augment.randaugment.magnitude_std", "augment.randaugment.implementation"), text)
    if recipe.data.preprocess.channels == 1:
        for name in ("saturation", "hue"):
            if getattr(augment.color_jitter, name) > 0:
                text = "needs color images, but data.preprocess.channels is 1"
                fields = (f"augment.color_jitter.{name}", "data.preprocess.channels")
                yield Contradiction(fields, text, (f"--set {fields[0]}=0",))
    yield from _mixing(recipe)


def _mixing(recipe: Recipe) -> Iterator[Contradiction]:
    augment, cutmix, batch = recipe.augment, recipe.augment.cutmix, recipe.batch
    if cutmix.mode == "beta" and cutmix.lam < 1:
        text = "is for augment.cutmix.mode fixed and random; beta uses alpha"
        yield Contradiction(("augment.cutmix.lam", "augment.cutmix.mode"), text)
    if cutmix.mode != "beta" and cutmix.alpha > 0:
        text = f"is for augment.cutmix.mode beta; {cutmix.mode} uses lam"
        yield Contradiction(("augment.cutmix.alpha", "augment.cutmix.mode"), text)
    if augment.combine == "both" and not (augment.mixup.enabled and cutmix.enabled):
        yield Contradiction(
            ("augment.combine", "augment.mixup.alpha", "augment.cutmix.alpha", "augment.cutmix.lam"),
            "both needs augment.mixup and augment.cutmix enabled",
        )
    if not augment.mixes:
        return
    fields = ("augment.mixup.alpha",) if augment.mixup.enabled else ("augment.cutmix.alpha", "augment.cutmix.lam")
    group = batch.group if isinstance(batch.group, int) else batch.size
    smallest = 2 if not cutmix.enabled else max(2, cutmix.roll + 1)
    if group >= smallest:
        return
    larger = f"--batch-size {max(smallest, batch.size)}"
    if isinstance(batch.group, int):
        larger += f" --set batch.group={smallest}"
    off = [
        *(["--set augment.mixup.alpha=0"] if augment.mixup.enabled else []),
        *(["--set augment.cutmix.alpha=0"] if cutmix.enabled and cutmix.mode == "beta" else []),
        *(["--set augment.cutmix.lam=1"] if cutmix.enabled and cutmix.mode != "beta" else []),
        *(["--set augment.combine=one-of"] if augment.combine == "both" else []),
    ]
    cures = [larger, " ".join(off)]
    if group == 1:
        text = "needs groups of at least two samples"
        yield Contradiction((*fields, "batch.group", "batch.size"), text, tuple(cures))
    else:
        text = f"{cutmix.roll} must be smaller than the group of {group} samples"
        cures.append(f"--set augment.cutmix.roll={group - 1}")
        yield Contradiction(("augment.cutmix.roll", "batch.group", "batch.size"), text, tuple(cures))


def color_jitter_rules(recipe: Recipe) -> Iterator[Contradiction]:
    jitter = recipe.augment.color_jitter
    if jitter.enabled and jitter.implementation == "tensorflow" and recipe.data.preprocess.per_image_standardization:
        yield Contradiction(
            ("augment.color_jitter.implementation", "data.preprocess.per_image_standardization"),
            "tensorflow does not round pixel values, but data.preprocess.per_image_standardization needs whole ones",
        )
