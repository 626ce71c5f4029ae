"""Images normalized by the kernel equal those of tensor operations; it is used if no other transform is needed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from reconv.core.batch import Batch
from reconv.data.transforms.color import COLOR_JITTER
from reconv.data.transforms.geometry import ERASE_BOXES
from reconv.data.transforms.mixup import mix_params
from reconv.data.transforms.train import TrainPreprocess
from reconv.kernels.jit.launch import trace_launches
from reconv.kernels.ops.normalize_images import normalize_images
from reconv.recipe.parts.data import AugmentConfig, PreprocessConfig

LAYOUTS = {
    "planes": lambda images: images,
    "channels_last": lambda images: images.contiguous(memory_format=torch.channels_last),
    "cropped": lambda images: F.pad(images, (1, 2, 1, 1))[..., 1:-1, 1:-2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("has_flips", [False, True])
@pytest.mark.parametrize(
    "channels, height, width, dtype",
    [
        (3, 9, 7, torch.float32),  # runs of 1 value
        (3, 5, 8, torch.float32),  # runs of 4
        (3, 4, 16, torch.float16),  # runs of 8
        (3, 6, 12, torch.float16),  # runs of 4
        (1, 7, 24, torch.float16),
        (4, 3, 10, torch.float16),
        (3, 50, 40, torch.float16),  # several programs
    ],
)
def test_fused_preprocessing_equals_tensor_operations(channels, height, width, dtype, has_flips, layout) -> None:
    generator = torch.Generator().manual_seed(width)
    images = torch.randint(0, 256, (3, channels, height, width), dtype=torch.uint8, generator=generator)
    flips = torch.tensor([True, False, True])
    factor = torch.rand(1, channels, 1, 1, generator=generator) / 50
    shift = torch.randn(1, channels, 1, 1, generator=generator)
    out = normalize_images(LAYOUTS[layout](images), flips if has_flips else None, factor, shift, dtype)
    expected = torch.where(flips.view(-1, 1, 1, 1), images.flip(-1), images) if has_flips else images
    assert out.shape == images.shape and out.dtype == dtype
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(out, (expected.float() * factor + shift).to(dtype))


def test_images_in_float32_are_not_truncated() -> None:
    images, ones = torch.rand(2, 3, 4, 8), torch.ones(1, 3, 1, 1)
    assert torch.equal(normalize_images(images, None, ones, 0 * ones, torch.float32), images)


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


MIXUP = {"mixup": {"alpha": 0.2, "mode": "sample"}}
CUTMIX = {"cutmix": {"mode": "fixed", "lam": 0.6}}
BOTH = {**MIXUP, **CUTMIX, "combine": "both"}
JITTER = {"color_jitter": {"brightness": 0.6, "hue": 0.5, "implementation": "tensorflow"}}


def mix_tensors(augment: dict[str, object], groups: tuple[int, ...] = (4,)) -> dict[str, torch.Tensor]:
    config = AugmentConfig.model_validate(augment)
    return {name: torch.from_numpy(drawn) for name, drawn in mix_params(config, 1, 0, np.arange(4), groups, 8).items()}


@pytest.mark.parametrize("groups", [(4,), (3, 1), (2, 2)])
@pytest.mark.parametrize("hflip", [0, 0.5])
@pytest.mark.parametrize("augment", [MIXUP, CUTMIX, BOTH], ids=["mixup", "cutmix", "both"])
def test_mixed_images_are_preprocessed_by_one_kernel(augment, hflip, groups) -> None:
    plain, quick, copies = both({"hflip": hflip, **augment}, batch(**mix_tensors(augment, groups)))
    unmixed, _, _ = both({"hflip": hflip}, batch())
    assert copies == 0
    assert quick["images"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(quick["images"], plain["images"])
    assert torch.equal(quick["soft_targets"], plain["soft_targets"])
    is_changed = (quick["images"] != unmixed["images"]).flatten(1).any(1).tolist()
    assert is_changed == [size > 1 for size in groups for _ in range(size)]


@pytest.mark.parametrize(
    "more, augment, given",
    [
        ({}, {"random_erasing": {"probability": 1.0}}, {ERASE_BOXES: torch.tensor([[1, 1, 3, 3]]).expand(4, 4)}),
        ({}, {**MIXUP, **JITTER}, {**mix_tensors(MIXUP), COLOR_JITTER: torch.rand(4, 4)}),
        ({"spec": PreprocessConfig(per_image_standardization=True)}, {}, {}),
        ({"channels_last": False}, {}, {}),
        ({"channels_last": False}, MIXUP, mix_tensors(MIXUP)),
    ],
    ids=["erased", "jittered and mixed", "standardized", "in planes", "mixed in planes"],
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


@pytest.mark.parametrize("augment", [MIXUP, CUTMIX, BOTH], ids=["mixup", "cutmix", "both"])
def test_the_traced_launch_of_mixed_images_is_the_one_of_a_step(augment: dict[str, object]) -> None:
    prepare = TrainPreprocess(PreprocessConfig(), AugmentConfig(**augment), 4, torch.float32, True, kernels=True)
    with trace_launches() as noted:
        prepare.trace_kernels((3, 8, 8), torch.uint8)
    given = batch(**mix_tensors(augment))
    on_meta = Batch({name: tensor.to("meta") for name, tensor in given.tensors.items()}, given.positions, (4,))
    with trace_launches() as launched:
        prepare(on_meta, 0)
    assert list(noted) == list(launched)
    assert [variant.kernel.__name__ for variant in noted] == ["normalize_and_mix"]
