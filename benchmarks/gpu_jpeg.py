"""Measure on a CUDA GPU how fast images come from JPEG files, with and without its JPEG decoder.

    python -m benchmarks.gpu_jpeg IMAGES [--recipe resnet50] [--workers N] [--shares auto] [--set A.B=V] [--json FILE]
    taskset -c 0-3 python -m benchmarks.gpu_jpeg IMAGES --recipe resnet18 --set precision.mode=bf16    # few cores

IMAGES is a folder of JPEG files; links to them make a tree of 1000 classes in a temporary folder. Measured are decoding
alone, decoding with crops, the loader alone with each backend, and the network's training step from files against the
same step on images that stay on the device, before and after. tests/gpu/test_gpu_jpeg.py compares the crops.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks import as_overrides
from reconv.bench.run import Input, bench_args, open_bench_run
from reconv.bench.timing import TimingConfig
from reconv.bench.train import bench_train
from reconv.build.data_context import open_data_context
from reconv.build.loaders import build_train_loader
from reconv.data.stage_timing import StageTimes
from reconv.device.nvjpeg import NvJpegDecoder
from reconv.recipe.loader import Override

NUM_CLASSES, PER_CLASS = 1000, 13  # 50 steps of 256 per epoch
RATE_S = 1.5  # of one measurement
BATCH = 128  # images per call of the decoder


@contextmanager
def linked_tree(images: Path) -> Iterator[Path]:
    """A folder of classes whose files are links to the images, in turn."""
    files = sorted(path for path in images.resolve().iterdir() if path.suffix.lower() in (".jpg", ".jpeg"))
    if not files:
        raise SystemExit(f"no JPEG files in {images}")
    with tempfile.TemporaryDirectory(prefix="reconv-jpeg-") as root:
        for number in range(NUM_CLASSES * PER_CLASS):
            for split in ("train", "val") if number < NUM_CLASSES else ("train",):
                folder = Path(root, split, f"c{number % NUM_CLASSES:04}")
                folder.mkdir(parents=True, exist_ok=True)
                os.symlink(files[(number + 17 * (number // NUM_CLASSES)) % len(files)], folder / f"{number:05}.jpg")
        yield Path(root)


def overrides_of(**settings: object) -> list[Override]:
    return as_overrides({"batch.size": 256, "batch.group": "all", "batch.micro": "auto", **settings})


def decoder_rates(tree: Path, size: int) -> dict[str, list[float]]:
    """Images per second, decoded only and with crops of the middle; three times each."""
    decoder = NvJpegDecoder(torch.device("cuda"))
    files = sorted(tree.rglob("*.jpg"))[:BATCH]
    data = [torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8) for file in files]
    sides = [image.shape[1:] for image in decoder.decode(data)]
    boxes = [(w // 4, h // 4, w - w // 4, h - h // 4) for h, w in sides]

    def decode() -> None:
        decoder.decode(data)
        torch.cuda.synchronize()

    return {
        "decoded": [rate(decode) for _ in range(3)],
        "with crops": [rate(lambda: decoder.crops(data, boxes, size)) for _ in range(3)],
    }


def rate(work: Callable[[], object]) -> float:
    """Images per second of a call that takes a batch."""
    work()
    began_s, calls = time.perf_counter(), 0
    while (spent_s := time.perf_counter() - began_s) < RATE_S:
        work()
        calls += 1
    return calls * BATCH / spent_s


def loader_rate(recipe: str, overrides: list[Override], tree: Path, steps: int) -> float:
    """Images per second that reach the device while nothing trains."""
    args = bench_args(recipe, input="real", data=str(tree), overrides=overrides, device="cuda")
    with (
        open_bench_run(args) as run,
        open_data_context(run.recipe, run.plan, run.device, StageTimes()) as context,
    ):
        loader = build_train_loader(run.recipe, run.plan, run.datasets.train, context)
        stream = loader.steps(0, sys.maxsize)
        for _ in islice(stream, 5):
            pass
        began_s = time.perf_counter()
        for _ in islice(stream, steps):
            pass
        run.device.synchronize()
        rate = steps * run.plan.global_batch / (time.perf_counter() - began_s)
        stream.close()  # type: ignore[attr-defined]
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("--recipe", default="resnet50")
    parser.add_argument("--workers", type=int, default=0, help="0: as many as the plan chooses")
    parser.add_argument("--shares", nargs="*", default=["auto", "0.5"])
    parser.add_argument("--backends", nargs="*", default=["auto"], help="without the GPU")
    parser.add_argument("--steps", type=int, default=60, help="in a window; four windows each")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=V", help="a recipe field, for all variants")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with linked_tree(options.images) as tree:
        result = measure_all(tree, options)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))


def measure_all(tree: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All figures, each printed as soon as it is known."""
    result: dict[str, Any] = {}

    def add(name: str, value: Any) -> None:
        result[name] = value
        print(f"{name}: {json.dumps(value)}", flush=True)

    def train(overrides: list[Override], data: Path | None) -> dict[str, Any]:
        kind: Input = "device" if data is None else "real"
        path, config = None if data is None else str(data), TimingConfig(windows=4, steps=options.steps, warmup=10)
        measured = bench_train(options.recipe, input=kind, data=path, overrides=overrides, device="cuda", config=config)
        return {name: measured[name] for name in ("images_per_s", "window_images_per_s", "step_ms")}

    add("decoder alone", decoder_rates(tree, 224))
    given: dict[str, object] = dict(setting.split("=", 1) for setting in options.set)
    if options.workers:
        given["data.num_workers"] = options.workers
    variants = {name: overrides_of(**{"data.backend": name}, **given) for name in options.backends}
    for share in options.shares:
        value = share if share == "auto" else float(share)
        variants[f"gpu {share}"] = overrides_of(**{"data.backend": "gpu", "data.gpu_decode_fraction": value}, **given)
    for name, overrides in variants.items():
        add(f"loader alone, {name}", loader_rate(options.recipe, overrides, tree, 40))
    add("training, images on the device", train(overrides_of(**given), None))
    for name, overrides in variants.items():
        add(f"training, {name}", train(overrides, tree))
    add("training, images on the device again", train(overrides_of(**given), None))
    return result


if __name__ == "__main__":
    main()
