"""The recipe: every field a person may set, typed, frozen and strict, with its default.

The sections about images and detection lie beside this file and obey the same rules.

Owns names, types and ranges; `rules` holds what fields say about each other. Refuses to know files (load) and derived
numbers (plan). Invariant: a `Recipe` that exists is valid, and never changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from reconv.recipe.contradiction import ContradictionError
from reconv.recipe.data_fields import AugmentConfig, DataConfig
from reconv.recipe.detection_fields import DetectionConfig
from reconv.recipe.memory_fields import MemoryConfig
from reconv.recipe.rules import contradictions
from reconv.recipe.section import (
    BatchSize,
    Fraction,
    Listed,
    NonNegative,
    Off,
    Positive,
    PositiveFloat,
    PositiveFraction,
    Section,
    Threads,
    words_of_switches,
)
from reconv.recipe.units import Duration, parse_rate, split_rate


def _lone_rate(value: object) -> object:
    """`2^-3` as a number; a text that names its batch has been split before, unless `per` says something else."""
    if not isinstance(value, str) or not ("^" in value or "per" in value):
        return value
    parsed = parse_rate(value)
    if parsed is None:
        raise ValueError("a number, also as in 2^-11 per image or 0.256 per 256")
    if parsed[1] is not None:
        raise ValueError("a rate without `per`, since schedule.base_batch_size is given too")
    return parsed[0]


Option = bool | int | float | str | None | list[int] | list[float] | list[str]


class ModelConfig(Section):
    """The network. `options` are the builder's own keyword arguments, checked when the model is built."""

    name: str = "resnet50"
    options: dict[Annotated[str, Field(pattern=r"^\w+$")], Option] = Field(default_factory=dict)
    init: str | None = None  # a weights file, a run, torchvision:NAME, timm:NAME or an https address
    freeze_backbone: bool = False  # train the head only
    trainable: Annotated[
        tuple[str, ...], Listed
    ] = ()  # names of trained parameters, as in [layer4.*, fc.*]; empty: all


class BatchConfig(Section):
    """The global batch, its groups (where batch norm and mixing happen) and what one device takes at a time."""

    size: BatchSize = 256  # global: all devices, one optimizer step
    group: BatchSize | Literal["all", "micro"] = "all"  # samples; `all`: the global batch
    micro: BatchSize | Literal["auto"] = "auto"  # the most samples a device takes in one forward pass


class OptimizerConfig(Section):
    """How a gradient becomes a step. `rmsprop` is torch's form, `rmsprop-tf` TensorFlow's."""

    name: Literal["sgd", "lars", "rmsprop", "rmsprop-tf"] = "sgd"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    nesterov: bool = False  # sgd and lars
    weight_decay: NonNegative = 1e-4
    weight_decay_exclude: Literal["none", "norm-bias", "norm", "nvidia-by-name"] = "none"  # parameters without decay
    alpha: Annotated[float, Field(ge=0, lt=1)] = 0.9  # rmsprop: share of the old mean square
    alpha_exponent: Annotated[float, Field(ge=-64, lt=0)] | None = None  # alpha = 1 - global batch x 2^exponent
    eps: NonNegative | Literal["auto"] = "auto"  # auto: 1e-3 for rmsprop, 0 for lars
    trust_coefficient: PositiveFloat = 0.001  # lars: a step is at most this share of the weight's norm
    lars_exclude: Literal["norm-bias", "norm", "none"] = "norm-bias"  # lars: plain momentum without decay for these
    implementation: Literal["auto", "foreach", "fused"] = "auto"  # the same mathematics; auto: fused where torch has it
    norm_bias_lr_scale: PositiveFloat = 1  # sgd: times the rate, for the biases of norms; rate x decay stays as it is

    @property
    def effective_eps(self) -> float:
        """The epsilon as a number: vendors' default of the kind where the recipe leaves it open."""
        if self.eps != "auto":
            return self.eps
        return 1e-3 if self.name.startswith("rmsprop") else 0.0


