"""Metadata of an exported model, in `preprocess.json` and in the metadata of its file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from reconv.build.postprocess import build_postprocess_config
from reconv.core.confidence import ConfidenceCalibration
from reconv.core.version import __version__
from reconv.data.transforms.host import resized_shorter_side
from reconv.detection.postprocess import PostprocessConfig
from reconv.inference.predictor import Predictor
from reconv.recipe.load.identity import recipe_digest
from reconv.recipe.loader import dump
from reconv.recipe.parts.data import PreprocessConfig

FORMAT = 1


@dataclass(frozen=True, slots=True)
class NMSRules:
    """The post-processing of a detector."""

    in_model: bool  # else run.py does it
    score_threshold: float  # exclusive
    iou_threshold: float
    max_per_class: int  # before NMS
    max_per_image: int

    @classmethod
    def of(cls, config: PostprocessConfig, in_model: bool) -> NMSRules:
        return cls(in_model, config.score_threshold, config.nms_iou, config.max_per_class, config.max_per_image)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportMetadata:
    """The model that is exported."""

    name: str  # of the recipe
    task: str
    network: str
    preprocess: PreprocessConfig
    class_names: tuple[str, ...]  # as in the data
    display_names: tuple[str, ...]  # for people
    class_ids: tuple[int, ...]  # detectors: the category ids of the training data
    recipe_digest: str
    weights: str  # raw, ema or averaged
    step: int | None
    tta: str = "none"
    batch: int | None = None  # the fixed batch size; None: any
    precision: str = "fp32"
    nms: NMSRules | None = None  # detectors
    extra: Mapping[str, Any] = field(default_factory=dict)  # what the run.py of one target needs besides
    header: Mapping[str, str] = field(default_factory=dict)  # of a safetensors file
    timm_names: Mapping[str, str] | None = None  # of the tensors, where timm has the network
    confidence: ConfidenceCalibration | None = None

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the model's outputs."""
        if self.nms is None:
            return ("logits",)
        return ("boxes", "scores", "labels", "counts") if self.nms.in_model else ("boxes", "scores")

    @classmethod
    def of(
        cls, predictor: Predictor, batch: int | None = None, *, nms: bool = True, precision: str = "fp32"
    ) -> ExportMetadata:
        """The metadata of a loaded model; `nms` says whether the file of a detector will contain NMS."""
        recipe = predictor.recipe
        return cls(
            name=recipe.name,
            task=recipe.task,
            network=recipe.model.name,
            preprocess=recipe.data.preprocess,
            class_names=predictor.class_names,
            display_names=predictor.classes,
            class_ids=predictor.class_ids,
            recipe_digest=recipe_digest(dump(recipe)),
            weights=predictor.weights,
            step=predictor.step,
            tta=recipe.evaluate.tta,
            batch=batch,
            precision=precision,
            nms=NMSRules.of(build_postprocess_config(recipe), nms) if predictor.is_detector else None,
            confidence=predictor.confidence,
        )

    def settings(self, model_file: str) -> dict[str, Any]:
        """The content of preprocess.json."""
        preprocess = self.preprocess
        return {
            "format": FORMAT,
            "model": model_file,
            "task": self.task,
            "size": preprocess.size,
            "resize": resized_shorter_side(preprocess),
            "interpolation": preprocess.interpolation,
            "channels": preprocess.channels,
            "divide_by": preprocess.divide_by,
            "mean": list(preprocess.mean),
            "std": list(preprocess.std),
            "per_image_standardization": preprocess.per_image_standardization,
            "batch": self.batch,
            "outputs": list(self.outputs),
            "classes": list(self.display_names),
            "class_names": list(self.class_names),
            "class_ids": list(self.class_ids),
            "recipe": self.name,
            "recipe_digest": self.recipe_digest,
            "network": self.network,
            "weights": self.weights,
            "step": self.step,
            "tta": self.tta,
            "precision": self.precision,
            "nms": None if self.nms is None else asdict(self.nms),
            "confidence": None if self.confidence is None else self.confidence.to_dict(),
            "versions": {"reconv": __version__, "torch": torch.__version__},
            **self.extra,
        }

    def properties(self, model_file: str) -> dict[str, str]:
        """The same for the metadata of a file, which holds texts: lists and numbers as JSON."""
        settings = self.settings(model_file)
        return {name: value if isinstance(value, str) else json.dumps(value) for name, value in settings.items()}
