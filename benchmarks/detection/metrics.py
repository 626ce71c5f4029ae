"""Time the metrics of 5,000 synthetic images like COCO's, from padded detections to metrics and error analysis.

    python -m benchmarks.detection.metrics [--images 5000] [--detections 60] [--times 3]

The network, box decoding and NMS are left out: detections lie in memory as post-processing returns them, padded to 200.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import pairwise

import numpy as np
import torch

from reconv.core.batch import Batch
from reconv.detection.annotation import Annotation, make_annotation
from reconv.detection.postprocess import Detections
from reconv.metrics.coco_eval import evaluate_coco
from reconv.metrics.detection import DetectionMetrics
from reconv.metrics.detection_matches import match_detections
from reconv.metrics.voc_eval import precision_recall_by_class

NUM_CLASSES, WIDTH, BATCH = 80, 200, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--detections", type=float, default=60.0, help="per image, on average")
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    random = np.random.default_rng(0)
    truths = [random_truth(random, index) for index in range(options.images)]
    batches = [
        _batch(random, truths, range(start, min(start + BATCH, options.images)), options.detections)
        for start in range(0, options.images, BATCH)
    ]
    runs = [_timed(truths, batches) for _ in range(options.times)]
    result = {
        "images": options.images,
        "objects": sum(map(len, truths)),
        "detections": int(sum(int(found.counts.sum()) for _, found in batches)),
        **{
            name: {
                "median_s": round(statistics.median(run[name] for run in runs), 3),
                "runs_s": [run[name] for run in runs],
            }
            for name in runs[0]
        },
    }
    print(json.dumps(result, indent=2))


def _timed(truths: list[Annotation], batches: list[tuple[Batch, Detections]]) -> dict[str, float]:
    """Seconds of each part of one evaluation."""
    evaluator = DetectionMetrics(lambda found: found, lambda index: truths[index], [str(n) for n in range(NUM_CLASSES)])
    marks = [time.perf_counter()]
    for batch, found in batches:
        evaluator.update(found, batch)
    marks.append(time.perf_counter())
    images = evaluator.images()
    marks.append(time.perf_counter())
    evaluate_coco(images, NUM_CLASSES)
    marks.append(time.perf_counter())
    precision_recall_by_class(match_detections(images), NUM_CLASSES)
    marks.append(time.perf_counter())
    evaluator.compute()
    marks.append(time.perf_counter())
    evaluator.result().analysis()
    marks.append(time.perf_counter())
    update, read, coco, voc, result, errors = (round(b - a, 3) for a, b in pairwise(marks))
    return {
        "update": update,
        "read": read,
        "coco": coco,
        "voc": voc,
        "whole evaluation": round(update + read + result, 3),
        "error analysis of the report": errors,
    }


def random_truth(random: np.random.Generator, index: int) -> Annotation:
    """Random boxes, as many as in COCO, of frequent and rare classes; one in a hundred images has none."""
    height, width = random.integers(240, 640, 2)
    count = 0 if random.random() < 0.01 else random.poisson(7.3)
    sides = np.minimum(np.exp(random.uniform(np.log(8), np.log(300), (count, 2))), (width - 1, height - 1))
    corners = random.uniform(0, 1, (count, 2)) * ((width, height) - sides)
    shares = 1 / np.arange(1, NUM_CLASSES + 1)
    labels = random.choice(NUM_CLASSES, count, p=shares / shares.sum())
    boxes = np.concatenate([corners, corners + sides], axis=1)
    return make_annotation(boxes, labels, index, int(height), int(width), is_crowd=random.random(count) < 0.012)


def _batch(
    random: np.random.Generator, truths: list[Annotation], indices: range, mean: float
) -> tuple[Batch, Detections]:
    """Padded detections of a batch: seven in ten near an object, the others anywhere."""
    boxes, scores = np.zeros((len(indices), WIDTH, 4)), np.zeros((len(indices), WIDTH))
    labels, counts = np.zeros((len(indices), WIDTH), np.int64), np.zeros(len(indices), np.int64)
    for row, index in enumerate(indices):
        truth, count = truths[index], min(WIDTH, random.poisson(mean))
        low = random.uniform(0, 0.8, (count, 2))
        placed = np.concatenate([low, low + random.uniform(0.02, 0.2, (count, 2))], axis=1)
        classes = random.integers(0, NUM_CLASSES, count)
        if len(truth):
            near = np.flatnonzero(random.random(count) < 0.7)
            which = random.integers(0, len(truth), len(near))
            sides = np.array([truth.width, truth.height, truth.width, truth.height])
            placed[near] = truth.boxes_xyxy[which] / sides + random.normal(0, 0.01, (len(near), 4))
            classes[near] = np.where(random.random(len(near)) < 0.8, truth.labels[which], classes[near])
        boxes[row, :count], labels[row, :count], counts[row] = placed, classes + 1, count
        scores[row, :count] = np.sort(0.05 + 0.95 * random.beta(1, 4, count))[::-1]
    rows = torch.tensor(list(indices))
    found = Detections(
        torch.from_numpy(boxes).float(),
        torch.from_numpy(scores).float(),
        torch.from_numpy(labels),
        torch.from_numpy(counts),
    )
    return Batch({"indices": rows}, rows, (len(indices),)), found


if __name__ == "__main__":
    main()
