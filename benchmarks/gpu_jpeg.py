"""Measure on a CUDA GPU how fast images come from JPEG files, with and without its JPEG decoder.

    python -m benchmarks.gpu_jpeg IMAGES [--workers N] [--shares auto 0.5] [--steps 60] [--json FILE]

IMAGES is a folder of JPEG files; links to them make a tree of 1000 classes in a temporary folder. Measured are decoding
alone, decoding with crops, the loader alone with each back-end, and ResNet-50's training step from files against the
same step on images that stay on the device, before and after. tests/gpu/test_gpu_jpeg.py compares the crops.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from reconv.bench.bench_target import BenchTarget, open_subject
from reconv.bench.timing import Marks, Wish, measure
from reconv.checkpoint.run_dir import RunDir
from reconv.data.pipeline.stage_timing import StageTimes
from reconv.device.nvjpeg import NvJpegDecoder
from reconv.distributed.process_group import ProcessGroup
from reconv.logging.run_logger import RunLogger
from reconv.trainer.build import loaders as parts
from reconv.trainer.build.data_context import open_data_context
from reconv.trainer.build.datasets import Datasets
from reconv.trainer.build.train_state import TrainingRun, build_learner, build_step, parallelize
from reconv.trainer.resume import RestorePoint
from reconv.trainer.trainer import Counters

NUM_CLASSES, PER_CLASS = 1000, 13  # 50 steps of 256 an epoch
RATE_S = 1.5  # how long a rate is measured, three times
BATCH = 128  # of a call to the engine


@contextmanager
def tree_of(pictures: Path) -> Iterator[Path]:
    """A tree of classes whose files are links to the images, in turn."""
    files = sorted(path for path in pictures.resolve().iterdir() if path.suffix.lower() in (".jpg", ".jpeg"))
    if not files:
        raise SystemExit(f"no JPEG files in {pictures}")
    with tempfile.TemporaryDirectory(prefix="reconv-jpeg-") as root:
        for number in range(NUM_CLASSES * PER_CLASS):
            for split in ("train", "val") if number < NUM_CLASSES else ("train",):
                folder = Path(root, split, f"c{number % NUM_CLASSES:04}")
                folder.mkdir(parents=True, exist_ok=True)
                os.symlink(files[(number + 17 * (number // NUM_CLASSES)) % len(files)], folder / f"{number:05}.jpg")
        yield Path(root)


def opened(tree: Path | None, settings: Mapping[str, object], device: str = "cuda") -> BenchTarget:
    """ResNet-50 at 256 images a step on the tree, or on made-up images that stay on the device."""
    given = {"batch.size": 256, "batch.group": "all", "batch.micro": "auto", **settings}
    overrides = [(field, value, "tool") for field, value in given.items()]
    data = None if tree is None else str(tree)
    return open_subject(
        "resnet50", input="device" if tree is None else "real", data=data, overrides=overrides, device=device
    )


def engine_rates(tree: Path, size: int) -> dict[str, list[float]]:
    """Images a second, decoded alone and with crops of the middle; three times each."""
    engine = NvJpegDecoder(torch.device("cuda"))
    files = sorted(tree.rglob("*.jpg"))[:BATCH]
    some = [torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8) for file in files]
    sides = [image.shape[1:] for image in engine.decode(some)]
    some_boxes = [(w // 4, h // 4, w - w // 4, h - h // 4) for h, w in sides]

    def decode() -> None:
        engine.decode(some)
        torch.cuda.synchronize()

    return {
        "decoded": [rate(decode) for _ in range(3)],
        "with crops": [rate(lambda: engine.crops(some, some_boxes, size)) for _ in range(3)],
    }


def rate(work: Callable[[], object]) -> float:
    """Images of a call a second."""
    work()
    began_s, calls = time.perf_counter(), 0
    while (spent_s := time.perf_counter() - began_s) < RATE_S:
        work()
        calls += 1
    return calls * BATCH / spent_s


def loader_rate(subject: BenchTarget, steps: int) -> float:
    """Images a second that reach the device while nothing trains."""
    with open_data_context(subject.recipe, subject.plan, subject.device, StageTimes()) as feed:
        loader = parts.train_loader(subject.recipe, subject.plan, subject.source, subject.device.move, feed=feed)
        stream = loader.steps(0, sys.maxsize)
        for _ in islice(stream, 5):
            pass
        began_s = time.perf_counter()
        for _ in islice(stream, steps):
            pass
        subject.device.synchronize()
        found = steps * subject.plan.global_batch / (time.perf_counter() - began_s)
        stream.close()  # type: ignore[attr-defined]
    return found


class Trainer:
    """One training step, fed from different places."""

    def __init__(self, subject: BenchTarget) -> None:
        sources, point = Datasets(subject.source, subject.source), RestorePoint(None, ())
        folder, process_group = RunDir(Path("tool")), ProcessGroup.single()
        job = TrainingRun(subject.recipe, subject.plan, sources, subject.device, process_group, folder, point)
        learner = build_learner(job, RunLogger())
        self._marks, strategy = Marks(subject.device), parallelize(job, learner.network)
        self._step = build_step(job, learner, Counters(step=1), RunLogger(), self._marks.mark, strategy)

    def rates(self, subject: BenchTarget, wish: Wish) -> dict[str, Any]:
        """Images a second of each window, and the host's wait for input in a step."""
        with open_data_context(subject.recipe, subject.plan, subject.device, stages := StageTimes()) as feed:
            loader = parts.train_loader(subject.recipe, subject.plan, subject.source, subject.device.move, feed=feed)
            windows = measure(self._step, loader, subject.device, wish, self._marks)
        rates = [subject.plan.global_batch / step_s for step_s in windows.step_s]
        return {
            "images_per_s": statistics.median(rates),
            "windows": rates,
            "step_ms": windows.step_ms(),
            "stage_s": stages.seconds,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("--workers", type=int, default=0, help="0: as many as the plan would take")
    parser.add_argument("--shares", nargs="*", default=["auto", "0.5"])
    parser.add_argument("--backends", nargs="*", default=["processes"], help="without the GPU")
    parser.add_argument("--steps", type=int, default=60, help="in a window; four windows each")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tree_of(options.images) as tree:
        result = measure_all(tree, options)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))


