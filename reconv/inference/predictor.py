"""`Predictor`: the one way from images to predictions, for eval, predict and Python."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reconv.batch import Batch
from reconv.checkpoint.locate import LocatedWeights
from reconv.custom_code import TrustCode
from reconv.data.dataset import Dataset, Split
from reconv.data.pipeline.bad_samples import BadSamples
from reconv.data.transforms.host_transforms import eval_transform
from reconv.detection.postprocess import Detections
from reconv.device import Device, open_device
from reconv.distributed.environment import SINGLE_PROCESS, LaunchEnv
from reconv.distributed.process_group import ProcessGroup
from reconv.errors import DataError, UsageError
from reconv.inference.eval_data import ModelClasses, open_eval_set
from reconv.inference.evaluate import InferenceStep, eval_mode, evaluate, merge_ranks
from reconv.inference.image_input import ImageFile, ImageInput, split_images, to_pil
from reconv.inference.load_model import build_saved_model, find_weights, read_saved_model
from reconv.inference.predictions import ClassScore, DetectedBox, Prediction, PredictionList
from reconv.machine import Machine, cores_per_process
from reconv.metrics.analysis import analyze_metrics
from reconv.metrics.coco_eval import INSTALL, has_coco_eval
from reconv.metrics.multilabel_metrics import THRESHOLD
from reconv.precision.accumulate import to_accumulate_dtype
from reconv.recipe.schema import Recipe
from reconv.recipe.workers import AUTO_THREADS, IN_MEMORY
from reconv.trainer.build.datasets import limit_samples
from reconv.trainer.build.loaders import build_eval_loader, build_eval_preprocess
from reconv.trainer.build.network import Network
from reconv.trainer.build.task_builder import build_postprocess, build_task
from reconv.trainer.run_setup import check_same_data

BATCH_SIZE = 64
TOP_K = 5
MIN_SCORE = 0.3
_BAD_IMAGE_HINT = "`reconv data check PATH` lists all such images (data.bad_images of the run's recipe is stop)"

LogFunction = Callable[[str], None]


def no_log(text: str) -> None:
    """Discard a message."""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The metrics of one set of weights on the validation set."""

    path: Path
    step: int | None
    weights: str  # raw, ema or averaged
    metrics: dict[str, float]
    num_samples: int
    skipped: int = 0  # images that could not be read; they are not part of the metrics
    partial: bool = False  # only a part of the validation set was evaluated
    split: str = "val"
    data: str = ""  # what was evaluated, for people
    wall_s: float | None = field(default=None, compare=False)  # of the pass over the images; None: an earlier result
    analysis: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)  # by class, where requested

    @property
    def images_per_s(self) -> float | None:
        return self.num_samples / self.wall_s if self.wall_s else None


@dataclass(frozen=True, slots=True)
class _Sample:
    """A decoded image, resized and cropped for the model, and its original size."""

    image: ImageInput  # as it was passed
    path: Path | None
    pixels: Tensor  # [channels, size, size] uint8
    width: int
    height: int


