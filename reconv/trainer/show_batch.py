"""`reconv data show`: a training batch and an evaluation batch as one image, made by the real data pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

from reconv.build.data import Datasets, build_train_loader, check_data_is_read, open_datasets, sample_pipeline_maker
from reconv.build.derived_recipe import load_derived
from reconv.core.batch import Batch
from reconv.core.errors import UsageError
from reconv.data.inspect.contact_sheet import ContactSheet, contact_sheets
from reconv.data.inspect.draw_boxes import draw_batch_boxes
from reconv.data.inspect.lenient_open import find_box_reader
from reconv.data.pipeline.bad_samples import BadSamples
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.readers.dataset_factory import subsample
from reconv.data.readers.detect import DetectedDataset, detect
from reconv.data.transforms.normalize import EvalPreprocess, denormalize
from reconv.data.transforms.train import TrainPreprocess
from reconv.recipe.loader import Override
from reconv.recipe.parts.code import add_code_path, names_code
from reconv.recipe.parts.data import NEED_NO_PATH
from reconv.recipe.plan import Facts, make_plan
from reconv.recipe.schema import Recipe
from reconv.trainer.callbacks.report_images import target_names

_MAX_IMAGES = 128
_DEFAULT_RECIPES = {
    "cifar10": "cifar10-resnet20",
    "cifar100": "cifar100-resnet20",
    "digits": "quickstart",
    "scattered-digits": "quickstart-detection",
    "coco": "ssd-resnet34",
    "yolo": "ssd-resnet34",
    "voc": "ssd-resnet34-voc",
}
_FALLBACK_RECIPE = "resnet50"


@dataclass(frozen=True, slots=True)
class ShownBatch:
    """The image as PNG, and the recipe and dataset it shows."""

    png: bytes
    recipe: str
    origin: str


def show_batch(
    data: str, recipe: str | None = None, *, overrides: Sequence[Override] = (), images: int = 32, step: int = 0
) -> ShownBatch:
    """Draw a training batch and an evaluation batch of `data`: a folder, `digits` or `synthetic`.

    Without `recipe`, the usual recipe for the kind of data is used.
    """
    if not 1 <= images <= _MAX_IMAGES:
        raise UsageError(f"cannot show {images} images", hint=f"choose 1 to {_MAX_IMAGES}")
    is_built_in = (data in NEED_NO_PATH or names_code(data)) and not Path(data).exists()
    kind = data if is_built_in else _kind(detect(Path(data)))
    source: Override = ("data.source", data, "PATH") if is_built_in else ("data.path", data, "PATH")
    resolved = load_derived(recipe or _DEFAULT_RECIPES.get(kind, _FALLBACK_RECIPE), [source, *overrides]).recipe
    check_data_is_read(resolved, None if is_built_in else data, "PATH")
    add_code_path(resolved)
    datasets = open_datasets(resolved)
    small = _with_small_batch(resolved, min(images, len(datasets.train)))
    train, val = _train_batch(small, datasets, step), _eval_batch(small, datasets, images)
    train_px, val_px = train["images"].shape[-1], val["images"].shape[-1]
    sheets = [
        _sheet(f"{resolved.name}: training batch at step {step}, {train_px} pixels", train, small, datasets),
        _sheet(f"{resolved.name}: evaluation batch, {val_px} pixels", val, small, datasets),
    ]
    side_px = max(train_px, val_px, 96)
    return ShownBatch(contact_sheets(sheets, tile_px=min(side_px, 256)), resolved.name, datasets.train.origin)


def _kind(found: DetectedDataset) -> str:
    """The key of the default recipe; TFRecords with boxes count as COCO."""
    return "coco" if found.kind == "tfrecord" and find_box_reader(found) is not None else found.kind


def _with_small_batch(recipe: Recipe, images: int) -> Recipe:
    """The recipe with a smaller batch; the transforms of an image stay the same."""
    size = min(images, recipe.batch.size)
    group = recipe.batch.group
    batch = recipe.batch.model_copy(
        update={"size": size, "micro": "auto", "group": min(group, size) if isinstance(group, int) else "all"}
    )
    data = recipe.data.model_copy(update={"preload": "off", "num_workers": 0})
    return recipe.model_copy(update={"batch": batch, "data": data, "profile": "off"})


def _train_batch(recipe: Recipe, datasets: Datasets, step: int) -> Batch:
    facts = Facts(len(datasets.train), len(datasets.val), len(datasets.train.class_names), source=datasets.train.kind)
    plan = make_plan(recipe, facts)
    if step >= plan.total_steps:
        raise UsageError(f"there is no step {step}", why=f"with this batch size, a run has {plan.total_steps:,} steps")
    bad_samples = BadSamples(recipe.data.bad_images.limit)
    loader = build_train_loader(recipe, plan, datasets.train, DataContext.on_host(), bad_samples)
    [micro_batches] = loader.steps(step, step + 1)
    prepare = TrainPreprocess(recipe.data.preprocess, recipe.augment, plan.num_classes, torch.float32)
    prepared = [prepare(batch, step) for batch in micro_batches]
    names = {"images", "targets", "boxes", "labels"} & set(prepared[0].tensors)
    tensors = {name: torch.cat([batch[name] for batch in prepared]) for name in sorted(names)}
    return Batch(tensors, torch.cat([batch.positions for batch in prepared]), (recipe.batch.size,))


def _eval_batch(recipe: Recipe, datasets: Datasets, images: int) -> Batch:
    """Validation images, evenly spaced over the dataset and thus over the classes."""
    subset = subsample(datasets.val, min(100.0, 100 * images / len(datasets.val)))
    loader = EvalLoader(
        subset,
        recipe.data.preprocess,
        len(subset),
        DataContext.on_host(),
        bad_samples=BadSamples(recipe.data.bad_images.limit),
        make_pipeline=sample_pipeline_maker(recipe),
    )
    [batch] = loader
    return EvalPreprocess(recipe.data.preprocess, torch.float32)(batch)


def _sheet(title: str, batch: Batch, recipe: Recipe, datasets: Datasets) -> ContactSheet:
    pixels = denormalize(batch["images"], recipe.data.preprocess).permute(0, 2, 3, 1).numpy()
    tiles = [Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image) for image in pixels]
    names = datasets.names
    if "boxes" not in batch.tensors:
        return ContactSheet(title, tiles, [target_names(names, target) for target in batch["targets"]])
    rows = zip(tiles, batch["boxes"], batch["labels"], strict=True)
    drawn = [draw_batch_boxes(tile, boxes, labels, names) for tile, boxes, labels in rows]
    return ContactSheet(title, drawn, [_count_boxes(int((labels > 0).sum())) for labels in batch["labels"]])


def _count_boxes(count: int) -> str:
    return f"{count} box{'es' * (count != 1)}"
