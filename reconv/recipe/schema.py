"""The recipe: every field a person may set, typed, frozen and strict. Defaults live here and nowhere else.

Owns names, types and ranges; `rules` holds what fields say about each other. Refuses to know files (load) and derived
numbers (plan). Invariant: a `Recipe` that exists is valid, and never changes.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from reconv.recipe.rules import ContradictionError, contradictions
from reconv.recipe.units import Duration

Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[int, Field(gt=0, le=10**9)]
Pixels = Annotated[int, Field(gt=0, le=8192)]
Threads = Annotated[int, Field(gt=0, le=1024)]
BatchSize = Annotated[int, Field(gt=0, le=2**20)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Listed = Field(strict=False)  # a YAML list may fill a tuple; its items stay strict


def _off(value: object) -> object:
    """YAML reads a bare `off` as False and `on` as True; people mean the words."""
    return {False: "off", True: "on"}.get(value, value) if isinstance(value, bool) else value


Off = Annotated[Literal["off"], BeforeValidator(_off)]


class Section(BaseModel):
    """A frozen part of a recipe that refuses unknown keys and silent conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)


Option = bool | int | float | str | None | list[int] | list[float] | list[str]


class Model(Section):
    """The network. `options` are the builder's own keyword arguments, checked when the model is built."""

    name: str = "resnet50"
    options: dict[Annotated[str, Field(pattern=r"^\w+$")], Option] = {}
    init: str | None = None  # a weights file, a run, torchvision:NAME or timm:NAME
    freeze: bool = False  # train the head only


class Preprocess(Section):
    """What an image becomes before the network: the same spec serves evaluation, prediction and export."""

    size: Pixels = 224  # side of the square the network sees
    resize: Pixels | None = 256  # shorter side before the centre crop; null: the image is resized to size x size
    interpolation: Literal["bilinear", "bicubic", "nearest"] = "bilinear"
    channels: Literal[1, 3] = 3
    mean: Annotated[tuple[float, ...], Listed] = (0.485, 0.456, 0.406)  # of pixel values divided by 255
    std: Annotated[tuple[PositiveFloat, ...], Listed] = (0.229, 0.224, 0.225)
    standardise: bool = False  # per image, instead of mean and std


class Data(Section):
    """Where samples come from and how they are read."""

    source: Literal["auto", "digits", "cifar10", "cifar100", "folder", "synthetic", "synthetic-device"] = "auto"
    path: str | None = None
    tail: Literal["drop", "wrap"] = "drop"  # the part of an epoch that does not fill a batch
    percent: Annotated[float, Field(gt=0, le=100)] = 100  # of the training samples
    workers: Annotated[int, Field(ge=0, le=1024)] | Literal["auto"] = "auto"  # decoding threads
    prefetch: Annotated[int, Field(gt=0, le=1024)] = 2  # steps decoded ahead
    preprocess: Preprocess = Preprocess()
    num_samples: Positive | None = None  # synthetic only
    num_classes: Positive | None = None  # synthetic only


class Mixup(Section):
    alpha: NonNegative = 0  # 0: off
    per: Literal["batch", "sample"] = "batch"


class Cutmix(Section):
    alpha: NonNegative = 0  # 0: off


class Augment(Section):
    """What training adds to preprocessing. Crops run where images are decoded, the rest on the device."""

    crop: Literal["none", "pad", "resized"] = "resized"
    pad: Annotated[int, Field(ge=0, le=8192)] = 4  # pixels around the image, for crop: pad
    area: Annotated[tuple[PositiveFraction, PositiveFraction], Listed] = (0.08, 1.0)  # for crop: resized
    ratio: Annotated[tuple[PositiveFloat, PositiveFloat], Listed] = (0.75, 1.3333333333333333)
    flip: Fraction = 0.5
    mixup: Mixup = Mixup()
    cutmix: Cutmix = Cutmix()


class BatchSizes(Section):
    """The global batch, its groups (where batch norm and mixing happen) and what one device takes at a time."""

    size: BatchSize = 256  # global: all devices, one optimizer step
    group: BatchSize | Literal["all", "micro"] = "all"  # samples; `all`: the global batch
    micro: BatchSize | Literal["auto"] = "auto"  # the most samples a device takes in one forward pass