@dataclass(frozen=True, slots=True, repr=False)
class Predictor:
    """A trained model with the preprocessing it was evaluated with and its post-processing."""

    recipe: Recipe
    class_names: tuple[str, ...]
    has_class_names: bool  # False: a weights file without names; they are indices, of 1,000 classes ImageNet's
    network: Network
    device: Device
    path: Path
    weights: str  # raw, ema or averaged
    step: int | None
    class_ids: tuple[int, ...] = ()  # detectors: the category ids of the training data
    data_fingerprint: Mapping[str, str] = field(default_factory=dict)  # of the data it was trained on
    display_names: tuple[str, ...] = ()  # of the classes, for people; empty: their names

    @classmethod
    def load(
        cls,
        run: str | Path,
        *,
        best: bool = False,
        weights: str = "auto",
        recipe: str | None = None,
        device: str = "auto",
        trust_code: TrustCode = False,
        model: Any = None,
        log: LogFunction = no_log,
    ) -> Predictor:
        """Load a run directory, a checkpoint directory, a weights file or published weights.

        `weights` is `auto` (EMA where there is one), `raw`, `ema` or `averaged`. A weights file of another program
        needs `recipe`. With `trust_code`, code that the recipe of the run names is imported; `model` is the network of
        a run that got it from Python.
        """
        located = find_model(run, best, log)
        return cls.from_located(
            located, weights=weights, recipe=recipe, device=device, trust_code=trust_code, model=model
        )

    @classmethod
    def from_located(
        cls,
        located: LocatedWeights,
        *,
        weights: str,
        recipe: str | None,
        device: str,
        trust_code: TrustCode = False,
        model: Any = None,
        launch_env: LaunchEnv = SINGLE_PROCESS,
    ) -> Predictor:
        """Load what was located; one of several processes on this machine takes its own device and share of cores."""
        saved = read_saved_model(located, weights=weights, recipe=recipe, trust_code=trust_code, model=model)
        threads = cores_per_process(Machine(), launch_env.local_world_size) if launch_env.world_size > 1 else None
        opened = open_device(device, threads, launch_env.local_rank)
        network = build_saved_model(saved, saved.recipe, opened)
        network.model.eval()
        return cls(
            recipe=saved.recipe,
            class_names=saved.class_names,
            has_class_names=saved.has_class_names,
            network=network,
            device=opened,
            path=saved.path,
            weights=saved.weights,
            step=saved.step,
            class_ids=saved.class_ids,
            data_fingerprint=saved.data_fingerprint,
            display_names=saved.display_names,
        )

    def __call__(
        self, images: ImageInput | Iterable[ImageInput], *, top: int | None = None, min_score: float | None = None
    ) -> Prediction | PredictionList:
        """The prediction for an image, or those for several: a list, or a tensor or array of four dimensions."""
        items, is_single = split_images(images)
        predictions = self.predict(items, top=top, min_score=min_score)
        return predictions[0] if is_single else predictions

    @property
    def module(self) -> nn.Module:
        """The network, on its device and in eval mode."""
        return self.network.model

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes for people, in the order of the network's outputs; data is matched by `class_names`."""
        return self.display_names or self.class_names

    def preprocess(self, images: ImageInput | Iterable[ImageInput]) -> Tensor:
        """Images as the network takes them: a batch [n, channels, size, size] on its device; n is 1 for one image."""
        samples = [self._read(image, skip_bad=False) for image in split_images(images)[0]]
        batch = self._collate([sample for sample in samples if isinstance(sample, _Sample)])
        prepared = build_eval_preprocess(self.recipe, self.network)(batch)["images"]
        return prepared.to(next(self.module.parameters()).dtype)

    def __repr__(self) -> str:
        name, num_classes = self.recipe.model.name, len(self.class_names)
        return f"<Predictor {name}, {num_classes} classes, {self.weights} weights of {self.path}, {self.device.kind}>"

    @property
    def model_classes(self) -> ModelClasses:
        return ModelClasses(self.class_names, self.has_class_names, self.data_fingerprint, self.classes)

    @property
    def is_detector(self) -> bool:
        return self.recipe.task == "detection"

    @property
    def inference_step(self) -> InferenceStep:
        """From a batch on the device to the model's outputs."""
        preprocess = build_eval_preprocess(self.recipe, self.network)
        return InferenceStep(self.network.model, preprocess, self.network.precision, self.recipe.evaluate.tta)

    def predict(
        self,
        images: ImageInput | Iterable[ImageInput],
        *,
        top: int | None = None,
        min_score: float | None = None,
        batch_size: int = BATCH_SIZE,
        skip_bad: bool = False,
    ) -> PredictionList:
        """The prediction for each image: paths, encoded bytes, PIL images, arrays [H, W(, C)] or tensors [C, H, W].

        Arrays and tensors are uint8, or floats from 0 to 1; those of four dimensions are batches. A classifier gives
        its `top` (5) classes. A detector gives its `top` boxes (all) with a score of at least `min_score` (0.3), a
        multi-label model its `top` labels (all) with at least 0.5. With `skip_bad`, an image that cannot be read does
        not raise `DataError`; its prediction has the `error`.
        """
        if min_score is not None and self.recipe.task == "classification":
            raise UsageError(
                "--min-score is for detectors and multi-label models, and this model gives one class per image",
                then="omit --min-score",
            )
        if self.is_detector:
            to_predictions = self._to_boxes(top, min_score)
        elif self.recipe.task == "multilabel":
            to_predictions = self._to_labels(top, THRESHOLD if min_score is None else min_score)
        else:
            to_predictions = self._to_classes(top)
        items, _ = split_images(images)
        step, predictions = self.inference_step, PredictionList()
        with eval_mode(self.network.model):
            for start in range(0, len(items), batch_size):
                chunk = [self._read(image, skip_bad) for image in items[start : start + batch_size]]
                samples = [sample for sample in chunk if isinstance(sample, _Sample)]
                good = iter(to_predictions(step(self._collate(samples))[0], samples) if samples else ())
                predictions += [next(good) if isinstance(item, _Sample) else item for item in chunk]
        return predictions

    def evaluate(
        self,
        data: str | Path | None = None,
        *,
        split: Split | None = None,
        batch_size: int | None = None,
        samples: int | None = None,
        per_class: bool = False,
        process_group: ProcessGroup | None = None,
        log: LogFunction = no_log,
    ) -> EvalResult:
        """Evaluate on a split (validation) of `data`, else of the run's own data, or on `samples` images of it.

        With `per_class`, the result has an `analysis` by class. All ranks of a process group get the same result.
        """
        process_group = process_group or ProcessGroup.single()
        recipe, whole = self.recipe, open_eval_set(self.recipe, self.model_classes, data, split)
        if data is not None or split is not None:
            log(f"data: {whole.origin}")
        dataset = limit_samples(whole, samples)
        check_same_data(process_group, dataset)
        if self.is_detector and not has_coco_eval():
            log(f"COCO metrics are not computed: {INSTALL}")
        task = build_task(recipe, dataset, self.device)
        bad = BadSamples(
            recipe.data.bad_images.limit,
            lambda bad: log(f"skipped {bad.path}: {bad.why}"),
            process_group.all_gather if process_group.world_size > 1 else None,
            _BAD_IMAGE_HINT,
        )
        batch_size = batch_size or recipe.evaluate.batch_size
        loader = build_eval_loader(
            recipe, dataset, self.device, batch_size, _num_workers(recipe, dataset, process_group), bad, process_group
        )
        start_s = time.perf_counter()
        metrics = evaluate(self.inference_step, task.metrics(), loader, step_boundary=self.device.step_boundary)
        merge_ranks(metrics, bad, process_group)
        values = metrics.compute()
        wall_s = time.perf_counter() - start_s
        return EvalResult(
            self.path,
            self.step,
            self.weights,
            values,
            metrics.num_samples,
            skipped=len(bad.known("val")),
            partial=len(dataset) < len(whole),
            split=split or "val",
            data=whole.origin,
            wall_s=wall_s,
            analysis=analyze_metrics(metrics, dataset.class_names) if per_class else None,
        )

    def _read(self, image: ImageInput, skip_bad: bool) -> _Sample | Prediction:
        """The image as the model sees it, or, where it cannot be read and `skip_bad`, a prediction with the error."""
        image = ImageFile(Path(image)) if isinstance(image, str | Path) else image
        path = image.path if isinstance(image, ImageFile) else None
        preprocess = self.recipe.data.preprocess
        try:
            pil = to_pil(image, preprocess.channels)
        except DataError as error:
            if not skip_bad:
                raise
            return Prediction(path, error=f"{error.what}: {error.why}" if error.why else error.what)
        return _Sample(image, path, torch.tensor(eval_transform(pil, preprocess)), pil.width, pil.height)

    def _collate(self, samples: Sequence[_Sample]) -> Batch:
        rows = torch.arange(len(samples))
        tensors = {"images": torch.stack([sample.pixels for sample in samples]), "indices": rows, "targets": rows * 0}
        return Batch(tensors, rows, (len(samples),)).map(self.device.move)

    def _to_classes(self, top: int | None) -> Callable[[Any, Sequence[_Sample]], Iterator[Prediction]]:
        def to_predictions(logits: Tensor, samples: Sequence[_Sample]) -> Iterator[Prediction]:
            scores, labels = to_accumulate_dtype(logits).softmax(dim=1).topk(min(top or TOP_K, logits.shape[1]))
            for sample, row_scores, row_labels in zip(samples, scores.tolist(), labels.tolist(), strict=True):
                pairs = zip(row_scores, row_labels, strict=True)
                classes = tuple(ClassScore(self.classes[label], score, label) for score, label in pairs)
                yield Prediction(sample.path, classes, image=sample.image)

        return to_predictions

    def _to_labels(self, top: int | None, min_score: float) -> Callable[[Any, Sequence[_Sample]], Iterator[Prediction]]:
        def to_predictions(logits: Tensor, samples: Sequence[_Sample]) -> Iterator[Prediction]:
            scores, labels = to_accumulate_dtype(logits).sigmoid().sort(dim=1, descending=True, stable=True)
            for sample, row_scores, row_labels in zip(samples, scores.tolist(), labels.tolist(), strict=True):
                pairs = [pair for pair in zip(row_scores, row_labels, strict=True) if pair[0] >= min_score][:top]
                classes = tuple(ClassScore(self.classes[label], score, label) for score, label in pairs)
                yield Prediction(sample.path, classes, image=sample.image)

        return to_predictions

    def _to_boxes(
        self, top: int | None, min_score: float | None
    ) -> Callable[[Any, Sequence[_Sample]], Iterator[Prediction]]:
        postprocess = build_postprocess(self.recipe, self.device)
        threshold = MIN_SCORE if min_score is None else min_score

        def to_predictions(outputs: Any, samples: Sequence[_Sample]) -> Iterator[Prediction]:
            detections = postprocess(outputs).cpu()
            for row, sample in enumerate(samples):
                found = boxes_in_pixels(detections, row, sample.width, sample.height, self.classes, self.class_ids)
                boxes = [box for box in found if box.score >= threshold][:top]
                yield Prediction(sample.path, boxes=tuple(boxes), image=sample.image)

        return to_predictions


