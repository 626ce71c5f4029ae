"""Train our SSD-ResNet34 and torchvision's SSD300 (VGG16) from scratch on the same images, and score both alike.

    python -m benchmarks.ssd_vs_torchvision --data VOC --out RUN --json compared.json [--images 90000] [--limit-s 560]

VOC has JPEGImages, Annotations and ImageSets/Main; torchvision must be installed, with its compiled operations. Ours is
`reconv.train` on `ssd-resnet34-voc`, so RUN is an ordinary run with its curve and report; --init gives its trunk
weights to begin with. Theirs is `ssd300_vgg16(weights=None, weights_backbone=None)` with its own matching, losses and
post-processing, fed by our loader: the same order, crops, flips and colours (fields of `augment` and `data` that --set
gives are for both). Both see as many images, by SGD with momentum 0.9 and a decay of 5e-4, in bf16 with losses in fp32,
with a warm-up over 8 % and a cosine to zero; each has a rate (for 32 images) and a batch of its own, theirs those of
torchvision's reference (0.002, 32). Both give up to 200 boxes with a score above 0.01 for each validation image
squeezed to 300 x 300, and VOC's precision is counted by the same function.

What differs from torchvision's reference, meant to help it: inputs are scaled to a deviation near 1 (its default, 0 to
255, is that of the pretrained trunk, and made the first gradient of one made-up batch eight times as long), and
gradients are cut to a norm of 35, since a trunk without norms might diverge. Neither was tried against leaving it out.

Some steps of theirs are timed first. Where the rest of --limit-s, less --ours-s, does not suffice for --images, both
are given fewer, so that both schedules come to their end. If theirs is stopped all the same, ours is told at that point
too.
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

from benchmarks.train_variants import Result, as_overrides, as_typed, for_images, print_table, trained, write_json
from reconv.batch import Batch
from reconv.bench.bench_target import BenchTarget, about, open_subject
from reconv.data.pipeline.stage_timing import StageTimes
from reconv.data.transforms.on_device import EvalPreprocess, TrainPreprocess
from reconv.detection.postprocess import Detections
from reconv.metrics.detection_metrics import DetectionMetrics
from reconv.recipe.loader import Override
from reconv.trainer.build import loaders as parts
from reconv.trainer.build.data_context import DataContext, open_data_context
from reconv.trainer.build.datasets import data_path, open_split
from reconv.trainer.build.task_builder import with_boxes
from reconv.trainer.lr_schedule import learning_rate

RECIPE = "ssd-resnet34-voc"
METRIC = "voc10"
PER = 32
MAX_NORM = 35.0
MAX_DETECTIONS = 200
PROBE_STEPS = 12
UNTIMED_STEPS = 6  # in which algorithms are tried
SCORING_S = 20.0  # kept free for each evaluation of theirs


def main() -> None:
    given = _arguments()
    ends_s = time.perf_counter() + given.limit_s - SCORING_S * given.their_points
    subject = _opened(given, given.images)
    with open_data_context(subject.recipe, subject.plan, subject.device, StageTimes()) as feed:
        rate = Theirs(subject, feed).probe(min(PROBE_STEPS, subject.plan.total_steps))
        images = min(given.images, int(rate * (ends_s - time.perf_counter() - given.ours_s)))
        if images < given.their_batch:
            raise SystemExit(f"no time is left for training: theirs takes {given.images / rate:.0f} s at {rate:.0f}/s")
        print(f"theirs: {rate:.0f} images/s; both get {images:,} images", flush=True)
        ours = _ours(given, images)
        told = {**about(subject.recipe, subject.device), "ours": asdict(ours)}
        write_json(given.json, told)
        theirs = Theirs(_opened(given, images), feed, given.their_points).train(ends_s)
    write_json(given.json, {**told, "theirs": asdict(theirs)})
    earlier = [point for point in ours.curve if point[0] <= theirs.images]
    underway = [Result("ours, underway", METRIC, *earlier[-1], earlier)] if earlier and theirs.note else []
    print_table([ours, theirs, *underway])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a VOC folder")
    parser.add_argument("--out", required=True, type=Path, help="the folder of our run")
    parser.add_argument("--json", required=True, type=Path, help="where the figures go")
    parser.add_argument("--images", type=int, default=90_000, help="that each sees in training")
    parser.add_argument("--limit-s", type=float, default=560.0, help="seconds for both, from the start")
    parser.add_argument("--ours-s", type=float, default=120.0, help="seconds of those that ours may take")
    parser.add_argument("--batch", type=int, default=32, help="ours")
    parser.add_argument("--lr", type=float, default=0.02, help="ours, for 32 images")
    parser.add_argument("--init", default=None, help="weights of our trunk: a run of resnet34")
    parser.add_argument("--points", type=int, default=8, help="of our curve")
    parser.add_argument("--their-batch", type=int, default=32)
    parser.add_argument("--their-lr", type=float, default=0.002, help="for 32 images")
    parser.add_argument("--their-points", type=int, default=3, help="of their curve")
    parser.add_argument("--workers", type=int, default=16, help="processes that decode")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="more overrides")
    return parser.parse_args()


def _overrides(workers: int, batch: int, lr: float) -> list[Override]:
    """The recipe for a short run from scratch."""
    # Choosing a crop takes 0.4 ms under the GIL, so processes decode.
    fields = {
        "batch.size": batch,
        "schedule.kind": "cosine",
        "schedule.milestones": [],
        "schedule.lr": lr,
        "schedule.per": PER,
        "schedule.warmup": "8%",
        "detection.score": 0.01,
        "detection.max_per_image": MAX_DETECTIONS,
        "data.backend": "processes",
        "data.workers": workers,
        "data.prefetch": 8,
        "evaluate.batch": 100,
        "save.every": "100%",
        "save.keep_best": False,
    }
    return as_overrides(fields, "compare_detectors")


def _ours(given: argparse.Namespace, images: int) -> Result:
    overrides = [*_overrides(given.workers, given.batch, given.lr), *as_typed(given.set)]
    if given.init is not None:
        overrides.append(("model.init", given.init, "--init"))
    overrides = for_images(RECIPE, overrides, images, given.points)
    result = Result("ours", METRIC)
    return trained(result, RECIPE, data=given.data, out=given.out, overrides=overrides, device=given.device)


def _opened(given: argparse.Namespace, images: int) -> BenchTarget:
    """The data and the plan of theirs."""
    both = [override for override in as_typed(given.set) if override[0].startswith(("augment.", "data."))]
    overrides = [*_overrides(given.workers, given.their_batch, given.their_lr), *both]
    overrides = for_images(RECIPE, overrides, images, given.their_points)
    return open_subject(RECIPE, input="real", data=given.data, overrides=overrides, device=given.device)


class Theirs:
    """torchvision's SSD300 on the batches of ours."""

    def __init__(self, subject: BenchTarget, feed: DataContext, points: int = 1) -> None:
        from torchvision.models.detection import ssd300_vgg16  # an oracle here, never a part of the product

        recipe, self._device = subject.recipe, subject.device
        preprocess = recipe.data.preprocess
        torch.manual_seed(recipe.seed)
        self._model: nn.Module = ssd300_vgg16(
            weights=None,
            weights_backbone=None,
            num_classes=len(subject.source.class_names) + 1,
            image_mean=list(preprocess.mean),
            image_std=list(preprocess.std),
        )
        # Boxes are coded and decoded in the type of the heads, and bf16 knows 256 px to the nearest 2.
        self._model.head.register_forward_hook(_in_float32)
        self._model.to(self._device.torch, memory_format=torch.channels_last)
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.SGD(
            self._parameters,
            lr=recipe.schedule.lr,
            momentum=recipe.optimizer.momentum,
            weight_decay=recipe.optimizer.weight_decay,
        )
        plain = preprocess.model_copy(update={"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)})  # 0 to 1, as it wants
        self._prepare = TrainPreprocess(plain, recipe.augment, subject.plan.num_classes, torch.float32)
        self._prepare_eval = EvalPreprocess(plain, torch.float32)
        self._plan, self._side = subject.plan, preprocess.size
        self._score_every = -(-subject.plan.total_steps // points)
        self._loader = parts.train_loader(recipe, subject.plan, subject.source, self._device.move, feed=feed)
        self._val = with_boxes(open_split(recipe, data_path(recipe), "val"))
        self._val_loader = parts.eval_loader(
            recipe, self._val, self._device, recipe.evaluate.batch, subject.plan.workers, feed=feed
        )

    def probe(self, steps: int) -> float:
        """Images a second in the first steps, the very first left out."""
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
        """Train to the end of the plan, or as far as time goes."""
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
                result.images, result.note = done * size, f"diverged: the loss is {value}"
                break
            result.reached(done * size, self._score())
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
        """VOC's numbers of the validation images by its own post-processing."""
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


def _in_float32(_module: nn.Module, _given: Any, answers: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: answer.float() for name, answer in answers.items()}


def _targets(batch: Batch, side: int) -> list[dict[str, Tensor]]:
    """Boxes in pixels of the input, at least a tenth of a pixel wide and high: it refuses those without an area."""
    near, far = (batch["boxes"] * side).split(2, dim=-1)
    boxes = torch.cat([near, torch.maximum(far, near + 0.1)], dim=-1)
    counts = batch["num_boxes"].tolist()
    return [
        {"boxes": own[:count], "labels": labels[:count]}
        for own, labels, count in zip(boxes, batch["labels"], counts, strict=True)
    ]


def _padded(found: Sequence[dict[str, Tensor]], side: int) -> Detections:
    """torchvision's lists as our padded batch, boxes as fractions of the image."""
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
