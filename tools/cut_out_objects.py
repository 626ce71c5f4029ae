"""Cut the objects out of images with boxes, as a folder of classes: what a trunk can learn from before its detector.

    python tools/cut_out_objects.py --data VOC --out OBJECTS [--margin 0.1] [--smallest 16]
    reconv train resnet34 --data OBJECTS ...
    reconv train ssd-resnet34-voc --data VOC --init runs/...

Each box becomes a JPEG file with a margin around it, as a share of its sides. Boxes of crowds, difficult ones and those
with a side of less than --smallest pixels are left out. Any data that a detection recipe takes will do.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from reconv.data.boxes.annotations import DetectionDataset
from reconv.data.dataset import Split
from reconv.data.pipeline.box_samples import picture_as_annotated
from reconv.recipe.loader import load
from reconv.trainer.build.datasets import open_split
from reconv.trainer.build.task_builder import with_boxes

RECIPE = "ssd-resnet34-voc"
QUALITY = 95


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--margin", type=float, default=0.1)
    parser.add_argument("--smallest", type=int, default=16)
    given = parser.parse_args()
    recipe = load(RECIPE, [("data.source", "auto", "cut_out_objects")]).recipe
    splits: tuple[Split, ...] = ("train", "val")
    for split in splits:
        source = with_boxes(open_split(recipe, given.data, split))
        counts = _cut(source, given.out / split, given.margin, given.smallest)
        print(f"{split}: {sum(counts.values()):,} objects of {len(counts)} classes from {len(source):,} images")


def _cut(source: DetectionDataset, folder: Path, margin: float, smallest: int) -> Counter[str]:
    """Write every object of a split, and count them by class."""
    for name in source.class_names:
        (folder / name).mkdir(parents=True)
    counts: Counter[str] = Counter()
    for index in range(len(source)):
        sample, said = source.sample(index), source.annotation(index)
        image = picture_as_annotated(sample, said, channels=3)
        for row in (~said.is_crowd & ~said.difficult).nonzero()[0].tolist():
            left, top, right, bottom = said.boxes_xyxy[row].tolist()
            across, down = margin * (right - left), margin * (bottom - top)
            if min(right - left, bottom - top) < smallest:
                continue
            name = source.class_names[said.labels[row]]
            corners = (max(0, left - across), max(0, top - down), right + across, bottom + down)
            x0, y0, x1, y1 = (round(value) for value in corners)
            part = image.crop((x0, y0, min(x1, image.width), min(y1, image.height)))
            part.save(folder / name / f"{index:06d}-{row:03d}.jpg", quality=QUALITY)
            counts[name] += 1
    return counts


if __name__ == "__main__":
    main()