def _num_workers(recipe: Recipe, dataset: Dataset, process_group: ProcessGroup) -> int:
    """The number of decoding threads: as in training, or one per core."""
    if recipe.data.num_workers != "auto":
        return recipe.data.num_workers
    if dataset.kind in IN_MEMORY:
        return 0
    return min(cores_per_process(Machine(), process_group.launch_env.local_world_size), AUTO_THREADS)


def load(
    run: str | Path,
    *,
    best: bool = False,
    weights: str = "auto",
    recipe: str | None = None,
    device: str = "auto",
    trust_code: TrustCode = False,
    model: Any = None,
    log: LogFunction = print,
) -> Predictor:
    """Load a run directory, a checkpoint, a weights file or published weights, to predict images: `model(image)`.

    See `Predictor.load` for the options.
    """
    return Predictor.load(
        run, best=best, weights=weights, recipe=recipe, device=device, trust_code=trust_code, model=model, log=log
    )


def find_model(run: str | Path, best: bool, log: LogFunction) -> LocatedWeights:
    """The checkpoint or weights file that `run` stands for; logs why it is not the one that one may expect."""
    located = find_weights(run, "best" if best else "newest", log).located
    for note in located.notes:
        log(note)
    for path, reason in located.skipped:
        log(f"skipped {path.name}, which cannot be used: {reason}")
    return located


def boxes_in_pixels(
    detections: Detections,
    row: int,
    width: int,
    height: int,
    class_names: Sequence[str],
    class_ids: Sequence[int] = (),
) -> Iterable[DetectedBox]:
    """The detections of one image of a batch, in pixels of that image, best score first."""
    count = int(detections.counts[row])
    boxes = (detections.boxes_xyxy[row, :count].double() * torch.tensor([width, height, width, height])).tolist()
    scores, labels = detections.scores[row, :count].tolist(), detections.labels[row, :count].tolist()
    for (left, top, right, bottom), score, label in zip(boxes, scores, labels, strict=True):
        class_id = class_ids[label - 1] if class_ids else None
        yield DetectedBox(class_names[label - 1], score, (left, top, right, bottom), label - 1, class_id)
