"""The data pipelines that `bench data --compare` compares: Pillow with torchvision's transforms, and ours.

All of them make the same crops and flips of the same images in the same order. Packed copies of the images are in a
temporary directory.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from reconv.build.data import Datasets
from reconv.data.convert.dataset import ConvertTarget, convert
from reconv.data.convert.transcode import TranscodeOptions
from reconv.data.dataset import Dataset, NamedArrays, Sample, Subset, at_most
from reconv.data.decode.pillow import formats_of, to_image
from reconv.data.readers.shards.packed import PackedDataset
from reconv.data.transforms.geometry import random_resized_crop_box
from reconv.recipe.parts.data import AugmentConfig
from reconv.storage.temporary_folder import temporary_folder
from reconv.trainer.prepare import PreparedRun

ORIGINAL, NO_ANTIALIAS = "as-given", "fast"
PACKED = {
    "packed-320": TranscodeOptions(shortest=320, quality=90),
    "raw-400": TranscodeOptions(raw=True, longest=400),
}
DESCRIPTIONS = {
    ORIGINAL: "the data as it is",
    NO_ANTIALIAS: "the same without antialiasing",
    "packed-320": "packed, short side 320, JPEG 90",
    "raw-400": "packed, raw pixels, long side 400",
}


@dataclass(frozen=True, slots=True)
class DataPath:
    """A dataset and how it is read, under the name of the result."""

    name: str
    run: PreparedRun


@contextmanager
def open_data_paths(run: PreparedRun, num_images: int, log: Callable[[str], None]) -> Iterator[list[DataPath]]:
    """Some images of the run: as they are, without antialiasing and, if they are files, from packed copies."""
    subset_run = _with_dataset(run, _subset(run.datasets.train, num_images))
    found = [DataPath(ORIGINAL, subset_run)]
    if run.recipe.augment.antialias:
        augment = run.recipe.augment.model_copy(update={"antialias": False})
        found.append(
            DataPath(NO_ANTIALIAS, replace(subset_run, recipe=run.recipe.model_copy(update={"augment": augment})))
        )
    with temporary_folder("bench") as directory:
        for name, options in PACKED.items() if _are_files(subset_run.datasets.train) else ():
            log(f"packing {len(subset_run.datasets.train):,} images: {options.text}")
            copy = directory / name
            convert(
                {"train": subset_run.datasets.train},
                None,
                copy,
                ConvertTarget("packed", options),
                run.plan.workers or 1,
                _no_progress,
            )
            found.append(DataPath(name, _with_dataset(subset_run, PackedDataset(copy, "train"))))
        yield found


def _with_dataset(run: PreparedRun, dataset: Dataset) -> PreparedRun:
    return replace(run, datasets=Datasets(dataset, dataset))


def _subset(dataset: Dataset, num_images: int) -> Dataset:
    """At most `num_images` images, evenly spaced over the dataset."""
    return dataset if len(dataset) <= num_images else Subset(dataset, at_most(len(dataset), num_images))


def _are_files(dataset: Dataset) -> bool:
    return dataset.kind != PackedDataset.kind and isinstance(dataset[0].data, bytes)


def _no_progress(done: int, total: int) -> None:
    """A conversion of a few images needs no progress bar."""


def baseline_image(sample: Sample, size: int, augment: AugmentConfig, crop: NamedArrays, is_flipped: bool) -> Tensor:
    """One training image [3, size, size] as torchvision makes it: uint8, after crop, antialiased resize and flip.

    The whole image is decoded by Pillow, as in RandomResizedCrop, RandomHorizontalFlip and PILToTensor. The crop is
    that of our own loader, so that both pipelines make the same image.
    """
    if isinstance(sample.data, bytes):
        image = Image.open(io.BytesIO(sample.data), formats=formats_of(sample.data)).convert("RGB")
    else:
        image = to_image(sample.data, 3)
    box = random_resized_crop_box(image.width, image.height, crop, augment)
    image = image.crop(box).resize((size, size), Image.Resampling.BILINEAR)
    if is_flipped:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