class ScheduleConfig(Section):
    """The learning rate as a pure function of the step."""

    name: Literal[
        "constant", "cosine", "linear", "step", "multistep", "piecewise", "exponential", "polynomial", "one-cycle"
    ] = "cosine"
    lr: Annotated[PositiveFloat, BeforeValidator(_lone_rate)] = 0.1  # at the reference batch
    base_batch_size: Positive | None = None  # reference batch: lr x global batch / per; null: lr is absolute
    interval: Literal["step", "epoch"] = "step"  # how often the rate moves
    warmup: Duration = Duration(0, "ep")
    warmup_from: Literal["first", "zero"] = "first"  # step s of W has (s + 1) / W of the rate, or s / W
    warmup_mode: Literal["prefix", "replace", "multiply"] = "prefix"
    end_lr: NonNegative = 0  # absolute, not scaled: cosine, linear, polynomial, one-cycle
    end_lr_ratio: Fraction | None = None  # the same as a share of the peak
    decay_until: Duration | None = None  # where cosine, linear and polynomial arrive; null: at the end of the run
    period: Duration | None = None  # step: length of one level; exponential: time of one factor, null: an epoch
    num_periods: Positive | None = None  # exponential: the run is so many periods
    staircase: bool = False  # exponential: whole factors only
    milestones: Annotated[tuple[Duration, ...], Listed] = ()
    milestone_when: Literal["reached", "exceeded"] = (
        "reached"  # when a milestone counts: at its step, or at the next one
    )
    milestone_lrs: Annotated[
        tuple[PositiveFloat, ...], Listed
    ] = ()  # table: the rate from each milestone on; lr before
    gamma: PositiveFloat = 0.1  # step, milestones, exponential
    power: PositiveFloat = 2  # polynomial
    start_lr_ratio: Fraction = 0.04  # one-cycle: the first rate as a share of the peak
    anneal_strategy: Literal["cosine", "linear"] = "cosine"  # one-cycle: the form of both ways

    @property
    def uses_lr(self) -> bool:
        """Whether lr is the rate of any step: not where a table holds from step 0 and no warm-up leads to lr."""
        if self.name != "piecewise" or not self.milestones:
            return True
        from_start = self.milestones[0].value == 0 and self.milestone_when == "reached"
        return not from_start or (self.warmup.value > 0 and self.warmup_mode != "multiply")

    @model_validator(mode="before")
    @classmethod
    def _split_rate(cls, given: Any) -> Any:
        """`lr: 2^-11 per image` sets lr and base_batch_size."""
        return split_rate(given) if isinstance(given, Mapping) else given


class LossConfig(Section):
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0  # in training only
    # uniform: the share is spread over all classes; others: over all but the right one, which keeps 1 - share
    smooth_over: Literal["all-classes", "other-classes"] = "all-classes"


class DistillConfig(Section):
    """A trained network whose answers are learned beside the labels: (1 - alpha) x loss + alpha x T^2 x divergence."""

    teacher: str | None = None  # a run or a weights file; null: off
    teacher_recipe: str | None = None  # of a teacher that is a bare weights file
    alpha: Fraction = 0.5  # the teacher's share
    temperature: PositiveFloat = 4


class EmaConfig(Section):
    """A moving average of the weights, evaluated and saved beside them."""

    decay: Annotated[float, Field(ge=0, lt=1)] = 0  # 0: off
    warmup: bool = True  # min(decay, (1 + step) / (10 + step))


class CheckpointAverageConfig(Section):
    """The checkpoints of the last epochs as one more set of weights when the run is done: averaged.safetensors."""

    last: Duration | Off = "off"  # of the checkpoints that save.every wrote; 100%: all
    mode: Literal["mean", "exponential"] = "mean"
    decay: PositiveFraction = 0.99  # exponential: share of the average kept at each next checkpoint


class EarlyStoppingConfig(Section):
    """When a run may end before its length, judged by the metric of its evaluations."""

    target: PositiveFraction | Off = "off"  # as soon as it is reached
    patience: Positive | Off = "off"  # after so many evaluations without a better one


# As torch calls them. Those of the loss, which is float32 always, may be listed as such.
OperationName = Literal[
    "conv2d",
    "linear",
    "matmul",
    "mm",
    "bmm",
    "addmm",
    "mv",
    "dot",
    "t",
    "batch_norm",
    "group_norm",
    "layer_norm",
    "max_pool2d",
    "avg_pool2d",
    "adaptive_avg_pool2d",
    "mean",
    "relu",
    "relu6",
    "silu",
    "gelu",
    "sigmoid",
    "add",
    "mul",
    "cat",
    "softmax",
    "log_softmax",
    "topk",
    "cross_entropy",
    "nll_loss",
]


class PrecisionOps(Section):
    """Operations of the network whose type the recipe decides; the others run as the mode has them."""

    float32: Annotated[tuple[OperationName, ...], Listed] = ()
    low_precision: Annotated[tuple[OperationName, ...], Listed] = ()  # bfloat16 or float16, by the mode


