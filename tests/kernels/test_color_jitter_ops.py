"""Images jittered and normalized by the kernels have the bits of the tensor operations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reconv.core.batch import Batch
from reconv.data.transforms.color import COLOR_JITTER, device_color_params, jitter_on_device
from reconv.data.transforms.geometry import FLIPS
from reconv.data.transforms.train import TrainPreprocess
from reconv.kernels.jit.launch import trace_launches
from reconv.kernels.ops.color_jitter import jitter_and_normalize, supports
from reconv.recipe.parts.data import AugmentConfig, ColorJitterConfig, PreprocessConfig

HEIGHT, WIDTH = 70, 61  # more pixels than a program sums
STRONG = ColorJitterConfig(brightness=0.6, contrast=1.5, saturation=2, hue=0.5, implementation="tensorflow")
AUGMENT = AugmentConfig(hflip=0.5, color_jitter=STRONG)


def images() -> Tensor:
    """Random images of 0 to 255, the first with gray, black, white and nearly gray pixels."""
    values = torch.randint(0, 256, (6, 3, HEIGHT, WIDTH), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    values[0, :, :20] = values[0, :1, :20]
    values[0, :, 20:25], values[0, :, 25:30] = 0, 255
    values[0, 0, 30:50] = values[0, 1, 30:50] // 2 + 100
    values[0, 1:, 30:50] = values[0, 0, 30:50] - 1
    return values


def jitter() -> Tensor:
    """Parameters in the middle and at the ends of their ranges."""
    drawn = torch.from_numpy(device_color_params(STRONG, 0, np.arange(6)))
    drawn[1:4] = torch.tensor([[0.0, 1, 1, 0], [-0.6, 2.5, 3, -0.5], [0.6, 0, 0, 0.5]])
    return drawn


FLIPPED = torch.tensor([True, False] * 3)


LAYOUTS = {
    "planes": images,
    "channels_last": lambda: images().contiguous(memory_format=torch.channels_last),
    "cropped": lambda: F.pad(images(), (1, 2, 1, 1), value=9)[..., 1:-1, 1:-2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_jittered_batches_have_the_bits_of_tensor_operations(layout: str) -> None:
    boxes, labels = torch.rand(6, 2, 4), torch.ones(6, 2, dtype=torch.int64)
    tensors = {"images": LAYOUTS[layout](), FLIPS: FLIPPED, COLOR_JITTER: jitter()}
    batch = Batch({**tensors, "boxes": boxes, "labels": labels}, torch.arange(6), (6,))
    plain, fused = (
        TrainPreprocess(PreprocessConfig(), AUGMENT, 4, torch.float32, channels_last=True, kernels=kernels)(batch, 0)
        for kernels in (False, True)
    )
    assert fused["images"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(fused["images"], plain["images"])
    assert torch.equal(fused["boxes"], plain["boxes"])


@pytest.mark.parametrize("has_flips", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.float16, 2**-11)])
def test_jittered_images_equal_float64(dtype: torch.dtype, tolerance: float, has_flips: bool) -> None:
    factor, shift = torch.tensor([1 / 60, 1 / 70, 1 / 50]).view(1, 3, 1, 1), torch.tensor([-2.0, 1.0, 0.5])
    out = jitter_and_normalize(images(), jitter(), FLIPPED if has_flips else None, factor, shift, dtype)
    given = torch.where(FLIPPED.view(-1, 1, 1, 1), images().flip(-1), images()) if has_flips else images()
    expected = jitter_on_device(given, jitter(), torch.float64) * factor.double() + shift.double().view(1, 3, 1, 1)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=2e-5)


def test_an_image_does_not_depend_on_its_batch() -> None:
    factor, shift = torch.rand(3), torch.randn(3)
    whole = jitter_and_normalize(images(), jitter(), FLIPPED, factor, shift, torch.float32)
    for i in range(6):
        rows = slice(i, i + 1)
        alone = jitter_and_normalize(images()[rows], jitter()[rows], FLIPPED[rows], factor, shift, torch.float32)
        assert torch.equal(alone[0], whole[i])


def test_gray_images_floats_and_float64_are_left_to_tensor_operations() -> None:
    assert supports(images(), torch.float32)
    assert not supports(images()[:, :1], torch.float32)
    assert not supports(images().float(), torch.float32)
    assert not supports(images(), torch.float64)


@pytest.mark.parametrize("dtype, names", [(torch.uint8, ["channel_sums", "jitter_and_normalize"]), (torch.float32, [])])
def test_tracing_records_the_launches_of_a_batch(dtype: torch.dtype, names: list[str]) -> None:
    prepare = TrainPreprocess(PreprocessConfig(), AUGMENT, 4, torch.float32, channels_last=True, kernels=True)
    with trace_launches() as traced:
        prepare.trace_kernels((3, 8, 6), dtype)
    assert [variant.kernel.__name__ for variant in traced] == names
