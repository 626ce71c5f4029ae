"""The recipe: every section and field that can be set, with its type, range, default and description.

Sections are frozen and strict, and lie in `parts`. The docstring below a field is its description, in error messages
and in the reference. `rules` checks how fields combine. Fields are also listed here by dotted name, with their values
in a recipe, and suggested for mistyped ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BeforeValidator, Field, model_validator

from reconv.recipe.parts.batch import BatchConfig, MemoryConfig, ParallelConfig
from reconv.recipe.parts.code import NamedCode, parse_list
from reconv.recipe.parts.contradiction import ContradictionError
from reconv.recipe.parts.data import AugmentConfig, DataConfig
from reconv.recipe.parts.detection import DetectionConfig
from reconv.recipe.parts.engine import EngineConfig
from reconv.recipe.parts.evaluation import EarlyStoppingConfig, EvaluateConfig, LogConfig, SaveConfig
from reconv.recipe.parts.loss import DistillConfig, LossConfig
from reconv.recipe.parts.model import CheckpointAverageConfig, EmaConfig, ModelConfig
from reconv.recipe.parts.optimizer import OptimizerConfig
from reconv.recipe.parts.precision import PrecisionConfig
from reconv.recipe.parts.result import ExpectedResult, MeasuredResult, PublishedResult
from reconv.recipe.parts.schedule import ScheduleConfig
from reconv.recipe.presets import nearest
from reconv.recipe.rules import contradictions
from reconv.recipe.units import Duration, Listed, Off, Positive, Section

LoggerName = Literal["csv", "tensorboard", "wandb", "mlflow", "mlperf"]
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
# Other programs' names for these fields.
_SYNONYMS = {
    "epochs": "length",
    "steps": "length",
    "arch": "model.name",
    "batchsize": "batch.size",
    "bs": "batch.size",
    "learning_rate": "schedule.lr",
    "lr_schedule": "schedule.name",
    "scheduler": "schedule.name",
    "warmup_epochs": "schedule.warmup",
    "wd": "optimizer.weight_decay",
    "dtype": "precision.mode",
    "amp": "precision.mode",
    "accumulation": "batch.micro",
    "dataset": "data.source",
    "data_dir": "data.path",
    "classes": "data.num_classes",
}


def _listed(value: object) -> object:
    """`csv,mlperf` and a bare `csv` are lists too, and `off` is the empty one."""
    value = () if value is False or value == "off" else value
    return [word.strip() for word in value.split(",")] if isinstance(value, str) else value


class Recipe(Section):
    """Everything that determines a training run, and the result to expect from it."""

    name: Annotated[str, Field(pattern=r"^\w[\w .+-]*$", max_length=100)] = "recipe"
    """Name of the recipe and of the folder of its runs."""
    description: str = ""
    """One line about the recipe."""
    task: Literal["classification", "multilabel", "detection"] = "classification"
    """The task: one class per image, any number of labels per image, or boxes."""
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
    loggers: Annotated[tuple[LoggerName, ...], Listed, BeforeValidator(_listed)] = ("csv",)
    """Further loggers besides the event log and the report, as in [csv, tensorboard]; `off` is none."""
    metrics: Annotated[tuple[NamedCode, ...], Listed, BeforeValidator(parse_list)] = ()
    """Custom metrics of the evaluation, by import path, as in [my_pkg.metrics:MacroF1]."""
    callbacks: Annotated[tuple[NamedCode, ...], Listed, BeforeValidator(parse_list)] = ()
    """Custom callbacks, by import path, as in [my_pkg.callbacks:Notify]."""
    code_path: Annotated[tuple[str, ...], Listed] = ()
    """Folders to import custom code from, after the installed packages; in a recipe file, relative to that file. If
    it is not given: the folder of the recipe file and the current one."""
    profile: Annotated[tuple[Positive, Positive], Listed] | Off = "off"
    """First and last step to trace with torch's profiler, counted from 1."""
    expect: ExpectedResult | None = None
    """The result to expect, which the run checks at its end; null: none."""
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


@cache
def schema_fields() -> Mapping[str, Any]:
    """The annotation of every section and leaf, by dotted name."""
    return _walk(Recipe, "")


def _walk(section: type[Section], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, info in section.model_fields.items():
        found[prefix + name] = info.annotation
        inner = section_type(info.annotation)
        if inner is not None:
            found |= _walk(inner, f"{prefix}{name}.")
    return found


def section_type(annotation: Any) -> type[Section] | None:
    """The section that a field holds; None for a leaf (a list of sections is a leaf)."""
    if get_origin(annotation) is tuple:
        return None
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def is_derived(field: str, derive: Collection[str]) -> bool:
    """True if a field, or the section it is in, is in a recipe's `derive`."""
    return any(field == name or field.startswith(f"{name}.") for name in derive)


def takes_only_text(field: str) -> bool:
    """True if a field takes text, or text and null, and nothing else."""
    annotation = schema_fields().get(field)
    return annotation is str or set(get_args(annotation)) == {str, type(None)}


def takes_null(field: str) -> bool:
    """True if the field accepts null."""
    return type(None) in get_args(schema_fields().get(field))


def suggest(field: str) -> str | None:
    """The field that an unknown dotted name most likely meant."""
    names = schema_fields()
    parent, _, key = field.rpartition(".")
    spelled = field.replace("_", ".").replace("-", ".")
    if spelled in names:
        return spelled
    if key in _SYNONYMS:
        return _SYNONYMS[key]
    siblings = {n.rpartition(".")[2]: n for n in names if n.rpartition(".")[0] == parent}
    near = nearest(key, siblings)
    if near is not None:
        return siblings[near]
    same_ending = [n for n in names if n.rpartition(".")[2] == key]
    if same_ending:
        return same_ending[0]
    # The name of a section alone would make the section and its other fields look close.
    return None if parent in names else nearest(field, names)


def fields_of(section: str) -> list[str]:
    """The names of the fields and sections in a section; empty if there is no such section."""
    return [name.rpartition(".")[2] for name in schema_fields() if name.rpartition(".")[0] == section != ""]


def flatten(recipe: Recipe) -> dict[str, Any]:
    """Every leaf value of a recipe by dotted name; each entry of model.options is a leaf."""
    leaves: dict[str, Any] = {}
    _add_leaves(recipe, "", leaves)
    return leaves


def _add_leaves(section: Section, prefix: str, leaves: dict[str, Any]) -> None:
    for name, value in section.__dict__.items():  # a model's fields, in their order; `model_fields` is slow
        if isinstance(value, Section):
            _add_leaves(value, f"{prefix}{name}.", leaves)
        elif isinstance(value, dict) and value:
            leaves.update((f"{prefix}{name}.{key}", item) for key, item in value.items())
        else:
            leaves[prefix + name] = value
