"""`show`: what the network will see of some data, as one image.

Owns the choice of batches. Refuses to know how images are drawn. Invariant: the images went through the loaders and
the preparation that training and evaluation use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from reconv.batch import Batch
from reconv.data.inspect.contact_sheet import ContactSheet, contact_sheets
from reconv.data.inspect.draw_boxes import DrawnBox, class_colour, draw_boxes
from reconv.data.inspect.lenient_open import find_box_reader
from reconv.data.pipeline.bad_samples import BadSamples
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.readers.detect import DetectedDataset, detect
from reconv.data.readers.factory import NEED_NO_PATH, subsample
from reconv.data.transforms.device_transforms import EvalPreprocess, TrainPreprocess, denormalize
from reconv.errors import UsageError
from reconv.recipe.loader import Override, load
from reconv.recipe.plan import Facts, make_plan
from reconv.recipe.schema import Recipe
from reconv.trainer.build import loaders as parts
from reconv.trainer.build.datasets import Datasets, open_datasets, refuse_unread_path

_MOST_SHOWN = 128
_USUAL = {
    "cifar10": "cifar10-resnet20",
    "cifar100": "cifar100-resnet20",
    "digits": "quickstart",
    "scattered-digits": "quickstart-detection",
    "coco": "ssd-resnet34",
    "yolo": "ssd-resnet34",
    "voc": "ssd-resnet34-voc",
}
_ELSE = "resnet50"


@dataclass(frozen=True, slots=True)
class Shown:
    """The image, and what it is of."""

    png: bytes
    recipe: str
    origin: str


def show(
    data: str, recipe: str | None = None, *, overrides: Sequence[Override] = (), images: int = 32, step: int = 0
) -> Shown:
    """One training batch and one evaluation batch of `data` (a folder, or digits or synthetic) by a recipe."""
    if not 1 <= images <= _MOST_SHOWN:
        raise UsageError(f"{images} images do not fit into an image", then=f"1 to {_MOST_SHOWN}")
    made_up = data in NEED_NO_PATH and not Path(data).exists()
    kind = data if made_up else _kind(detect(Path(data)))
    place: Override = ("data.source", data, "PATH") if made_up else ("data.path", data, "PATH")
    resolved = load(recipe or _USUAL.get(kind, _ELSE), [place, *overrides]).recipe
    refuse_unread_path(resolved, None if made_up else data, "PATH")
    sources = open_datasets(resolved)
    some = _few_at_a_time(resolved, min(images, len(sources.train)))
    train, seen = _train_batch(some, sources, step), _eval_batch(some, sources, images)
    what = f"step {step}, {train['images'].shape[-1]} pixels, as training sees them"
    sheets = [
        _sheet(f"{resolved.name}: {what}", train, some, sources),
        _sheet(f"{resolved.name}: {seen['images'].shape[-1]} pixels, as evaluation sees them", seen, some, sources),
    ]
    side_px = max(train["images"].shape[-1], seen["images"].shape[-1], 96)
    return Shown(contact_sheets(sheets, tile_px=min(side_px, 256)), resolved.name, sources.train.origin)


def _kind(found: DetectedDataset) -> str:
    """What tells the usual recipe: records with boxes are as COCO is."""
    return "coco" if found.kind == "tfrecord" and find_box_reader(found) is not None else found.kind


def _few_at_a_time(recipe: Recipe, images: int) -> Recipe:
    """The recipe with a batch that fits into an image; what happens to an image stays as it is."""
    size = min(images, recipe.batch.size)
    group = recipe.batch.group
    batch = recipe.batch.model_copy(
        update={"size": size, "micro": "auto", "group": min(group, size) if isinstance(group, int) else "all"}
    )
    data = recipe.data.model_copy(update={"preload": "off", "num_workers": 0})
    return recipe.model_copy(update={"batch": batch, "data": data, "profile": "off"})


def _train_batch(recipe: Recipe, sources: Datasets, step: int) -> Batch:
    facts = Facts(len(sources.train), len(sources.val), len(sources.train.class_names), source=sources.train.kind)
    plan = make_plan(recipe, facts)
    if step >= plan.total_steps:
        raise UsageError(f"there is no step {step}", why=f"at this batch the run has {plan.total_steps:,}")
    bad_samples = BadSamples(recipe.data.bad_images.limit)
    loader = parts.train_loader(recipe, plan, sources.train, DataContext.on_host(), bad_samples)
    [micro_batches] = loader.steps(step, step + 1)
    prepare = TrainPreprocess(recipe.data.preprocess, recipe.augment, plan.num_classes, torch.float32)
    prepared = [prepare(batch, step) for batch in micro_batches]
    shown = {"images", "targets", "boxes", "labels"} & set(prepared[0].tensors)
    tensors = {name: torch.cat([batch[name] for batch in prepared]) for name in sorted(shown)}
    return Batch(tensors, torch.cat([batch.positions for batch in prepared]), (recipe.batch.size,))


def _eval_batch(recipe: Recipe, sources: Datasets, images: int) -> Batch:
    """Validation images spread over the classes."""
    some = subsample(sources.val, min(100.0, 100 * images / len(sources.val)))
    loader = EvalLoader(
        some,
        recipe.data.preprocess,
        len(some),
        DataContext.on_host(),
        bad_samples=BadSamples(recipe.data.bad_images.limit),
        make_pipeline=parts.sample_pipeline_maker(recipe),
    )
    [batch] = loader
    return EvalPreprocess(recipe.data.preprocess, torch.float32)(batch)


def _sheet(title: str, batch: Batch, recipe: Recipe, sources: Datasets) -> ContactSheet:
    pixels = denormalize(batch["images"], recipe.data.preprocess).permute(0, 2, 3, 1).numpy()
    tiles = [Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image) for image in pixels]
    names = sources.train.class_names
    if "boxes" not in batch.tensors:
        return ContactSheet(title, tiles, [names[target] for target in batch["targets"].tolist()])
    rows = zip(tiles, batch["boxes"], batch["labels"], strict=True)
    drawn = [_with_boxes(tile, boxes, labels, names) for tile, boxes, labels in rows]
    return ContactSheet(title, drawn, [_boxes(int((labels > 0).sum())) for labels in batch["labels"]])


def _with_boxes(tile: Image.Image, boxes: Tensor, labels: Tensor, names: Sequence[str]) -> Image.Image:
    """An image of the network's size with the boxes of its row."""
    scaled = boxes * torch.tensor([tile.width, tile.height] * 2)
    used = labels > 0
    pairs = zip(scaled[used].tolist(), (labels[used] - 1).tolist(), strict=True)
    return draw_boxes(
        tile, [DrawnBox((x0, y0, x1, y1), names[label], class_colour(label)) for (x0, y0, x1, y1), label in pairs]
    )


def _boxes(count: int) -> str:
    return f"{count} box{'es' * (count != 1)}"
