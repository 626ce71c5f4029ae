"""JPEG decoding on an NVIDIA GPU, by the nvJPEG of TorchCodec or torchvision.

torchvision decodes on a stream of its own, which does not wait for ours: crops are complete when they are returned, and
until then the memory they are made from is not reused. TorchCodec decodes on the current stream.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from reconv.core.compat import gpu_jpeg_decoder, gpu_jpeg_requirement
from reconv.core.errors import UsageError
from reconv.kernels.ops.crop import CropBox, crop

_WHERE, _THEN = "data.backend: gpu", "--set data.backend=processes decodes on the CPU"

_SIDE = 64  # of the test image


class NvJpegDecoder:
    """Decodes JPEG files and crops boxes from the images; used by one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise UsageError(f"{device.type} cannot decode JPEG", where=_WHERE, why="only NVIDIA GPUs can", then=_THEN)
        self._device = device
        try:
            self.decode = gpu_jpeg_decoder(device)
        except ImportError as error:
            raise UsageError(
                "decoding on the GPU needs TorchCodec, or torchvision before 0.29",
                where=_WHERE,
                why=str(error),
                then=f"pip install '{gpu_jpeg_requirement()}', which fits torch {torch.__version__}; {_THEN}",
            ) from error
        self._stream = torch.cuda.Stream(device, priority=-1)  # a crop is short, and the next batch waits for it
        small = _test_file()
        try:
            self.decode([small])
        except RuntimeError as error:
            raise UsageError(
                "decoding JPEG on the GPU does not work", where=_WHERE, why=str(error), then=_THEN
            ) from error
        self.crops([small], [(0, 0, _SIDE, _SIDE)], _SIDE)  # compiles the kernel, in the main thread

    def crops(
        self,
        files: Sequence[Tensor],
        boxes: Sequence[CropBox],
        size: int,
        *,
        antialias: bool = True,
        is_cut: bool = True,
    ) -> tuple[Tensor, list[int]]:
        """Crops resized to [n, 3, size, size], and the indices of the n files that could be decoded."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            decoded = dict(self._decode(list(files)))
            indices = list(decoded)
            if not indices:
                return torch.empty((0, 3, size, size), dtype=torch.uint8, device=self._device), indices
            decoded_boxes = [boxes[index] for index in indices]
            crops = crop(list(decoded.values()), decoded_boxes, size, antialias=antialias, is_cut=is_cut)
            self._stream.synchronize()
        return crops, indices

    def write_crops(self, images: Tensor, rows: Tensor, crops: Tensor, indices: Tensor) -> None:
        """images[rows] = crops[indices], on the current stream."""
        source, target = torch.stack([indices, rows]).pin_memory().to(self._device, non_blocking=True)
        images.index_copy_(0, target, crops.index_select(0, source).to(images.dtype))
        # Else the allocator could reuse its memory before it was read.
        crops.record_stream(torch.cuda.current_stream(self._device))

    def _decode(self, files: list[Tensor]) -> list[tuple[int, Tensor]]:
        """The images [3, height, width] of the files that can be decoded, with their indices."""
        try:
            return list(enumerate(self.decode(files)))
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError:  # one file that nvJPEG does not support fails the whole batch
            if len(files) == 1:
                return []
        return [(index, image) for index, file in enumerate(files) for _, image in self._decode([file])]


def _test_file() -> Tensor:
    file = io.BytesIO()
    Image.new("RGB", (_SIDE, _SIDE), (90, 120, 150)).save(file, "JPEG")
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
