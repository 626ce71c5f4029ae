"""Decoding with Pillow: any supported image file to upright 8-bit pixels.

An alpha channel is dropped, 16-bit gray is cut to its upper 8 bits, and of several pages the first is used. Gray in
float is 0 to 255, or 0 to 1 if no value is above. A file that does not decode is a `DataError` that names it.
"""

from __future__ import annotations

import io
import time
import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from reconv.core.errors import DataError
from reconv.data.dataset import U8
from reconv.data.decode.jpeg_header import count_scans
from reconv.data.stage_timing import record_stage
from reconv.storage import read_limits

MAX_PIXELS = read_limits.IMAGE_PIXELS

# Formats that read a file's own bytes and nothing else.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM")
_JPEG = ("JPEG", "MPO")
_PLAIN_PNM = (b"P1", b"P2", b"P3")
_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")  # the first ones of a file
NEEDS_HEIF = "HEIC images need pillow-heif, which is not installed"
INSTALL_HEIF = "pip install 'reconv[heic]', or convert them to JPEG"
_BITS_PER_SAMPLE, _SAMPLES_PER_PIXEL, _SAMPLE_FORMAT = 258, 277, 339  # TIFF tags
_SAVE_AS = "save it as 8-bit TIFF, PNG or JPEG"
_REPLACE = "replace the file or remove it"
# Pillow warns of large, damaged and oddly written files, with a line of its own source; what matters is an error here.
warnings.filterwarnings("ignore", module=r"PIL\.")
RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}


@cache
def reads_heic() -> bool:
    """True if pillow-heif is installed, which reads HEIC images."""
    return find_spec("pillow_heif") is not None


def formats_of(data: bytes, name: str = "") -> tuple[str, ...]:
    """Pillow's names of the formats that a file may have; raises `DataError` for what is not read."""
    if data[:2] in _PLAIN_PNM and (comments := data.count(b"#")) > read_limits.PNM_COMMENTS:
        raise _too_large(name, f"{comments:,} comments, more than {read_limits.PNM_COMMENTS:,}")
    if data[4:8] != b"ftyp" or data[8:12] not in _HEIC_BRANDS:
        return FORMATS
    if not reads_heic():
        raise DataError("image does not decode", where=name, why=NEEDS_HEIF, hint=INSTALL_HEIF)
    _register_heif()
    return ("HEIF",)


@cache
def _register_heif() -> None:
    import_module("pillow_heif").register_heif_opener(thumbnails=False)


def decode(data: bytes, channels: int, name: str = "") -> U8:
    """The image as [height, width, channels], upright."""
    return to_array(decode_image(data, channels, name))


def decode_image(data: bytes, channels: int, name: str = "", apply_exif: bool = True) -> Image.Image:
    """The image in mode L (1 channel) or RGB (3), rotated as its EXIF orientation asks unless `apply_exif` is off."""
    began_s = time.perf_counter()
    try:
        with Image.open(io.BytesIO(data), formats=formats_of(data, name)) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                raise _too_large(name, f"{opened.width} x {opened.height} pixels, more than {MAX_PIXELS:,}")
            if opened.format in _JPEG and (scans := count_scans(data)) > read_limits.JPEG_SCANS:
                raise _too_large(name, f"{scans:,} scans, more than {read_limits.JPEG_SCANS}")
            opened.load()
            if apply_exif:  # in place: otherwise every image is copied, and few are rotated
                ImageOps.exif_transpose(opened, in_place=True)
        image = convert_mode(opened, channels, name)
    except (DataError, MemoryError):  # running out of memory does not make the file a bad one
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_large(name, str(error)) from error
    except UnidentifiedImageError as error:
        raise unidentified(data, name) from error
    except Exception as error:  # damaged bytes may raise anything in a decoder
        why = f"the file is truncated or damaged: {error}"
        raise DataError("image does not decode", where=name, why=why, hint=_REPLACE) from error
    record_stage("decode", began_s)
    return image


