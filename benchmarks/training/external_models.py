"""Time training of torchvision's and timm's networks on one GPU: our engine beside stock torch.compile.

    python -m benchmarks.training.external_models [torchvision:NAME | timm:NAME ...] [--batch 256] [--windows 5]
                                           [--ways engine] [--device cuda] [--set A.B=V ...] [--json FILE]

Each network is trained in one process on the same synthetic images, bf16 and channels_last, in up to four ways:

    engine       what `engine.compile: auto` chooses: fused kernels where patterns match, else torch.compile; CUDA graph
    no kernels   the engine with `engine.fused_kernels: off`: torch.compile in a CUDA graph
    no graph     the engine with `engine.cuda_graphs: off`
    stock        torch.compile of the package's network, autocast, torch's SGD: the package's own way

A way that fails is reported, and the next one starts. Needs torchvision or timm in a version that fits torch.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import as_overrides
from reconv.bench.baselines import compare, find_baselines
from reconv.bench.run import bench_args, no_log, open_bench_run
from reconv.bench.timing import TimingConfig
from reconv.bench.train import bench_train
from reconv.kernels.fuse import fuse
from reconv.models import build_model
from reconv.recipe.loader import Override

RECIPE = "resnet50"
NETWORKS = (
    "torchvision:regnet_y_400mf",
    "torchvision:regnet_y_8gf",
    "torchvision:convnext_tiny",
    "torchvision:mobilenet_v3_large",
)
WAYS: dict[str, dict[str, object]] = {
    "engine": {},
    "no kernels": {"engine.fused_kernels": "off"},
    "no graph": {"engine.cuda_graphs": "off"},
}
STOCK = "channels_last compiled"


def measure(
    network: str, ways: Sequence[str], settings: Sequence[str], batch: int, device: str, config: TimingConfig
) -> dict[str, Any]:
    """Images per second of each way, and notes on those that failed."""
    row: dict[str, Any] = {"network": network, "batch": batch, "swapped": swapped(network), "notes": []}
    common: dict[str, object] = {
        "model.name": network,
        "batch.size": batch,
        "batch.group": "all",
        "precision.mode": "bf16",
    }
    common |= {"model.zero_init_last": False, **dict(setting.split("=", 1) for setting in settings)}
    for way in ways:
        with noted_failure(way, row):
            overrides = as_overrides(common | WAYS[way])
            result = bench_train(RECIPE, overrides=overrides, device=device, config=config)
            row[way] = result["images_per_s"]
            row["windows"] = {**row.get("windows", {}), way: result["window_images_per_s"]}
            row["device"] = result["device"]
    with noted_failure("stock", row):
        row |= measure_stock(network, as_overrides(common), device, config)
    if "stock" in row:
        row["speedup"] = {way: row[way] / row["stock"] for way in WAYS if way in row}
    return row


def measure_stock(network: str, overrides: Sequence[Override], device: str, config: TimingConfig) -> dict[str, Any]:
    """Images per second of the package's network with torch.compile, on the batches of the run."""
    package, _, name = network.partition(":")
    baselines, missing = find_baselines(name, f"{package} {STOCK}")
    if not baselines:
        raise RuntimeError("; ".join(missing))
    with open_bench_run(bench_args(RECIPE, overrides=overrides, device=device)) as run:
        found, notes = compare(run, baselines[:1], config, 1.0, no_log)
    if not found:
        raise RuntimeError("; ".join(notes))
    (stock,) = found.values()
    return {"stock": stock["images_per_s"]}


@contextmanager
def noted_failure(way: str, row: dict[str, Any]) -> Iterator[None]:
    """Add an error to the notes of a row instead of raising it; frees the device's memory afterwards."""
    try:
        yield
    except Exception as error:  # one failure must not lose the other figures
        row["notes"].append(f"{way}: {repr(error)[:300]}")
    gc.collect()  # a step and its CUDA graph reference each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def swapped(network: str) -> dict[str, int]:
    """Numbers of modules that `fuse` swaps, by class."""
    with torch.device("meta"):
        model = build_model(network, num_classes=1000)
    before = [type(module) for module in model.modules()]
    fuse(model)
    pairs = zip(before, model.modules(), strict=True)
    return dict(Counter(kind.__name__ for kind, module in pairs if kind is not type(module)))


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The figures as Markdown."""
    yield "| network | batch | engine | no kernels | no graph | stock torch.compile | engine / stock |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        rates = [f"{row[way]:,.0f}" if way in row else "-" for way in (*WAYS, "stock")]
        speedup = row.get("speedup", {}).get("engine")
        ratio = "-" if speedup is None else f"{speedup:.2f} x"
        yield f"| {row['network']} | {row['batch']} | {' | '.join(rates)} | {ratio} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=NETWORKS)
    parser.add_argument("--ways", nargs="+", default=[*WAYS], choices=[*WAYS], help="beside stock")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--windows", type=int, default=5, help="of half a second")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for network in options.networks:
        rows.append(
            measure(network, options.ways, options.set, options.batch, options.device, TimingConfig(options.windows))
        )
        print(json.dumps(rows[-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
