"""The images that an exported model is checked with, as files: validation images, or those of a folder, and test images
that every preprocessing must read alike: odd sizes, color modes, EXIF orientation."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from reconv.build.data import limit_samples
from reconv.core.errors import DataError, UsageError
from reconv.data.dataset import Dataset, sample_files
from reconv.data.decode.pillow import to_image
from reconv.detection.annotation import Annotation
from reconv.inference.eval_data import open_eval_set
from reconv.inference.image_input import image_files
from reconv.inference.predictor import Predictor

_ORIENTATION = 0x0112  # EXIF
_ROTATED = 6


@dataclass(frozen=True, slots=True)
class GateImage:
    """An image file; in a temporary folder, as a link to the original where that is a file."""

    name: str  # for people
    path: Path
    target: int | None = None  # the class index; None: not known, or not a single one
    annotation: Annotation | None = None  # detection: the boxes; None: not known


@dataclass(frozen=True, slots=True)
class GateImages:
    """The images, those of the dataset first and in its order, and where they come from."""

    images: Sequence[GateImage]
    origin: str
    dataset: Dataset | None  # None: images of a folder
    num_probes: int  # the test images, which are the last ones


def collect_images(
    predictor: Predictor, images: str | Path | None, data: str | Path | None, samples: int | None, folder: Path
) -> GateImages:
    """Validation images of the run, or of `data`, or images of a folder, and the test images, as files in `folder`."""
    probes = list(_probe_images(predictor.recipe.data.preprocess.size, folder))
    if images is not None:
        found = [file.path for file in image_files(Path(images))]
        links = [GateImage(str(path), _link(path, folder / f"{n:08d}")) for n, path in enumerate(found[:samples])]
        return GateImages([*links, *probes], f"{len(links):,} images of {images}", None, len(probes))
    try:
        whole = open_eval_set(predictor.recipe, predictor.model_classes, data, None)
    except (DataError, UsageError) as error:
        raise type(error)(
            f"the exported model cannot be checked: {error.what}",
            where=error.where,
            why=error.why,
            hint=f"{error.hint + ', or ' if error.hint else ''}check it with other images: --images DIR",
        ) from error
    dataset = limit_samples(whole, samples)
    origin = f"{len(dataset):,} of {len(whole):,} images: {whole.origin}"
    return GateImages([*_dataset_images(dataset, folder), *probes], origin, dataset, len(probes))


def _dataset_images(dataset: Dataset, folder: Path) -> Iterator[GateImage]:
    """Each sample as a file: a link to its own, else its encoded bytes, else its pixels as PNG."""
    found = sample_files(dataset, np.arange(len(dataset)))
    for index in range(len(dataset)):
        path = folder / f"{index:08d}"
        if found is not None:
            original = Path(os.fsdecode(found[0][index]))
            target = int(found[1][index]) if found[1].ndim == 1 else None
            yield GateImage(str(original), _link(original, path), target)
            continue
        sample = dataset[index]
        if isinstance(sample.data, bytes):
            path.write_bytes(sample.data)
        else:
            to_image(sample.data, sample.data.shape[2]).save(path, "PNG")
        is_single = sample.labels is None and sample.annotation is None
        yield GateImage(sample.name, path, sample.target if is_single else None, sample.annotation)


def _link(original: Path, path: Path) -> Path:
    path.symlink_to(original.absolute())
    return path


def _probe_images(size: int, folder: Path) -> Iterator[GateImage]:
    """Test images: small patterns in all color modes, larger and smaller than the network's input, upright or not."""
    rows, columns = np.mgrid[0 : size * 2 + 3, 0 : size * 3 + 1]
    ramps = [columns * 255 // columns.max(), rows * 255 // rows.max(), (rows * 7 + columns * 13) % 256]
    color = Image.fromarray(np.stack(ramps, axis=2).astype(np.uint8))
    gray = Image.fromarray(((rows * columns) % 256).astype(np.uint8))
    deep = Image.fromarray(((rows * 251 + columns * 509) % 65536).astype(np.uint16))
    rotated = Image.Exif()
    rotated[_ORIENTATION] = _ROTATED
    alpha = color.copy()
    alpha.putalpha(gray)
    images = {
        "rgb.png": color,
        "gray.png": gray,
        "gray16.png": deep,
        "alpha.png": alpha,
        "palette.png": color.quantize(64),
        "one-bit.png": gray.convert("1"),
        "cmyk.jpg": color.convert("CMYK"),
        "tall.png": color.crop((5, 0, 5 + size // 2 + 1, size * 2)),
        "thin.png": color.crop((0, 0, size * 3, 1)),
        "small.png": color.crop((0, 0, size // 2 + 1, size // 3 + 1)),
    }
    encoded = {name: _encode(image, "JPEG" if name.endswith("jpg") else "PNG") for name, image in images.items()}
    encoded["rotated.jpg"] = _encode(color, "JPEG", rotated)
    for name, content in encoded.items():
        path = folder / f"test-{name}"
        path.write_bytes(content)
        yield GateImage(f"test image {name}", path)


def _encode(image: Image.Image, kind: str, exif: Image.Exif | None = None) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **({} if exif is None else {"exif": exif}))
    return file.getvalue()
