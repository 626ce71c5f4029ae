"""The recipe sections `data` and `augment`, and which of their values do not go together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from reconv.recipe.parts.code import ImportPath, NamedTransform, Options, TransformConfig, names_code, parse_list
from reconv.recipe.parts.contradiction import Contradiction
from reconv.recipe.units import (
    BadImages,
    Duration,
    Fraction,
    Listed,
    NonNegative,
    Pixels,
    Positive,
    PositiveFloat,
    PositiveFraction,
    Section,
    parse_switch,
)

if TYPE_CHECKING:
    from reconv.recipe.schema import Recipe

NEED_NO_PATH = ("digits", "scattered-digits", "synthetic", "synthetic-device")  # values of data.source
Decoder = Literal["pillow", "native"]
Interpolation = Literal["bilinear", "bicubic", "nearest"]  # antialiased, as Pillow resizes


ListFile = Annotated[str, AfterValidator(os.path.abspath)]  # of the directory where the command is given
PixelValue = Annotated[int, Field(ge=0, le=255)]


class PreprocessConfig(Section):
    """Preprocessing of an image for the network; evaluation, prediction and export use the same settings."""

    size: Pixels = 224
    """Height and width of the network's input in pixels."""
    resize: Pixels | Literal["auto-ratio", "auto-plus32"] | None = 256
    """Length of the shorter side before the center crop; `auto-ratio` is size x 256/224, `auto-plus32` is size + 32,
    null resizes to size x size without keeping the aspect ratio."""
    interpolation: Interpolation = "bilinear"
    """Filter of the resize; all are antialiased, as in Pillow."""
    channels: Literal[1, 3] = 3
    """Color channels: 3 for RGB, 1 for grayscale."""
    divide_by: Literal[1, 255] = 255
    """Pixel values are divided by this before `mean` and `std` apply; 1 keeps them at 0 to 255."""
    mean: Annotated[tuple[float, ...], Listed] = (0.485, 0.456, 0.406)
    """Per-channel mean that is subtracted, in units of pixel value / divide_by."""
    std: Annotated[tuple[PositiveFloat, ...], Listed] = (0.229, 0.224, 0.225)
    """Per-channel standard deviation to divide by, in units of pixel value / divide_by."""
    per_image_standardization: bool = False
    """Normalize each image by its own mean and standard deviation instead of `mean` and `std`."""


