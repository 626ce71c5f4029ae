"""The GPU's JPEG decoder gives nearly the crops of the host's.

The JPEG standard leaves the inverse transform a level of room, and nvJPEG repeats subsampled colors where libjpeg
interpolates them: most pixels are equal or one level apart, edges of strong colors by many. The crop kernel alone, on
the same decoded pixels, may be one level away from the plain version.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from reconv.bench.run import bench_args, open_bench_run
from reconv.build.data_context import open_data_context
from reconv.build.loaders import build_eval_loader, build_train_loader
from reconv.data.stage_timing import StageTimes
from reconv.device.nvjpeg import NvJpegDecoder
from reconv.kernels.ops.crop import crop, crop_reference
from reconv.trainer.prepare_run import PreparedRun

NUM_IMAGES, BATCH = 64, 32


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of smooth images with a little noise, as JPEG files with subsampled colors."""
    root, random = tmp_path_factory.mktemp("jpeg"), np.random.default_rng(0)
    for number in range(NUM_IMAGES):
        height, width = random.integers(200, 500, 2)
        y, x = np.mgrid[0:height, 0:width][..., None] / 100
        waves = random.uniform(0.5, 3, (2, 3))
        pixels = 128 + 80 * np.sin(x * waves[0] + y * waves[1]) + random.normal(0, 4, (height, width, 3))
        for split in ("train", "val"):
            folder = root / split / f"class{number % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{number}.jpg", quality=90)
    return root


def opened(tree: Path, **data: object) -> PreparedRun:
    given = {"batch.size": BATCH, "batch.group": "all", "data.num_workers": 2, "augment.decoder": "pillow"}
    given |= {f"data.{name}": value for name, value in data.items()}
    overrides = [(field, value, "test") for field, value in given.items()]
    args = bench_args("resnet50", input="real", data=str(tree), overrides=overrides, device="cuda")
    with open_bench_run(args) as run:
        return run


def images(run: PreparedRun, *, training: bool) -> Tensor:
    """The images of an epoch's first steps or of the evaluation, as the loader gives them."""
    recipe, plan, device = run.recipe, run.plan, run.device
    with open_data_context(recipe, plan, device, StageTimes()) as context:
        if training:
            loader = build_train_loader(recipe, plan, run.datasets.train, context)
            batches = [batch for pieces in loader.steps(0, NUM_IMAGES // BATCH) for batch in pieces]
        else:
            batches = list(build_eval_loader(recipe, run.datasets.train, device, BATCH, plan.workers, context=context))
        return torch.cat([batch["images"].cpu().float() for batch in batches])


@pytest.mark.parametrize("training", [True, False])
def test_gpu_decoded_batches_are_close_to_the_host(tree: Path, training: bool) -> None:
    on_gpu = images(opened(tree, backend="gpu", gpu_decode_fraction=1.0), training=training)
    on_host = images(opened(tree, backend="threads"), training=training)
    assert on_gpu.shape == on_host.shape
    assert len(on_gpu) == NUM_IMAGES
    difference = (on_gpu - on_host).abs()
    assert 0 < difference.mean() <= 1.5  # in gray levels
    assert difference.mean((1, 2, 3)).max() <= 5


@pytest.mark.parametrize("antialias", [True, False])
def test_the_crop_kernel_is_within_one_level_of_the_plain_crop(tree: Path, antialias: bool) -> None:
    files = [torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8) for file in tree.rglob("*.jpg")]
    decoded = NvJpegDecoder(torch.device("cuda")).decode(files)
    random = np.random.default_rng(1)
    boxes = []
    for image in decoded:
        height, width = image.shape[1:]
        corners = random.uniform((0, 0, 0.6, 0.6), (0.4, 0.4, 1, 1)) * (width, height, width, height)
        boxes.append(tuple(corners.astype(int).tolist()))  # left, top, right, bottom
    fused = crop(decoded, boxes, 224, antialias=antialias).int()
    assert (fused - crop_reference(decoded, boxes, 224, antialias=antialias).int()).abs().max() <= 1
