"""Prove on a CUDA GPU that its JPEG engine makes the host's crops, then measure how fast images come from files.

    python tools/prove_gpu_jpeg.py PICTURES [--workers N] [--shares auto 0.5] [--steps 60] [--json FILE]

PICTURES is a folder of JPEG files; links to them make a tree of 1000 classes in a temporary folder. Equality: the crops
of every image by engine and kernel against those of the host (Pillow's decoder, torch's resize). The JPEG standard
leaves the inverse transform a level of room, and nvJPEG repeats halved colours where the usual decoder interpolates
them, so edges of strong colours are apart by many levels and most pixels by none or one: TOLERANCES says how far on
average. The kernel alone, on the same decoded pixels, may be one level away. Then the rates: decoding alone, decoding
with crops, the loader alone by each back-end, and ResNet-50's own training step from files against the same step on
images that stay on the device, before and after. The exit code says whether the crops are near enough.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reconv.bench.bench_target import BenchTarget, open_subject
from reconv.bench.timing import Marks, Wish, measure
from reconv.checkpoint.run_dir import RunDir
from reconv.data.decode.decode import train_preprocess
from reconv.data.decode.native import available
from reconv.data.pipeline.gpu_decode import HANDED, HandOver
from reconv.data.pipeline.stage_timing import StageTimes
from reconv.data.transforms.random_params import effective
from reconv.device.nvjpeg import NvJpegDecoder
from reconv.distributed.process_group import ProcessGroup
from reconv.kernels.crop.ops import crop, crop_plainly
from reconv.logging.run_logger import RunLogger
from reconv.recipe.data_fields import AugmentConfig
from reconv.trainer.build import loaders as parts
from reconv.trainer.build.data_context import open_data_context
from reconv.trainer.build.datasets import Datasets
from reconv.trainer.build.train_state import TrainingRun, build_learner, build_step, share
from reconv.trainer.resume import RestorePoint
from reconv.trainer.trainer import Counters

TOLERANCES = {"mean": 1.5, "mean of the worst image": 5.0}  # in grey levels, against the host's crops
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


def prove_crops(subject: BenchTarget, num_pictures: int) -> tuple[bool, dict[str, Any]]:
    """How far the engine's crops are from the host's, and the kernel's from the plain form's on the same pixels."""
    augment = effective(subject.recipe.augment)
    spec = train_preprocess(subject.recipe.data.preprocess, augment, subject.plan.size_at(0))
    engine, indices = NvJpegDecoder(subject.device.torch), np.arange(num_pictures, dtype=np.int64)

    def filled(by_engine: float, form: AugmentConfig | None) -> dict[str, Any]:
        preprocess = subject.recipe.data.preprocess if form is None else spec
        fetch = HandOver(subject.source, preprocess, form, by_engine)
        rows = {column.name: column.empty(num_pictures) for column in fetch.columns}
        fetch(indices, fetch.draw(subject.recipe.seed, indices), rows)
        return rows

    def apart_from(form: AugmentConfig | None) -> dict[str, float]:
        apart = (ours - torch.from_numpy(filled(0.0, form)["images"])[rows].float()).abs()
        return {
            "mean": float(apart.mean()),
            "mean of the worst image": float(apart.mean((1, 2, 3)).max()),
            "max": int(apart.max()),
            "99.9 % within": float(np.quantile(apart.numpy(), 0.999)),
        }

    result: dict[str, Any] = {"images": num_pictures}
    of = {name: augment.model_copy(update={"decoder": name}) for name in ("plain", *["native"][: int(available())])}
    files, boxes = handed_files(filled(1.0, None))
    crops, taken = engine.crops(files, boxes, subject.recipe.data.preprocess.size, is_cut=False)
    ours, rows = crops.cpu().float(), handed_rows(filled(1.0, None), taken)
    result["evaluation against plain"] = apart_from(None)
    files, boxes = handed_files(filled(1.0, of["plain"]))
    crops, taken = engine.crops(files, boxes, spec.size, antialias=augment.antialias)
    ours, rows = crops.cpu().float(), handed_rows(filled(1.0, of["plain"]), taken)
    result |= {"handed over": len(files), "taken": len(taken)}
    result |= {f"against {name}": apart_from(form) for name, form in of.items()}
    pictures = engine.decode([files[number] for number in taken])
    some = [boxes[number] for number in taken]
    for antialias in (True, False):
        plain = crop_plainly(pictures, some, spec.size, antialias=antialias)
        apart = crop(pictures, some, spec.size, antialias=antialias).int() - plain.int()
        result[f"kernel, antialias {antialias}"] = {
            "max": int(apart.abs().max()),
            "other by one": float((apart != 0).float().mean()),
        }
    against = (result["against plain"], result["evaluation against plain"])
    is_near = all(found[name] <= limit for found in against for name, limit in TOLERANCES.items())
    is_same = all(result[f"kernel, antialias {form}"]["max"] <= 1 for form in (True, False))
    result["rates of the engine"] = engine_rates(engine, files, boxes, spec.size)
    return is_near and is_same and len(taken) == len(files), result


def handed_files(rows: Mapping[str, Any]) -> tuple[list[Tensor], list[Any]]:
    """Files that were handed over, and their boxes."""
    entries = [(row, *entry) for row, entry in enumerate(rows[HANDED].tolist()) if entry[0]]
    files = [torch.from_numpy(rows["images"][row].reshape(-1)[: int(size)]) for row, size, *_ in entries]
    return files, [tuple(entry[2:]) for entry in entries]


def handed_rows(rows: Mapping[str, Any], taken: Sequence[int]) -> Tensor:
    """The rows of those files that the engine took."""
    return torch.from_numpy(np.flatnonzero(rows[HANDED][:, 0])[list(taken)])


def engine_rates(engine: NvJpegDecoder, files: list[Any], boxes: Sequence[Any], size: int) -> dict[str, list[float]]:
    """Images a second, decoded alone and with their crops; three times each."""
    some, some_boxes = (files * BATCH)[:BATCH], (list(boxes) * BATCH)[:BATCH]

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
        self._marks, shared = Marks(subject.device), share(job, learner.network)
        self._step = build_step(job, learner, Counters(step=1), RunLogger(), self._marks.mark, shared)

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("--workers", type=int, default=0, help="0: as many as the plan would take")
    parser.add_argument("--shares", nargs="*", default=["auto", "0.5"])
    parser.add_argument("--backends", nargs="*", default=["processes"], help="without the GPU")
    parser.add_argument("--steps", type=int, default=60, help="in a window; four windows each")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tree_of(options.pictures) as tree:
        is_right, result = prove(tree, options)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))
    print("crops are near enough" if is_right else "crops are NOT near enough")
    return 0 if is_right else 1


def prove(tree: Path, options: argparse.Namespace) -> tuple[bool, dict[str, Any]]:
    """Everything, told as it is found."""

    def tell(name: str, found: Any) -> None:
        result[name] = found
        print(f"{name}: {json.dumps(found)}", flush=True)

    result: dict[str, Any] = {}
    workers = {"data.workers": options.workers} if options.workers else {}
    ways = {name: {"data.backend": name, **workers} for name in options.backends}
    first = opened(tree, workers)
    is_right, found = prove_crops(first, min(200, len(first.source)))
    tell("crops", found)
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
    return is_right, result


if __name__ == "__main__":
    sys.exit(main())
