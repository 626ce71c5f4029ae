"""The training loader on packed shards behind 100 ms of latency, compared with the same shards on the local disk.

    python benchmarks/data/remote_store.py --images JPEG_FOLDER --work /tmp/remote-data --out remote_data.json
    python benchmarks/data/remote_store.py --images JPEG_FOLDER --work /tmp/remote-data --store s3://data/bench

Photographs are resized to 320 px and repeated to `--samples` images in packed shards. Each round measures the local
disk and the store one after the other; the cache is deleted before each of the store's turns. `train` decodes and crops
as training does, `read` only reads, at up to `--max-mb-s`. Rates are those after the first batch, whose time is given
on its own. The cache is in `--work`, so that must be able to write as fast as the data is read; /dev/shm is. Without
`--store` the shards come from a web server of this script that waits 100 ms before each answer, in a process of its
own; for a bucket, put `tests/support/store_proxy.py URL --delay-ms 100` in between (AWS_ENDPOINT_URL).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socketserver
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_CLASSES = 10


class _DelayedFiles(BaseHTTPRequestHandler):
    """Files with ranges; each answer begins after the latency."""

    protocol_version = "HTTP/1.1"
    folder = Path()
    delay_s = 0.0

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        time.sleep(self.delay_s)
        path = self.folder / urlsplit(self.path).path.lstrip("/")
        if not path.is_file():
            self.send_error(404)
            return
        size, (start, stop) = path.stat().st_size, (0, path.stat().st_size)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if asked is not None:
            start, stop = int(asked[1]), min(int(asked[2]) + 1, size)
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{path.stat().st_mtime_ns:x}"')
        self.send_header("Content-Length", str(stop - start))
        if asked is not None:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.end_headers()
        if with_body:
            with open(path, "rb") as file:
                while start < stop:
                    start += os.sendfile(self.connection.fileno(), file.fileno(), start, stop - start)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 256


def serve(folder: Path, delay_ms: float) -> None:
    """Serve until the process is killed; prints the address."""
    _DelayedFiles.folder, _DelayedFiles.delay_s = folder, delay_ms / 1000
    with _Server(("127.0.0.1", 0), _DelayedFiles) as server:
        print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
        server.serve_forever()


@contextmanager
def server_process(folder: Path, delay_ms: float) -> Iterator[str]:
    """The address of the server, in a process of its own."""
    command = [sys.executable, __file__, "--serve", str(folder), "--delay-ms", str(delay_ms)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def make_shards(images: Path, work: Path, num_samples: int) -> Path:
    """Packed shards of `num_samples` images of 320 px, made of the photographs in a folder."""
    from reconv.data.convert.dataset import convert, make_target
    from reconv.data.convert.open_splits import open_splits
    from reconv.data.convert.transcode import TranscodeOptions
    from reconv.storage.remote_index import write_index

    packed = work / f"packed-{num_samples}"
    if packed.is_dir():
        return packed
    photographs = sorted(path for path in images.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    small, tree = work / "small", work / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    small.mkdir(parents=True, exist_ok=True)
    from PIL import Image

    for path in photographs:
        with Image.open(path) as image:
            rgb = image.convert("RGB")
        scale = 320 / min(rgb.size)
        rgb.resize((round(rgb.width * scale), round(rgb.height * scale)), Image.Resampling.BILINEAR).save(
            small / f"{path.stem}.jpg", quality=90
        )
    files = sorted(small.iterdir())
    for split, number in (("train", num_samples), ("val", 2 * _CLASSES)):
        for index in range(number):
            folder = tree / split / f"class{index % _CLASSES}"
            folder.mkdir(parents=True, exist_ok=True)
            os.link(files[index % len(files)], folder / f"{index:06}.jpg")
    splits, root = open_splits(str(tree), "auto", None, None)
    target = make_target("packed", TranscodeOptions(), 2048, None)
    convert(splits, root, packed, target, 1, lambda done, total: None)
    shutil.rmtree(tree)
    write_index(packed)
    return packed


def measure(address: str, mode: str, window: int | None, workers: int, max_mb_s: float) -> dict[str, float]:
    """Images and MB per second of one epoch after the first batch, and the time to the first batch."""
    from reconv.data.decode.native import choose_decoder, native_support
    from reconv.data.pipeline.prefetcher import DataContext
    from reconv.data.pipeline.train_loader import make_train_loader
    from reconv.data.readers.dataset_factory import open_dataset
    from reconv.recipe.loader import load
    from reconv.recipe.plan import Facts, make_plan

    overrides = [("data.source", "packed", "bench"), ("batch.size", 64, "bench"), ("batch.group", "all", "bench")]
    overrides += [("data.num_workers", workers, "bench"), ("data.backend", "threads", "bench")]
    overrides += [("data.shuffle_window", window, "bench")] if window else []
    recipe = load("resnet50", overrides).recipe
    began_s = time.perf_counter()
    dataset = open_dataset("packed", Path(address), "train", recipe.data)
    if mode == "read":
        return _measure_reading(dataset, recipe, began_s, workers, max_mb_s)
    facts = Facts(
        num_train=len(dataset),
        num_val=1,
        num_classes=_CLASSES,
        source="packed",
        cores=workers,
        decoder=choose_decoder("auto", None, [native_support()]),
    )
    plan = make_plan(recipe, facts)
    loader = make_train_loader(dataset, recipe, plan, DataContext.on_host())
    steps = iter(loader.steps(0, len(dataset) // 64))
    next(steps)
    first_s = time.perf_counter() - began_s
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    num_images = 64 * sum(1 for _ in steps)
    seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    return {**_rates(dataset, num_images, seconds, first_s), "cpu_ms_per_image": 1000 * cpu_s / num_images}


def _measure_reading(dataset, recipe, began_s: float, workers: int, max_mb_s: float) -> dict[str, float]:  # type: ignore[no-untyped-def]
    from concurrent.futures import ThreadPoolExecutor

    from reconv.data.pipeline.read_ahead import read_ahead
    from reconv.data.sampler import make_sampler

    sampler = make_sampler(dataset, recipe, 64)
    steps = range(len(dataset) // 64)
    done_bytes, first_s = 0, 0.0

    def read(index: int) -> int:
        return len(dataset[index].data)

    with (
        ThreadPoolExecutor(workers) as pool,
        read_ahead(dataset, steps, sampler.indices, recipe.data.shuffle_window is not None) as reached,
    ):
        for step in steps:
            num_bytes = sum(pool.map(read, sampler.indices(step).tolist()))
            if reached is not None:
                reached(step)
            if step == 0:
                first_s, start_s = time.perf_counter() - began_s, time.perf_counter()
                continue
            done_bytes += num_bytes
            ahead_s = done_bytes / (max_mb_s * 1e6) - (time.perf_counter() - start_s)
            if ahead_s > 0:
                time.sleep(ahead_s)
    return _rates(dataset, 64 * (len(steps) - 1), time.perf_counter() - start_s, first_s)


def _rates(dataset, num_images: int, seconds: float, first_s: float) -> dict[str, float]:  # type: ignore[no-untyped-def]
    import numpy as np

    from reconv.data.dataset import sample_ranges

    lengths = [length or 0 for _, _, length in sample_ranges(dataset, np.arange(0, len(dataset), 97, dtype=np.int64))]
    mean_bytes = sum(lengths) / len(lengths)
    rate = num_images / seconds
    return {"images_per_s": rate, "mb_per_s": rate * mean_bytes / 1e6, "first_batch_s": first_s}


def _measure_in_process(args: argparse.Namespace, address: str, cache: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", address, "--mode", args.mode, "--workers", str(args.workers)]
    command += ["--window", str(args.window), "--max-mb-s", str(args.max_mb_s)]
    environ = {**os.environ, "RECONV_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE, text=True).stdout
    rates: dict[str, float] = json.loads(found.splitlines()[-1])
    return rates


def compare(args: argparse.Namespace) -> dict[str, object]:
    """Alternate between the local disk and the store."""
    packed, cache = make_shards(args.images, args.work, args.samples), args.work / "cache"
    rounds: list[dict[str, Any]] = []
    with server_process(packed, args.delay_ms) as url:
        address = args.store or url
        for number in range(args.repeats):
            local = _measure_in_process(args, str(packed), cache)
            if not args.warm or number == 0:
                shutil.rmtree(cache, ignore_errors=True)
            if args.warm and number == 0:
                _measure_in_process(args, address, cache)
            remote = _measure_in_process(args, address, cache)
            ratio = remote["images_per_s"] / local["images_per_s"]
            rounds.append({"local": local, "store": remote, "ratio": ratio})
            print(f"round {number + 1}: local {_text(local)}; store {_text(remote)}; ratio {ratio:.3f}", flush=True)
    shutil.rmtree(cache, ignore_errors=True)
    ratios: list[float] = [entry["ratio"] for entry in rounds]
    summary = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios), "n": len(ratios)}
    spread = f"min {summary['min']:.3f}, max {summary['max']:.3f}, n {summary['n']}"
    print(f"{args.mode}: {summary['median']:.3f} of the local rate ({spread})")
    settings = {name: str(value) for name, value in vars(args).items() if value is not None}
    return {"settings": settings, "rounds": rounds, "ratio": summary}


def _text(rates: dict[str, float]) -> str:
    speed = f"{rates['images_per_s']:.0f} images/s, {rates['mb_per_s']:.1f} MB/s"
    cpu = f", {rates['cpu_ms_per_image']:.2f} ms of CPU per image" if "cpu_ms_per_image" in rates else ""
    return f"{speed}, first batch {rates['first_batch_s']:.1f} s{cpu}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, help="a folder of photographs")
    parser.add_argument("--work", type=Path, default=Path("remote-data"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--mode", choices=["train", "read"], default="train")
    parser.add_argument("--window", type=int, default=4096, help="data.shuffle_window; 0 shuffles all samples")
    parser.add_argument("--warm", action="store_true", help="keep the cache between rounds")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--delay-ms", type=float, default=100.0)
    parser.add_argument("--max-mb-s", type=float, default=150.0)
    parser.add_argument("--store", help="the address of a copy of the shards")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve, args.delay_ms)
    elif args.measure is not None:
        print(json.dumps(measure(args.measure, args.mode, args.window or None, args.workers, args.max_mb_s)))
    else:
        result = compare(args)
        if args.out is not None:
            args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