class Optimizer(Section):
    kind: Literal["sgd"] = "sgd"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    nesterov: bool = False
    weight_decay: NonNegative = 1e-4
    decay: Literal["all", "not-norm-bias", "not-norm"] = "all"  # which parameters are decayed


class Schedule(Section):
    """The learning rate as a pure function of the step."""

    kind: Literal["constant", "cosine", "linear", "step", "milestones", "exponential", "polynomial"] = "cosine"
    lr: PositiveFloat = 0.1  # at the reference batch
    per: Positive | None = None  # reference batch: lr x global batch / per; null: lr is absolute
    warmup: Duration = Duration(0, "ep")
    end_lr: NonNegative = 0  # absolute, not scaled: cosine, linear, polynomial
    period: Duration | None = None  # step: length of one level
    milestones: Annotated[tuple[Duration, ...], Listed] = ()
    factor: PositiveFloat = 0.1  # step, milestones, exponential (per epoch)
    power: PositiveFloat = 2  # polynomial


class Loss(Section):
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0


class Ema(Section):
    """A moving average of the weights, evaluated and saved beside them."""

    decay: Annotated[float, Field(ge=0, lt=1)] = 0  # 0: off
    ramp: bool = True  # min(decay, (1 + step) / (10 + step))


class Precision(Section):
    mode: Literal["fp64", "fp32", "tf32", "bf16", "fp16"] = "fp32"
    loss_scale: PositiveFloat | Literal["dynamic"] = "dynamic"  # fp16 only


class NonFinite(Section):
    """What happens when a loss or gradient is NaN or infinite: the update is never applied."""

    policy: Literal["stop", "skip"] = "stop"
    budget: Positive = 10  # skipped steps in one run before it stops all the same


class Engine(Section):
    compile: Annotated[Literal["auto", "on", "off"], BeforeValidator(_off)] = "auto"
    deterministic: bool = False
    threads: Threads | Literal["auto"] = "auto"  # torch threads per rank; auto: all cores this process may use
    channels_last: Annotated[Literal["auto", "on", "off"], BeforeValidator(_off)] = "auto"
    non_finite: NonFinite = NonFinite()


class Evaluate(Section):
    every: Duration | Off = Duration(1, "ep")
    offset: Duration = Duration(0, "ep")  # the first evaluation comes here, the next `every` later
    batch: Positive = 256


class Save(Section):
    every: Duration | Off = Duration(1, "ep")  # epochs, steps, a share, or minutes; off writes no checkpoint at all
    keep_last: Positive = 2
    keep_best: bool = True
    pin: Annotated[tuple[Duration, ...], Listed] = ()  # checkpoints at these points are never deleted


class Log(Section):
    every: Duration = Duration(10, "step")


class Parallel(Section):
    reduce: Literal["fast", "ordered"] = "fast"  # ordered: group gradients are added in group order


class Expect(Section):
    """What the recipe promises, and where the promise comes from."""

    metric: str = "top1"
    value: float
    tolerance: NonNegative = 0
    on: str = ""  # hardware and data
    source: str = ""  # published where, or measured by us when and how often


class Recipe(Section):
    """Everything that decides a run's mathematics, and what it expects to reach."""

    name: Annotated[str, Field(pattern=r"^\w[\w .+-]*$", max_length=100)] = "recipe"  # also a folder's name
    description: str = ""
    task: Literal["classification"] = "classification"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    length: Duration = Duration(90, "ep")
    model: Model = Model()
    data: Data = Data()
    augment: Augment = Augment()
    batch: BatchSizes = BatchSizes()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    loss: Loss = Loss()
    ema: Ema = Ema()
    precision: Precision = Precision()
    engine: Engine = Engine()
    evaluate: Evaluate = Evaluate()
    save: Save = Save()
    log: Log = Log()
    parallel: Parallel = Parallel()
    expect: Expect | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Recipe:
        found = contradictions(self)
        if found:
            raise ContradictionError(found)
        return self