def measure_all(tree: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Every figure, printed as it is found."""

    def tell(name: str, found: Any) -> None:
        result[name] = found
        print(f"{name}: {json.dumps(found)}", flush=True)

    result: dict[str, Any] = {}
    workers = {"data.workers": options.workers} if options.workers else {}
    ways = {name: {"data.backend": name, **workers} for name in options.backends}
    tell("rates of the engine", engine_rates(tree, 224))
    subjects = {name: opened(tree, settings) for name, settings in ways.items()}
    for wish in options.shares:
        settings = {"data.backend": "gpu", "data.gpu_share": wish if wish == "auto" else float(wish), **workers}
        subjects[f"gpu {wish}"] = opened(tree, settings)
    for name, subject in subjects.items():
        words = f"{name}, {subject.plan.workers} workers, share {subject.plan.gpu_share}"
        tell(f"loader, {words}", loader_rate(subject, 40))
    made_up = opened(None, {})
    trainer, wish = Trainer(made_up), Wish(windows=4, steps=options.steps, warmup=10)
    tell("training, images on the device", before := trainer.rates(made_up, wish))
    for name, subject in subjects.items():
        found = trainer.rates(subject, wish)
        found["share of synthetic"] = found["images_per_s"] / before["images_per_s"]
        tell(f"training, {name}, share {subject.plan.gpu_share}", found)
    tell("training, images on the device again", trainer.rates(made_up, wish))
    return result


if __name__ == "__main__":
    main()
