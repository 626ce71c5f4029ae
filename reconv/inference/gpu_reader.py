"""Reading JPEG files by the GPU's decoder: a fixed fraction of the images, by position, beside the host's threads."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from reconv.data.dataset import I64
from reconv.data.pipeline.gpu_decode import JpegDecoderDevice, is_on_gpu
from reconv.errors import DataError
from reconv.inference.image_input import ImageInput
from reconv.inference.image_reader import EncodedImage, ImageInfo, ImageReader, JpegCrop, read_encoded

FRACTION = 0.5  # of the images


@dataclass(frozen=True, slots=True)
class GpuImages:
    """Images of a batch that the GPU has decoded."""

    rows: list[int]  # of the batch, one for each crop
    crops: Tensor | None  # uint8 [n, 3, size, size] on the device; None: there are none
    infos: dict[int, ImageInfo]  # by row
    rejected: dict[int, EncodedImage]  # by row: files that the host decodes, or reports


class GpuReader:
    """Decodes batches of files one after the other, in a thread of its own."""

    def __init__(self, decoder: JpegDecoderDevice, fraction: float = FRACTION) -> None:
        self._decoder = decoder
        self._fraction = fraction
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reconv-gpu-read")

    def takes(self, positions: I64) -> npt.NDArray[np.bool_]:
        """Whether the images at these positions are for the GPU; the host reads those that it rejects."""
        return is_on_gpu(positions, self._fraction)

    def start(self, read: ImageReader, items: Sequence[ImageInput], rows: Sequence[int]) -> Future[GpuImages]:
        """Start to decode some images of a batch."""
        return self._thread.submit(self._decode, read, items, rows)

    def place(self, decoded: GpuImages, images: Tensor) -> None:
        """Put the crops into their rows of a batch on the device."""
        assert decoded.crops is not None
        rows = torch.tensor(decoded.rows)
        self._decoder.write_crops(images, rows, decoded.crops, torch.arange(len(rows)))

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _decode(self, read: ImageReader, items: Sequence[ImageInput], rows: Sequence[int]) -> GpuImages:
        located: dict[int, JpegCrop] = {}
        files: dict[int, EncodedImage] = {}
        for row in rows:
            try:
                encoded = read_encoded(items[row])
            except DataError:
                continue  # the host reads it again, and reports it
            if encoded is not None:
                files[row] = encoded
                crop = read.locate(encoded)
                if crop is not None:
                    located[row] = crop
        if not located:
            return GpuImages([], None, {}, files)
        tensors = [torch.frombuffer(bytearray(crop.data), dtype=torch.uint8) for crop in located.values()]
        boxes = [crop.box for crop in located.values()]
        crops, numbers = self._decoder.crops(tensors, boxes, read.shape[-1], antialias=True, is_cut=False)
        names = list(located)
        decoded = [names[number] for number in numbers]
        infos = {row: located[row].info for row in decoded}
        rejected = {row: encoded for row, encoded in files.items() if row not in infos}
        return GpuImages(decoded, crops if decoded else None, infos, rejected)
