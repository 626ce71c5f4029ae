"""The derived rate of `finetune` beside the rule without features and a sweep, in cells of sizes, images and classes.

    python -m benchmarks.training.finetune_rates head PHOTOS --weights mobilenet_v2.pth [--cells 8] --json FILE
    python -m benchmarks.training.finetune_rates train PHOTOS --weights mobilenet_v2.pth --seeds 3 --json FILE

PHOTOS has train/CLASS and val/CLASS; a cell takes some of its classes and images. `head` computes the features of the
pretrained network once and trains the last layer on them, as the first part of a run does, with each rate. `train` runs
the whole recipe. A training collapses if its loss ends above that of guessing, or its accuracy far below its own best.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import reconv
from reconv.build.data import data_path, open_split
from reconv.build.derived_recipe import load_derived
from reconv.build.head_features import head_input, head_layer
from reconv.build.model import model_options
from reconv.build.saved_model import find_weights
from reconv.checkpoint.load_weights import load_weights, read_weights
from reconv.data.dataset import Split
from reconv.data.pipeline.bad_samples import BadSamples
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.transforms.normalize import EvalPreprocess
from reconv.models import build_model
from reconv.recipe.schema import Recipe

MOMENTUM, SMOOTHING, WARMUP, BATCH_OF_FEATURES = 0.9, 0.1, 0.05, 32
FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)  # of the sweep, times the derived rate
DROP = 0.15  # of accuracy below its own best: a collapse


@dataclass(frozen=True, slots=True)
class Cell:
    """A dataset and an image size."""

    size: int
    images: int
    classes: int


# Sizes from 64 to 320, 50 to 5,000 images, 2 to 200 classes; the ones that collapsed first.
CELLS = (
    *(Cell(size, 480, 6) for size in (96, 64, 128, 160, 224, 320)),
    *(Cell(96, images, 6) for images in (50, 120, 1000)),
    *(Cell(96, 480, classes) for classes in (2, 12, 20)),
    *(Cell(size, images, classes) for size, images, classes in ((64, 50, 2), (64, 2000, 20), (128, 50, 2))),
    *(Cell(size, images, classes) for size, images, classes in ((128, 2000, 20), (160, 120, 2), (160, 1000, 12))),
    *(Cell(size, images, classes) for size, images, classes in ((224, 50, 2), (224, 1000, 20), (320, 120, 12))),
    *(Cell(size, images, classes) for size, images, classes in ((192, 2000, 20), (96, 5000, 100), (96, 5000, 200))),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["head", "train"])
    parser.add_argument("photos", type=Path)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--cells", type=int, default=len(CELLS))
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="leave the first N cells out")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for cell in CELLS[args.skip : args.skip + args.cells]:
        if len(list((args.photos / "train").iterdir())) < cell.classes:
            print(f"{cell}: the data has fewer classes", flush=True)
            continue
        with subset(args.photos, cell) as data:
            run = head_cell if args.mode == "head" else train_cell
            row = {**asdict(cell), **run(data, args.weights, cell, args.seeds)}
        rows.append(row)
        print(json.dumps(row), flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps({"weights": args.weights, "rows": rows}, indent=2) + "\n")


@contextmanager
def subset(photos: Path, cell: Cell) -> Iterator[Path]:
    """A folder of links to some classes and images; all validation images of these classes."""
    counts = {folder.name: len(list(folder.iterdir())) for folder in (photos / "train").iterdir()}
    classes = sorted(sorted(counts, key=lambda name: (-counts[name], name))[: cell.classes])
    with tempfile.TemporaryDirectory(prefix="reconv-rates-") as name:
        for label in classes:
            for split in ("train", "val"):
                files = sorted((photos / split / label).iterdir())
                most = max(1, cell.images // cell.classes) if split == "train" else len(files)
                chosen = files[:: max(1, len(files) // most)][:most]
                folder = Path(name) / split / label
                folder.mkdir(parents=True)
                for file in chosen:
                    (folder / file.name).symlink_to(file.resolve())
        yield Path(name)


def overrides(data: Path, weights: str, cell: Cell, *more: tuple[str, str]) -> list[tuple[str, str, str]]:
    given = (("data.path", str(data)), ("model.init", weights), ("data.preprocess.size", str(cell.size)), *more)
    return [(name, value, "benchmark") for name, value in given]


def plain_rate(batch: int) -> float:
    """The rate of the rule without features, as it was."""
    return float(f"{0.05 * math.sqrt(batch / 64):.2g}")


def head_cell(data: Path, weights: str, cell: Cell, seeds: int) -> dict[str, Any]:
    """Accuracy of the last layer with the derived rate, the plain rule and the best of the sweep."""
    recipe = load_derived("finetune", overrides(data, weights, cell)).recipe
    derived, batch = float(recipe.schedule.lr), recipe.batch.size
    (x, y), (x_val, y_val) = (features(recipe, split) for split in ("train", "val"))
    steps = max(1, int(recipe.length.value * (len(y) / batch)))
    rates = {"derived": derived, "plain rule": plain_rate(batch), **{f"x {f:g}": f * derived for f in FACTORS}}
    found = {
        name: [train_head(x, y, x_val, y_val, rate, batch, steps, seed, cell.classes) for seed in range(seeds)]
        for name, rate in rates.items()
    }
    return {"rates": rates, "validation": len(y_val), "steps": steps, **summary(found)}


def summary(found: Mapping[str, Sequence[tuple[float, bool]]]) -> dict[str, Any]:
    """The mean accuracy of each rate, how many seeds collapsed, and the derived rate beside the best of the sweep."""
    accuracy = {name: sum(a for a, _ in runs) / len(runs) for name, runs in found.items()}
    return {
        "accuracy": accuracy,
        "collapsed": {name: sum(c for _, c in runs) for name, runs in found.items()},
        "behind the best": max(accuracy[name] for name in accuracy if name != "plain rule") - accuracy["derived"],
    }


def features(recipe: Recipe, split: Split) -> tuple[Tensor, Tensor]:
    """The last layer's inputs [n, d] for the images of a split as evaluation prepares them, and their classes [n]."""
    dataset = open_split(recipe, data_path(recipe), split)
    model = build_model(recipe.model.name, seed=recipe.seed, **model_options(recipe, len(dataset.class_names)))
    assert recipe.model.init is not None
    tensors = read_weights(find_weights(recipe.model.init).located.weights, num_classes=len(dataset.class_names))
    load_weights(model, tensors, strict=False, source=recipe.model.init)
    head = head_layer(model)
    assert head is not None
    preprocess = EvalPreprocess(recipe.data.preprocess, torch.float32)
    loader = EvalLoader(
        dataset, recipe.data.preprocess, BATCH_OF_FEATURES, DataContext.on_host(), bad_samples=BadSamples(len(dataset))
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    inputs, targets = [], []
    for batch in loader:
        images = preprocess(batch)["images"].to(device)
        inputs.append(head_input(model, head[1], images, batch_statistics=False).cpu())
        targets.append(batch["targets"].clone())
    return torch.cat(inputs), torch.cat(targets)


def train_head(
    x: Tensor, y: Tensor, x_val: Tensor, y_val: Tensor, rate: float, batch: int, steps: int, seed: int, classes: int
) -> tuple[float, bool]:
    """The last accuracy of a softmax layer that SGD trains on features, and whether it collapsed."""
    random = torch.Generator().manual_seed(seed)
    weight = ((torch.rand(classes, x.shape[1], generator=random) * 2 - 1) / math.sqrt(x.shape[1])).requires_grad_()
    bias = torch.zeros(classes, requires_grad=True)
    optimizer = torch.optim.SGD([weight, bias], rate, MOMENTUM)
    warmup, best, losses = max(1, round(WARMUP * steps)), 0.0, []
    accuracy = 0.0
    for step in range(steps):
        progress = max(0, step - warmup) / max(1, steps - warmup)
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / warmup) * (1 + math.cos(math.pi * progress)) / 2
        chosen = torch.randint(len(y), (min(batch, len(y)),), generator=random)
        loss = F.cross_entropy(x[chosen] @ weight.T + bias, y[chosen], label_smoothing=SMOOTHING)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if (step + 1) % max(1, steps // 10) == 0 or step + 1 == steps:
            with torch.no_grad():
                accuracy = float(((x_val @ weight.T + bias).argmax(1) == y_val).double().mean())
            best = max(best, accuracy)
    late = sum(losses[-10:]) / len(losses[-10:])
    peak = max(sum(losses[n : n + 10]) / 10 for n in range(max(1, len(losses) - 9)))
    is_collapsed = not math.isfinite(late) or late > math.log(classes) or best - accuracy > DROP
    return accuracy, is_collapsed or peak > 2 * math.log(classes)


def train_cell(data: Path, weights: str, cell: Cell, seeds: int) -> dict[str, Any]:
    """The same of whole runs: three seeds of the derived rate and of the plain rule, one of each rate of the sweep."""
    recipe = load_derived("finetune", overrides(data, weights, cell)).recipe
    derived, plain = float(recipe.schedule.lr), plain_rate(recipe.batch.size)
    jobs: list[tuple[str, float | None, int]] = [("derived", None, seed) for seed in range(seeds)]
    jobs += [("plain rule", plain, seed) for seed in range(seeds)]
    jobs += [(f"x {factor:g}", factor * derived, 0) for factor in FACTORS if factor != 1]
    found: dict[str, list[tuple[float, bool]]] = {}
    for name, rate, seed in jobs:
        more = [("seed", str(seed)), ("engine.divergence.policy", "ignore")]
        more += [] if rate is None else [("schedule.lr", f"{rate:g}"), ("optimizer.backbone_lr_scale", "0.2")]
        with tempfile.TemporaryDirectory(prefix="reconv-rates-run-") as out:
            given = overrides(data, weights, cell, *more)
            result = reconv.train("finetune", out=Path(out) / "run", overrides=given)
            summary_of_run = result.summary
        value, best = float(summary_of_run["value"] or 0), float(summary_of_run["best"] or 0)
        found.setdefault(name, []).append((value, best - value > DROP or value < 1.2 / cell.classes))
    return {"rates": {"derived": derived, "plain rule": plain}, **summary(found)}


if __name__ == "__main__":
    main()
