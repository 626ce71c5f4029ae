"""Images of a run for its report: the first batch and, after training, what the network got wrong or was unsure of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from reconv.build.data import as_detection_dataset, data_path
from reconv.core.batch import Batch
from reconv.data.inspect.contact_sheet import grid
from reconv.data.inspect.draw_boxes import draw_batch_boxes
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.readers.dataset_factory import select
from reconv.data.transforms.normalize import denormalize
from reconv.logging.events import ImageLogged
from reconv.logging.phases import Phase
from reconv.metrics.detection import DetectionMetrics
from reconv.metrics.multilabel import MultilabelMetrics
from reconv.metrics.topk import I64, ClassificationMetrics, PredictionTable
from reconv.storage.files import write_atomic
from reconv.storage.remote_tree import shown_path
from reconv.trainer.callbacks.base import TrainerCallback
from reconv.trainer.callbacks.detection_images import log_detection_images
from reconv.trainer.callbacks.live_report import write_analysis
from reconv.trainer.step import StepResult

if TYPE_CHECKING:
    from reconv.trainer.loop import Trainer
    from reconv.trainer.run import TrainingRun

NUM_TRAIN_IMAGES, GRID_COLUMNS = 32, 8
NUM_TRAIN_IMAGES_WITH_BOXES, BOX_COLUMNS, MIN_BOX_TILE_PX = 12, 4, 256  # fewer and larger, so that names are readable
NUM_MISTAKES, NUM_UNCERTAIN = 32, 16
UNCERTAIN_NOTE = "The images whose two most probable classes are closest to each other, right or wrong."


@dataclass(frozen=True, slots=True)
class ReportImages(TrainerCallback):
    """Saves the first batch as the network got it and, after training, mistakes and uncertain images or detections."""

    run: TrainingRun

    def on_step_end(self, trainer: Trainer, step: int, result: StepResult, micro_batches: Sequence[Batch]) -> None:
        if step == 0 and self.run.process_group.is_rank0:
            first = next(trainer.step.forward_batches(micro_batches))
            with torch.no_grad(), trainer.clock.phases.during(Phase.REPORTS):
                self._log_first_batch(trainer.step.preprocess(first, step))

    def on_fit_end(self, trainer: Trainer) -> None:
        run, metrics, step = self.run, trainer.evaluator.last_metrics, trainer.counters.step
        if metrics is None or not run.process_group.is_rank0:
            return
        write_analysis(run, trainer)
        if isinstance(metrics, DetectionMetrics):
            log_detection_images(metrics, as_detection_dataset(run.datasets.val), run.run_dir, step, run.logger)
        elif isinstance(metrics, ClassificationMetrics):
            self._log_mistakes(metrics.predictions(), step)
            self._log_uncertain(metrics.predictions(), step)
        elif isinstance(metrics, MultilabelMetrics):
            self._log_multilabel_mistakes(metrics, step)

    def _log_first_batch(self, batch: Batch) -> None:
        has_boxes = "boxes" in batch.tensors
        count = NUM_TRAIN_IMAGES_WITH_BOXES if has_boxes else NUM_TRAIN_IMAGES
        images = denormalize(batch["images"][:count], self.run.recipe.data.preprocess)
        class_names = self.run.datasets.names
        captions = tuple(_caption(class_names, batch, row) for row in range(len(images)))
        if has_boxes:
            images = _draw_boxes(images, batch, class_names)
        columns = BOX_COLUMNS if has_boxes else GRID_COLUMNS
        self._log_grid("first-batch.png", images, "First training batch", captions, 0, columns=columns)

    def _log_mistakes(self, predictions: PredictionTable, step: int) -> None:
        """Save the validation images with the most confident wrong predictions."""
        names = self.run.datasets.names

        def caption(row: int) -> str:
            predicted, target = names[predictions.predicted[row]], names[predictions.target[row]]
            return f"predicted {predicted} ({predictions.confidence[row]:.0%}), target {target}"

        rows = predictions.worst(NUM_MISTAKES)
        classes = tuple(names[predictions.target[row]] for row in rows.tolist())
        self._log_rows(predictions, rows, caption, "mistakes.png", "Worst mistakes", step, classes=classes)

    def _log_uncertain(self, predictions: PredictionTable, step: int) -> None:
        """Save the validation images for which two classes are almost equally probable."""
        names = self.run.datasets.names

        def caption(row: int) -> str:
            first, second = names[predictions.predicted[row]], names[predictions.runner_up[row]]
            scores = predictions.confidence[row], predictions.runner_up_confidence[row]
            return f"{first} ({scores[0]:.0%}) or {second} ({scores[1]:.0%}), target {names[predictions.target[row]]}"

        rows = predictions.most_uncertain(NUM_UNCERTAIN) if len(names) > 1 else predictions.index[:0]
        self._log_rows(predictions, rows, caption, "uncertain.png", "Most uncertain images", step, UNCERTAIN_NOTE)

    def _log_multilabel_mistakes(self, metrics: MultilabelMetrics, step: int) -> None:
        """Save the validation images with the highest loss among those with a wrong or missing label."""
        names, mistakes = self.run.datasets.train.class_names, metrics.mistakes(NUM_MISTAKES)
        captions = [
            f"predicted {_label_names(names, mistake.predicted)}, labels {_label_names(names, mistake.labels)}"
            for mistake in mistakes
        ]
        indices = np.array([mistake.index for mistake in mistakes], np.int64)
        self._log_images(indices, captions, "mistakes.png", "Worst mistakes", step)

    def _log_rows(
        self,
        predictions: PredictionTable,
        rows: I64,
        caption: Callable[[int], str],
        name: str,
        title: str,
        step: int,
        note: str = "",
        classes: tuple[str, ...] = (),
    ) -> None:
        """Save the validation images of some predictions."""
        indices = np.asarray(predictions.index[rows], dtype=np.int64)
        self._log_images(indices, [caption(row) for row in rows.tolist()], name, title, step, note, classes)

    def _log_images(
        self,
        indices: I64,
        captions: Sequence[str],
        name: str,
        title: str,
        step: int,
        note: str = "",
        classes: tuple[str, ...] = (),
    ) -> None:
        """Save the validation images at some indices; the captions get the names of the files, in the data's folder."""
        if not len(indices):
            return
        dataset = self.run.datasets.val
        chosen = select(dataset, indices)
        [batch] = EvalLoader(chosen, self.run.recipe.data.preprocess, len(indices), DataContext.on_host())
        root = shown_path(path) if (path := data_path(self.run.recipe)) is not None else ""
        files = [dataset[index].name.removeprefix(f"{root.rstrip('/')}/") for index in indices.tolist()]
        named = tuple(f"{caption} · {file}" for caption, file in zip(captions, files, strict=True))
        self._log_grid(name, batch["images"], title, named, step, note, classes=classes)

    def _log_grid(
        self,
        name: str,
        images: Tensor,
        title: str,
        captions: tuple[str, ...],
        step: int,
        note: str = "",
        columns: int = GRID_COLUMNS,
        classes: tuple[str, ...] = (),
    ) -> None:
        """Write a grid of images to the run directory and log it for the report."""
        folder = self.run.run_dir.images
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / name, grid(images, columns))
        self.run.logger.log(
            ImageLogged(title, f"{folder.name}/{name}", captions, step, columns, note=note, classes=classes)
        )


