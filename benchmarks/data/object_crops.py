"""Cut the objects of a detection dataset out into class folders: photographs to train a classifier on.

    python -m benchmarks.data.object_crops VOC_OR_COCO OUT [--shortest 144] [--min-side 40] [--quality 80]

Each object that is not difficult, crowded or smaller than --min-side becomes OUT/<split>/<class>/NAME.jpg, with a
margin of a tenth of its size on each side, scaled so that its shorter side has at most --shortest pixels.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from reconv.data.boxes.annotations import DetectionDataset
from reconv.data.decode.pillow import decode_image
from reconv.data.readers.dataset_factory import open_dataset
from reconv.recipe.parts.data import DataConfig

CONTEXT = 0.1  # margin around an object, as a fraction of its size


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shortest", type=int, default=144)
    parser.add_argument("--min-side", type=int, default=40)
    parser.add_argument("--quality", type=int, default=80)
    args = parser.parse_args(argv)
    for split in ("train", "val"):
        dataset = open_dataset("auto", args.data, split, DataConfig(), boxes=True)
        assert isinstance(dataset, DetectionDataset)
        count = write_crops(dataset, args.out / split, args.shortest, args.min_side, args.quality)
        print(f"{split}: {count:,} crops")


def write_crops(dataset: DetectionDataset, out: Path, shortest: int, min_side: int, quality: int) -> int:
    """Write the crops of one split; returns how many."""
    count = 0
    for index in range(len(dataset)):
        annotation, sample = dataset.annotation(index), dataset[index]
        assert isinstance(sample.data, bytes)
        image = decode_image(sample.data, 3)
        keep = ~(annotation.is_crowd | annotation.difficult)
        boxes, labels = annotation.boxes_xyxy[keep], annotation.labels[keep]
        for number, ((left, top, right, bottom), label) in enumerate(zip(boxes.tolist(), labels.tolist(), strict=True)):
            width, height = right - left, bottom - top
            if min(width, height) < min_side:
                continue
            margin = (CONTEXT * width, CONTEXT * height)
            crop = image.crop(
                (
                    round(max(0, left - margin[0])),
                    round(max(0, top - margin[1])),
                    round(min(image.width, right + margin[0])),
                    round(min(image.height, bottom + margin[1])),
                )
            )
            scale = min(1.0, shortest / min(crop.size))
            crop = crop.resize((round(crop.width * scale), round(crop.height * scale)), Image.Resampling.BICUBIC)
            folder = out / dataset.class_names[int(label)]
            folder.mkdir(parents=True, exist_ok=True)
            encoded = io.BytesIO()
            crop.save(encoded, "JPEG", quality=quality)
            (folder / f"{index:05d}-{number}.jpg").write_bytes(encoded.getvalue())
            count += 1
    return count


if __name__ == "__main__":
    main()
