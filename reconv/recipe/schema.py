"""The recipe: every field that can be set, with its type, range, default and description.

Sections are frozen and strict. The docstring below a field is its description, in error messages and in the reference.
The sections about images, detection and the loss are in `data_fields`, `detection_fields` and `loss_fields`; `rules`
checks how fields combine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from reconv.recipe.code_fields import NamedCode, Options, parse_list
from reconv.recipe.data_fields import AugmentConfig, DataConfig
from reconv.recipe.detection_fields import DetectionConfig
from reconv.recipe.loss_fields import LossConfig
from reconv.recipe.rules import contradictions
from reconv.recipe.rules.contradiction import ContradictionError
from reconv.recipe.units import (
    BatchSize,
    Duration,
    Fraction,
    Listed,
    NonNegative,
    Off,
    Positive,
    PositiveFloat,
    PositiveFraction,
    Section,
    Threads,
    parse_rate,
    parse_switch,
    split_rate,
)

Beta = Annotated[float, Field(ge=0, lt=1)]
Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(parse_switch)]


class ModelConfig(Section):
    """The network and the weights it starts from."""

    name: str = "resnet50"
    """Name of the network, as `reconv.models` or timm:NAME or torchvision:NAME has it, or the import path of your own,
    as in my_pkg.nets:make or ./nets.py:make."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments of the network's builder; they are checked when the network is built."""
    zero_init_last: bool = False
    """Initialize the last norm of each residual block to zero, in ResNets; model.options.zero_gamma overrides it."""
    init: str | None = None
    """Initial weights: a weights file, a run, torchvision:NAME, timm:NAME or an https URL; null is random."""
    freeze_backbone: bool = False
    """Train the head only."""
    freeze_until: Duration | Off = "off"
    """Train only the head until this point of the run and all parameters from there on, as in 2ep or 10%."""
    trainable: Annotated[tuple[str, ...], Listed] = ()
    """Name patterns of the parameters to train, as in [layer4.*, fc.*]; empty trains all."""


class BatchConfig(Section):
    """The global batch, its groups and its micro-batches."""

    size: BatchSize = 256
    """Global batch size: samples of one optimizer step over all devices."""
    group: BatchSize | Literal["all", "micro"] = "all"
    """Ghost batch norm size: samples over which batch norm statistics, MixUp and CutMix work. `all` is the global
    batch; `micro` is the micro-batch, so that results depend on the hardware."""
    micro: BatchSize | Literal["auto"] = "auto"
    """Most samples per forward pass of a device; smaller values accumulate gradients over several passes."""


