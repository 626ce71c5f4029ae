"""The JPEG engine of an NVIDIA GPU, by torchvision's nvJPEG.

Owns the calls, their stream and what they need. Refuses to know batches, draws and which files are worth a try.
Invariant: crops are whole when they are returned, and until then nothing they are made of is given to anybody else:
torchvision decodes on a stream of its own, which does not wait for ours.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from reconv.errors import UsageError
from reconv.kernels.crop.ops import CropBox, crop

_WHERE, _THEN = "data.backend: gpu", "--set data.backend=processes decodes on the host alone"

_SIDE = 64  # of the image that is tried

Decode = Callable[[list[Tensor]], list[Tensor]]


class NvJpegDecoder:
    """Decodes files of bytes and cuts boxes out of their images; used by one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise UsageError(f"{device.type} has no JPEG engine", where=_WHERE, why="NVIDIA GPUs have", then=_THEN)
        self._device = device
        self.decode = _nvjpeg(device)
        self._stream = torch.cuda.Stream(device, priority=-1)  # a crop is short, and the next batch waits for it
        small = _small_file()
        try:
            self.decode([small])
        except RuntimeError as error:
            raise UsageError("the GPU's JPEG engine does not work", where=_WHERE, why=str(error), then=_THEN) from error
        self.crops([small], [(0, 0, _SIDE, _SIDE)], _SIDE)  # compiles the kernel, here in the main thread

    def crops(
        self,
        files: Sequence[Tensor],
        boxes: Sequence[CropBox],
        size: int,
        *,
        antialias: bool = True,
        is_cut: bool = True,
    ) -> tuple[Tensor, list[int]]:
        """The boxes of the files' images, resized to [n, 3, size, size], and which files those are."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            decoded = dict(self._decoded(list(files)))
            taken = list(decoded)
            if not taken:
                return torch.empty((0, 3, size, size), dtype=torch.uint8, device=self._device), taken
            own = [boxes[number] for number in taken]
            crops = crop(list(decoded.values()), own, size, antialias=antialias, is_cut=is_cut)
            self._stream.synchronize()
        return crops, taken

    def place(self, images: Tensor, rows: Tensor, crops: Tensor, numbers: Tensor) -> None:
        """Put some of the crops into rows of a batch, in order with what this thread computes."""
        chosen, there = torch.stack([numbers, rows]).pin_memory().to(self._device, non_blocking=True)
        images.index_copy_(0, there, crops.index_select(0, chosen).to(images.dtype))
        # Else its memory could be given out again before it was read.
        crops.record_stream(torch.cuda.current_stream(self._device))

    def _decoded(self, files: list[Tensor]) -> list[tuple[int, Tensor]]:
        """The images [3, height, width] of files that decode, with their numbers."""
        try:
            return list(enumerate(self.decode(files)))
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError:  # one file that is not for this decoder refuses all
            if len(files) == 1:
                return []
        return [(number, picture) for number, file in enumerate(files) for _, picture in self._decoded([file])]


def _nvjpeg(device: torch.device) -> Decode:
    """Torchvision's decoder, which nothing else here needs."""
    try:
        torchvision: Any = importlib.import_module("torchvision.io")
    except (ImportError, OSError, RuntimeError) as error:  # built for another torch it raises any of these
        raise UsageError(
            "decoding on the GPU needs torchvision",
            where=_WHERE,
            why=str(error),
            then=f"install the torchvision that belongs to torch {torch.__version__}; {_THEN}",
        ) from error

    def decode(files: list[Tensor]) -> list[Tensor]:
        pictures: list[Tensor] = torchvision.decode_jpeg(files, mode=torchvision.ImageReadMode.RGB, device=device)
        return pictures

    return decode


def _small_file() -> Tensor:
    file = io.BytesIO()
    Image.new("RGB", (_SIDE, _SIDE), (90, 120, 150)).save(file, "JPEG")
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
