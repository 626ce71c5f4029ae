"""`Predictor`: the one way from images to predictions, for eval, predict, serve and Python."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from reconv.build.model import Network, build_eval_preprocess
from reconv.build.postprocess import build_postprocess
from reconv.build.saved_model import ModelClasses, SavedModel, build_saved_model, find_weights, read_saved_model
from reconv.checkpoint.locate import LocatedWeights
from reconv.core.batch import Batch
from reconv.core.confidence import ConfidenceCalibration
from reconv.core.custom_code import TrustCode
from reconv.core.errors import DataError, UsageError
from reconv.core.machine import Machine, cores_per_process, usable_cores
from reconv.data.dataset import Split
from reconv.device import Device, open_device
from reconv.distributed.environment import SINGLE_PROCESS, LaunchEnv
from reconv.inference.backends.base import BackendName, InferenceBackend, LogFunction, Precision, no_log
from reconv.inference.backends.choose import BackendChoice, LoadedNetwork, plain_network_recipe
from reconv.inference.calibration import CalibrationSource
from reconv.inference.image_input import ImageFile, ImageInput, split_images
from reconv.inference.image_reader import DecoderName, ImageInfo, ImageReader, ImageSample
from reconv.inference.outputs import OutputClasses, Selection, make_predictions, without_gc
from reconv.inference.pipeline import PixelBuffers, PredictPipeline, PredictStep
from reconv.inference.predictions import Prediction, PredictionList
from reconv.recipe.schema import Recipe
from reconv.tasks.evaluation import InferenceStep

if TYPE_CHECKING:
    from reconv.distributed.process_group import ProcessGroup
    from reconv.inference.model_evaluation import EvalResult

BATCH_SIZE = 64
BATCH_SIZES = {"cuda": 256}  # by kind of device, where it is another


class LoadOptions(TypedDict, total=False):
    """The options of `Predictor.load`, but for `log`."""

    best: bool
    weights: str
    recipe: str | None
    device: str
    backend: BackendName
    precision: Precision
    decoder: DecoderName
    calibration: str | Path | None
    trust_code: TrustCode
    model: Any


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
    backend_choice: BackendChoice
    read: ImageReader  # read(image) -> ImageSample, in any thread; raises DataError
    class_ids: tuple[int, ...] = ()  # detectors: the category ids of the training data
    data_fingerprint: Mapping[str, str] = field(default_factory=dict)  # of the data it was trained on
    display_names: tuple[str, ...] = ()  # of the classes, for people; empty: their names
    confidence: ConfidenceCalibration | None = None  # of a classifier, where enough images were validated
    _buffers: PixelBuffers = field(default_factory=lambda: PixelBuffers(False), compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, compare=False)  # held by what uses the network

    @classmethod
    def load(
        cls,
        run: str | Path,
        *,
        best: bool = False,
        weights: str = "auto",
        recipe: str | None = None,
        device: str = "auto",
        backend: BackendName = "auto",
        precision: Precision = "auto",
        decoder: DecoderName = "auto",
        calibration: str | Path | None = None,
        trust_code: TrustCode = False,
        model: Any = None,
        log: LogFunction = no_log,
    ) -> Predictor:
        """Load a run directory, a checkpoint directory, a weights file or published weights.

        `weights` is `auto` (EMA where there is one), `raw`, `ema` or `averaged`. A weights file of another program
        needs `recipe`. `backend` is how the network runs: `auto` takes the fastest that a check finds equal to `eager`,
        the network as trained. `calibration` is a folder of images for `precision="int8"`, instead of the training
        data of the run. With `trust_code`, code that the recipe of the run names is imported; `model` is the
        network of a run that got it from Python.
        """
        return cls.from_located(
            find_model(run, best, log),
            weights=weights,
            recipe=recipe,
            device=device,
            backend=backend,
            precision=precision,
            decoder=decoder,
            calibration=calibration,
            trust_code=trust_code,
            model=model,
            log=log,
        )

    @classmethod
    def from_located(
        cls,
        located: LocatedWeights,
        *,
        weights: str,
        recipe: str | None,
        device: str,
        backend: BackendName = "auto",
        precision: Precision = "auto",
        decoder: DecoderName = "auto",
        calibration: str | Path | None = None,
        trust_code: TrustCode = False,
        model: Any = None,
        launch_env: LaunchEnv = SINGLE_PROCESS,
        log: LogFunction = no_log,
    ) -> Predictor:
        """Load what was located; one of several processes on this machine takes its own device and share of cores."""
        if (backend, decoder) == ("eager", "auto"):
            decoder = "pillow"  # as in training, from the file to the logits
        saved = read_saved_model(located, weights=weights, recipe=recipe, trust_code=trust_code, model=model)
        threads = cores_per_process(Machine(), launch_env.local_world_size) if launch_env.world_size > 1 else None
        opened = open_device(device, threads, launch_env.local_rank)
        network = build_saved_model(saved, plain_network_recipe(saved.recipe), opened)
        return cls.from_network(saved, network, opened, backend, precision, decoder, calibration, log)

    @classmethod
    def from_network(
        cls,
        saved: SavedModel,
        network: Network,
        opened: Device,
        backend: BackendName = "auto",
        precision: Precision = "auto",
        decoder: DecoderName = "auto",
        calibration: str | Path | None = None,
        log: LogFunction = no_log,
    ) -> Predictor:
        """The predictor of a network that is on its device."""
        if calibration is not None and precision != "int8":
            raise UsageError("calibration images are for int8", where="--calibration", hint="add --precision int8")
        network.model.eval()
        read = ImageReader(saved.recipe.data.preprocess, decoder)
        classes = ModelClasses(
            saved.class_names, saved.has_class_names, saved.data_fingerprint, saved.display_names or saved.class_names
        )
        source = CalibrationSource(saved.recipe, classes, read, calibration)
        loaded = LoadedNetwork(saved.recipe, network, opened, source)
        return cls(
            recipe=saved.recipe,
            class_names=saved.class_names,
            has_class_names=saved.has_class_names,
            network=network,
            device=opened,
            path=saved.path,
            weights=saved.weights,
            step=saved.step,
            backend_choice=BackendChoice(loaded, backend, precision, log),
            read=read,
            class_ids=saved.class_ids,
            data_fingerprint=saved.data_fingerprint,
            display_names=saved.display_names,
            confidence=saved.confidence,
            _buffers=PixelBuffers(opened.kind == "cuda"),
        )

    def __call__(
        self, images: ImageInput | Iterable[ImageInput], *, top: int | None = None, min_score: float | None = None
    ) -> Prediction | PredictionList:
        """The prediction for an image, or those for several: a list, or a tensor or array of four dimensions."""
        items, is_single = split_images(images)
        predictions = self.predict(items, top=top, min_score=min_score)
        return predictions[0] if is_single else predictions

    @property
    def backend(self) -> InferenceBackend:
        """Backend that runs the network; `auto` is chosen, and checked, when it is first needed."""
        return self.backend_choice.get()

    @property
    def module(self) -> nn.Module:
        """The network as trained, on its device and in eval mode."""
        return self.network.model

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes for people, in the order of the network's outputs; data is matched by `class_names`."""
        return self.display_names or self.class_names

    def preprocess(self, images: ImageInput | Iterable[ImageInput]) -> Tensor:
        """Images as the network takes them: a batch [n, channels, size, size] on its device; n is 1 for one image."""
        batch = self._collate([self.read(image) for image in split_images(images)[0]])
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
        """From a batch on the device to the outputs of the network as trained."""
        preprocess = build_eval_preprocess(self.recipe, self.network)
        return InferenceStep(self.network.model, preprocess, self.network.precision, self.recipe.evaluate.tta)

    @property
    def batch_size(self) -> int:
        """Images per batch of the network, unless a call says otherwise."""
        return BATCH_SIZES.get(self.device.kind, BATCH_SIZE)

    def warm_up(self, batch_sizes: Sequence[int] = ()) -> None:
        """Prepare batches of these sizes, so that the first of them is as fast as the next."""
        with self._lock:
            self.backend.warm_up(batch_sizes or (self.batch_size,))

    def predict(
        self,
        images: ImageInput | Iterable[ImageInput],
        *,
        top: int | None = None,
        min_score: float | None = None,
        batch_size: int | None = None,
        skip_bad: bool = False,
    ) -> PredictionList:
        """The prediction for each image: paths, encoded bytes, PIL images, arrays [H, W(, C)] or tensors [C, H, W].

        Arrays and tensors are uint8, or floats from 0 to 1; those of four dimensions are batches. A classifier gives
        its `top` (5) classes. A detector gives its `top` boxes (all) with a score of at least `min_score` (0.3), a
        multi-label model its `top` labels (all) with at least 0.5. With `skip_bad`, an image that cannot be read does
        not raise `DataError`; its prediction has the `error`. Threads read images beside the network.
        """
        selection = Selection(top, min_score)
        selection.check(self.recipe.task)
        items, _ = split_images(images)
        threads, num_threads = read_threads()
        pipeline = PredictPipeline(self._step(), self.read, threads, num_threads, self._buffers)
        predictions = PredictionList()
        with without_gc():
            for found in pipeline.run(items, selection, batch_size or self.batch_size):
                if isinstance(found, Prediction):
                    predictions.append(found)
                elif skip_bad:
                    predictions.append(_unreadable(items[len(predictions)], found))
                else:
                    raise found
        return predictions

    def predict_samples(
        self, samples: Sequence[ImageSample], *, top: int | None = None, min_score: float | None = None
    ) -> PredictionList:
        """The prediction for each image that `read` returned: one batch of the network, one thread at a time."""
        selection = Selection(top, min_score)
        selection.check(self.recipe.task)
        if not samples:
            return PredictionList()
        step = self._step()
        selected = step.start(self._collate(samples)["images"], selection)()
        return PredictionList(make_predictions(selected, samples, step.classes, selection))

    def predict_pixels(
        self,
        pixels: Tensor,
        *,
        top: int | None = None,
        min_score: float | None = None,
        batch_size: int | None = None,
    ) -> PredictionList:
        """The prediction for images [n, channels, size, size] in uint8 that already have the network's size.

        They are not resized or cropped, and may be on the network's device. Boxes are in pixels of these images.
        """
        selection = Selection(top, min_score)
        selection.check(self.recipe.task)
        if pixels.dtype != torch.uint8 or tuple(pixels.shape[1:]) != self.read.shape:
            wanted = ", ".join(map(str, self.read.shape))
            raise UsageError(
                f"pixels are uint8 [n, {wanted}], not {pixels.dtype} {list(pixels.shape)}",
                hint="pass images of any size to predict instead",
            )
        step, predictions = self._step(), PredictionList()
        waiting: deque[tuple[Callable[[], Any], int]] = deque()
        info = ImageInfo(None, None, pixels.shape[-1], pixels.shape[-2])
        with without_gc():
            for part in pixels.split(batch_size or self.batch_size):
                waiting.append((step.start(self.device.move(part), selection), len(part)))
                while len(waiting) > 1:
                    wait, count = waiting.popleft()
                    predictions += make_predictions(wait(), [info] * count, step.classes, selection)
            for wait, count in waiting:
                predictions += make_predictions(wait(), [info] * count, step.classes, selection)
        return predictions

    def logits(self, samples: Sequence[ImageSample]) -> Tensor:
        """The logits [n, classes] of a classifier, on the host: one batch of the network, one thread at a time."""
        with self._lock, torch.no_grad():
            logits: Tensor = self.backend(self._collate(samples)["images"])
            return logits.cpu()

    def activation_maps(self, sample: ImageSample, labels: Sequence[int]) -> Tensor:
        """Class activation maps [labels, rows, columns] of these classes in one image.

        They are of the network as trained, whatever the backend. The mean of a map is what all positions together add
        to the logit of its class.
        """
        if self.is_detector:
            raise UsageError("class activation maps are for classifiers, and this model is a detector")
        from reconv.inference.activation_map import sample_activation_maps

        with self._lock:
            return sample_activation_maps(self.inference_step, self.device.move(sample.pixels), labels)

    def evaluate(
        self,
        data: str | Path | None = None,
        *,
        split: Split | None = None,
        batch_size: int | None = None,
        samples: int | None = None,
        per_class: bool = False,
        process_group: ProcessGroup | None = None,
        journal_dir: Path | None = None,
        rows: bool = False,
        coverage: float | None = None,
        log: LogFunction = no_log,
    ) -> EvalResult:
        """Evaluate on a split (validation) of `data`, else of the run's own data, or on `samples` images of it.

        With `per_class`, the result has an `analysis` by class, with `rows` a row for each image. With `coverage`,
        temperature and prediction sets that have the right class of such a share of images are fitted: the `confidence`
        of the result. All ranks of a process group get the same result. In `journal_dir` finished batches are kept, so
        that the same call continues after a kill; delete it afterwards.
        """
        from reconv.inference.model_evaluation import EvalModel, EvalRequest, evaluate_model

        model = EvalModel(
            self.module,
            self.recipe,
            self.model_classes,
            self.backend_choice,
            self.device,
            self.path,
            self.step,
            self.weights,
        )
        request = EvalRequest(data, split, batch_size, samples, per_class, journal_dir, rows, coverage)
        with self._lock:
            return evaluate_model(model, request, process_group, log)

    def _collate(self, samples: Sequence[ImageSample]) -> Batch:
        rows = torch.arange(len(samples))
        tensors = {"images": torch.stack([sample.pixels for sample in samples]), "indices": rows, "targets": rows * 0}
        return Batch(tensors, rows, (len(samples),)).map(self.device.move)

    def _step(self) -> PredictStep:
        classes = OutputClasses(self.recipe.task, self.classes, self.class_ids, self.confidence)
        postprocess = build_postprocess(self.recipe, self.device) if self.is_detector else None
        return PredictStep(self.backend, self.device, classes, postprocess, self._lock)


