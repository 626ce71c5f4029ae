"""Two small photo datasets for the golden runs: a folder per class, and Pascal VOC."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("cat", "dog", "owl")


def _write_photo(path: Path, height: int, width: int, seed: int) -> None:
    """Write blocks of color with noise as JPEG: integers alone, so that no library's sine decides a pixel."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(30, 226, (-(-height // 8), -(-width // 8), 3))
    pixels = np.kron(blocks, np.ones((8, 8, 1), dtype=np.int64))[:height, :width]
    pixels = np.clip(pixels + rng.integers(-20, 21, pixels.shape), 0, 255).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, "JPEG", quality=90, subsampling=2)


def write_photo_folder(root: Path) -> Path:
    """Write 24 training and 6 validation images of three classes, of several sizes."""
    for split, count in (("train", 8), ("val", 2)):
        for label, name in enumerate(CLASSES):
            for number in range(count):
                seed = 100 * label + number + 1000 * (split == "val")
                _write_photo(root / split / name / f"{number}.jpg", 40 + 3 * number, 60 - 2 * number, seed)
    return root


def write_voc(root: Path) -> Path:
    """Write 8 training and 3 validation images with one or two boxes each."""
    for folder in ("Annotations", "ImageSets/Main"):
        (root / folder).mkdir(parents=True)
    for split, stems in (("trainval", range(8)), ("test", range(8, 11))):
        (root / "ImageSets" / "Main" / f"{split}.txt").write_text("".join(f"{stem:06}\n" for stem in stems))
        for stem in stems:
            height, width = 60 + stem, 90 - 2 * stem
            _write_photo(root / "JPEGImages" / f"{stem:06}.jpg", height, width, 5000 + stem)
            boxes = [("dog", 5 + stem, 8, 40 + stem, 50), ("person", 30, 12 + stem, 70, 55)][: 1 + stem % 2]
            objects = "".join(
                f"<object><name>{name}</name><difficult>{int(stem == 9)}</difficult><bndbox><xmin>{left}</xmin>"
                f"<ymin>{top}</ymin><xmax>{right}</xmax><ymax>{bottom}</ymax></bndbox></object>"
                for name, left, top, right, bottom in boxes
            )
            size = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
            (root / "Annotations" / f"{stem:06}.xml").write_text(f"<annotation>{size}{objects}</annotation>")
    return root
