"""Make tests/tasks/fixtures/coco_cases.json: small detection problems, and what pycocotools says of each.

    pip install pycocotools      # made with 2.0.11
    python tools/make_coco_cases.py

The problems are drawn from fixed seeds and have what scorers stumble over: crowds, images without boxes or without
detections, gaps in the numbers of images and classes, classes that never occur, equal scores, more than 100
detections in an image, and sizes that no object has.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
from pathlib import Path
from typing import Any

from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

OUT = Path(__file__).parent.parent / "tests" / "metrics" / "fixtures" / "coco_cases.json"
CASES: dict[str, dict[str, Any]] = {
    "crowds": {"num_images": 12, "crowd": 0.3},
    "empty images": {"num_images": 20, "empty": 0.5, "blind": 0.3},
    "gaps in ids": {"num_images": 10, "image_step": 17, "class_step": 3},
    "a class that never occurs": {"num_images": 10, "num_classes": 6, "num_used": 3},
    "small objects only": {"num_images": 8, "largest_px": 28.0},
    "equal scores": {"num_images": 8, "score_digits": 1},
    "more than 100 detections in an image": {"num_images": 3, "detections": 160},
    "nothing found": {"num_images": 4, "detections": 0},
    "only background found": {"num_images": 6, "hit": 0.0},
}


def main() -> None:
    cases = []
    for seed, (name, options) in enumerate(CASES.items()):
        truth, found = make_problem(seed, **options)
        cases.append({"name": name, "truth": truth, "found": found, "numbers": pycocotools_numbers(truth, found)})
    OUT.write_text("[\n" + ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases) + "\n]\n")
    print(f"{OUT}: {len(cases)} cases, {OUT.stat().st_size:,} bytes")


def make_problem(
    seed: int,
    num_images: int,
    num_classes: int = 4,
    num_used: int | None = None,
    crowd: float = 0.05,
    empty: float = 0.1,
    blind: float = 0.05,
    image_step: int = 1,
    class_step: int = 1,
    largest_px: float = 250.0,
    score_digits: int = 4,
    detections: int = 25,
    hit: float = 0.7,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A data set in COCO's form and detections for it."""
    draw = random.Random(seed)
    classes = [3 + class_step * n for n in range(num_classes)]
    used = classes[: num_used or num_classes]
    images: list[Any] = []
    annotations: list[Any] = []
    found: list[Any] = []
    for number in range(num_images):
        image = {"id": 5 + image_step * number, "width": draw.randint(200, 400), "height": draw.randint(200, 400)}
        images.append(image)
        own = (
            [] if draw.random() < empty else [_object(draw, image, used, largest_px) for _ in range(draw.randint(1, 9))]
        )
        for thing in own:
            is_crowd = int(draw.random() < crowd)
            annotations.append({"id": len(annotations) + 1, "image_id": image["id"], "iscrowd": is_crowd, **thing})
        for _ in range(0 if draw.random() < blind else detections):
            near = draw.choice(own) if own and draw.random() < hit else None
            box, label = _moved(draw, near) if near else (_box(draw, image, largest_px), draw.choice(classes))
            label = draw.choice(classes) if draw.random() < 0.1 else label
            score = max(0.06, round(draw.betavariate(1.2, 3), score_digits))
            found.append({"image_id": image["id"], "category_id": label, "bbox": box, "score": score})
    categories = [{"id": label, "name": f"class {label}"} for label in classes]
    return {"images": images, "annotations": annotations, "categories": categories}, found


def _object(draw: random.Random, image: dict[str, Any], classes: list[int], largest_px: float) -> dict[str, Any]:
    box = _box(draw, image, largest_px)
    area = round(box[2] * box[3] * draw.uniform(0.5, 1.0), 2)
    return {"category_id": draw.choice(classes), "bbox": box, "area": area}


def _box(draw: random.Random, image: dict[str, Any], largest_px: float) -> list[float]:
    sides = [math.exp(draw.uniform(math.log(6), math.log(min(largest_px, image[s] - 1)))) for s in ("width", "height")]
    corner = [draw.uniform(0, image[side] - length) for side, length in zip(("width", "height"), sides, strict=True)]
    return [round(value, 2) for value in (*corner, *sides)]


def _moved(draw: random.Random, thing: dict[str, Any]) -> tuple[list[float], int]:
    """A box near that of an object, and its class."""
    left, top, width, height = thing["bbox"]
    box = [
        left + width * draw.gauss(0, 0.08),
        top + height * draw.gauss(0, 0.08),
        width * math.exp(draw.gauss(0, 0.12)),
        height * math.exp(draw.gauss(0, 0.12)),
    ]
    return [round(value, 2) for value in box], thing["category_id"]


def pycocotools_numbers(truth: dict[str, Any], found: list[dict[str, Any]]) -> list[float]:
    """The 12 numbers in the order of pycocotools; -1 where there is nothing to measure."""
    with contextlib.redirect_stdout(io.StringIO()):
        known = COCO()
        known.dataset = {"info": {}, **json.loads(json.dumps(truth))}
        known.createIndex()
        results = known.loadRes(json.loads(json.dumps(found))) if found else COCO()
        scorer = COCOeval(known, results, "bbox")
        scorer.evaluate()
        scorer.accumulate()
        scorer.summarize()
    return [float(value) for value in scorer.stats]


if __name__ == "__main__":
    main()
