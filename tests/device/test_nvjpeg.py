"""JPEG decoding on a GPU: machines without it, and files that nvJPEG does not decode."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from reconv.core.compat import gpu_jpeg_decoder, release_numbers
from reconv.core.errors import ExitCode, UsageError
from reconv.device.nvjpeg import NvJpegDecoder


def test_a_missing_decoder_is_reported_with_the_package_that_fits_this_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchcodec.decoders", "torchvision.io"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError):
        gpu_jpeg_decoder(torch.device("cuda", 0))
    with pytest.raises(UsageError, match="needs TorchCodec, or torchvision before") as exc_info:
        NvJpegDecoder(torch.device("cuda", 0))
    assert exc_info.value.code == ExitCode.USAGE
    fitting = "torchvision==" if release_numbers(torch.__version__) < (2, 14) else "torchcodec>="
    assert exc_info.value.then.startswith(f"pip install '{fitting}")


def test_other_devices_are_rejected() -> None:
    with pytest.raises(UsageError, match="cpu cannot decode JPEG"):
        NvJpegDecoder(torch.device("cpu"))


def picky(files: list[Tensor]) -> list[Tensor]:
    """A decoder that fails on a whole batch because of one file, as nvJPEG does."""
    if any(int(file[0]) == 9 for file in files):
        raise torch.OutOfMemoryError("no memory")
    if any(int(file[0]) % 2 for file in files):
        raise RuntimeError("Error while decoding JPEG images")
    return [file + 1 for file in files]


def test_one_bad_file_does_not_fail_the_others_and_out_of_memory_is_raised() -> None:
    decoder = object.__new__(NvJpegDecoder)  # what is tested here needs no GPU
    decoder.decode = picky
    files = [torch.tensor([value], dtype=torch.uint8) for value in (2, 3, 4, 5, 6)]
    assert [(index, int(image)) for index, image in decoder._decode(files)] == [(0, 3), (2, 5), (4, 7)]
    assert decoder._decode(files[1:2]) == []
    with pytest.raises(torch.OutOfMemoryError):
        decoder._decode([*files, torch.tensor([9], dtype=torch.uint8)])
