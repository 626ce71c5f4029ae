"""Images normalized by the kernel equal those of tensor operations; it is used if no other transform is needed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from reconv.batch import Batch
from reconv.data.transforms.device_transforms import TrainPreprocess
from reconv.data.transforms.mixup import mix_params
from reconv.data.transforms.params import ERASE_BOXES
from reconv.kernels.jit.launch import trace_launches
from reconv.kernels.normalize_images.ops import normalize_images
from reconv.recipe.data_fields import AugmentConfig, PreprocessConfig


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("has_flips", [False, True])
def test_fused_preprocessing_equals_tensor_operations(has_flips, layout) -> None:
    images = torch.randint(0, 256, (3, 3, 9, 7), dtype=torch.uint8).contiguous(memory_format=layout)
    flips = torch.tensor([True, False, True])
    factor, shift = torch.rand(1, 3, 1, 1) / 50, torch.randn(1, 3, 1, 1)
    out = normalize_images(images, flips if has_flips else None, factor, shift, torch.float32)
    expected = torch.where(flips.view(-1, 1, 1, 1), images.flip(-1), images) if has_flips else images
    assert out.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(out, expected.float() * factor + shift, rtol=1e-6, atol=1e-6)


class Mirrors(TorchFunctionMode):
    """Counts the mirrored copies that tensor operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.number += func is torch.Tensor.flip
        return func(*args, **(kwargs or {}))


def batch(**more: torch.Tensor) -> Batch:
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    flips = torch.tensor([True, False, True, False])
    return Batch({"images": images, "flips": flips, "targets": torch.arange(4), **more}, torch.arange(4), (4,))


def both(
    augment: dict[str, object], given: Batch, spec: PreprocessConfig | None = None, channels_last: bool = True
) -> tuple[Batch, Batch, int]:
    """The batch prepared by tensor operations and with kernels, and the mirrored copies made with them."""
    made = []
    for kernels in (False, True):
        augmented = AugmentConfig.model_validate(augment)
        prepare = TrainPreprocess(spec or PreprocessConfig(), augmented, 4, torch.float32, channels_last, kernels)
        with Mirrors() as mirrors:
            made.append(prepare(given, 0))
    return made[0], made[1], mirrors.number


def test_a_batch_with_boxes_is_preprocessed_by_one_kernel() -> None:
    boxes = torch.tensor([[[0.1, 0.2, 0.4, 0.5]]]).expand(4, 1, 4)
    given = batch(boxes=boxes, labels=torch.ones(4, 1, dtype=torch.int64))
    plain, quick, copies = both({"hflip": 0.5}, given)
    assert copies == 0
    assert quick["images"].is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(quick["images"], plain["images"], rtol=1e-6, atol=1e-6)
    assert torch.equal(quick["boxes"], plain["boxes"])


MIXUP = {"mixup": {"alpha": 0.2}}
MIXED = mix_params(AugmentConfig.model_validate(MIXUP), 0, 0, np.arange(4), (4,), 8)


@pytest.mark.parametrize(
    "more, augment, given",
    [
        ({}, {"random_erasing": {"probability": 1.0}}, {ERASE_BOXES: torch.tensor([[1, 1, 3, 3]]).expand(4, 4)}),
        ({}, MIXUP, {name: torch.from_numpy(drawn) for name, drawn in MIXED.items()}),
        ({"spec": PreprocessConfig(per_image_standardization=True)}, {}, {}),
        ({"channels_last": False}, {}, {}),
    ],
    ids=["erased", "mixed", "standardized", "in planes"],
)
def test_other_transforms_fall_back_to_tensor_operations(more, augment, given) -> None:
    plain, quick, copies = both({"hflip": 0.5, **augment}, batch(**given), **more)
    assert copies == 1
    assert torch.equal(quick["images"], plain["images"])
    assert quick["images"].stride() == plain["images"].stride()


def test_tracing_records_the_launch_and_changes_nothing() -> None:
    prepare = TrainPreprocess(PreprocessConfig(), AugmentConfig(hflip=0.5), 4, torch.float32, True, kernels=True)
    before = prepare(batch(), 0)["images"]
    with trace_launches() as noted:
        prepare.trace_kernels((3, 8, 6), torch.uint8)
    assert [variant.kernel.__name__ for variant in noted] == ["normalize"]
    assert torch.equal(prepare(batch(), 0)["images"], before)
