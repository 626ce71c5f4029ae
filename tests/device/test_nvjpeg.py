"""JPEG decoding on a GPU: machines without it, and files that nvJPEG does not decode."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from reconv.device.nvjpeg import NvJpegDecoder, _nvjpeg
from reconv.errors import ExitCode, UsageError


def test_a_missing_torchvision_is_reported_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.io", None)
    with pytest.raises(UsageError, match="needs torchvision") as exc_info:
        _nvjpeg(torch.device("cuda", 0))
    assert exc_info.value.code == ExitCode.USAGE
    assert exc_info.value.then is not None and torch.__version__ in exc_info.value.then


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