class OptimizerConfig(Section):
    """The optimizer. `rmsprop` is torch's formula, `rmsprop-tf` TensorFlow's."""

    name: Literal["sgd", "lars", "rmsprop", "rmsprop-tf", "adamw", "lamb"] = "sgd"
    """Optimizer."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum factor of sgd, lars and rmsprop."""
    nesterov: bool = False
    """Use Nesterov momentum, for sgd and lars."""
    weight_decay: NonNegative = 1e-4
    """Weight decay: an L2 penalty, for adamw and lamb decoupled from the gradient's moments."""
    weight_decay_exclude: Literal["none", "norm-bias", "norm", "nvidia-by-name"] = "none"
    """Parameters without weight decay: norms and biases, norms, or those NVIDIA's code finds by the name `bn`."""
    alpha: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Smoothing constant of rmsprop's mean square."""
    alpha_exponent: Annotated[float, Field(ge=-64, lt=0)] | None = None
    """Set alpha by the batch size: alpha = 1 - global batch x 2^exponent."""
    betas: Annotated[tuple[Beta, Beta], Listed] = (0.9, 0.999)
    """AdamW and LAMB: smoothing constants of the gradient and of its square."""
    eps: NonNegative | Literal["auto"] = "auto"
    """Term added to the denominator; `auto` is 1e-3 for rmsprop, 0 for lars, 1e-8 for adamw and 1e-6 for lamb."""
    trust_coefficient: PositiveFloat = 0.001
    """LARS: a step is at most this fraction of the weight's norm."""
    lars_exclude: Literal["norm-bias", "norm", "none"] = "norm-bias"
    """LARS: parameters that take plain momentum steps without weight decay."""
    implementation: Literal["auto", "foreach", "fused"] = "auto"
    """Implementation of the same mathematics; `auto` uses torch's fused one where it exists."""
    clip_grad: PositiveFloat | Literal["auto"] | Off = "auto"
    """Gradient clipping: the largest norm or value, or AGC's factor; `auto` is off, and for lamb 1 (max_grad_norm)."""
    clip_mode: Literal["norm", "value", "agc"] = "norm"
    """Clip the norm of the whole gradient, each value, or adaptively each unit (AGC) by the norm of its weights."""
    layer_decay: PositiveFraction = 1
    """Layer-wise learning rate decay: each layer has this times the learning rate of the next; the last has it all."""
    backbone_lr_scale: PositiveFloat = 1
    """Factor of the learning rate of all parameters but the head's."""
    norm_bias_lr_scale: PositiveFloat = 1
    """SGD: factor of the learning rate of norm biases; their learning rate x weight decay stays the same."""

    @property
    def effective_clip_grad(self) -> float | None:
        """`clip_grad` with `auto` replaced by timm's default for the optimizer; None is off."""
        if isinstance(self.clip_grad, str):
            return 1.0 if self.clip_grad == "auto" and self.name == "lamb" else None
        return self.clip_grad

    @property
    def effective_eps(self) -> float:
        """`eps` with `auto` replaced by the vendors' default for the optimizer."""
        if self.eps != "auto":
            return self.eps
        return {"rmsprop": 1e-3, "rmsprop-tf": 1e-3, "adamw": 1e-8, "lamb": 1e-6}.get(self.name, 0.0)


def _plain_rate(value: object) -> object:
    """`2^-3` as a number. A rate with its batch size was split before, unless base_batch_size is given and differs."""
    if not isinstance(value, str) or not ("^" in value or "per" in value):
        return value
    parsed = parse_rate(value)
    if parsed is None:
        raise ValueError("a number, also as in 2^-11 per image or 0.256 per 256")
    if parsed[1] is not None:
        raise ValueError("a rate without `per`; schedule.base_batch_size is the batch size of all rates")
    return parsed[0]


Rate = Annotated[PositiveFloat, BeforeValidator(_plain_rate)]


class ScheduleConfig(Section):
    """The learning rate schedule, a pure function of the step."""

    name: Literal[
        "constant", "cosine", "linear", "step", "multistep", "piecewise", "exponential", "polynomial", "one-cycle"
    ] = "cosine"
    """Shape of the schedule after warm-up."""
    lr: Rate = 0.1
    """Peak learning rate, at base_batch_size if that is set; `0.256 per 256` and `2^-11 per image` set both. Written
    without `per`, it is used as it is: it does not inherit base_batch_size."""
    base_batch_size: Positive | None = None
    """Scale the learning rate linearly: lr x batch.size / base_batch_size; null uses lr as it is."""
    interval: Literal["step", "epoch"] = "step"
    """Update the learning rate every step or every epoch."""
    warmup: Duration = Duration(0, "ep")
    """Length of the linear warm-up."""
    warmup_from: Literal["first", "zero"] = "first"
    """Step s of a warm-up of W steps uses the fraction (s + 1) / W (`first`) or s / W (`zero`)."""
    warmup_mode: Literal["prefix", "replace", "multiply"] = "prefix"
    """`prefix` starts the schedule after warm-up; `replace` starts it at step 0 and warm-up replaces its first steps;
    `multiply` starts it at step 0 and multiplies it by warm-up."""
    end_lr: Annotated[NonNegative, BeforeValidator(_plain_rate)] = 0
    """Final learning rate of cosine, linear, polynomial and one-cycle; it is not scaled with the batch size."""
    end_lr_ratio: Fraction | None = None
    """Final learning rate as a fraction of the peak, instead of end_lr."""
    decay_until: Duration | None = None
    """Point at which cosine, linear and polynomial reach the final rate; null is the end of the run."""
    period: Duration | None = None
    """Time between two multiplications by gamma, for step and exponential; null is an epoch for exponential."""
    num_periods: Positive | None = None
    """Exponential: number of periods in the run, instead of `period`."""
    staircase: bool = False
    """Exponential: multiply once at the end of each period instead of continuously."""
    milestones: Annotated[tuple[Duration, ...], Listed] = ()
    """Points at which multistep and piecewise change the learning rate."""
    milestone_when: Literal["reached", "exceeded"] = "reached"
    """Whether a milestone takes effect at its step or one step later."""
    milestone_lrs: Annotated[tuple[Rate, ...], Listed] = ()
    """Piecewise: learning rate from each milestone on; `lr` applies before the first. Like lr, they are scaled only by
    a base_batch_size that is written with them."""
    gamma: PositiveFloat = 0.1
    """Factor of the learning rate for step, multistep and exponential."""
    power: PositiveFloat = 2
    """Exponent of polynomial."""
    start_lr_ratio: Fraction = 0.04
    """One-cycle: first learning rate as a fraction of the peak."""
    anneal_strategy: Literal["cosine", "linear"] = "cosine"
    """One-cycle: shape of the rise and of the fall."""

    @property
    def uses_lr(self) -> bool:
        """Whether any step uses lr: not where piecewise starts at step 0 and no warm-up leads to lr."""
        if self.name != "piecewise" or not self.milestones:
            return True
        from_start = self.milestones[0].value == 0 and self.milestone_when == "reached"
        return not from_start or (self.warmup.value > 0 and self.warmup_mode != "multiply")

    @model_validator(mode="before")
    @classmethod
    def _split_rate(cls, given: Any) -> Any:
        """`lr: 2^-11 per image` sets lr and base_batch_size."""
        return split_rate(given) if isinstance(given, Mapping) else given