class DataConfig(Section):
    """The dataset and how it is read."""

    source: (
        Literal[
            "auto",
            "digits",
            "cifar10",
            "cifar100",
            "folder",
            "packed",
            "tfrecord",
            "tar",
            "csv",
            "hf",
            "coco",
            "voc",
            "yolo",
            "scattered-digits",
            "synthetic",
            "synthetic-device",
        ]
        | ImportPath
    ) = "auto"
    """Format of the dataset; `auto` detects it from the files at `path`. An import path as in my_pkg.data:make is your
    own: make(split=..., path=...) returns a map-style dataset of images and class indices."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments of your own dataset."""
    path: str | None = None
    """Folder or file of the dataset; in a recipe file, relative to that file."""
    sampler: Literal["random", "balanced"] = "random"
    """Order of the training samples: `random` shuffles them in each epoch; `balanced` gives every class the same number
    of samples, repeating those of small classes. The length of an epoch stays the size of the training set."""
    shuffle_window: Positive | None = None
    """Shuffle so that an epoch reads each part of the data once: runs of 256 neighboring samples are shuffled, and the
    samples of a run spread over this many positions. null shuffles all samples one by one. For data in an object store
    that is larger than the cache, or to start before it is downloaded; local data is read in the same order."""
    drop_last: bool = True
    """Drop the samples of an epoch that do not fill the last batch; false fills it with samples of the next epoch."""
    validation_split: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Fraction of the images to hold out for validation if the data has no validation split of its own, in every class
    and by a hash of each image's path, so that images stay where they are when files are added."""
    split_seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Chooses which images `validation_split` holds out; the recipe's `seed` does not, so runs with other seeds are
    validated on the same images."""
    fold: Annotated[str, Field(pattern=r"^[1-9]\d{0,3}/[1-9]\d{0,3}$")] | None = None
    """Cross-validation, as in 2/5: validate on fold 2 of 5 of the training set, and train on the others; the validation
    split is not used. Folds have equal shares of every class and follow from `split_seed`."""
    exclude: ListFile | None = None
    """A CSV file of images to leave out, as `reconv data review` writes it: rows with the action `exclude`, or all rows
    where it has no column `action`; `path` is relative to the data."""
    relabel: ListFile | None = None
    """A CSV file of images with another class, likewise: rows with the action `relabel` have it in `label`."""
    subset_percent: Annotated[float, Field(gt=0, le=100)] = 100
    """Percentage of the training samples to train on."""
    epoch_samples: Positive | None = None
    """Samples that count as one epoch; null counts the whole training set. The order of samples does not change."""
    backend: Literal["auto", "threads", "processes", "dali"] = "auto"
    """What decodes images: threads and processes give the same bytes."""
    num_workers: Annotated[int, Field(ge=0, le=1024)] | Literal["auto"] = "auto"
    """Number of decoding threads or processes; 0 decodes in the training process."""
    prefetch: Annotated[int, Field(gt=0, le=1024)] = 2
    """Number of steps to decode ahead."""
    transfer_dtype: Literal["uint8", "float16", "bfloat16", "float32"] = "uint8"
    """Dtype in which images are copied to the device; all of them hold 0 to 255 exactly, so results do not change."""
    preload: Annotated[Literal["off", "device"], BeforeValidator(parse_switch)] = "off"
    """`device` copies a training set that fits in memory to the device once and crops it there; results stay."""
    cache: Annotated[Literal["off", "ram"], BeforeValidator(parse_switch)] = "off"
    """`ram` keeps encoded samples in memory after the first read, in up to half of the free memory."""
    bad_images: BadImages = BadImages(0)
    """What to do with an unreadable image: `stop`, or `skip up to N` files over the whole run. Training replaces a
    skipped sample by another one, chosen from (seed, epoch, index); evaluation leaves it out and reports it."""
    background_class: bool = False
    """Add a background class 0 that no sample has, as TensorFlow programs with 1001 classes do."""
    bad_boxes: Literal["stop", "skip", "clip"] = "stop"
    """Detection: what training does with a box that leaves its image or has no area; `clip` skips it if nothing is
    left."""
    empty_images: Literal["drop", "keep"] = "drop"
    """Detection: whether training keeps images without a usable box."""
    difficult_boxes: Literal["use", "ignore"] = "use"
    """Detection: whether training uses boxes marked difficult; metrics never require them."""
    preprocess: PreprocessConfig = PreprocessConfig()
    num_samples: Positive | None = None
    """Number of samples to generate, for synthetic data and scattered-digits."""
    num_classes: Positive | None = None
    """Number of classes to generate, for synthetic data."""


class MixupConfig(Section):
    """MixUp: lam x image + (1 - lam) x another image of the group, with lam from Beta(alpha, alpha)."""

    alpha: NonNegative = 0
    """Parameter of the Beta distribution; 0 switches MixUp off."""
    mode: Literal["batch", "sample"] = "batch"
    """Draw one lam per group (`batch`) or one per sample."""
    partner: Literal["roll", "permutation"] = "roll"
    """Blend with the previous sample of the group (`roll`) or with a random permutation of it."""
    lam_at_least_half: bool = False
    """Use max(lam, 1 - lam), so that the sample itself always has the larger weight."""

    @property
    def enabled(self) -> bool:
        return self.alpha > 0


class CutmixConfig(Section):
    """CutMix: paste a box of another image of the group; one box per group, its center anywhere in the image."""

    mode: Literal["beta", "fixed", "random"] = "beta"
    """How lam, the fraction of the image to keep, is chosen: `beta` draws it from Beta(alpha, alpha), `fixed` uses
    `lam`, `random` leaves the group unchanged with probability 1.55 x lam - 0.96 and otherwise uses
    max(0, 1 + ln(u)/4) with uniform u."""
    alpha: NonNegative = 0
    """Parameter of the Beta distribution with `mode: beta`; 0 switches CutMix off."""
    lam: Fraction = 1
    """Fraction of the image to keep with `mode: fixed` and `random`; 1 switches CutMix off."""
    roll: Annotated[int, Field(gt=0, le=2**20)] = 1
    """The partner is this many samples earlier in the group."""

    @property
    def enabled(self) -> bool:
        return self.alpha > 0 if self.mode == "beta" else self.lam < 1


class RandomErasingConfig(Section):
    """Random erasing: set a random box to the mean color (0 after normalization), before MixUp and CutMix."""

    probability: Fraction = 0
    """Probability of erasing a box; 0 switches it off."""
    scale: Annotated[tuple[PositiveFraction, PositiveFraction], Listed] = (0.02, 0.33)
    """Range of the erased area as a fraction of the image."""
    ratio: Annotated[tuple[PositiveFloat, PositiveFloat], Listed] = (0.3, 3.3)
    """Range of the erased box's aspect ratio."""