def _mode(value: object) -> object:
    """YAML reads a bare 16.16 as a number; people mean the name."""
    return {16.16: "16.16", 16.32: "16.32", 32.32: "32.32"}.get(value, value) if isinstance(value, float) else value


class PrecisionConfig(Section):
    """Which types weights and products have. Batch norm statistics are never below fp32, nor is the loss."""

    # bf16, fp16: fp32 weights, and products as torch's autocast chooses. bf16-all, 16.32: fp32 weights, and the whole
    # network on a half cast of them. 16.16: half weights too, no copy of them in fp32. 32.32: fp32.
    mode: Annotated[
        Literal["fp64", "fp32", "tf32", "bf16", "fp16", "bf16-all", "16.16", "16.32", "32.32"], BeforeValidator(_mode)
    ] = "fp32"
    loss_scale: PositiveFloat | Literal["dynamic"] = "dynamic"  # fp16, 16.16 and 16.32
    rounding: Literal["auto", "nearest", "stochastic"] = "auto"  # of a 16.16 weight's update; auto: stochastic
    ops: PrecisionOps = PrecisionOps()
    # cuda: whether parts of a sum in a half-precision matrix product may be added in half; auto: as torch has it, half
    reduced_precision_reduction: Annotated[Literal["auto", "on", "off"], BeforeValidator(words_of_switches)] = "auto"

    @property
    def has_lower(self) -> bool:
        return self.mode in ("bf16", "fp16", "bf16-all", "16.16", "16.32")

    @property
    def is_plain(self) -> bool:
        """Whether every operation has the type that torch gives it."""
        return self.mode in ("fp32", "32.32", "tf32", "bf16", "fp16") and self.ops == PrecisionOps()

    @property
    def is_scaled(self) -> bool:
        return self.mode in ("fp16", "16.16", "16.32")


class NonFiniteConfig(Section):
    """What happens when a loss or gradient is NaN or infinite: the update is never applied."""

    policy: Literal["stop", "skip"] = "stop"
    max_skipped: Positive = 10  # skipped steps in one run before it stops all the same


class EngineConfig(Section):
    compile: Annotated[Literal["auto", "on", "off"], BeforeValidator(words_of_switches)] = "auto"
    # cuda: our own kernels for batch norm and what surrounds it; auto: where the network has such layers, in place of
    # torch.compile, unless compile is on or off
    fused_kernels: Annotated[Literal["auto", "on", "off"], BeforeValidator(words_of_switches)] = "auto"
    # cuda: the whole step recorded once and launched as one graph; auto: unless compile is off or
    # there are several processes; other devices have nothing to record
    cuda_graphs: Annotated[Literal["auto", "on", "off"], BeforeValidator(words_of_switches)] = "auto"
    deterministic: bool = False
    # cuda: try convolution algorithms on the first images of a size, and keep the fastest; auto: unless
    # deterministic, since the fastest may be another one in the next run
    cudnn_benchmark: Annotated[Literal["auto", "on", "off"], BeforeValidator(words_of_switches)] = "auto"
    # so many, by cuDNN's own order of what should be fast; trials are most of the first step of a large network
    cudnn_benchmark_limit: Literal["all"] | Positive = 4
    num_threads: Threads | Literal["auto"] = "auto"  # torch threads per rank; auto: all cores this process may use
    # The cores of this process and its workers: any, those near the device (near), a list as in 0-7,16-23, or a share
    # of the machine's for each of its processes (share).
    cpu_affinity: Annotated[str, Field(pattern=r"^(any|near|share|\d+(-\d+)?(,\d+(-\d+)?)*)$")] = "any"
    channels_last: Annotated[Literal["auto", "on", "off"], BeforeValidator(words_of_switches)] = "auto"
    non_finite: NonFiniteConfig = NonFiniteConfig()


class EvaluateConfig(Section):
    every: Duration | Off = Duration(1, "ep")
    offset: Duration = Duration(0, "ep")  # the first evaluation comes here, the next `every` later
    batch_size: Positive = 256
    num_samples: Positive | None = (
        None  # so many of the validation set, evenly spread; what they give is marked partial
    )
    # Several views of each image, their logits averaged; also for prediction. flip: and its mirror image.
    # flip-translate: and both moved by a pixel to the upper left and to the lower right, which count half in all.
    tta: Literal["none", "flip", "flip-translate"] = "none"


