"""Train our SSD-ResNet34 and torchvision's SSD300 (VGG16) from scratch on the same images, and score both alike.

    python -m benchmarks.training.ssd_vs_torchvision --data VOC --out RUN --json FILE [--images 90000] [--limit-s 560]

VOC has JPEGImages, Annotations and ImageSets/Main; torchvision must be installed, with its compiled operations. Ours is
`reconv.train` on `ssd-resnet34-voc`, so RUN is an ordinary run directory; --init gives weights for its backbone. Theirs
is `ssd300_vgg16(weights=None, weights_backbone=None)` with its own matching, losses and post-processing, fed by our
loader with the same order, crops, flips and colors (overrides of `augment` and `data` apply to both). Both see the same
number of images, with SGD, momentum 0.9, weight decay 5e-4, bf16 with losses in fp32, a warm-up over 8 % and a cosine
to zero; each has its own learning rate (for 32 images) and batch size, theirs those of torchvision's reference (0.002,
32). Both give up to 200 boxes with a score above 0.01 for each validation image resized to 300 x 300, and the same
function computes the VOC metrics.

Two changes are meant to help torchvision's: inputs are normalized to a standard deviation near 1 (its default, 0 to
255, suits the pretrained backbone, and made the first gradient of one random batch eight times as long); gradients are
clipped to a norm of 35, since a backbone without norms might diverge. Neither was compared with leaving it out.

A few of their steps are timed first. If --limit-s less --ours-s does not suffice for --images, both get fewer, so that
both schedules finish. If theirs is stopped all the same, our result at that point is printed too.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import as_overrides
from benchmarks.training.variants import Result, for_images, parse_set, print_table, train_run, write_json
from reconv.bench.run import bench_args, describe_setup, open_bench_run
from reconv.build.data import (
    as_detection_dataset,
    build_eval_loader,
    build_train_loader,
    data_path,
    open_data_context,
    open_split,
)
from reconv.core.batch import Batch
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.stage_timing import StageTimes
from reconv.data.transforms.normalize import EvalPreprocess
from reconv.data.transforms.train import TrainPreprocess
from reconv.detection.postprocess import Detections
from reconv.metrics.detection import DetectionMetrics
from reconv.recipe.loader import Override
from reconv.recipe.parts.schedule import learning_rate
from reconv.trainer.prepare import PreparedRun

RECIPE = "ssd-resnet34-voc"
METRIC = "voc10"
PER = 32
MAX_NORM = 35.0
MAX_DETECTIONS = 200
PROBE_STEPS = 12
UNTIMED_STEPS = 6  # in which cuDNN tries algorithms
EVAL_S = 20.0  # reserved for each of their evaluations


def main() -> None:
    given = _arguments()
    ends_s = time.perf_counter() + given.limit_s - EVAL_S * given.their_points
    run = _opened(given, given.images)
    with open_data_context(run.recipe, run.plan, run.device, StageTimes()) as context:
        rate = Theirs(run, context).probe(min(PROBE_STEPS, run.plan.total_steps))
        images = min(given.images, int(rate * (ends_s - time.perf_counter() - given.ours_s)))
        if images < given.their_batch:
            raise SystemExit(f"no time left: theirs takes {given.images / rate:.0f} s at {rate:.0f} images/s")
        print(f"theirs: {rate:.0f} images/s; both get {images:,} images", flush=True)
        ours = _ours(given, images)
        result = {**describe_setup(run.recipe, run.device), "ours": asdict(ours)}
        write_json(given.json, result)
        theirs = Theirs(_opened(given, images), context, given.their_points).train(ends_s)
    write_json(given.json, {**result, "theirs": asdict(theirs)})
    earlier = [point for point in ours.curve if point[0] <= theirs.images]
    halfway = [Result("ours at that point", METRIC, *earlier[-1], earlier)] if earlier and theirs.note else []
    print_table([ours, theirs, *halfway])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a VOC folder")
    parser.add_argument("--out", required=True, type=Path, help="folder of our run")
    parser.add_argument("--json", required=True, type=Path, help="file for the figures")
    parser.add_argument("--images", type=int, default=90_000, help="seen by each in training")
    parser.add_argument("--limit-s", type=float, default=560.0, help="seconds for both")
    parser.add_argument("--ours-s", type=float, default=120.0, help="seconds of those for ours")
    parser.add_argument("--batch", type=int, default=32, help="ours")
    parser.add_argument("--lr", type=float, default=0.02, help="ours, per 32 images")
    parser.add_argument("--init", default=None, help="weights of our backbone, a run of resnet34")
    parser.add_argument("--points", type=int, default=8, help="evaluations of ours")
    parser.add_argument("--their-batch", type=int, default=32)
    parser.add_argument("--their-lr", type=float, default=0.002, help="per 32 images")
    parser.add_argument("--their-points", type=int, default=3, help="evaluations of theirs")
    parser.add_argument("--workers", type=int, default=16, help="decoding processes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="more overrides")
    return parser.parse_args()


def _overrides(workers: int, batch: int, lr: float) -> list[Override]:
    """Overrides for a short run from scratch."""
    # Choosing a crop holds the GIL for 0.4 ms, so processes decode.
    fields = {
        "batch.size": batch,
        "schedule.name": "cosine",
        "schedule.milestones": [],
        "schedule.lr": lr,
        "schedule.base_batch_size": PER,
        "schedule.warmup": "8%",
        "detection.score_threshold": 0.01,
        "detection.detections_per_image": MAX_DETECTIONS,
        "data.backend": "processes",
        "data.num_workers": workers,
        "data.prefetch": 8,
        "evaluate.batch_size": 100,
        "save.every": "100%",
        "save.keep_best": False,
    }
    return as_overrides(fields)


def _ours(given: argparse.Namespace, images: int) -> Result:
    overrides = [*_overrides(given.workers, given.batch, given.lr), *parse_set(given.set)]
    if given.init is not None:
        overrides.append(("model.init", given.init, "--init"))
    overrides = for_images(RECIPE, overrides, images, given.points)
    result = Result("ours", METRIC)
    return train_run(result, RECIPE, data=given.data, out=given.out, overrides=overrides, device=given.device)


def _opened(given: argparse.Namespace, images: int) -> PreparedRun:
    """Data and plan of theirs."""
    both = [override for override in parse_set(given.set) if override[0].startswith(("augment.", "data."))]
    overrides = [*_overrides(given.workers, given.their_batch, given.their_lr), *both]
    overrides = for_images(RECIPE, overrides, images, given.their_points)
    args = bench_args(RECIPE, input="real", data=given.data, overrides=overrides, device=given.device)
    with open_bench_run(args) as run:
        return run


class Theirs:
    """torchvision's SSD300, trained on our batches."""

    def __init__(self, run: PreparedRun, context: DataContext, points: int = 1) -> None:
        from torchvision.models.detection import ssd300_vgg16

        recipe, self._device = run.recipe, run.device
        preprocess = recipe.data.preprocess
        torch.manual_seed(recipe.seed)
        self._model: nn.Module = ssd300_vgg16(
            weights=None,
            weights_backbone=None,
            num_classes=len(run.datasets.train.class_names) + 1,
            image_mean=list(preprocess.mean),
            image_std=list(preprocess.std),
        )
        # Boxes are encoded and decoded in the dtype of the heads, and bf16 has steps of 2 at 256 px.
        self._model.head.register_forward_hook(_in_float32)
        self._model.to(self._device.torch, memory_format=torch.channels_last)
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.SGD(
            self._parameters,
            lr=recipe.schedule.lr,
            momentum=recipe.optimizer.momentum,
            weight_decay=recipe.optimizer.weight_decay,
        )
        plain = preprocess.model_copy(update={"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)})  # it expects 0 to 1
        self._prepare = TrainPreprocess(plain, recipe.augment, run.plan.num_classes, torch.float32)
        self._prepare_eval = EvalPreprocess(plain, torch.float32)
        self._plan, self._side = run.plan, preprocess.size
        self._score_every = -(-run.plan.total_steps // points)
        self._loader = build_train_loader(recipe, run.plan, run.datasets.train, context)
        self._val = as_detection_dataset(open_split(recipe, data_path(recipe), "val"))
        self._val_loader = build_eval_loader(
            recipe, self._val, self._device, recipe.evaluate.batch_size, run.plan.workers, context=context
        )

    def probe(self, steps: int) -> float:
        """Images per second in the first steps, without the untimed ones."""
        untimed = min(UNTIMED_STEPS, steps - 1)
        started_s = 0.0
        for step, batch in enumerate(islice(self._batches(), steps)):
            if step == untimed:
                self._device.synchronize()
                started_s = time.perf_counter()
            self._step(step, batch)
        self._device.synchronize()
        return (steps - untimed) * self._plan.global_batch / (time.perf_counter() - started_s)

    def train(self, ends_s: float) -> Result:
        """Train to the end of the plan, or until time is up."""
        result, total, size = Result("theirs", METRIC), self._plan.total_steps, self._plan.global_batch
        began_s = time.perf_counter()
        train_s, mark_s = 0.0, began_s
        for done, batch in enumerate(self._batches(), start=1):
            loss = self._step(done - 1, batch)
            is_late = done < total and time.perf_counter() > ends_s
            if not is_late and done < total and done % self._score_every:
                continue
            self._device.synchronize()
            train_s += time.perf_counter() - mark_s
            result.images_per_s = done * size / train_s
            value = float(loss)
            if not math.isfinite(value):
                result.images, result.note = done * size, f"diverged, the loss is {value}"
                break
            result.add_point(done * size, self._score())
            if is_late:
                result.note = f"stopped by --limit-s after {done * size:,} of {total * size:,} images"
                break
            mark_s = time.perf_counter()
        result.wall_s = time.perf_counter() - began_s
        return result

    def _batches(self) -> Iterator[Batch]:
        for number, pieces in enumerate(self._loader.steps(0, self._plan.total_steps)):
            [batch] = pieces
            yield self._prepare(batch, number)

    def _step(self, step: int, batch: Batch) -> Tensor:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._plan.schedule, step)
        self._model.train()
        with self._autocast():
            losses = self._model(list(batch["images"]), _targets(batch, self._side))
        loss: Tensor = sum(losses.values(), start=torch.zeros((), device=self._device.torch))
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, MAX_NORM)
        self._optimizer.step()
        return loss.detach()

    def _score(self) -> dict[str, float]:
        """VOC metrics of the validation images, with its own post-processing."""
        evaluator = DetectionMetrics(
            lambda found: _padded(found, self._side), self._val.annotation, self._val.class_names
        )
        self._model.eval()
        with torch.no_grad():
            for raw in self._val_loader:
                batch = self._prepare_eval(raw)
                with self._autocast():
                    found = self._model(list(batch["images"]))
                evaluator.update(found, batch)
        return evaluator.compute()

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.torch.type, torch.bfloat16)


