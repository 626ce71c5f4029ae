"""Images of a run in its report: sheets of equal tiles are cut up, large images made smaller.

Owns what an image file becomes in a page. Refuses to know what is pictured. Invariant: only
image files inside the run folder get into a page, and all images of a page together stay within a budget.
"""

from __future__ import annotations

import base64
import io
import math
from pathlib import Path
from typing import TYPE_CHECKING

from reconv.logging.events import ImageLogged

if TYPE_CHECKING:
    from PIL.Image import Image

# A page with every image stays below 5 MB; base64 makes a third more of each byte.
BUDGET_BYTES = 2_500_000
_MAX_TILE_SIDE = 160
_MAX_WIDE_TILE_SIDE = 644  # of sheets of one or two columns, where details count
_MAX_PICTURE_SIDE = 1400
# Tiny tiles and drawn grids are small as PNG and are shown enlarged, where the artefacts of JPEG would be seen.
_MAX_PNG_TILE_BYTES = 6_000
_MAX_PNG_PICTURE_BYTES = 300_000


def embed(run_dir: Path, event: ImageLogged, budget_bytes: int) -> list[str] | None:
    """The image as data URIs, one a tile of a sheet; None where the file is gone, no image or over the budget."""
    from PIL import Image, UnidentifiedImageError

    path = (run_dir / event.path).resolve()
    if not path.is_relative_to(run_dir.resolve()) or not path.is_file():
        return None
    try:
        with Image.open(path) as picture:
            picture.load()
            tiles = _cut(picture, event)
            uris = [_uri(tile, event.columns) for tile in tiles]
    except (UnidentifiedImageError, OSError, ValueError):
        return None
    return uris if sum(map(len, uris)) <= budget_bytes else None


def _cut(picture: Image, event: ImageLogged) -> list[Image]:
    """The tiles of a sheet in reading order, as many as there are captions; a single image as it is."""
    if event.columns <= 0 or not event.captions:
        return [picture]
    rows = math.ceil(len(event.captions) / event.columns)
    pitch_x, pitch_y = (picture.width + event.gap_px) // event.columns, (picture.height + event.gap_px) // rows
    width, height = max(1, pitch_x - event.gap_px), max(1, pitch_y - event.gap_px)
    corners = [(n % event.columns * pitch_x, n // event.columns * pitch_y) for n in range(len(event.captions))]
    return [picture.crop((x, y, x + width, y + height)) for x, y in corners]


def _uri(picture: Image, columns: int) -> str:
    """An image as a data URI: PNG where that is small, else JPEG."""
    from PIL.Image import Resampling

    is_tile, tile_side = columns > 0, _MAX_TILE_SIDE if columns > 2 else _MAX_WIDE_TILE_SIDE
    max_side = tile_side if is_tile else _MAX_PICTURE_SIDE
    shown = picture.convert("L" if picture.mode in ("1", "L", "I", "I;16", "F") else "RGB")
    if max(shown.size) > max_side:
        shown.thumbnail((max_side, max_side), Resampling.LANCZOS)
    file, kind = io.BytesIO(), "png"
    shown.save(file, "PNG")
    if len(file.getvalue()) > (_MAX_PNG_TILE_BYTES if is_tile else _MAX_PNG_PICTURE_BYTES):
        file, kind = io.BytesIO(), "jpeg"
        shown.save(file, "JPEG", quality=85)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
