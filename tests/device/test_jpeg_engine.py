"""The JPEG engine where there is none, and what becomes of a file that it refuses."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from reconv.device.nvjpeg import NvJpegDecoder, _nvjpeg
from reconv.errors import ExitCode, UsageError


def test_without_torchvision_it_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.io", None)
    with pytest.raises(UsageError, match="needs torchvision") as caught:
        _nvjpeg(torch.device("cuda", 0))
    assert caught.value.code == ExitCode.USAGE
    assert caught.value.then is not None and torch.__version__ in caught.value.then


def test_devices_without_an_engine_are_refused() -> None:
    with pytest.raises(UsageError, match="cpu has no JPEG engine"):
        NvJpegDecoder(torch.device("cpu"))


def picky(files: list[Tensor]) -> list[Tensor]:
    """A decoder that refuses a whole list for one file, as nvJPEG does, and fails at another."""
    if any(int(file[0]) == 9 for file in files):
        raise torch.OutOfMemoryError("no memory")
    if any(int(file[0]) % 2 for file in files):
        raise RuntimeError("Error while decoding JPEG images")
    return [file + 1 for file in files]


def test_a_file_that_is_refused_takes_no_other_with_it_and_no_memory_is_no_bad_file() -> None:
    engine = object.__new__(NvJpegDecoder)  # without a GPU; what is tried here needs none
    engine.decode = picky
    files = [torch.tensor([value], dtype=torch.uint8) for value in (2, 3, 4, 5, 6)]
    assert [(number, int(picture)) for number, picture in engine._decoded(files)] == [(0, 3), (2, 5), (4, 7)]
    assert engine._decoded(files[1:2]) == []
    with pytest.raises(torch.OutOfMemoryError):
        engine._decoded([*files, torch.tensor([9], dtype=torch.uint8)])