class DistillConfig(Section):
    """Knowledge distillation: (1 - alpha) x loss + alpha x T^2 x KL divergence from the teacher."""

    teacher: str | None = None
    """Run or weights file of the teacher; null switches distillation off."""
    teacher_recipe: str | None = None
    """Recipe of a teacher that is given by a weights file."""
    alpha: Fraction = 0.5
    """Weight of the distillation loss."""
    temperature: PositiveFloat = 4
    """Temperature T of both softmaxes."""


class EmaConfig(Section):
    """An exponential moving average (EMA) of the weights, evaluated and saved with them."""

    decay: Annotated[float, Field(ge=0, lt=1)] = 0
    """Decay per step; 0 switches EMA off."""
    warmup: bool = True
    """Start with a smaller decay: min(decay, (1 + step) / (10 + step))."""


class CheckpointAverageConfig(Section):
    """The average of the last checkpoints, written to averaged.safetensors at the end of the run."""

    last: Duration | Off = "off"
    """Average the checkpoints that `save.every` wrote in this last part of the run; 100% averages all."""
    mode: Literal["mean", "exponential"] = "mean"
    """Plain or exponential average."""
    decay: PositiveFraction = 0.99
    """Exponential: weight of the average so far at each next checkpoint."""


class EarlyStoppingConfig(Section):
    """When to end a run early, by the metric of its evaluations."""

    target: PositiveFraction | Off = "off"
    """Stop as soon as the metric reaches this value."""
    patience: Positive | Off = "off"
    """Stop after this many evaluations without improvement."""


# Torch's names. Operations of the loss may be listed too; the loss is always float32.
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
    """Operations whose dtype the recipe sets; all others have the dtype of the precision mode."""

    float32: Annotated[tuple[OperationName, ...], Listed] = ()
    """Operations to run in float32."""
    low_precision: Annotated[tuple[OperationName, ...], Listed] = ()
    """Operations to run in the bfloat16 or float16 of the mode."""


def _mode(value: object) -> object:
    """YAML reads a bare 16.16 as a number; it is the name of a mode."""
    return {16.16: "16.16", 16.32: "16.32", 32.32: "32.32"}.get(value, value) if isinstance(value, float) else value