def _in_float32(_module: nn.Module, _inputs: Any, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: output.float() for name, output in outputs.items()}


def _targets(batch: Batch, side: int) -> list[dict[str, Tensor]]:
    """Boxes in pixels of the input, at least 0.1 px wide and high: torchvision rejects boxes without an area."""
    near, far = (batch["boxes"] * side).split(2, dim=-1)
    boxes = torch.cat([near, torch.maximum(far, near + 0.1)], dim=-1)
    counts = batch["num_boxes"].tolist()
    return [
        {"boxes": own[:count], "labels": labels[:count]}
        for own, labels, count in zip(boxes, batch["labels"], counts, strict=True)
    ]


def _padded(found: Sequence[dict[str, Tensor]], side: int) -> Detections:
    """torchvision's lists as our padded batch, with boxes as fractions of the image."""
    counts = [len(one["scores"]) for one in found]
    device = found[0]["scores"].device
    boxes = torch.zeros(len(found), MAX_DETECTIONS, 4, device=device)
    scores = torch.zeros(len(found), MAX_DETECTIONS, device=device)
    labels = torch.zeros(len(found), MAX_DETECTIONS, dtype=torch.int64, device=device)
    for row, (one, count) in enumerate(zip(found, counts, strict=True)):
        boxes[row, :count] = one["boxes"] / side
        scores[row, :count] = one["scores"]
        labels[row, :count] = one["labels"]
    return Detections(boxes, scores, labels, torch.tensor(counts))


if __name__ == "__main__":
    main()