def unidentified(data: bytes, name: str) -> DataError:
    """The error for a file that no decoder recognizes."""
    if not data:
        return DataError("image file is empty", where=name, why="nothing was written to it", hint=_REPLACE)
    if (kind := describe_tiff(data)) is not None:
        why = f"it has {kind}; supported are 8 and 16 bits, palettes and CMYK, and 32-bit float in gray"
        return DataError("this kind of TIFF is not supported", where=name, why=why, hint=_SAVE_AS)
    why = f"it is none of {', '.join(FORMATS)}, or its first bytes are damaged"
    return DataError("image does not decode", where=name, why=why, hint=_REPLACE)


def to_image(data: bytes | U8, channels: int, name: str = "") -> Image.Image:
    """An encoded file, or pixels [height, width, 1 or 3], as a Pillow image of `channels` channels."""
    if isinstance(data, bytes):
        return decode_image(data, channels, name)
    return convert_mode(Image.fromarray(data[:, :, 0] if data.shape[2] == 1 else data), channels)


def to_array(image: Image.Image) -> U8:
    """The image as [height, width, channels]."""
    pixels: U8 = np.asarray(image, dtype=np.uint8).reshape(image.height, image.width, len(image.getbands()))
    return pixels


def convert_mode(image: Image.Image, channels: int, name: str = "") -> Image.Image:
    """The image in mode L (1 channel) or RGB (3); `name` is for errors."""
    mode = "L" if channels == 1 else "RGB"
    if image.mode == mode:
        return image
    if image.mode == "I" and image.format == "TIFF":
        image = Image.fromarray(_integers_to_8_bit(np.asarray(image), name))
    elif image.mode.startswith("I"):
        wide = np.clip(np.asarray(image), 0, 65535).astype(np.uint16)
        image = Image.fromarray((wide >> 8).astype(np.uint8))
    elif image.mode == "F":
        image = Image.fromarray(_floats_to_8_bit(np.asarray(image), name))
    elif image.mode in ("P", "PA"):
        # Pillow warns when a palette with transparency is converted without an alpha channel in between.
        image = image.convert("RGBA")
    return image.convert(mode)


def _integers_to_8_bit(values: npt.NDArray[np.int32], name: str) -> U8:
    """Signed or 32-bit integers of a TIFF, which may hold 8 or 16 bits."""
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 65535:
        why = f"its integers are {low} to {high}; only 0 to 255 and 0 to 65535 have a known meaning"
        raise DataError("these pixel values are not supported", where=name, why=why, hint=_SAVE_AS)
    return (values if high < 256 else values >> 8).astype(np.uint8)


def _floats_to_8_bit(values: npt.NDArray[np.float32], name: str) -> U8:
    if not np.isfinite(values).all():
        why = "some values are not finite"
        raise DataError("these pixel values are not supported", where=name, why=why, hint=_SAVE_AS)
    scale = 255 if 0 < values.max() <= 1 else 1
    return np.clip(values * scale, 0, 255).astype(np.uint8)


def describe_tiff(data: bytes) -> str | None:
    """The samples of a TIFF file, such as `3 samples of 32-bit float per pixel`; None if it is no readable TIFF."""
    try:
        tags = ImageFileDirectory_v2(data[:8])
        file = io.BytesIO(data)
        file.seek(tags.next)
        tags.load(file)
        bits, num_samples = tags[_BITS_PER_SAMPLE], tags.get(_SAMPLES_PER_PIXEL, 1)
        kinds = tags.get(_SAMPLE_FORMAT, (1,))
    except Exception:  # damaged bytes may raise anything
        return None
    kind = {1: "unsigned integer", 2: "signed integer", 3: "float"}.get(kinds[0], "unknown type")
    return f"{num_samples} sample{'s' * (num_samples != 1)} of {bits[0]}-bit {kind} per pixel"


def _too_large(name: str, why: str) -> DataError:
    return DataError("image is too large to decode safely", where=name, why=why, hint="shrink the file or remove it")
