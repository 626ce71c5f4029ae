"""The images of a run: its first batch as the network saw it, and the worst mistakes of its last evaluation.

Owns what is shown. Refuses to know how an image is encoded. Invariant: making one changes nothing of the run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from reconv.batch import Batch
from reconv.checkpoint.run_dir import RunDir
from reconv.data.inspect.contact_sheet import grid
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.readers.factory import select
from reconv.data.transforms.device_transforms import TrainPreprocess, denormalize
from reconv.logging.events import ImageLogged
from reconv.logging.run_logger import RunLogger
from reconv.metrics.topk import ClassificationMetrics
from reconv.recipe.schema import Recipe
from reconv.trainer.build.datasets import Datasets
from reconv.trainer.evaluator import Evaluation

NUM_PICTURED = 32
PICTURE_COLUMNS = 8


@dataclass(slots=True)
class PicturedFirstBatch:
    """A `Prepare` that also keeps an image of the first batch as the network sees it."""

    prepare: TrainPreprocess
    recipe: Recipe
    folder: RunDir
    class_names: tuple[str, ...]
    logger: RunLogger
    done: bool = False

    def __call__(self, batch: Batch, step: int | Tensor) -> Batch:
        prepared = self.prepare(batch, step)
        if not self.done:
            self.done = True
            self._picture(prepared, int(step))
        return prepared

    def _picture(self, batch: Batch, step: int) -> None:
        images = denormalize(batch["images"][:NUM_PICTURED].detach(), self.recipe.data.preprocess)
        names = tuple(_caption(self.class_names, batch, row) for row in range(len(images)))
        save_picture(self.folder, "first-batch.png", images, self.logger, "First training batch", names, step)


def _caption(class_names: tuple[str, ...], batch: Batch, row: int) -> str:
    """What an image shows: its class, or the classes of its boxes."""
    if "targets" in batch.tensors:
        return class_names[int(batch["targets"][row])]
    labels = batch["labels"][row, : int(batch["num_boxes"][row])].tolist()
    return ", ".join(class_names[label - 1] for label in labels)


def save_picture(
    folder: RunDir, name: str, images: Tensor, logger: RunLogger, title: str, captions: tuple[str, ...], step: int
) -> None:
    """Write a grid of images to the run folder and tell the report."""
    folder.images.mkdir(parents=True, exist_ok=True)
    (folder.images / name).write_bytes(grid(images, PICTURE_COLUMNS))
    logger.log(ImageLogged(title, f"{folder.images.name}/{name}", captions, step, PICTURE_COLUMNS))


def picture_mistakes(
    evaluation: Evaluation, sources: Datasets, folder: RunDir, recipe: Recipe, step: int, logger: RunLogger
) -> None:
    """Image the validation images the network got most wrong."""
    mistakes = evaluation.last.mistakes() if isinstance(evaluation.last, ClassificationMetrics) else []
    if not mistakes:
        return
    wrong = select(sources.val, np.array([m.index for m in mistakes], dtype=np.int64))
    [batch] = EvalLoader(wrong, recipe.data.preprocess, len(mistakes), DataContext.on_host())
    names = sources.train.class_names
    captions = tuple(
        f"predicted {names[m.predicted]} ({m.confidence:.0%}), target {names[m.target]} · {sources.val[m.index].name}"
        for m in mistakes
    )
    save_picture(folder, "mistakes.png", batch["images"], logger, "Worst mistakes", captions, step)