def _caption(class_names: tuple[str, ...], batch: Batch, row: int) -> str:
    """The class of an image, or the classes of its boxes."""
    if "boxes" not in batch.tensors:
        return target_names(class_names, batch["targets"][row])
    labels = batch["labels"][row, : int(batch["num_boxes"][row])].tolist()
    return ", ".join(class_names[label - 1] for label in labels)


def target_names(class_names: Sequence[str], target: Tensor) -> str:
    """The name of a class index, or the names of the classes that a multi-hot target has."""
    if target.ndim == 0:
        return class_names[int(target)]
    return _label_names(class_names, target.nonzero().flatten().tolist())


def _label_names(class_names: Sequence[str], labels: Sequence[int]) -> str:
    return ", ".join(class_names[label] for label in labels) or "none"


def _draw_boxes(images: Tensor, batch: Batch, class_names: tuple[str, ...]) -> Tensor:
    """Images [n, 1 or 3, S, S] in uint8 with their boxes; small ones are enlarged, so that names are readable."""
    scale = max(1, -(-MIN_BOX_TILE_PX // images.shape[-1]))
    enlarged = images.repeat_interleave(scale, dim=2).repeat_interleave(scale, dim=3).permute(0, 2, 3, 1).numpy()
    tiles = [Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels) for pixels in enlarged]
    boxes, labels = batch["boxes"].cpu(), batch["labels"].cpu()
    drawn = [draw_batch_boxes(tile, boxes[row], labels[row], class_names) for row, tile in enumerate(tiles)]
    return torch.from_numpy(np.stack([np.array(image) for image in drawn])).permute(0, 3, 1, 2)
