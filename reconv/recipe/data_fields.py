"""The sections about images: where samples come from, what an image becomes, what training adds to it.

Owns names, types, ranges and defaults of `data` and `augment`. Refuses to know how any of it is done (data/).
Invariant: as every section, valid and frozen.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from reconv.recipe.section import (
    Fraction,
    Listed,
    NonNegative,
    Pixels,
    Positive,
    PositiveFloat,
    PositiveFraction,
    Section,
    words_of_switches,
)
from reconv.recipe.units import BadImages, Duration

Decoder = Literal["pillow", "native"]
Interpolation = Literal["bilinear", "bicubic", "nearest"]  # antialiased, as Pillow resizes


class PreprocessConfig(Section):
    """What an image becomes before the network: the same spec serves evaluation, prediction and export."""

    size: Pixels = 224  # side of the square the network sees
    # The shorter side before the centre crop; auto-ratio: size x 256/224, auto-plus32: size + 32.
    # null: the image is resized to size x size, its aspect ratio lost.
    resize: Pixels | Literal["auto-ratio", "auto-plus32"] | None = 256
    interpolation: Interpolation = "bilinear"
    channels: Literal[1, 3] = 3
    divide_by: Literal[1, 255] = 255  # pixel values are divided by this first; 1: mean and std are of 0 to 255
    mean: Annotated[tuple[float, ...], Listed] = (0.485, 0.456, 0.406)  # of pixel values divided by scale
    std: Annotated[tuple[PositiveFloat, ...], Listed] = (0.229, 0.224, 0.225)
    per_image_standardization: bool = False  # per image, instead of mean and std


class DataConfig(Section):
    """Where samples come from and how they are read."""

    source: Literal[
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
    ] = "auto"
    path: str | None = None
    drop_last: bool = True  # the part of an epoch that does not fill a batch
    subset_percent: Annotated[float, Field(gt=0, le=100)] = 100  # of the training samples
    epoch_samples: Positive | None = None  # how many count as an epoch; null: all. The order of samples stays as it is
    # Who decodes. Threads and processes give the same bytes; gpu: processes, and a GPU's JPEG engine beside them.
    backend: Literal["auto", "threads", "processes", "gpu", "dali"] = "auto"
    # Of the training images, what the JPEG engine makes; auto: by the speed of both, measured when a run begins.
    gpu_decode_fraction: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] = "auto"
    num_workers: Annotated[int, Field(ge=0, le=1024)] | Literal["auto"] = "auto"  # decoding threads or processes
    prefetch: Annotated[int, Field(gt=0, le=1024)] = 2  # steps decoded ahead
    # What images travel to the device as; all of these hold 0 to 255 exactly, so that only the bus notices.
    transfer_dtype: Literal["uint8", "float16", "bfloat16", "float32"] = "uint8"
    # device: training images that fit into memory are moved there once, and cropped there; the same bytes.
    preload: Annotated[Literal["off", "device"], BeforeValidator(words_of_switches)] = "off"
    # ram: samples are read once and kept as they were, encoded, as far as half of the free memory goes.
    cache: Annotated[Literal["off", "ram"], BeforeValidator(words_of_switches)] = "off"
    # An image that cannot be read or decoded: `stop`, or `skip up to 20`, files counted over the whole run. In training
    # another sample takes its place, by a rule of (seed, epoch, index); evaluation leaves it out and says so.
    bad_images: BadImages = BadImages(0)
    background_class: bool = (
        False  # class 0 is a background that no sample has, as TensorFlow's programs count: 1001 classes
    )
    # For detection. A box that leaves its image or has no area, in training: `stop`; `skip` it, as the published
    # converter does; `clip` it to the image, and skip it where nothing is left.
    bad_boxes: Literal["stop", "skip", "clip"] = "stop"
    empty_images: Literal["drop", "keep"] = "drop"  # training images without a usable box
    difficult_boxes: Literal["use", "ignore"] = "use"  # in training; scores never demand them
    preprocess: PreprocessConfig = PreprocessConfig()
    num_samples: Positive | None = None  # synthetic and scattered-digits only
    num_classes: Positive | None = None  # synthetic only


class MixupConfig(Section):
    """Blends each image with another of its group, by a share drawn from Beta(alpha, alpha)."""

    alpha: NonNegative = 0  # 0: off
    mode: Literal["batch", "sample"] = "batch"  # one share for a group, or one for each sample
    partner: Literal["roll", "permutation"] = "roll"  # roll: the sample before in the group
    lam_at_least_half: bool = False  # max(share, 1 - share): the own image always weighs more

    @property
    def on(self) -> bool:
        return self.alpha > 0


class CutmixConfig(Section):
    """Fills a box of each image from another of its group; one box for a group, its centre anywhere in the image."""

    # beta: the share kept is drawn from Beta(alpha, alpha). fixed: it is `keep`. random: the group is left whole with
    # probability 1.55 x keep - 0.96, else the share is 1 + ln(u)/4 (not below 0), u uniform.
    mode: Literal["beta", "fixed", "random"] = "beta"
    alpha: NonNegative = 0  # for beta; 0: off
    lam: Fraction = 1  # for fixed and random; 1: off
    roll: Annotated[int, Field(gt=0, le=2**20)] = 1  # the partner is so many samples before, in the group

    @property
    def on(self) -> bool:
        return self.alpha > 0 if self.mode == "beta" else self.lam < 1


class RandomErasingConfig(Section):
    """Sets a random box to the mean colour (0 after normalising), before mixing."""

    probability: Fraction = 0
    scale: Annotated[tuple[PositiveFraction, PositiveFraction], Listed] = (0.02, 0.33)
    ratio: Annotated[tuple[PositiveFloat, PositiveFloat], Listed] = (0.3, 3.3)


class ColorJitterConfig(Section):
    """Random colours: factors from 1 - x to 1 + x, and a turn of the hue by up to x of the circle, in this order."""

    brightness: NonNegative = 0
    contrast: NonNegative = 0
    saturation: NonNegative = 0
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0
    # pillow: where images are decoded; brightness and contrast are factors. tensorflow: on the device, unrounded;
    # brightness is added (1 is white), contrast stretches each channel about its mean.
    implementation: Literal["pillow", "tensorflow"] = "pillow"

    @property
    def on(self) -> bool:
        return max(self.brightness, self.contrast, self.saturation, self.hue) > 0


class RandAugmentConfig(Section):
    num_ops: Annotated[int, Field(gt=0, le=100)] = 2  # operations an image
    magnitude: Annotated[int, Field(ge=0, le=30)] = 9


class SsdCropConfig(Section):
    """The random crop of SSD, for crop: ssd: either the whole image, or the last good one of some random rectangles.

    A rectangle is good if its sides (as shares of the image's) are less than `ratio` apart, it overlaps the boxes by
    more than a drawn bound, and the centre of a box lies in it. Where none is good, all of it is drawn again. Boxes
    whose centre is outside are dropped.
    """

    no_crop_probability: PositiveFraction = 1 / 7  # the chance, each time
    min_ious: Annotated[tuple[Fraction, ...], Field(min_length=1), Listed] = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
    iou_with: Literal["every", "any"] = "every"  # as published; any: the closest box alone, as in the paper
    scale: Annotated[tuple[PositiveFraction, PositiveFraction], Listed] = (0.3, 1.0)
    max_aspect_ratio: Annotated[float, Field(gt=1)] = 2.0
    trials: Annotated[int, Field(gt=0, le=1000)] = 50


class ZoomOutConfig(Section):
    """The paper's expansion: the image somewhere on a canvas of the mean colour, before the crop."""

    probability: Fraction = 0
    max_scale: Annotated[float, Field(gt=1, le=64)] = 4.0  # the canvas's side as a multiple of the image's


class AugmentConfig(Section):
    """What training adds to preprocessing. Crops, colours and policies run where images are decoded, the rest on the
    device: flips, erasing and mixing (which has no host form)."""

    train_like_eval: bool = False  # training images are made as evaluation's: no crop, flip, colours or erasing
    size: Pixels | None = None  # of training images; null: data.preprocess.size
    # Other sizes from these points on, as in [[0ep, 128], [50%, 192]]; evaluation stays at data.preprocess.size.
    progressive_resizing: Annotated[tuple[Annotated[tuple[Duration, Pixels], Listed], ...], Listed] = ()
    interpolation: Interpolation | None = None  # of training images; null: data.preprocess.interpolation
    # false: an image made smaller is sampled, not averaged; faster, and not what published results were made with
    antialias: bool = True
    # Who makes resized crops and SSD's from plain JPEG files. native: the compiled decoder, about 0.3 grey levels away
    # from Pillow; auto: native where an install has compiled it for this processor. A run keeps its decoder for all its
    # attempts.
    decoder: Decoder | Literal["auto"] = "auto"
    crop: Literal["none", "random", "random_resized", "ssd"] = "random_resized"  # detection has none and ssd
    padding: Annotated[int, Field(ge=0, le=8192)] = 4  # pixels around the image, for crop: pad
    padding_mode: Literal["constant", "reflect"] = "constant"  # what those pixels are
    scale: Annotated[tuple[PositiveFraction, PositiveFraction], Listed] = (0.08, 1.0)  # for crop: resized
    ratio: Annotated[tuple[PositiveFloat, PositiveFloat], Listed] = (0.75, 1.3333333333333333)
    attempts: Annotated[int, Field(gt=0, le=1000)] = 10  # boxes drawn before the fallback
    fallback: Literal["center", "whole"] = "center"  # the largest centred box of a fitting ratio, or the whole image
    ssd_crop: SsdCropConfig = SsdCropConfig()
    zoom_out: ZoomOutConfig = ZoomOutConfig()  # for detection
    hflip: Fraction = 0.5
    # alternating: the draw is an image's own, for all epochs, and every second epoch mirrors the other images instead
    hflip_mode: Literal["random", "alternating"] = "random"
    color_jitter: ColorJitterConfig = ColorJitterConfig()
    # autoaugment: the ImageNet policy of the paper; autoaugment-v0: the one EfficientNet was trained with.
    auto_augment: Literal["none", "autoaugment", "autoaugment-v0", "randaugment"] = "none"
    randaugment: RandAugmentConfig = RandAugmentConfig()
    fill: Annotated[int, Field(ge=0, le=255)] = 128  # grey of what a policy's geometry uncovers
    random_erasing: RandomErasingConfig = RandomErasingConfig()
    mixup: MixupConfig = MixupConfig()
    cutmix: CutmixConfig = CutmixConfig()
    # With MixUp and CutMix on: a coin chooses one for each group, or CutMix cuts MixUp's images (four-way labels).
    combine: Literal["one-of", "both"] = "one-of"

    @property
    def mixes(self) -> bool:
        return self.mixup.on or self.cutmix.on


def why_plain(augment: AugmentConfig, preprocess: PreprocessConfig) -> str | None:
    """Why the compiled decoder has nothing to do; None: it makes the crops of plain JPEG files."""
    reasons = {
        "augment.train_like_eval is true": augment.train_like_eval,
        f"augment.crop is {augment.crop}": augment.crop not in ("random_resized", "ssd"),
        "training images take the nearest pixel": (augment.interpolation or preprocess.interpolation) == "nearest",
        "images have one channel": preprocess.channels != 3,
    }
    return next((why for why, is_so in reasons.items() if is_so), None)


def why_not_gpu(augment: AugmentConfig, preprocess: PreprocessConfig) -> str | None:
    """Why a GPU's JPEG engine cannot make training images; None: it can."""
    interpolation = augment.interpolation or preprocess.interpolation
    reasons = {
        f"training images are resized by {interpolation}, not bilinearly": interpolation != "bilinear",
        "augment.auto_augment changes colours on the host": augment.auto_augment != "none",
        "augment.color_jitter.implementation pillow changes colours on the host": augment.color_jitter.on
        and augment.color_jitter.implementation == "pillow",
    }
    return why_plain(augment, preprocess) or next((why for why, is_so in reasons.items() if is_so), None)
