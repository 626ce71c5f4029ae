"""From encoded bytes to the uint8 square the network's device gets.

Owns decoding and resizing (Pillow). Refuses to know files, batches and normalisation. Invariant: any image that
decodes becomes [channels, size, size] uint8; one that does not is a `DataError` with its name; colours are those of
the upright image, with an alpha channel dropped, 16-bit grey cut to its upper 8 bits.
"""

from __future__ import annotations

import io
import time
import warnings

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from reconv.data.dataset import U8
from reconv.data.pipeline.stage_timing import spent
from reconv.errors import DataError
from reconv.recipe.data_fields import AugmentConfig, PreprocessConfig

MAX_PIXELS = 89_478_485  # a quarter of a GiB as RGB; where Pillow starts to warn of decompression bombs

# Formats that read a file's own bytes and nothing else.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM")
_REPLACE = "replace the file or remove it"
# Pillow warns of large, damaged and oddly written files, with a line of its own source; what matters is an error here.
warnings.filterwarnings("ignore", module=r"PIL\.")
FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}


def decode(data: bytes, channels: int, name: str = "") -> U8:
    """The image as [height, width, channels], upright."""
    return pixels_of(decode_picture(data, channels, name))


def decode_picture(data: bytes, channels: int, name: str = "", is_turned: bool = True) -> Image.Image:
    """The image in mode L (1 channel) or RGB (3); `is_turned` upright where its EXIF data say how, else as stored."""
    began_s = time.perf_counter()
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                raise _too_large(name, f"{opened.width} x {opened.height} pixels, more than {MAX_PIXELS:,}")
            opened.load()
            if is_turned:  # in place: otherwise every image is copied, and few lie on their side
                ImageOps.exif_transpose(opened, in_place=True)
        image = convert_mode(opened, channels)
    except (DataError, MemoryError):  # a machine without memory is no damaged file, and must not count as one
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_large(name, str(error)) from error
    except UnidentifiedImageError as error:
        what = "image does not decode" if data else "image file is empty"
        why = (
            f"it is none of {', '.join(FORMATS)}, or its beginning is damaged" if data else "nothing was written to it"
        )
        raise DataError(what, where=name, why=why, then=_REPLACE) from error
    except Exception as error:  # damaged bytes may raise anything in a decoder
        why = f"the file is half-written or damaged: {error}"
        raise DataError("image does not decode", where=name, why=why, then=_REPLACE) from error
    spent("decode", began_s)
    return image


def host_eval(image: U8, preprocess: PreprocessConfig) -> U8:
    """The centre of the image as evaluation sees it: [height, width, channels] to [channels, size, size]."""
    return eval_picture(picture(image, preprocess.channels), preprocess)


def picture(image: U8, channels: int) -> Image.Image:
    """Pixels [height, width, 1 or 3] as a Pillow image of `channels` channels."""
    return convert_mode(Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image), channels)


def any_picture(data: bytes | U8, channels: int, name: str = "") -> Image.Image:
    """A sample's encoded file or pixels as a Pillow image of `channels` channels."""
    return decode_picture(data, channels, name) if isinstance(data, bytes) else picture(data, channels)


def eval_picture(image: Image.Image, preprocess: PreprocessConfig) -> U8:
    """`host_eval` of a Pillow image."""
    size, box = preprocess.size, eval_box(image.width, image.height, preprocess)
    if box[2] - box[0] == box[3] - box[1] == size:
        return _planes(image.crop(tuple(round(side) for side in box)))  # type: ignore[arg-type]
    # Only the centre is computed: resizing a 1 x 5000 image whole would take a gigabyte.
    return _planes(image.resize((size, size), FILTERS[preprocess.interpolation], box=box))


def eval_box(width: int, height: int, preprocess: PreprocessConfig) -> tuple[float, float, float, float]:
    """The part of an image of these sides (left, top, right, bottom) that evaluation sees as the square."""
    size, resize = preprocess.size, shorter_side(preprocess)
    if resize is None:
        return 0, 0, width, height
    shorter = min(width, height)
    new_width, new_height = (max(resize, resize * side // shorter) for side in (width, height))
    left, top = round((new_width - size) / 2), round((new_height - size) / 2)
    across, down = width / new_width, height / new_height
    return left * across, top * down, (left + size) * across, (top + size) * down


def shorter_side(preprocess: PreprocessConfig) -> int | None:
    """The shorter side of the resized image before its centre is cut out; None: straight to the square."""
    if preprocess.resize == "auto-ratio":
        return preprocess.size * 256 // 224
    if preprocess.resize == "auto-plus32":
        return preprocess.size + 32
    return preprocess.resize


def train_preprocess(preprocess: PreprocessConfig, augment: AugmentConfig, size: int) -> PreprocessConfig:
    """What training images are made by: another size keeps the share of the image that the centre crop shows."""
    resize = preprocess.resize
    if isinstance(resize, int):
        resize = max(size, round(resize * size / preprocess.size))
    interpolation = augment.interpolation or preprocess.interpolation
    return preprocess.model_copy(update={"size": size, "resize": resize, "interpolation": interpolation})


def convert_mode(image: Image.Image, channels: int) -> Image.Image:
    """The image in mode L (1 channel) or RGB (3 channels)."""
    wanted = "L" if channels == 1 else "RGB"
    if image.mode == wanted:
        return image
    if image.mode.startswith("I"):
        wide = np.clip(np.asarray(image), 0, 65535).astype(np.uint16)
        image = Image.fromarray((wide >> 8).astype(np.uint8))
    elif image.mode == "F":
        image = Image.fromarray(np.clip(np.asarray(image), 0, 255).astype(np.uint8))
    elif image.mode in ("P", "PA"):
        # Pillow warns when a palette with transparency is converted without an alpha channel in between.
        image = image.convert("RGBA")
    return image.convert(wanted)


def pixels_of(image: Image.Image) -> U8:
    """The image as [height, width, channels]."""
    pixels: U8 = np.asarray(image, dtype=np.uint8).reshape(image.height, image.width, len(image.getbands()))
    return pixels


def _planes(image: Image.Image) -> U8:
    return np.ascontiguousarray(pixels_of(image).transpose(2, 0, 1))


def _too_large(name: str, why: str) -> DataError:
    return DataError("image is too large to decode safely", where=name, why=why, then="shrink the file or remove it")
