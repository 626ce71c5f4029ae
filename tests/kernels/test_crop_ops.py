"""Crops by the kernel equal the reference, and are close to those of the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from loading_examples import host_eval
from torch import Tensor

from reconv.data.transforms.host_transforms import eval_crop_box, resize_into
from reconv.kernels.ops.crop import CropBox, crop, crop_reference
from reconv.recipe.parts.data import PreprocessConfig

SIZE = 13  # fills no tile, and makes few exact halves


def noise(height: int, width: int) -> Tensor:
    pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return torch.from_numpy(pixels)


@dataclass(frozen=True)
class Case:
    """Images, a box of each, and what the kernel made of them."""

    images: list[Tensor]
    boxes: list[CropBox]
    antialias: bool
    found: Tensor


@pytest.fixture(scope="module", params=[True, False], ids=["antialiased", "sampled"])
def case(request: pytest.FixtureRequest) -> Case:
    """Random images and boxes; one pixel, a line, a large image, a box made much smaller, one made larger."""
    rng = np.random.default_rng(5)
    cases: list[tuple[int, int, CropBox | None]] = [
        (1, 1, (0, 0, 1, 1)),
        (1, 40, (3, 0, 40, 1)),
        (3000, 2500, (2440, 2991, 2500, 3000)),
        (50, 70, (0, 0, 70, 50)),
        (SIZE, SIZE, (0, 0, SIZE, SIZE)),
        *[(int(h), int(w), None) for h, w in rng.integers(1, 40, (6, 2))],
    ]
    images: list[Tensor] = []
    boxes: list[CropBox] = []
    for height, width, box in cases:
        images.append(torch.from_numpy(rng.integers(0, 256, (3, height, width), dtype=np.uint8)))
        left, top = int(rng.integers(0, width)), int(rng.integers(0, height))
        boxes.append(box or (left, top, int(rng.integers(left, width)) + 1, int(rng.integers(top, height)) + 1))
    return Case(images, boxes, request.param, crop(images, boxes, SIZE, antialias=request.param))


def test_the_crop_kernel_equals_the_reference(case: Case) -> None:
    expected = crop_reference(case.images, case.boxes, SIZE, antialias=case.antialias)
    assert case.found.shape == (11, 3, SIZE, SIZE)
    apart = (case.found.int() - expected.int()).abs()
    assert apart.max() <= 1
    assert (apart > 0).float().mean() < 0.005  # halves that float32 puts on the other side


def test_crops_are_within_one_level_of_the_host(case: Case) -> None:
    row = np.empty((3, SIZE, SIZE), np.uint8)
    apart = []
    for number, (image, (left, top, right, bottom)) in enumerate(zip(case.images, case.boxes, strict=True)):
        part = image.numpy().transpose(1, 2, 0)[top:bottom, left:right]
        resize_into(part, "bilinear", case.antialias, row)
        apart.append((case.found[number].int() - torch.from_numpy(row.astype(np.int32))).abs())
    assert torch.stack(apart).max() <= 1
    assert torch.stack(apart).float().mean() < 0.2


def test_a_row_depends_on_its_own_image_and_box_only(case: Case) -> None:
    alone = crop(case.images[-1:], case.boxes[-1:], SIZE, antialias=case.antialias)
    assert torch.equal(alone[0], case.found[-1])


def test_a_non_contiguous_image_is_rejected() -> None:
    turned = torch.zeros((3, 8, 6), dtype=torch.uint8).transpose(1, 2)
    with pytest.raises(ValueError, match="contiguous"):
        crop([turned], [(0, 0, 8, 6)], SIZE)


def test_resizing_without_cutting_equals_the_host_transform() -> None:
    spec = PreprocessConfig(size=SIZE, resize=SIZE + 3)
    images = [noise(height, width) for height, width in ((40, 31), (9, 33), (SIZE + 3, SIZE + 3))]
    boxes = [eval_crop_box(image.shape[1], image.shape[0], spec) for image in images]
    planes = [image.permute(2, 0, 1).contiguous() for image in images]
    found = crop(planes, boxes, SIZE, is_cut=False)
    plain = crop_reference(planes, boxes, SIZE, is_cut=False)
    expected = torch.stack([torch.from_numpy(host_eval(image.numpy(), spec)) for image in images])
    assert (found.int() - plain.int()).abs().max() <= 1
    assert (found.int() - expected.int()).abs().max() <= 1
    assert torch.equal(found[2], expected[2])  # nothing to resize