class PrecisionConfig(Section):
    """Dtypes of weights and computation. Batch norm statistics and the loss are always at least float32."""

    mode: Annotated[
        Literal["fp64", "fp32", "tf32", "bf16", "fp16", "bf16-all", "16.16", "16.32", "32.32"], BeforeValidator(_mode)
    ] = "fp32"
    """bf16 and fp16 use torch's autocast with float32 weights. bf16-all and 16.32 run the whole network on a
    half-precision copy of float32 weights. 16.16 stores the weights in half precision, too. 32.32 is fp32."""
    loss_scale: PositiveFloat | Literal["dynamic"] = "dynamic"
    """Loss scale for fp16, 16.16 and 16.32."""
    rounding: Literal["auto", "nearest", "stochastic"] = "auto"
    """Rounding of weight updates in mode 16.16; `auto` is stochastic."""
    ops: PrecisionOps = PrecisionOps()
    reduced_precision_reduction: Switch = "auto"
    """CUDA: allow reduced-precision reductions in half-precision matrix products; `auto` keeps torch's default, on."""

    @property
    def has_low_precision(self) -> bool:
        return self.mode in ("bf16", "fp16", "bf16-all", "16.16", "16.32")

    @property
    def follows_autocast(self) -> bool:
        """Whether every operation has the dtype that torch gives it."""
        return self.mode in ("fp32", "32.32", "tf32", "bf16", "fp16") and self.ops == PrecisionOps()

    @property
    def uses_loss_scale(self) -> bool:
        return self.mode in ("fp16", "16.16", "16.32")


class NonFiniteConfig(Section):
    """What happens when the loss or a gradient is NaN or infinite; such an update is never applied."""

    policy: Literal["stop", "skip"] = "stop"
    """Stop the run, or skip the step."""
    max_skipped: Positive = 10
    """Most skipped steps in a run before it stops."""


class EngineConfig(Section):
    """How steps are executed: compilation, kernels, CPU threads."""

    compile: Switch = "auto"
    """Use torch.compile; `auto` does on CUDA where fused_kernels are not used, and on Gaudi."""
    fused_kernels: Switch = "auto"
    """CUDA: use Reconv's fused kernels for batch norm and the layers around it; `auto` does where the network has
    such layers, unless `compile` is on or off."""
    cuda_graphs: Switch = "auto"
    """CUDA: capture the whole step as a CUDA graph; `auto` does unless `compile` is off, there are several processes
    or the step runs your own code."""
    deterministic: bool = False
    """Use deterministic algorithms only, so that a run on the same hardware gives the same bits."""
    cudnn_benchmark: Switch = "auto"
    """CUDA: time convolution algorithms for each input size and keep the fastest; `auto` does unless
    `deterministic`, since the next run may choose another one."""
    cudnn_benchmark_limit: Literal["all"] | Positive = 4
    """CUDA: number of algorithms to time per convolution; timing is most of a large network's first step."""
    num_threads: Threads | Literal["auto"] = "auto"
    """Torch threads per process; `auto` uses all cores this process may use."""
    cpu_affinity: Annotated[str, Field(pattern=r"^(any|near|share|\d+(-\d+)?(,\d+(-\d+)?)*)$")] = "any"
    """CPU cores of a process and its workers: `any`, those `near` its GPU, an equal `share` of the machine's for each
    process, or a list as in 0-7,16-23."""
    channels_last: Switch = "auto"
    """Use the channels-last memory format."""
    non_finite: NonFiniteConfig = NonFiniteConfig()


class EvaluateConfig(Section):
    """When and how the validation set is evaluated."""

    every: Duration | Off = Duration(1, "ep")
    """Interval between evaluations; there is always one at the end, unless `off`."""
    offset: Duration = Duration(0, "ep")
    """Point of the first evaluation; the next follows `every` later."""
    batch_size: Positive = 256
    """Samples per forward pass."""
    num_samples: Positive | None = None
    """Evaluate only this many samples, spread evenly over the validation set; such results are marked partial."""
    best_metric: str | None = None
    """Metric that decides which checkpoint is best and when early_stopping ends a run, larger is better: of
    classification top1 (null), top5 or one of your own metrics; of detection null, which is detection.metric."""
    tta: Literal["none", "flip", "flip-translate"] = "none"
    """Test-time augmentation, also for prediction: average the logits of the image and its mirror image (`flip`), and
    of both shifted by one pixel to the upper left and the lower right at half weight (`flip-translate`)."""


