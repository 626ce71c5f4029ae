"""Measure how fast `Predictor` is beside a plain torch loop, from JPEG files in memory to the top 5 classes.

    python -m benchmarks.inference.predict [--device cpu|cuda] [--images DIR] [--models NAME...] [--json FILE]

All ways alternate in one process; the table has the median of n windows and the lowest and highest ratio to the first
way. Networks have random weights and the norm statistics of random images. Without --images, photograph-like JPEG files
are generated (noise of several scales, about 470 x 400 px and 110 kB).

CPU: a plain loop (Pillow, torchvision's arithmetic, eager fp32, one batch after the other) against `Predictor`.
CUDA: bytes to top 5, pixels on the device against `bench infer` of the same batch, and a torch.compile loop.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from reconv.bench.infer import bench_infer, open_network
from reconv.core.machine import Machine, usable_cores
from reconv.data.transforms.host import eval_transform
from reconv.inference.predictor import Predictor

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RECIPES = {"resnet50": "resnet50", "mobilenet_v2": "resnet50"}  # the recipe whose preprocessing and size are used
NUM_CLASSES = 1000
LONG_LIST = 8192

Way = Callable[[Sequence[bytes]], object]


def generated_files(count: int) -> list[bytes]:
    """JPEG files with the size and the entropy of photographs: random colors at several scales."""
    random, files = np.random.default_rng(0), []
    for _ in range(count):
        width, height = int(random.integers(400, 541)), int(random.integers(340, 461))
        pixels = np.zeros((height, width, 3))
        for scale, strength in ((6, 90.0), (24, 50.0), (96, 30.0)):
            small = random.normal(0, strength, (scale, scale, 3)).clip(-255, 255)
            layers = [Image.fromarray(small[..., channel].astype(np.float32)) for channel in range(3)]
            layers = [layer.resize((width, height), Image.Resampling.BICUBIC) for layer in layers]
            pixels += np.stack([np.asarray(layer) for layer in layers], axis=2)
        pixels += random.normal(0, 16, pixels.shape)
        file = io.BytesIO()
        Image.fromarray((pixels + 118).clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=88)
        files.append(file.getvalue())
    return files


def read_files(folder: Path) -> list[bytes]:
    files = [path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix.lower() in (".jpg", ".jpeg")]
    if not files:
        raise SystemExit(f"no JPEG files in {folder}")
    return files


def write_images(files: Sequence[bytes], folder: Path) -> None:
    """Write some files where int8 is calibrated with them."""
    folder.mkdir()
    for number, file in enumerate(files[:64]):
        (folder / f"{number}.jpg").write_bytes(file)


def write_network(model: str, mode: str, folder: Path) -> Path:
    """A checkpoint-like weights file of an untrained network, whose norms have the statistics of random images."""
    overrides = [("model.name", model, "benchmark"), ("precision.mode", mode, "benchmark")]
    _, network, _ = open_network(RECIPES[model], overrides, "cpu")
    path = folder / f"{model}.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in network.model.state_dict().items()}, path)
    path.with_suffix(".yaml").write_text(
        f"extends: {RECIPES[model]}\nmodel:\n  name: {model}\nprecision:\n  mode: {mode}\nexpect: null\n"
    )
    return path


def open_predictor(path: Path, **options: Any) -> Predictor:
    return Predictor.load(path, recipe=str(path.with_suffix(".yaml")), log=note, **options)


def note(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def plain_loop(predictor: Predictor, batch: int, device: str, threads: int = 0, network: Any = None) -> Way:
    """The usual hand-written loop: Pillow, a float tensor per image, the model, softmax and topk; batch after batch."""
    preprocess, model = predictor.recipe.data.preprocess, predictor.module if network is None else network
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    pool = ThreadPoolExecutor(threads) if threads else None

    def read(file: bytes) -> torch.Tensor:
        pixels = eval_transform(Image.open(io.BytesIO(file)).convert("RGB"), preprocess)
        return (torch.tensor(pixels).float() / 255 - mean) / std

    def run(files: Sequence[bytes]) -> list[Any]:
        found: list[Any] = []
        with torch.inference_mode():
            for start in range(0, len(files), batch):
                part = files[start : start + batch]
                images = torch.stack(list(pool.map(read, part) if pool else map(read, part))).to(device)
                dtype = next(model.parameters()).dtype
                top = model(images.to(dtype)).float().softmax(1).topk(5)
                found += list(zip(top.values.tolist(), top.indices.tolist(), strict=True))
        return found

    return run


def windows(ways: dict[str, Way], files: Sequence[bytes], n: int) -> dict[str, list[float]]:
    """Images per second of each way, alternating; the first pass of each is not counted.

    On CUDA, ways that decode by Pillow get a sixteenth of the files: they are that much slower.
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    is_long = len(files) >= LONG_LIST
    parts = {name: files[: len(files) // 16] if is_long and "illow" in name else files for name in ways}
    for name, way in ways.items():
        way(parts[name])
    for _ in range(n):
        for name, way in ways.items():
            start_s = time.perf_counter()
            way(parts[name])
            found[name].append(len(parts[name]) / (time.perf_counter() - start_s))
    return found


def print_table(title: str, rates: dict[str, list[float]]) -> dict[str, Any]:
    print(f"\n{title}")
    base, rows = next(iter(rates.values())), {}
    for name, values in rates.items():
        ratios = [a / b for a, b in zip(values, base, strict=True)]
        middle, ratio = statistics.median(values), statistics.median(ratios)
        print(
            f"  {name:<44} {middle:>10,.1f} images/s ({min(values):,.1f} to {max(values):,.1f})"
            f"   x {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f}), n = {len(values)}"
        )
        rows[name] = {"images_per_s": values, "ratio": ratio}
    return rows


def cpu_ways(path: Path, batch: int, calibration: Path) -> Iterator[tuple[str, Way]]:
    eager = open_predictor(path, device="cpu", backend="eager", decoder="pillow")
    yield "plain loop: Pillow, eager fp32", plain_loop(eager, batch, "cpu")
    settings: list[tuple[str, dict[str, Any]]] = [
        ("Predictor, default", {}),
        ("Predictor, --decoder pillow", {"decoder": "pillow"}),
        ("Predictor, --backend onnxruntime", {"backend": "onnxruntime"}),
        ("Predictor, --precision bf16", {"precision": "bf16"}),
        ("Predictor, --precision int8", {"precision": "int8", "calibration": calibration}),
    ]
    for name, options in settings:
        try:
            predictor = open_predictor(path, device="cpu", **options)
        except Exception as error:
            note(f"{name} is not measured: {error!r}")
            continue
        print(f"{name}: {predictor.backend.describe()}, {predictor.read.decoder}")
        yield name, lambda files, p=predictor: p.predict(files, batch_size=batch)  # type: ignore[misc]


def cuda_ways(path: Path, batch: int) -> Iterator[tuple[str, Way]]:
    eager = open_predictor(path, device="cuda", backend="eager", decoder="pillow")
    cores = usable_cores(Machine())
    model = eager.module.to(torch.bfloat16)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    compiled = torch.compile(model)  # not reduce-overhead: its CUDA graphs and ours in one process have failed
    yield f"torch.compile bf16, Pillow in {cores} threads", plain_loop(eager, batch, "cuda", cores, compiled)
    for name, options in (
        ("Predictor, default", {}),
        ("Predictor, --decoder native", {"decoder": "native"}),
        ("Predictor, --decoder pillow", {"decoder": "pillow"}),
    ):
        start_s = time.perf_counter()
        try:
            predictor = open_predictor(path, device="cuda", **options)
        except Exception as error:
            note(f"{name} is not measured: {error!r}")
            continue
        predictor.warm_up([batch])
        loaded_s = time.perf_counter() - start_s
        notes = getattr(predictor.backend, "notes", [])
        print(f"{name}: {predictor.backend.describe()}, {predictor.read.decoder}, ready in {loaded_s:.1f} s {notes}")
        yield name, lambda files, p=predictor: p.predict(files, batch_size=batch)  # type: ignore[misc]


def stage_rates(path: Path, files: Sequence[bytes], batch: int, n: int) -> dict[str, Any]:
    """Reading alone, in all threads, and the network alone on pixels that are on the device, against `bench infer`."""
    predictor = open_predictor(path, device="cuda")
    predictor.warm_up([batch])
    pool, cores = ThreadPoolExecutor(usable_cores(Machine())), usable_cores(Machine())
    out = np.empty((cores, 16, *predictor.read.shape), np.uint8)

    def read_share(core: int) -> None:
        share = files[core::cores]
        for start in range(0, len(share), 16):
            group = share[start : start + 16]
            predictor.read.read_group(group, out[core, : len(group)])

    pixels = torch.randint(0, 256, (128 * batch, *predictor.read.shape), dtype=torch.uint8, device="cuda")

    def bench() -> float:
        """`bench infer`, for as long as a window of pixels: the clock of a GPU falls under a long load."""
        recipe, iterations = str(path.with_suffix(".yaml")), len(pixels) // batch
        found = bench_infer(recipe, batches=(batch,), device="cuda", iterations=iterations * n, log=lambda text: None)
        return float(found["images_per_s"])

    before = bench()
    ways: dict[str, Way] = {
        "pixels on the device to top 5": lambda files: predictor.predict_pixels(pixels, batch_size=batch),
        "pixels on the host to top 5": lambda files: predictor.predict_pixels(host, batch_size=batch),
    }
    host = pixels[: 32 * batch].cpu()
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for name, way in ways.items():
        way(files)
        images = host if "host" in name else pixels
        for _ in range(n):
            start_s = time.perf_counter()
            way(files)
            rates[name].append(len(images) / (time.perf_counter() - start_s))
    rows = print_table("the network alone", rates)
    after = bench()
    ratio = statistics.median(rates["pixels on the device to top 5"]) / statistics.mean((before, after))
    print(
        f"bench infer, batch {batch}: {before:,.1f} images/s before, {after:,.1f} after; on pixels x {ratio:.3f} of it"
    )
    reading = windows({"reading alone": lambda files: list(pool.map(read_share, range(cores)))}, files, n)
    rows |= print_table(f"reading alone, {cores} threads, {predictor.read.decoder}", reading)
    return rows | {"bench_infer": [before, after], "of_bench_infer": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--models", nargs="+", default=["resnet50", "mobilenet_v2"], choices=list(RECIPES))
    parser.add_argument("--images", type=Path, help="a folder of JPEG files [default: generated ones]")
    parser.add_argument("--count", type=int, help="images of a window [default: 64 on a CPU, 24,576 on CUDA]")
    parser.add_argument("--batch", type=int, help="images per batch [default: 16 on a CPU, 256 on CUDA]")
    parser.add_argument("--stages", action="store_true", help="on CUDA only the network alone and reading alone")
    parser.add_argument("-n", type=int, default=5, help="windows of each way")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    is_cuda = options.device == "cuda"
    count, batch = options.count or (24576 if is_cuda else 64), options.batch or (256 if is_cuda else 16)
    files = read_files(options.images) if options.images else generated_files(min(count, 200))
    files = [files[number % len(files)] for number in range(count)]
    print(f"{len(set(files))} files, {statistics.mean(map(len, files)) / 1000:.0f} kB on average; batch {batch}")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="reconv-predict-") as folder:
        write_images(files, Path(folder) / "images")
        for model in options.models:
            path = write_network(model, "bf16" if is_cuda else "fp32", Path(folder))
            found = cuda_ways(path, batch) if is_cuda else cpu_ways(path, batch, Path(folder) / "images")
            ways = {} if options.stages else dict(found)
            results[model] = print_table(f"{model}, {options.device}", windows(ways, files, options.n)) if ways else {}
            if is_cuda:
                results[model] |= stage_rates(path, files, batch, options.n)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