class ColorJitterConfig(Section):
    """Color jitter in this order: factors from 1 - x to 1 + x, and a hue shift of up to x of the color circle."""

    brightness: NonNegative = 0
    """Maximum change of brightness; 0 leaves it."""
    contrast: NonNegative = 0
    """Maximum change of contrast; 0 leaves it."""
    saturation: NonNegative = 0
    """Maximum change of saturation; 0 leaves it."""
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0
    """Maximum hue shift as a fraction of the color circle; 0 leaves it."""
    implementation: Literal["pillow", "tensorflow"] = "pillow"
    """`pillow` runs where images are decoded and multiplies brightness and contrast; `tensorflow` runs on the device
    without rounding, adds to the brightness (1 is white) and stretches each channel about its mean for contrast."""

    @property
    def enabled(self) -> bool:
        return max(self.brightness, self.contrast, self.saturation, self.hue) > 0


class RandAugmentConfig(Section):
    """RandAugment, for `augment.auto_augment: randaugment`."""

    num_ops: Annotated[int, Field(gt=0, le=100)] = 2
    """Number of operations applied to an image."""
    magnitude: Annotated[int, Field(ge=0, le=30)] = 9
    """Strength of the operations, from 0 to 30, for timm from 0 to 10."""
    magnitude_std: NonNegative = 0
    """timm: standard deviation of the magnitude."""
    implementation: Literal["paper", "timm"] = "paper"
    """`timm` is its rand-mM-mstdS-inc1: other operations, each applied with probability 0.5."""


class SsdCropConfig(Section):
    """SSD's random crop, for `augment.crop: ssd`: the whole image, or the last valid one of some random rectangles.

    A rectangle is valid if its aspect ratio (sides as fractions of the image's) is below `max_aspect_ratio`, its IoU
    with the boxes is above a bound drawn from `min_ious`, and it contains the center of a box. If none is valid,
    everything is drawn again. Boxes whose center is outside the crop are dropped.
    """

    no_crop_probability: PositiveFraction = 1 / 7
    """Probability of taking the whole image, at each draw."""
    min_ious: Annotated[tuple[Fraction, ...], Field(min_length=1), Listed] = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
    """Lower bounds of the IoU between crop and boxes; one is drawn at random."""
    iou_with: Literal["every", "any"] = "every"
    """Whether `every` box must reach the IoU, as in the published code, or `any` single one, as in the paper."""
    scale: Annotated[tuple[PositiveFraction, PositiveFraction], Listed] = (0.3, 1.0)
    """Range of a crop's width and height as fractions of the image's."""
    max_aspect_ratio: Annotated[float, Field(gt=1)] = 2.0
    """Largest ratio between the sides of a crop."""
    trials: Annotated[int, Field(gt=0, le=1000)] = 50
    """Number of random rectangles per draw."""


class ZoomOutConfig(Section):
    """SSD's zoom-out: place the image somewhere on a larger canvas of the mean color, before the crop."""

    probability: Fraction = 0
    """Probability of zooming out; 0 switches it off."""
    max_scale: Annotated[float, Field(gt=1, le=64)] = 4.0
    """Largest side of the canvas as a multiple of the image's."""