@cache
def read_threads() -> tuple[ThreadPoolExecutor, int]:
    """The threads that read images, one per core, and their number; all predictors of a process share them."""
    num_threads = usable_cores(Machine())
    return ThreadPoolExecutor(num_threads, thread_name_prefix="reconv-read"), num_threads


os.register_at_fork(after_in_child=read_threads.cache_clear)  # a forked process has none of them


def _unreadable(image: ImageInput, error: DataError) -> Prediction:
    path = image.path if isinstance(image, ImageFile) else image if isinstance(image, str | Path) else None
    why = f"{error.what}: {error.why}" if error.why else error.what
    return Prediction(None if path is None else Path(path), error=why)


def load(run: str | Path, *, log: LogFunction = print, **options: Unpack[LoadOptions]) -> Predictor:
    """Load a run directory, a checkpoint, a weights file or published weights, to predict images: `model(image)`.

    The options are those of `Predictor.load`: `best`, `weights`, `recipe`, `device`, `backend`, `precision`, `decoder`,
    `calibration`, `trust_code`, `model`.
    """
    return Predictor.load(run, log=log, **options)


def find_model(run: str | Path, best: bool, log: LogFunction, *, loads: bool = True) -> LocatedWeights:
    """The checkpoint, loaded, or the weights file of `run`; logs which checkpoints were skipped and why."""
    located = find_weights(run, "best" if best else "newest", log, loads=loads).located
    for note in located.notes:
        log(note)
    for path, reason in located.skipped:
        log(f"skipped {path.name}, which cannot be used: {reason}")
    return located