class SaveConfig(Section):
    every: Duration | Off = Duration(1, "ep")  # epochs, steps, a share, or minutes; off writes no checkpoint at all
    keep_last: Positive = 2
    keep_best: bool = True
    keep_at: Annotated[tuple[Duration, ...], Listed] = ()  # checkpoints at these points are never deleted
    background: bool = True  # training stops for a copy of the state alone, which is written while it goes on


class LogConfig(Section):
    every: Duration = Duration(10, "step")


RecordName = Literal["csv", "tensorboard", "wandb", "mlflow", "mlperf"]


def _listed(value: object) -> object:
    """`csv,mlperf` and a bare `csv` are lists too, and `off` is the empty one."""
    value = () if value is False or value == "off" else value
    return [word.strip() for word in value.split(",")] if isinstance(value, str) else value


class ParallelConfig(Section):
    """How the processes of a run add their gradients."""

    reduce: Literal["fast", "ordered"] = "fast"  # ordered: group gradients are added in group order
    bucket_cap_mb: PositiveFloat = 25  # fast: gradients travel in pieces of this size, beside the backward pass
    gradient_compression: Annotated[Literal["off", "bf16"], BeforeValidator(words_of_switches)] = (
        "off"  # fast: as they travel
    )
    pipeline_stages: Annotated[int, Field(ge=1, le=64)] = 1  # devices that share one copy of the network
    # The stages at which the next device of a pipeline begins.
    pipeline_splits: Annotated[tuple[str, ...], Listed] = ()
    # pipeline: all forward passes first (GPipe), forward and backward in turn (1F1B), or one micro-batch at a time
    pipeline_schedule: Literal["gpipe", "1f1b", "sequential"] = "gpipe"
    heartbeat_timeout_s: Annotated[float, Field(ge=2, le=600)] = 30  # of silence, until a process is given up


class ExpectedResult(Section):
    """What the recipe promises, and where the promise comes from."""

    metric: str = "top1"
    value: float
    tolerance: NonNegative = 0
    on: str = ""  # hardware and data
    source: str = ""  # published where, or measured by us when and how often


class PublishedResult(Section):
    """What others have published about this recipe; ours to check, not to promise."""

    source: Annotated[str, Field(min_length=1)]
    hardware: str = ""
    batch: Annotated[tuple[Positive, ...], Listed] = ()  # samples at a time, times accumulated, times cards
    metric: str = "top1"
    value: float | None = None
    spread: NonNegative | None = None  # as published, in the metric's unit
    images_per_s: PositiveFloat | None = None  # all cards together
    hours: PositiveFloat | None = None
    caveat: str = ""  # why it may not carry over


class MeasuredResult(Section):
    """What we have measured with this recipe ourselves."""

    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]
    hardware: Annotated[str, Field(min_length=1)]
    n: Positive  # runs
    metric: str = "top1"
    value: float  # mean of the runs
    spread: NonNegative | None = None  # standard deviation, in the metric's unit
    images_per_s: PositiveFloat | None = None
    hours: PositiveFloat | None = None


class Recipe(Section):
    """Everything that decides a run's mathematics, and what it expects to reach."""

    name: Annotated[str, Field(pattern=r"^\w[\w .+-]*$", max_length=100)] = "recipe"  # also a folder's name
    description: str = ""
    task: Literal["classification", "detection"] = "classification"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    length: Duration = Duration(90, "ep")
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    augment: AugmentConfig = AugmentConfig()
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    loss: LossConfig = LossConfig()
    detection: DetectionConfig = DetectionConfig()
    distill: DistillConfig = DistillConfig()
    ema: EmaConfig = EmaConfig()
    checkpoint_average: CheckpointAverageConfig = CheckpointAverageConfig()
    early_stopping: EarlyStoppingConfig = EarlyStoppingConfig()
    precision: PrecisionConfig = PrecisionConfig()
    engine: EngineConfig = EngineConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    save: SaveConfig = SaveConfig()
    log: LogConfig = LogConfig()
    parallel: ParallelConfig = ParallelConfig()
    memory: MemoryConfig = MemoryConfig()
    loggers: Annotated[tuple[RecordName, ...], Listed, BeforeValidator(_listed)] = ()  # written beside the report
    profile: Annotated[tuple[Positive, Positive], Listed] | Off = "off"  # trace these steps, from 1, both included
    expect: ExpectedResult | None = None
    published: Annotated[tuple[PublishedResult, ...], Listed] = ()  # by others
    measured: Annotated[tuple[MeasuredResult, ...], Listed] = ()  # by us

    @model_validator(mode="after")
    def _fields_agree(self) -> Recipe:
        found = contradictions(self)
        if found:
            raise ContradictionError(found)
        return self
