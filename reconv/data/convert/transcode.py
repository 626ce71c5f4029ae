"""Transcode one sample for a conversion: limit its size, set its JPEG quality, repair what a format cannot hold.

Images that nothing asks to change keep their bytes.
"""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass, replace
from typing import Literal

import numpy as np
from PIL import Image, UnidentifiedImageError, features
from PIL import __version__ as pillow_version

from reconv.core.errors import DataError, UsageError
from reconv.data.dataset import U8, Sample
from reconv.data.decode.pillow import FORMATS, MAX_PIXELS, decode_image, formats_of, to_image, unidentified

DEFAULT_QUALITY = 90
_REPAIR_QUALITY = 100  # for images that are re-encoded only because they are not RGB JPEGs
# A restart marker after every row of blocks costs two bytes and lets a crop skip the rows above it.
_JPEG_OPTIONS = {"restart_marker_rows": 1}
_GRAY_MODES = ("1", "L", "LA", "F")
# Formats that every reader of folders and tars takes; others become PNG there.
_EXTENSIONS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp", "BMP": "bmp", "TIFF": "tif"}

Encoding = Literal["any", "file", "jpeg"]  # pixels or an encoded file; an encoded file; an RGB or gray JPEG


@dataclass(frozen=True, slots=True)
class TranscodeOptions:
    """Options of re-encoding images; by default they keep their bytes."""

    raw: bool = False
    longest: int | None = None  # pixels; larger images are downscaled, smaller ones are kept
    shortest: int | None = None
    quality: int | None = None  # re-encode every image

    def __post_init__(self) -> None:
        if self.longest is not None and self.shortest is not None:
            raise UsageError("--longest and --shortest exclude each other", hint="use one of them")
        if self.raw and self.quality is not None:
            raise UsageError(
                "--raw and --quality exclude each other", why="--raw stores pixels", hint="use one of them"
            )

    @property
    def text(self) -> str:
        """A description for people; empty if images keep their bytes."""
        limits = (("longest", self.longest), ("shortest", self.shortest))
        sides = [f"{name} side at most {side}" for name, side in limits if side]
        kept = ["raw pixels"] if self.raw else []
        kept += [f"JPEG quality {self.quality or DEFAULT_QUALITY}"] if self.quality or (sides and not self.raw) else []
        return ", ".join((*kept, *sides))

    def facts(self, encoding: Encoding) -> dict[str, object]:
        """Facts that decide the bytes, including the encoder's version where images are re-encoded."""
        facts: dict[str, object] = dict(asdict(self))
        if self != TranscodeOptions() or encoding == "jpeg":
            facts["encoder"] = f"Pillow {pillow_version}, libjpeg-turbo {features.version('libjpeg_turbo')}"
            facts["layout"] = _JPEG_OPTIONS
        return facts


@dataclass(frozen=True, slots=True)
class TranscodedSample:
    """A sample as it will be written."""

    sample: Sample
    extension: str  # empty for pixels
    repaired: str = ""  # why it had to be re-encoded
    is_changed: bool = True


def transcode(sample: Sample, options: TranscodeOptions, encoding: Encoding) -> TranscodedSample:
    """The sample, re-encoded where the options or the encoding ask for it."""
    if isinstance(sample.data, bytes):
        return _transcode_file(sample, sample.data, options, encoding)
    height, width, channels = sample.data.shape
    new_size = _limited_size(width, height, options)
    if new_size is None and options.quality is None and encoding == "any":
        return TranscodedSample(sample, "", is_changed=False)
    image = to_image(sample.data, channels)
    image = image if new_size is None else image.resize(new_size, Image.Resampling.LANCZOS)
    return _encode(sample, image, options, encoding, is_lossless=True)


def _transcode_file(sample: Sample, data: bytes, options: TranscodeOptions, encoding: Encoding) -> TranscodedSample:
    kind, mode, size = _read_header(data, sample.name)
    repair = ""
    if encoding == "jpeg":
        repair = kind if kind != "JPEG" else "CMYK" if mode == "CMYK" else ""
    new_size = _limited_size(*size, options)
    is_rare = encoding == "file" and kind not in _EXTENSIONS
    if new_size is None and not repair and not is_rare and not options.raw and options.quality is None:
        return TranscodedSample(sample, _EXTENSIONS.get(kind, ""), is_changed=False)
    is_gray = mode in _GRAY_MODES or mode.startswith("I")
    image = decode_image(data, 1 if is_gray and not repair else 3, sample.name)
    # The EXIF orientation is applied by decoding, so the size is known only now.
    new_size = _limited_size(*image.size, options)
    image = image if new_size is None else image.resize(new_size, Image.Resampling.LANCZOS)
    if repair and options == TranscodeOptions():
        return TranscodedSample(replace(sample, data=_jpeg(image, _REPAIR_QUALITY)), "jpg", repair)
    is_lossless = is_rare and new_size is None
    return replace(_encode(sample, image, options, encoding, is_lossless), repaired=repair)


def _encode(
    sample: Sample, image: Image.Image, options: TranscodeOptions, encoding: Encoding, is_lossless: bool
) -> TranscodedSample:
    """The image as pixels, PNG or JPEG; lossless images stay lossless unless a quality is set."""
    if encoding == "any" and (options.raw or (is_lossless and options.quality is None)):
        pixels: U8 = np.asarray(image, np.uint8).reshape(image.height, image.width, len(image.getbands()))
        return TranscodedSample(replace(sample, data=pixels), "")
    if encoding == "file" and is_lossless and options.quality is None:
        file = io.BytesIO()
        image.save(file, "PNG")
        return TranscodedSample(replace(sample, data=file.getvalue()), "png")
    quality = options.quality or (_REPAIR_QUALITY if is_lossless else DEFAULT_QUALITY)
    return TranscodedSample(replace(sample, data=_jpeg(image, quality)), "jpg")


def _jpeg(image: Image.Image, quality: int) -> bytes:
    file = io.BytesIO()
    sampling = "4:4:4" if quality == _REPAIR_QUALITY else "4:2:0"
    image.save(file, "JPEG", quality=quality, subsampling=sampling, **_JPEG_OPTIONS)
    return file.getvalue()


def _limited_size(width: int, height: int, options: TranscodeOptions) -> tuple[int, int] | None:
    """The size within the limit; None if the image is within it."""
    side, limit = (max(width, height), options.longest) if options.longest else (min(width, height), options.shortest)
    if limit is None or side <= limit:
        return None
    return max(1, round(width * limit / side)), max(1, round(height * limit / side))


def size_of(data: bytes, name: str) -> tuple[int, int]:
    """Width and height, from the file's header."""
    return _read_header(data, name)[2]


def _read_header(data: bytes, name: str) -> tuple[str, str, tuple[int, int]]:
    """Format, mode and (width, height), from the file's header."""
    why = f"it is none of {', '.join(FORMATS)}, or its header is damaged"
    try:
        with Image.open(io.BytesIO(data), formats=formats_of(data, name)) as opened:
            if opened.width * opened.height <= MAX_PIXELS:
                return opened.format or "", opened.mode, opened.size
            why = f"{opened.width} x {opened.height} pixels, more than {MAX_PIXELS:,}"
    except DataError:
        raise
    except UnidentifiedImageError:
        why = unidentified(data, name).why
    except Exception as error:  # a decoder may raise anything for damaged bytes
        why = str(error)
    raise DataError("not an image that can be converted", where=name, why=why, hint="replace or remove the file")
