"""Time what follows the network in an evaluation: box decoding, NMS and metrics of 5,000 images like COCO's.

    python -m benchmarks.detection.evaluation [--images 5000] [--batch 100] [--score 0.05] [--device cuda]

The network is left out: synthetic outputs (8,732 anchors x 81 classes, bf16) lie on the device when the clock starts.
Nearly all of them are background; most anchors on an object predict it, and one in 500 predicts something else. Prints
one line. VOC's metrics are always computed, COCO's 12 where hotcoco is installed.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from torch import Tensor

from benchmarks.detection.metrics import NUM_CLASSES, random_truth
from reconv.build.postprocess import build_anchors
from reconv.core.batch import Batch
from reconv.detection.annotation import Annotation
from reconv.detection.box_coder import encode_boxes
from reconv.detection.box_ops import cxcywh_to_xyxy
from reconv.detection.matcher import match_anchors
from reconv.detection.postprocess import Detections, PostprocessConfig, postprocess
from reconv.device import Device, open_device
from reconv.metrics.coco_eval import has_coco_eval
from reconv.metrics.detection import DetectionMetrics
from reconv.models.architecture import SSDOutput
from reconv.recipe.loader import load

VARIANCES = (0.1, 0.2)
MAX_BOXES = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--score", type=float, default=PostprocessConfig().score_threshold, help="score threshold")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    device = open_device(options.device)
    anchors = build_anchors(load("ssd-resnet34").recipe).to(device.torch)
    random = np.random.default_rng(0)
    truths = [random_truth(random, index) for index in range(options.images)]
    torch.manual_seed(0)
    batches = [
        _batch(truths, range(start, min(start + options.batch, options.images)), anchors)
        for start in range(0, options.images, options.batch)
    ]
    print(_timed(truths, batches, anchors, PostprocessConfig(score_threshold=options.score), device))


def _timed(
    truths: list[Annotation],
    batches: list[tuple[Batch, SSDOutput]],
    anchors: Tensor,
    keep: PostprocessConfig,
    device: Device,
) -> str:
    """Time one evaluation, after one batch that is not counted."""

    def detect(outputs: SSDOutput) -> Detections:
        return postprocess(outputs.box_deltas, outputs.logits, anchors, VARIANCES, keep)

    detect(batches[0][1])
    device.synchronize()
    evaluator = DetectionMetrics(
        detect,
        truths.__getitem__,
        [str(number) for number in range(NUM_CLASSES)],
    )
    began_s = time.perf_counter()
    for batch, outputs in batches:
        evaluator.update(outputs, batch)
    device.synchronize()
    found_s = time.perf_counter()
    images = evaluator.images()
    numbers = evaluator.compute()
    ended_s = time.perf_counter()
    num_found = sum(len(image.scores) for image in images)
    return (
        f"{len(truths):,} images, {num_found / len(truths):.0f} detections each: "
        f"decoding and NMS {found_s - began_s:.2f} s, "
        f"{'COCO and VOC' if has_coco_eval() else 'VOC'} metrics {ended_s - found_s:.2f} s, "
        f"in all {ended_s - began_s:.2f} s; voc10 {numbers['voc10']:.3f}; {device.describe()}"
    )


def _batch(truths: list[Annotation], indices: range, anchors: Tensor) -> tuple[Batch, SSDOutput]:
    """Outputs of a network that finds most objects of a batch."""
    boxes, labels, counts = (x.to(anchors.device) for x in _padded([truths[index] for index in indices]))
    row, positive = match_anchors(cxcywh_to_xyxy(anchors), boxes, counts, 0.5)
    n, num_anchors = row.shape
    codes = encode_boxes(boxes.gather(1, row[:, :, None].expand(-1, -1, 4)), anchors, VARIANCES)
    codes = torch.where(positive[:, :, None], codes, 0) + torch.randn_like(codes) / 2
    logits = 0.7 * torch.randn(n, num_anchors, NUM_CLASSES + 1, device=anchors.device)
    logits[:, :, 0] += 9
    is_wrong = torch.rand(n, num_anchors, device=anchors.device) < 0.002
    predicted = torch.where(is_wrong, torch.randint_like(row, 1, NUM_CLASSES + 1), labels.gather(1, row))
    added = torch.where(is_wrong | positive, 5 + 6 * torch.rand(n, num_anchors, device=anchors.device), 0)
    logits.scatter_add_(2, predicted[:, :, None], added[:, :, None])
    kept = torch.tensor(list(indices), device=anchors.device)
    return Batch({"indices": kept}, kept, (n,)), SSDOutput(codes.bfloat16(), logits.bfloat16())


def _padded(truths: list[Annotation]) -> tuple[Tensor, Tensor, Tensor]:
    """Boxes as fractions of their images [n, M, 4], labels from 1 on, and counts."""
    boxes = torch.zeros(len(truths), MAX_BOXES, 4)
    labels = torch.ones(len(truths), MAX_BOXES, dtype=torch.int64)
    counts = torch.tensor([min(len(truth), MAX_BOXES) for truth in truths])
    for row, (truth, count) in enumerate(zip(truths, counts.tolist(), strict=True)):
        sides = np.array([truth.width, truth.height] * 2)
        boxes[row, :count] = torch.from_numpy(truth.boxes_xyxy[:count] / sides)
        labels[row, :count] = torch.from_numpy(truth.labels[:count]) + 1
    return boxes, labels, counts


if __name__ == "__main__":
    main()
