"""Images embedded in a report: grids are cut into tiles, large images are scaled down.

Only image files inside the run directory are embedded, and all images of a page stay within a size budget.
"""

from __future__ import annotations

import base64
import io
import math
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from reconv.logging.events import IMAGE_FORMATS, ImageLogged

if TYPE_CHECKING:
    from PIL.Image import Image

# A page stays below 5 MB; base64 adds a third.
BUDGET_BYTES = 2_500_000
# The largest side of a tile by the columns of its grid: few columns are for images where details matter.
_MAX_TILE_SIDES = {1: 644, 2: 644, 3: 320, 4: 320}
_MAX_TILE_SIDE = 160
_MAX_IMAGE_SIDE = 1400
# Tiny images are small as PNG and are shown enlarged, where JPEG artifacts would be visible.
_MAX_PNG_TILE_BYTES = 6_000
_MAX_PNG_IMAGE_BYTES = 300_000
_MAX_GAP_PX = 64
_MAX_ESTIMATE = 3  # times the bytes of a PNG that `_estimated_png_bytes` may give


def embed(run_dir: Path, event: ImageLogged, budget_bytes: int) -> list[str] | None:
    """The image as data URIs, one per tile of a grid; None if the file is missing, no image or over the budget."""
    from PIL import Image

    try:
        with Image.open(event.file(run_dir), formats=IMAGE_FORMATS) as image:
            image.load()
            tiles = _tiles(image, event)
            uris = [_uri(tile, event.columns) for tile in tiles]
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
    return uris if sum(map(len, uris)) <= budget_bytes else None


def _tiles(image: Image, event: ImageLogged) -> list[Image]:
    """The tiles of a grid row by row, one per caption; a single image as it is."""
    if event.columns <= 0 or not event.captions:
        return [image]
    rows = math.ceil(len(event.captions) / event.columns)
    gap_px = max(0, min(event.gap_px, _MAX_GAP_PX))
    pitch_x, pitch_y = (image.width + gap_px) // event.columns, (image.height + gap_px) // rows
    width, height = max(1, pitch_x - gap_px), max(1, pitch_y - gap_px)
    corners = [(n % event.columns * pitch_x, n // event.columns * pitch_y) for n in range(len(event.captions))]
    return [image.crop((x, y, x + width, y + height)) for x, y in corners]


def _uri(image: Image, columns: int) -> str:
    """An image as a data URI: PNG if that is small, else JPEG."""
    from PIL.Image import Resampling

    is_tile, tile_side = columns > 0, _MAX_TILE_SIDES.get(columns, _MAX_TILE_SIDE)
    max_side = tile_side if is_tile else _MAX_IMAGE_SIDE
    shown = image.convert("L" if image.mode in ("1", "L", "I", "I;16", "F") else "RGB")
    if max(shown.size) > max_side:
        shown.thumbnail((max_side, max_side), Resampling.LANCZOS)
    max_bytes = _MAX_PNG_TILE_BYTES if is_tile else _MAX_PNG_IMAGE_BYTES
    # Compressing a photograph as PNG takes 20 times as long as a JPEG, only to find it too large.
    is_photograph = _estimated_png_bytes(shown) > _MAX_ESTIMATE * max_bytes
    content, kind = b"" if is_photograph else _encoded(shown, "PNG"), "png"
    if is_photograph or len(content) > max_bytes:
        content, kind = _encoded(shown, "JPEG", quality=85), "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _estimated_png_bytes(image: Image) -> int:
    """The bytes of differences between neighboring pixels, as PNG stores them, after the fastest compression.

    Every fourth row stands for four: compressing them all takes as long as the rest of embedding an image.
    """
    import numpy as np

    pixels = np.asarray(image).reshape(image.height, image.width, -1)
    rows = pixels[::4]
    return len(zlib.compress(np.diff(rows, axis=1).tobytes(), 1)) * image.height // len(rows)


def _encoded(image: Image, file_format: str, **options: int) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()