class SaveConfig(Section):
    """When checkpoints are written and which are kept."""

    every: Duration | Off = Duration(1, "ep")
    """Interval between checkpoints in epochs, steps, percent of the run or minutes; `off` writes none."""
    keep_last: Positive = 2
    """Number of latest checkpoints to keep. If it is 1 or 2, a checkpoint that is due while others are being written
    may be left out in favor of the next one, so that training does not wait for the disk."""
    keep_best: bool = True
    """Also keep the best checkpoint by the evaluation metric."""
    keep_at: Annotated[tuple[Duration, ...], Listed] = ()
    """Points at which checkpoints are written and never deleted."""
    background: bool = True
    """Write checkpoints in the background; training only waits for a copy of the state."""


class LogConfig(Section):
    """How often training progress is logged."""

    every: Duration = Duration(10, "step")
    """Interval between log lines."""


LoggerName = Literal["csv", "tensorboard", "wandb", "mlflow", "mlperf"]


def _listed(value: object) -> object:
    """`csv,mlperf` and a bare `csv` are lists too, and `off` is the empty one."""
    value = () if value is False or value == "off" else value
    return [word.strip() for word in value.split(",")] if isinstance(value, str) else value


class ParallelConfig(Section):
    """Data and pipeline parallelism."""

    reduce: Literal["fast", "ordered"] = "fast"
    """How gradients are summed over processes: `fast` uses bucketed all-reduce during the backward pass; `ordered`
    sums in the order of the groups, so that the bits do not depend on the number of processes."""
    bucket_cap_mb: PositiveFloat = 25
    """Bucket size of the fast all-reduce in MiB."""
    gradient_compression: Annotated[Literal["off", "bf16"], BeforeValidator(parse_switch)] = "off"
    """Compress gradients for the fast all-reduce."""
    pipeline_stages: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of devices that one copy of the network is split over (pipeline parallelism)."""
    pipeline_splits: Annotated[tuple[str, ...], Listed] = ()
    """Names of the network's stages at which the next device begins."""
    pipeline_schedule: Literal["gpipe", "1f1b", "sequential"] = "gpipe"
    """Order of forward and backward passes: GPipe, 1F1B, or one micro-batch at a time."""
    heartbeat_timeout_s: Annotated[float, Field(ge=2, le=600)] = 30
    """Seconds without a heartbeat until a process counts as lost."""


def _stage_names(value: object) -> object:
    """A bare name is a list of one; `off` and `on` are words."""
    value = parse_switch(value)
    if isinstance(value, str) and value not in ("off", "auto", "all"):
        return [name.strip() for name in value.split(",")]
    return value


class MemoryConfig(Section):
    """How to save device memory. None of these fields changes what a run computes."""

    activation_checkpointing: Annotated[
        Annotated[tuple[str, ...], Listed] | Literal["off", "auto", "all"], BeforeValidator(_stage_names)
    ] = "off"
    """Stages whose activations are recomputed in the backward pass: names as in [stem, layer1], `all`, or `auto` for
    those with the largest activations, until half of the activation memory is saved."""
    checkpoint_segments: Annotated[tuple[str, ...], Listed] = ()
    """Stages at which a new checkpointed segment begins; all segments but the last are recomputed."""
    shard_optimizer: bool = False
    """Each process keeps the optimizer state of its share of the parameters (ZeRO stage 1)."""
    offload_optimizer: bool = False
    """Keep the optimizer state in host memory and copy it for each update."""


class ExpectedResult(Section):
    """The result the recipe promises."""

    metric: str = "top1"
    """Metric of the evaluation."""
    value: float
    """Expected value; accuracies are fractions."""
    tolerance: NonNegative = 0
    """How far below the value a run may end."""
    on: str = ""
    """Hardware and data of the promise."""
    source: str = ""
    """Where the value was published, or when and how often it was measured."""


