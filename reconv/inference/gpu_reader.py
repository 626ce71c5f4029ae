"""Reading JPEG files by the GPU's decoder: a fixed fraction of the batches, beside the host's threads.

Whole batches, because the decoder is faster on long lists of files than on short ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import ceil

import numpy as np
import torch
from torch import Tensor

from reconv.core.errors import DataError, UsageError
from reconv.data.dataset import U8
from reconv.data.decode import native
from reconv.data.decode.jpeg_header import read_header
from reconv.data.decode.pillow import MAX_PIXELS
from reconv.data.pipeline.gpu_decode import JpegDecoderDevice
from reconv.inference.image_input import ImageInput
from reconv.inference.image_reader import EncodedImage, ImageInfo, ImageReader, read_encoded

FRACTION = 0.5  # of the batches
MIN_IMAGES = 1024  # of a list that `auto` shares with the GPU: opening its decoder takes a while


@dataclass(frozen=True, slots=True)
class GpuImages:
    """Images that the GPU has decoded, by their number."""

    infos: dict[int, ImageInfo]  # in the order of the crops
    crops: Tensor | None  # uint8 [n, 3, size, size] on the device; None: there are none
    rejected: dict[int, EncodedImage]  # files that the host decodes, or reports

    def read_or_decode(self, number: int, image: ImageInput, read: ImageReader, out: U8) -> list[ImageInfo | DataError]:
        """What is known of an image; one that the GPU has rejected is decoded into `out` [1, channels, size, size]."""
        if number in self.infos:
            return [self.infos[number]]
        return read.read_group([image], out, {0: self.rejected[number]} if number in self.rejected else {})


class GpuReader:
    """Decodes batches of files one after the other, in a thread of its own."""

    def __init__(
        self, open_decoder: Callable[[], JpegDecoderDevice], fraction: float = FRACTION, min_images: int = 0
    ) -> None:
        """The first list of at least `min_images` images opens the decoder; shorter ones are left to the host."""
        self._open_decoder = open_decoder
        self._opened: JpegDecoderDevice | None = None
        self._min_images = min_images
        self._fraction = fraction
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reconv-gpu-read")

    def takes(self, num_images: int) -> bool:
        """Whether a part of a list of images is for the GPU; False too where its decoder turns out to be missing."""
        if num_images >= self._min_images and self._opened is None and self._fraction > 0:
            try:
                self._opened = self._open_decoder()
            except UsageError:
                if not self._min_images:  # it was asked for
                    raise
                self._fraction = 0.0
        return num_images >= self._min_images and self._opened is not None

    @property
    def _decoder(self) -> JpegDecoderDevice:
        assert self._opened is not None
        return self._opened

    def takes_batch(self, index: int) -> bool:
        """Whether a batch of the list is for the GPU, as the first is; the host reads the files that it rejects."""
        return ceil((index + 1) * self._fraction) > ceil(index * self._fraction)

    def start(self, read: ImageReader, images: Sequence[ImageInput]) -> Future[GpuImages]:
        """Start to decode images."""
        return self._thread.submit(self._decode, read, images)

    def place(self, decoded: GpuImages, images: Tensor) -> None:
        """Put the crops into their rows of a batch on the device."""
        if decoded.crops is not None:
            rows = torch.tensor(list(decoded.infos))
            self._decoder.write_crops(images, rows, decoded.crops, torch.arange(len(rows)))

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _decode(self, read: ImageReader, images: Sequence[ImageInput]) -> GpuImages:
        files: dict[int, EncodedImage] = {}
        for number, image in enumerate(images):
            try:
                if (encoded := read_encoded(image)) is not None:
                    files[number] = encoded
            except DataError:
                continue  # the host reads it again, and reports it
        infos = locate_jpegs(files)
        if not infos:
            return GpuImages({}, None, files)
        data = [files[number].data for number in infos]
        # Unlike bytes.join, numpy copies without the GIL.
        joined = torch.from_numpy(np.concatenate([np.frombuffer(file, np.uint8) for file in data]))
        boxes = [read.crop_box(info.width, info.height) for info in infos.values()]
        tensors = joined.split([len(file) for file in data])
        crops, decoded = self._decoder.crops(tensors, boxes, read.shape[-1], antialias=True, is_cut=False)
        names = list(infos)
        good = {names[index]: infos[names[index]] for index in decoded}
        rejected = {number: encoded for number, encoded in files.items() if number not in good}
        return GpuImages(good, crops if good else None, rejected)


def locate_jpegs(files: Mapping[int, EncodedImage]) -> dict[int, ImageInfo]:
    """The files that are ordinary JPEG in color, with their size."""
    if native.available():
        sizes = native.FilesInMemory([file.data for file in files.values()]).sizes().tolist()
    else:
        headers = [read_header(file.data) for file in files.values()]
        sizes = [(h.width, h.height) if h is not None and h.num_components == 3 else (0, 0) for h in headers]
    return {
        row: ImageInfo(file.image, file.path, width, height)
        for (row, file), (width, height) in zip(files.items(), sizes, strict=True)
        if 0 < width * height <= MAX_PIXELS
    }
