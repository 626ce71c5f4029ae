"""Near duplicates: images that are the same picture after re-encoding, resizing or cropping.

Descriptors propose pairs, and a search for one thumbnail inside the other decides: at every scale and position the
normalized correlation of brightness, as in template matching, and at the best one the difference of the colors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from reconv.core.errors import DataError
from reconv.data.dataset import F64, I64, U8, Dataset, Sample
from reconv.data.decode.pillow import to_image
from reconv.review.neighbors import F32, nearest_neighbors

THUMBNAIL_PX = 48  # the longer side
MIN_SIDE_PX = 24  # smaller images look alike: only identical ones are copies
NUM_CANDIDATES = 6  # of each image and descriptor
MIN_SIMILARITY = 0.85  # cosine of the descriptors of a candidate
MIN_COARSE = 0.85  # correlation of thumbnails of half the size: pairs below are not looked at closely
MIN_CORRELATION = 0.9
MIN_DETAIL = 0.82  # correlation of differences between pixels, which tells two skies apart
MAX_COLOR_DIFFERENCE = 0.10  # mean over the region, of 1
MIN_CROP = 0.55  # of the sides
_SCALES = tuple(float(scale) for scale in np.geomspace(1.0, MIN_CROP, 12))
_FINER = (1.0, 1.02, 0.98, 1.04, 0.96, 1.06, 0.94)
_MIN_PART = 0.95 * MIN_CROP
_MIN_CONTRAST = 0.03  # standard deviation of the brightness: of a flat image nothing can be told
_BATCH = 256


@dataclass(frozen=True, slots=True, eq=False)
class Thumbnails:
    """Small versions of n images; those that cannot be read have the height 0 and an error."""

    pixels: U8  # [n, side, side, 3], the image at the top left
    shapes: I64  # [n, 2] height and width of the thumbnail
    sizes: I64  # [n, 2] height and width of the upright image
    digests: Sequence[bytes]  # of the decoded pixels
    errors: Sequence[str]  # empty: it could be read

    @property
    def is_read(self) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """True for images that could be read [n]."""
        return self.shapes[:, 0] > 0


@dataclass(frozen=True, slots=True)
class Copy:
    """Two images that show the same, the one with more pixels first."""

    first: int
    second: int
    score: float  # correlation; 1: identical pixels


def make_thumbnails(
    samples: Sequence[tuple[Dataset, int]], num_threads: int, progress: Callable[[int], None] = lambda done: None
) -> Thumbnails:
    """Thumbnails of samples, read by several threads."""
    pixels = np.zeros((len(samples), THUMBNAIL_PX, THUMBNAIL_PX, 3), np.uint8)
    shapes, sizes = np.zeros((len(samples), 2), np.int64), np.zeros((len(samples), 2), np.int64)

    def fill(row: int) -> tuple[bytes, str]:
        dataset, index = samples[row]
        try:
            image = sample_image(dataset[index])
        except DataError as error:
            return b"", error.why or error.what
        scale = THUMBNAIL_PX / max(image.size)
        width, height = (max(1, round(side * scale)) for side in image.size)
        small = image.resize((width, height), Image.Resampling.BILINEAR, reducing_gap=2.0)
        pixels[row, :height, :width] = np.asarray(small)
        shapes[row], sizes[row] = (height, width), (image.height, image.width)
        return hashlib.blake2b(image.tobytes() + repr(image.size).encode(), digest_size=16).digest(), ""

    with ThreadPoolExecutor(max(1, num_threads)) as pool:
        outcomes = []
        for outcome in pool.map(fill, range(len(samples))):
            outcomes.append(outcome)
            progress(1)
    return Thumbnails(pixels, shapes, sizes, [digest for digest, _ in outcomes], [why for _, why in outcomes])


def sample_image(sample: Sample) -> Image.Image:
    """The upright RGB image of a sample."""
    channels = 1 if not isinstance(sample.data, bytes) and sample.data.shape[2] == 1 else 3
    return to_image(sample.data, channels, sample.name).convert("RGB")


def find_copies(thumbnails: Thumbnails, features: F32 | None, device: str = "cpu") -> list[Copy]:
    """All pairs of images that are copies, best first; `features` [n, d] of a network propose pairs as well."""
    rows = np.flatnonzero(thumbnails.is_read)
    identical = _identical(thumbnails, rows)
    scores = dict.fromkeys(identical, 1.0)
    large = rows[thumbnails.sizes[rows].min(axis=1) >= MIN_SIDE_PX]
    pairs = np.array(sorted(_candidates(thumbnails, features, large, device) - identical), np.int64).reshape(-1, 2)
    for (first, second), score in zip(pairs.tolist(), _correlations(thumbnails, pairs, device).tolist(), strict=True):
        if score >= MIN_CORRELATION:
            scores[first, second] = score
    num_pixels = thumbnails.sizes.prod(axis=1)
    found = [
        Copy(first, second, score) if num_pixels[first] >= num_pixels[second] else Copy(second, first, score)
        for (first, second), score in scores.items()
    ]
    return sorted(found, key=lambda copy: (-copy.score, copy.first, copy.second))


def _identical(thumbnails: Thumbnails, rows: I64) -> set[tuple[int, int]]:
    """Pairs of images with equal pixels: each with the first of its kind."""
    first: dict[bytes, int] = {}
    return {
        (first[thumbnails.digests[row]], row)
        for row in rows.tolist()
        if first.setdefault(thumbnails.digests[row], row) != row
    }


def _candidates(thumbnails: Thumbnails, features: F32 | None, rows: I64, device: str) -> set[tuple[int, int]]:
    """Pairs of neighbors by layout, by color and by the features of a network."""
    descriptors = [*_descriptors(thumbnails, rows), *([] if features is None else [features[rows]])]
    pairs: set[tuple[int, int]] = set()
    for descriptor in descriptors:
        neighbors, similarities = nearest_neighbors(descriptor, NUM_CANDIDATES, device)
        for at, column in zip(*np.nonzero(similarities >= MIN_SIMILARITY), strict=True):
            row, other = int(rows[at]), int(rows[neighbors[at, column]])
            pairs.add((min(row, other), max(row, other)))
    return pairs


def _descriptors(thumbnails: Thumbnails, rows: I64) -> tuple[F32, F32]:
    """The layout of each image, 8 x 8 gray cells without their mean, and a histogram of its colors."""
    layouts = np.zeros((len(rows), 64), np.float32)
    colors = np.zeros((len(rows), 64), np.float32)
    for at, row in enumerate(rows.tolist()):
        height, width = thumbnails.shapes[row]
        image = thumbnails.pixels[row, :height, :width]
        cells = np.asarray(Image.fromarray(image).convert("L").resize((8, 8), Image.Resampling.BOX), np.float32)
        layouts[at] = (cells - cells.mean()).ravel()
        bins = (image.reshape(-1, 3) // 64).astype(np.int64) @ np.array([16, 4, 1])
        colors[at] = np.sqrt(np.bincount(bins, minlength=64))
    return layouts, colors


def _correlations(thumbnails: Thumbnails, pairs: I64, device: str) -> F64:
    """The correlation of each pair, with either image inside the other; 0 for pairs that are no copies.

    Pairs are compared at their own aspect ratio, and squeezed to squares, as some datasets are.
    """
    best = np.zeros(len(pairs))
    for is_square in (False, True):
        small = _half_size(thumbnails, is_square)
        for ordered in (pairs, pairs[:, ::-1]):
            likely, scales = _search_all(small, ordered, device)
            for row in np.flatnonzero((likely >= MIN_COARSE) & (best < MIN_CORRELATION)).tolist():
                best[row] = _confirm(thumbnails, ordered[row], scales[row], is_square=is_square)
    return best


def _search_all(small: Sequence[Tensor], pairs: I64, device: str) -> tuple[F64, F64]:
    """The highest correlation of the first image of each pair with a region of the second, and the scale of it."""
    best, best_scale = np.zeros(len(pairs)), np.ones(len(pairs))
    for rows in _equal_shapes(small, pairs):
        inside, around = (torch.stack([small[row] for row in pairs[rows, n].tolist()]).to(device) for n in (0, 1))
        for scale, template in _at_scales(inside, around, _SCALES):
            value = _best_match(template, around)[0].cpu().numpy()
            is_better = value > best[rows]
            best[rows[is_better]], best_scale[rows[is_better]] = value[is_better], scale
    return best, best_scale


def _equal_shapes(small: Sequence[Tensor], pairs: I64) -> Iterator[I64]:
    """Groups of pairs of equal shapes, which are searched together."""
    shapes = np.array([[*small[a].shape[1:], *small[b].shape[1:]] for a, b in pairs.tolist()]).reshape(-1, 4)
    order = np.lexsort(shapes.T)
    changes = np.flatnonzero(np.any(np.diff(shapes[order], axis=0) != 0, axis=1)) + 1
    for group in np.split(order, changes):
        yield from (group[start : start + _BATCH] for start in range(0, len(group), _BATCH))


def _half_size(thumbnails: Thumbnails, is_square: bool) -> list[Tensor]:
    """Every thumbnail at half its size [3, h, w], with even sides, so that many have the same shape."""
    small = []
    for row, (height, width) in enumerate(thumbnails.shapes.tolist()):
        sides = (THUMBNAIL_PX, THUMBNAIL_PX) if is_square else (height, width)
        size = [max(2, 2 * round(side / 4)) for side in sides]
        image = _image(thumbnails, row, False) if height else torch.zeros(1, 3, 2, 2)
        small.append(F.interpolate(image, size=size, mode="bilinear", antialias=True, align_corners=False)[0])
    return small


def _image(thumbnails: Thumbnails, row: int, is_square: bool) -> Tensor:
    """One thumbnail [1, 3, h, w], squeezed to a square if that is asked for."""
    height, width = thumbnails.shapes[row]
    image = _as_tensor(thumbnails.pixels[row : row + 1, :height, :width])
    if not is_square:
        return image
    return F.interpolate(image, (THUMBNAIL_PX, THUMBNAIL_PX), mode="bilinear", antialias=True, align_corners=False)


def _at_scales(templates: Tensor, images: Tensor, scales: Sequence[float]) -> Iterator[tuple[float, Tensor]]:
    """The scale, and the templates at that size, for sizes that fit into the images and cover enough of them."""
    (height, width), (outer_height, outer_width) = templates.shape[2:], images.shape[2:]
    fit = min(outer_height / height, outer_width / width)
    for scale in scales:
        size = (max(1, round(height * fit * scale)), max(1, round(width * fit * scale)))
        parts = (size[0] / outer_height, size[1] / outer_width)
        if max(parts) <= 1 and min(parts) >= _MIN_PART:
            yield scale, F.interpolate(templates, size=size, mode="bilinear", antialias=True, align_corners=False)


def _best_match(templates: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """The highest correlation of the brightness of each template [n, 3, h, w] with a region of its image, and where."""
    gray, outer = templates.mean(1), images.mean(1)[None]
    height, width = gray.shape[1:]
    centered = gray - gray.mean((1, 2), keepdim=True)
    products = F.conv2d(outer, centered[:, None], groups=len(gray))[0]
    mean = F.avg_pool2d(outer, (height, width), 1)[0]
    deviation = (F.avg_pool2d(outer.square(), (height, width), 1)[0] - mean.square()).clamp_min(0).sqrt()
    own = centered.square().mean((1, 2)).sqrt()
    correlation = products / (height * width * own[:, None, None] * deviation).clamp_min(1e-9)
    correlation = correlation * ((own > _MIN_CONTRAST)[:, None, None] & (deviation > _MIN_CONTRAST))
    return correlation.flatten(1).max(1)


def _confirm(thumbnails: Thumbnails, pair: I64, scale: float, *, is_square: bool) -> float:
    """The correlation of the first image with a region of the second if colors and details agree as well, else 0.

    Sizes around `scale` are tried, at which half the size correlates best.
    """
    template, image = (_image(thumbnails, row, is_square) for row in pair.tolist())
    best = (0.0, template, image)
    for _, small in _at_scales(template, image, [scale * finer for finer in _FINER]):
        [value], [at] = _best_match(small, image)
        if float(value) > best[0]:
            height, width = small.shape[2:]
            top, left = divmod(int(at), image.shape[3] - width + 1)
            best = float(value), small, image[:, :, top : top + height, left : left + width]
    value, small, region = best
    if value < MIN_CORRELATION or float((region - small).abs().mean()) > MAX_COLOR_DIFFERENCE:
        return 0.0
    return value if _detail_correlation(small, region) >= MIN_DETAIL else 0.0


def _detail_correlation(first: Tensor, second: Tensor) -> float:
    """The correlation of the differences between neighboring pixels of two images [1, 3, h, w]."""
    details = []
    for image in (first, second):
        gray = image[0].mean(0)
        details.append(torch.cat([gray.diff(dim=0).flatten(), gray.diff(dim=1).flatten()]))
    a, b = details
    return float((a * b).sum() / (a.norm() * b.norm()).clamp_min(1e-9))


def _as_tensor(pixels: U8) -> Tensor:
    """Images [n, h, w, 3] as [n, 3, h, w] from 0 to 1."""
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))).float() / 255