class PublishedResult(Section):
    """A result that others have published for this recipe."""

    source: Annotated[str, Field(min_length=1)]
    """Where it was published."""
    hardware: str = ""
    """Hardware of the published run."""
    batch: Annotated[tuple[Positive, ...], Listed] = ()
    """Batch arithmetic as published: samples x accumulation steps x devices."""
    metric: str = "top1"
    """Metric of the value."""
    value: float | None = None
    """Published value; accuracies are fractions."""
    spread: NonNegative | None = None
    """Published spread, in the metric's unit."""
    images_per_s: PositiveFloat | None = None
    """Training throughput of all devices together."""
    hours: PositiveFloat | None = None
    """Training time."""
    caveat: str = ""
    """Why the result may not carry over."""


class MeasuredResult(Section):
    """A result that was measured with Reconv."""

    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]
    """Date of the measurement."""
    hardware: Annotated[str, Field(min_length=1)]
    """Hardware of the runs."""
    n: Positive
    """Number of runs."""
    metric: str = "top1"
    """Metric of the value."""
    value: float
    """Mean of the runs."""
    spread: NonNegative | None = None
    """Standard deviation of the runs, in the metric's unit."""
    images_per_s: PositiveFloat | None = None
    """Training throughput."""
    hours: PositiveFloat | None = None
    """Training time."""


DerivedField = Literal[
    "model.name",
    "model.options",
    "data.preprocess",
    "batch.size",
    "batch.group",
    "length",
    "model.freeze_until",
    "schedule.lr",
    "optimizer.backbone_lr_scale",
    "schedule.warmup",
    "optimizer.weight_decay",
    "ema.decay",
    "evaluate.every",
    "save.every",
    "loss.class_weights",
    "data.bad_images",
    "detection.anchors",
    "detection.max_gt_boxes",
]


class Recipe(Section):
    """Everything that determines a training run, and the result to expect from it."""

    name: Annotated[str, Field(pattern=r"^\w[\w .+-]*$", max_length=100)] = "recipe"
    """Name of the recipe and of the folder of its runs."""
    description: str = ""
    """One line about the recipe."""
    task: Literal["classification", "multilabel", "detection"] = "classification"
    """What the network learns: one class per image, any number of labels per image, or boxes."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the initial weights, the order of samples and the augmentation."""
    length: Duration = Duration(90, "ep")
    """Length of training in epochs or steps, as in 90ep or 5000step."""
    derive: Annotated[tuple[DerivedField, ...], Listed] = ()
    """Fields and sections whose values follow from the data and the initial weights, unless they are set here or by
    the command; the rules are in docs/how-to/finetune.md."""
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
    loggers: Annotated[tuple[LoggerName, ...], Listed, BeforeValidator(_listed)] = ()
    """Further loggers besides the event log and the report, as in [csv, tensorboard]."""
    metrics: Annotated[tuple[NamedCode, ...], Listed, BeforeValidator(parse_list)] = ()
    """Your own metrics of the evaluation, by import path, as in [my_pkg.metrics:MacroF1]."""
    callbacks: Annotated[tuple[NamedCode, ...], Listed, BeforeValidator(parse_list)] = ()
    """Your own callbacks, by import path, as in [my_pkg.callbacks:Notify]."""
    code_path: Annotated[tuple[str, ...], Listed] = ()
    """Folders to import your own code from, after the installed packages; in a recipe file, relative to that file. If
    it is not given: the folder of the recipe file and the current one."""
    profile: Annotated[tuple[Positive, Positive], Listed] | Off = "off"
    """First and last step to trace with torch's profiler, counted from 1."""
    expect: ExpectedResult | None = None
    """The result to expect; null promises none."""
    published: Annotated[tuple[PublishedResult, ...], Listed] = ()
    """Results that others have published."""
    measured: Annotated[tuple[MeasuredResult, ...], Listed] = ()
    """Results that were measured with Reconv."""

    @model_validator(mode="after")
    def _check_combinations(self) -> Recipe:
        open_fields = tuple(f"{name}." for name in self.derive)  # checked when they are derived
        found = [
            c for c in contradictions(self) if not any(f in self.derive or f.startswith(open_fields) for f in c.fields)
        ]
        if found:
            raise ContradictionError(found)
        return self
