"""What becomes of one sample on its way into another form.

Owns limits of size, JPEG quality and repairs. Refuses to know files and shards. Invariant: the result is a function of
the sample and the form; bytes that nothing asks to change are passed on as they are.
"""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass, replace
from typing import Literal

import numpy as np
from PIL import Image, UnidentifiedImageError, features
from PIL import __version__ as pillow_version

from reconv.data.dataset import U8, Sample
from reconv.data.decode.decode import FORMATS, MAX_PIXELS, decode_picture, picture
from reconv.errors import DataError, UsageError

DEFAULT_QUALITY = 90
_REPAIR_QUALITY = 100  # of the few images that are encoded anew only because they are no RGB JPEG
# A restart after every row of blocks: two bytes and some bits, for which a crop decodes no row above it.
_LAYOUT = {"restart_marker_rows": 1}
_GREY_MODES = ("1", "L", "LA", "F")
# Formats that every reader of folders and tars takes; others become PNG there.
_ENDINGS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp", "BMP": "bmp", "TIFF": "tif"}

Wanted = Literal["any", "file", "jpeg"]  # pixels or a file; a file; an RGB or grey JPEG


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How images are to be kept; without any of it, as they are."""

    raw: bool = False
    longest: int | None = None  # pixels; larger images are made smaller, never the reverse
    shortest: int | None = None
    quality: int | None = None  # encodes every image anew

    def __post_init__(self) -> None:
        if self.longest is not None and self.shortest is not None:
            raise UsageError("--longest and --shortest exclude each other", then="name the one that you mean")
        if self.raw and self.quality is not None:
            raise UsageError("--raw keeps pixels, and --quality is for JPEG", then="leave one of them out")

    @property
    def words(self) -> str:
        """The form in words; empty if images stay as they are."""
        limits = (("longest", self.longest), ("shortest", self.shortest))
        sides = [f"{name} side at most {side}" for name, side in limits if side]
        kept = ["raw pixels"] if self.raw else []
        kept += [f"JPEG quality {self.quality or DEFAULT_QUALITY}"] if self.quality or (sides and not self.raw) else []
        return ", ".join((*kept, *sides))

    def facts(self, wanted: Wanted) -> dict[str, object]:
        """What decides the bytes; the encoder is part of it where images are encoded anew."""
        facts: dict[str, object] = dict(asdict(self))
        if self != OutputFormat() or wanted == "jpeg":
            facts["encoder"] = f"Pillow {pillow_version}, libjpeg-turbo {features.version('libjpeg_turbo')}"
            facts["layout"] = _LAYOUT
        return facts


@dataclass(frozen=True, slots=True)
class Formed:
    """A sample as it will be written: its file's ending (empty for pixels), what was repaired, and if it changed."""

    sample: Sample
    ending: str
    repaired: str = ""
    is_changed: bool = True


def formed(sample: Sample, form: OutputFormat, wanted: Wanted) -> Formed:
    """The sample in its new form."""
    if isinstance(sample.data, bytes):
        return _formed_file(sample, sample.data, form, wanted)
    height, width, channels = sample.data.shape
    small = _smaller(width, height, form)
    if small is None and form.quality is None and wanted == "any":
        return Formed(sample, "", is_changed=False)
    image = picture(sample.data, channels)
    image = image if small is None else image.resize(small, Image.Resampling.LANCZOS)
    return _kept(sample, image, form, wanted, is_lossless=True)


def _formed_file(sample: Sample, data: bytes, form: OutputFormat, wanted: Wanted) -> Formed:
    kind, mode, size = _look(data, sample.name)
    fault = ""
    if wanted == "jpeg":
        fault = kind if kind != "JPEG" else "CMYK" if mode == "CMYK" else ""
    small = _smaller(*size, form)
    is_rare = wanted == "file" and kind not in _ENDINGS
    if small is None and not fault and not is_rare and not form.raw and form.quality is None:
        return Formed(sample, _ENDINGS.get(kind, ""), is_changed=False)
    is_grey = mode in _GREY_MODES or mode.startswith("I")
    image = decode_picture(data, 1 if is_grey and not fault else 3, sample.name)
    # Only decoding shows whether the image lies on its side.
    small = _smaller(*image.size, form)
    image = image if small is None else image.resize(small, Image.Resampling.LANCZOS)
    if fault and form == OutputFormat():
        return Formed(replace(sample, data=_jpeg(image, _REPAIR_QUALITY)), "jpg", fault)
    is_lossless = is_rare and small is None
    return replace(_kept(sample, image, form, wanted, is_lossless), repaired=fault)


def _kept(sample: Sample, image: Image.Image, form: OutputFormat, wanted: Wanted, is_lossless: bool) -> Formed:
    """The image as pixels, PNG or JPEG: what must stay without loss does, unless a quality is named."""
    if wanted == "any" and (form.raw or (is_lossless and form.quality is None)):
        pixels: U8 = np.asarray(image, np.uint8).reshape(image.height, image.width, len(image.getbands()))
        return Formed(replace(sample, data=pixels), "")
    if wanted == "file" and is_lossless and form.quality is None:
        file = io.BytesIO()
        image.save(file, "PNG")
        return Formed(replace(sample, data=file.getvalue()), "png")
    quality = form.quality or (_REPAIR_QUALITY if is_lossless else DEFAULT_QUALITY)
    return Formed(replace(sample, data=_jpeg(image, quality)), "jpg")


def _jpeg(image: Image.Image, quality: int) -> bytes:
    file = io.BytesIO()
    sampling = "4:4:4" if quality == _REPAIR_QUALITY else "4:2:0"
    image.save(file, "JPEG", quality=quality, subsampling=sampling, **_LAYOUT)
    return file.getvalue()


def _smaller(width: int, height: int, form: OutputFormat) -> tuple[int, int] | None:
    """The size within the limit; None if the image is within it already."""
    side, limit = (max(width, height), form.longest) if form.longest else (min(width, height), form.shortest)
    if limit is None or side <= limit:
        return None
    return max(1, round(width * limit / side)), max(1, round(height * limit / side))


def size_of(data: bytes, name: str) -> tuple[int, int]:
    """Width and height, from the beginning of the file."""
    return _look(data, name)[2]


def _look(data: bytes, name: str) -> tuple[str, str, tuple[int, int]]:
    """Format, mode and size, from the beginning of the file."""
    why = f"it is none of {', '.join(FORMATS)}, or its beginning is damaged"
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            if opened.width * opened.height <= MAX_PIXELS:
                return opened.format or "", opened.mode, opened.size
            why = f"{opened.width} x {opened.height} pixels, more than {MAX_PIXELS:,}"
    except UnidentifiedImageError:
        pass
    except Exception as error:  # damaged bytes may raise anything in a decoder
        why = str(error)
    raise DataError("not an image that can be converted", where=name, why=why, then="replace the file or remove it")
