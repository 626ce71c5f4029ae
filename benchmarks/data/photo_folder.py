"""Make a folder dataset of small photographs: random crops of the images in a folder, as JPEG files.

    python -m benchmarks.data.photo_folder IMAGES OUT [--train 9469] [--val 1000] [--classes 10] [--size 128]
                                           [--quality 90]

An image belongs to one class, so that a network can learn them. The same arguments give the same pixels.
"""

from __future__ import annotations

import argparse
import random
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from PIL import Image


def write_crop(job: tuple[int, Path, Path], size: int, quality: int) -> None:
    """Write one random crop of an image; the job's number decides which."""
    number, source, target = job
    chosen = random.Random(number)
    with Image.open(source) as opened:
        image = opened.convert("RGB")
    side = int(min(image.size) * chosen.uniform(0.5, 1.0))
    left, top = (chosen.randint(0, length - side) for length in image.size)
    crop = image.resize((size, size), Image.Resampling.BILINEAR, (left, top, left + side, top + side))
    crop.save(target, quality=quality)


def crop_jobs(images: list[Path], out: Path, num_classes: int, counts: dict[str, int]) -> list[tuple[int, Path, Path]]:
    """A crop to make, and its file: OUT/SPLIT/CLASS/NUMBER.jpg."""
    jobs: list[tuple[int, Path, Path]] = []
    for split, count in counts.items():
        for name in range(num_classes):
            (out / split / f"class{name}").mkdir(parents=True)
        for number in range(count):
            image = number % len(images)
            target = out / split / f"class{image % num_classes}" / f"{number:06}.jpg"
            jobs.append((len(jobs), images[image], target))
    return jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int, default=9469)
    parser.add_argument("--val", type=int, default=1000)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--quality", type=int, default=90)
    options = parser.parse_args()
    images = sorted(path for path in options.images.iterdir() if path.suffix.lower() in (".jpg", ".jpeg"))
    jobs = crop_jobs(images, options.out, options.classes, {"train": options.train, "val": options.val})
    with ProcessPoolExecutor() as pool:
        for _ in pool.map(partial(write_crop, size=options.size, quality=options.quality), jobs, chunksize=64):
            pass
    print(f"{len(jobs)} crops of {len(images)} images in {options.out}")


if __name__ == "__main__":
    main()
