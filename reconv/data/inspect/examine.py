"""The record that `data check` keeps of each sample until all have been read."""

from __future__ import annotations

import hashlib
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass

from PIL import Image

from reconv.core.errors import DataError
from reconv.core.text import printable
from reconv.data.boxes.annotations import AnnotationError
from reconv.data.dataset import Dataset, Sample
from reconv.data.decode.pillow import decode_image, formats_of
from reconv.data.pipeline.detection import decode_annotated

_EXIF_ORIENTATION = 0x0112


@dataclass(frozen=True, slots=True)
class ExaminedSample:
    """One sample that decodes."""

    target: int  # 0 for detection
    labels: tuple[int, ...]  # the class, or the classes of the boxes
    format: str
    mode: str  # as stored: RGB, L, CMYK, P, ...
    width: int  # with the EXIF orientation applied
    height: int
    orientation: int  # EXIF; 1: stored upright
    num_bytes: int
    digest: bytes  # of the file's bytes
    num_pages: int = 1  # of a TIFF; the first is used


@dataclass(frozen=True, slots=True)
class RejectedSample:
    """One sample that cannot be used."""

    path: str
    why: str
    kind: str  # missing-file, wrong-size or bad-image


Examined = ExaminedSample | RejectedSample


def examine(dataset: Dataset, index: int) -> Examined:
    """One sample, decoded, or what is wrong with it."""
    try:
        sample = dataset[index]
        target, labels = _labels(sample, len(dataset.class_names))
        if isinstance(sample.data, bytes):
            upright = decode_image(sample.data, 3, sample.name)
            with Image.open(io.BytesIO(sample.data), formats=formats_of(sample.data)) as stored:
                form, mode = stored.format or "unknown", stored.mode
                num_pages = getattr(stored, "n_frames", 1) if form == "TIFF" else 1
                tag = stored.getexif().get(_EXIF_ORIENTATION)
            orientation = tag if isinstance(tag, int) and 1 <= tag <= 8 else 1  # files hold all sorts of values there
            width, height, content = upright.width, upright.height, sample.data
        else:
            height, width, channels = sample.data.shape
            form, mode, orientation, num_pages = "pixels", "L" if channels == 1 else "RGB", 1, 1
            content = repr(sample.data.shape).encode() + sample.data.tobytes()
    except DataError as error:
        why = error.what if isinstance(error, AnnotationError) else error.why or error.what
        return RejectedSample(printable(error.where or f"sample {index}"), why, _error_kind(error))
    digest = hashlib.blake2b(content, digest_size=16).digest()
    return ExaminedSample(target, labels, form, mode, width, height, orientation, len(content), digest, num_pages)


def _labels(sample: Sample, num_classes: int) -> tuple[int, tuple[int, ...]]:
    """The target and the classes of a sample; checks that boxes fit the size of the image.

    Several labels have one number as their target, so that identical images with other labels are found.
    """
    if sample.annotation is not None:
        decode_annotated(sample, sample.annotation, 3)
        return 0, tuple(label for label in sample.annotation.labels.tolist() if label >= 0)
    if sample.labels is not None:
        return zlib.crc32(repr(sample.labels).encode()), sample.labels
    if not 0 <= sample.target < num_classes:
        raise DataError(f"label {sample.target}", where=sample.name, why=f"label {sample.target} is out of range")
    return sample.target, (sample.target,)


def _error_kind(error: DataError) -> str:
    if isinstance(error, AnnotationError):
        return "wrong-size"
    return "missing-file" if isinstance(error.__cause__, FileNotFoundError) else "bad-image"


def encode_examined(samples: Iterable[Examined]) -> bytes:
    """Samples as JSON; a bad one has three values."""
    rows = [
        astuple(sample)
        if isinstance(sample, RejectedSample)
        else [*astuple(sample)[:8], sample.digest.hex(), sample.num_pages]
        for sample in samples
    ]
    return json.dumps(rows, separators=(",", ":")).encode()


def decode_examined(payload: bytes) -> Iterator[Examined]:
    """The samples of `encode_examined`."""
    for row in json.loads(payload):
        if len(row) == 3:
            yield RejectedSample(*row)
        else:
            target, labels, form, mode, width, height, orientation, num_bytes, digest, num_pages = row
            yield ExaminedSample(
                target,
                tuple(labels),
                form,
                mode,
                width,
                height,
                orientation,
                num_bytes,
                bytes.fromhex(digest),
                num_pages,
            )