class AugmentConfig(Section):
    """Training augmentation. Crops, color jitter and AutoAugment run where images are decoded; flips, random erasing,
    MixUp and CutMix run on the device."""

    train_like_eval: bool = False
    """Prepare training images like evaluation images: no crop, flip, color jitter or erasing."""
    repeats: Annotated[int, Field(gt=0, le=64)] = 1
    """Repeated augmentation: each image of an epoch comes this often, differently augmented; the epoch keeps its length
    and has 1 / repeats of the images, as timm's --aug-repeats."""
    size: Pixels | None = None
    """Height and width of training images; null uses data.preprocess.size."""
    progressive_resizing: Annotated[tuple[Annotated[tuple[Duration, Pixels], Listed], ...], Listed] = ()
    """Sizes of training images from given points on, as in [[0ep, 128], [50%, 192]]; evaluation keeps
    data.preprocess.size."""
    interpolation: Interpolation | None = None
    """Filter of the resize of training images; null uses data.preprocess.interpolation."""
    antialias: bool = True
    """Antialias when downscaling; false is faster, and not what published results were made with."""
    decoder: Decoder | Literal["auto"] = "auto"
    """What makes random resized and SSD crops of JPEG files: `native`, the compiled decoder, is about 0.3 gray levels
    away from `pillow`. `auto` uses native where it is compiled for this CPU. A resumed run keeps its decoder."""
    crop: Literal["none", "random", "random_resized", "ssd"] = "random_resized"
    """Random crop: `random` with `padding`, `random_resized` as RandomResizedCrop, `ssd` for detection (see
    `ssd_crop`)."""
    padding: Annotated[int, Field(ge=0, le=8192)] = 4
    """Pixels added on each side before `crop: random`."""
    padding_mode: Literal["constant", "reflect"] = "constant"
    """Content of the padding: black or the mirrored image."""
    scale: Annotated[tuple[PositiveFraction, PositiveFraction], Listed] = (0.08, 1.0)
    """Range of the crop's area as a fraction of the image, for `crop: random_resized`."""
    ratio: Annotated[tuple[PositiveFloat, PositiveFloat], Listed] = (0.75, 1.3333333333333333)
    """Range of the crop's aspect ratio, for `crop: random_resized`."""
    attempts: Annotated[int, Field(gt=0, le=1000)] = 10
    """Number of boxes to draw before the fallback, for `crop: random_resized`."""
    fallback: Literal["center", "whole"] = "center"
    """Crop to use when no drawn box fits: the largest center crop with an allowed ratio, or the whole image."""
    ssd_crop: SsdCropConfig = SsdCropConfig()
    zoom_out: ZoomOutConfig = ZoomOutConfig()
    hflip: Fraction = 0.5
    """Probability of a horizontal flip."""
    hflip_mode: Literal["random", "alternating"] = "random"
    """`alternating` decides once per image and then flips it in every second epoch."""
    color_jitter: ColorJitterConfig = ColorJitterConfig()
    auto_augment: Literal["none", "autoaugment", "autoaugment-v0", "randaugment", "ta_wide", "3-augment"] = "none"
    """Augmentation policy: the ImageNet policy of the AutoAugment paper, the `v0` policy of EfficientNet, RandAugment,
    torchvision's TrivialAugmentWide, or DeiT III's 3-Augment (which goes with `color_jitter` of 0.3)."""
    randaugment: RandAugmentConfig = RandAugmentConfig()
    fill: PixelValue | Annotated[tuple[PixelValue, PixelValue, PixelValue], Listed] = 128
    """Gray value, or color, of the pixels that geometric operations of `auto_augment` uncover."""
    extra: Annotated[tuple[NamedTransform, ...], Listed, BeforeValidator(parse_list)] = ()
    """Your own transforms by import path, as in [my_pkg.transforms:Blur]: transform(image, rng) of a PIL image after
    crop, color jitter and auto_augment; with `on_device: true`, transform(images, uniforms) of a normalized batch."""
    random_erasing: RandomErasingConfig = RandomErasingConfig()
    mixup: MixupConfig = MixupConfig()
    cutmix: CutmixConfig = CutmixConfig()
    combine: Literal["one-of", "both"] = "one-of"
    """With MixUp and CutMix on: choose one of them for each group by a coin flip, or apply CutMix to MixUp's images."""

    @property
    def mixes(self) -> bool:
        return self.mixup.enabled or self.cutmix.enabled

    @property
    def host_extra(self) -> tuple[TransformConfig, ...]:
        """The entries of `extra` that run where images are decoded."""
        return tuple(transform for transform in self.extra if not transform.on_device)

    @property
    def device_extra(self) -> tuple[TransformConfig, ...]:
        """The entries of `extra` that run on the device."""
        return tuple(transform for transform in self.extra if transform.on_device)


def effective_augment(augment: AugmentConfig) -> AugmentConfig:
    """The augmentation that really happens: only mixing if training images are made like those of evaluation."""
    if not augment.train_like_eval:
        return augment
    return augment.model_copy(update={"crop": "none", "hflip": 0.0, "zoom_out": ZoomOutConfig()})


def why_not_native(augment: AugmentConfig, preprocess: PreprocessConfig) -> str | None:
    """Reason why the compiled decoder cannot make the crops of JPEG files; None if it can."""
    reasons = {
        "augment.train_like_eval is true": augment.train_like_eval,
        f"augment.crop is {augment.crop}": augment.crop not in ("random_resized", "ssd"),
        "training images are resized by nearest": (augment.interpolation or preprocess.interpolation) == "nearest",
        "images have one channel": preprocess.channels != 3,
    }
    return next((why for why, applies in reasons.items() if applies), None)


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
