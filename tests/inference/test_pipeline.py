"""Images are read in groups and threads; predictions come in order, whatever reads them."""

from __future__ import annotations

import gc
import io
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from reconv.core.errors import DataError, UsageError
from reconv.data.decode import native
from reconv.device import Cpu
from reconv.inference.backends.base import InferenceBackend
from reconv.inference.image_reader import ImageReader
from reconv.inference.outputs import OutputClasses, Selection, without_gc
from reconv.inference.pipeline import PixelBuffers, PredictPipeline, PredictStep
from reconv.inference.predictions import Prediction
from reconv.recipe.parts.data import PreprocessConfig

PREPROCESS = PreprocessConfig(channels=3, size=32, resize=36)


def jpeg(number: int, **options: object) -> bytes:
    colors = np.random.default_rng(number).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    file = io.BytesIO()
    image = Image.fromarray(colors).resize((60 + number, 50), Image.Resampling.BICUBIC)
    image.save(file, "JPEG", quality=90, **options)
    return file.getvalue()


class MeanBackend(InferenceBackend):
    """Its first logit is the mean of the image, so that predictions tell images apart."""

    name, precision = "mean", "fp32"

    def __call__(self, images: Tensor) -> Tensor:
        means = images.float().mean((1, 2, 3)) / 255
        return torch.stack([means, torch.zeros_like(means)], 1)


def predict(files: Sequence[bytes], threads: int, read: ImageReader, batch: int = 8) -> list[Prediction | DataError]:
    step = PredictStep(MeanBackend(), Cpu(), OutputClasses("classification", ("a", "b")), None, threading.Lock())
    with ThreadPoolExecutor(threads) as pool:
        return list(PredictPipeline(step, read, pool, threads, PixelBuffers(False)).run(files, Selection(), batch))

    return threading.Lock()


def scores(found: Sequence[Prediction | DataError]) -> list[float]:
    return [next(c.score for c in p.classes if c.index == 0) for p in found if isinstance(p, Prediction)]


def test_predictions_are_in_order_and_do_not_depend_on_threads() -> None:
    files = [jpeg(number) for number in range(21)]
    read = ImageReader(PREPROCESS)
    expected = torch.tensor([read(file).pixels.float().mean().item() / 255 for file in files])
    one, many = (predict(files, threads, read) for threads in (1, 5))
    assert one == many and len(one) == 21
    assert scores(one) == pytest.approx(torch.stack([expected, expected * 0], 1).softmax(1)[:, 0].tolist())
    assert [found.image for found in one if isinstance(found, Prediction)] == files


def test_unreadable_images_keep_their_place_and_change_no_other() -> None:
    files = [jpeg(number) for number in range(6)]
    read = ImageReader(PREPROCESS)
    whole, broken = predict(files, 2, read), predict([*files[:2], b"no image", *files[3:]], 2, read)
    assert isinstance(broken[2], DataError)
    assert broken[:2] == whole[:2] and broken[3:] == whole[3:]


def test_the_garbage_collector_is_as_before_after_predictions() -> None:
    with pytest.raises(KeyError), without_gc():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    try:
        with without_gc():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.native
def test_groups_by_the_compiled_decoder_equal_single_images_and_are_near_pillow() -> None:
    assert native.available()
    exif = Image.Exif()
    exif[0x0112] = 6
    odd = [jpeg(3, exif=exif), jpeg(4, progressive=True), b"no image"]  # rotated, progressive: Pillow reads them
    files = [*(jpeg(number) for number in range(5)), *odd]
    compiled, pillow = ImageReader(PREPROCESS, "native"), ImageReader(PREPROCESS, "pillow")
    out = np.empty((len(files), 3, 32, 32), np.uint8)
    found = compiled.read_group(files, out)
    assert isinstance(found[-1], DataError) and not out[-1].any()
    for row, file in enumerate(files[:-1]):
        single, info, plain = compiled(file), found[row], pillow(file)
        assert not isinstance(info, DataError) and (info.width, info.height) == (single.width, single.height)
        assert np.array_equal(out[row], single.pixels.numpy())
        assert (single.width, single.height) == (plain.width, plain.height)
        assert (plain.pixels.float() - single.pixels.float()).abs().mean() < 1.5


def test_files_are_read_once_even_from_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe.jpg").write_bytes(jpeg(1, progressive=True)))
    writer.start()
    out = np.empty((1, 3, 32, 32), np.uint8)
    [info] = ImageReader(PREPROCESS).read_group([tmp_path / "pipe.jpg"], out)
    writer.join()
    assert not isinstance(info, DataError) and info.path == tmp_path / "pipe.jpg"


def test_a_decoder_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "problem", lambda: "it was not compiled")
    with pytest.raises(UsageError, match="compiled JPEG decoder is not available"):
        ImageReader(PREPROCESS, "native")
