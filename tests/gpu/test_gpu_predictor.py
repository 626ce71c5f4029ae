"""On a GPU, the captured network of `Predictor` gives the outputs of eager, from pixels and from JPEG files."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from reconv.bench.infer import open_network
from reconv.core.errors import UsageError
from reconv.device.nvjpeg import NvJpegDecoder
from reconv.inference.backends.choose import LoadedNetwork, choose_backend
from reconv.inference.backends.eager import EagerBackend
from reconv.inference.backends.outputs import largest_difference
from reconv.inference.gpu_reader import GpuReader
from reconv.inference.image_reader import ImageReader

LIMITS = {"fp32": 1e-3, "bf16": 0.1}


def jpeg(number: int) -> bytes:
    random = np.random.default_rng(number)
    colors = Image.fromarray(random.integers(0, 256, (9, 12, 3), dtype=np.uint8))
    file = io.BytesIO()
    colors.resize((300 + number, 260), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


@pytest.mark.parametrize("model, mode", [("resnet18", "fp32"), ("resnet18", "bf16"), ("mobilenet_v2", "bf16")])
def test_fused_graphs_equal_eager_at_every_batch_size(model: str, mode: str) -> None:
    overrides = [("model.name", model, "test"), ("precision.mode", mode, "test")]
    recipe, network, device = open_network("resnet50", overrides, "cuda")
    network.model.eval()
    loaded, said = LoadedNetwork(recipe, network, device), list[str]()
    backend = choose_backend(loaded, "auto", "auto", said.append)
    assert backend.name == "fused", said
    eager = EagerBackend(recipe, network)
    for num in (1, 258):
        images = torch.randint(0, 256, (num, *loaded.image_shape), dtype=torch.uint8, device="cuda")
        expected = eager(images)
        assert largest_difference(backend(images), expected) <= LIMITS[mode], (num, backend.describe())


def test_the_gpu_reads_what_pillow_reads() -> None:
    try:
        decoder = NvJpegDecoder(torch.device("cuda"))
    except UsageError as error:
        pytest.skip(str(error))
    recipe, _, _ = open_network("resnet50", [], "cpu")
    read, files = ImageReader(recipe.data.preprocess, "pillow"), [jpeg(number) for number in range(6)]
    reader = GpuReader(lambda: decoder, fraction=1.0)
    assert reader.takes(1)
    found = reader.start(read, [*files, b"no image"]).result()
    reader.close()
    assert list(found.infos) == list(range(6)) and found.crops is not None and list(found.rejected) == [6]
    for file, crop in zip(files, found.crops.cpu(), strict=True):
        assert (crop.float() - read(file).pixels.float()).abs().mean() < 1.5
