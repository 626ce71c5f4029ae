"""Coverage of prediction sets over random splits, and how well the confidence tells foreign images from its own.

    python -m benchmarks.inference.confidence WEIGHTS --recipe cifar10-resnet20 --data CIFAR10 [--foreign NAME=DIR]

Of each of the splits of the test images, one half calibrates and the other is judged. Foreign images are handwritten
digits, noise and those of folders; AUROC is that of the largest probability (Hendrycks and Gimpel 2017): the chance
that an image of the test set has a larger one than a foreign image.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import reconv
from reconv.api import Predictor
from reconv.build.data import open_split
from reconv.data.readers.digits import open_digits
from reconv.inference.image_input import image_files
from reconv.metrics.confidence import fit_confidence, prediction_sets
from reconv.recipe.schema import Recipe

BATCH = 250


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights")
    parser.add_argument("--recipe")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--splits", type=int, default=100)
    parser.add_argument("--coverage", type=float, nargs="+", default=[0.9, 0.95])
    parser.add_argument("--foreign", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    model = reconv.load(args.weights, recipe=args.recipe, device="cpu", backend="eager")
    logits, targets = test_logits(model, args.data)
    found: dict[str, object] = {"images": len(targets), "splits": args.splits, "top1": accuracy(logits, targets)}
    for coverage in args.coverage:
        found[f"coverage {coverage:g}"] = row = coverage_over_splits(logits, targets, coverage, args.splits)
        print(f"promise {coverage:g}: {row}")
    calibration = fit_confidence(logits, targets, args.coverage[0]).calibration
    assert calibration is not None
    found["temperature"] = calibration.temperature
    found["calibration error"] = {
        name: calibration_error((logits / t).softmax(1), targets)
        for name, t in (("before", 1.0), ("after", calibration.temperature))
    }
    print(f"temperature {calibration.temperature:g}; calibration error {found['calibration error']}")
    own = (logits / calibration.temperature).softmax(1).amax(1)
    for name, images in foreign_images(model.recipe.data.preprocess.size, args.foreign):
        foreign = logits_of(model, images)
        score = (foreign / calibration.temperature).softmax(1).amax(1)
        unsure = float((prediction_sets(foreign, calibration).sum(1) != 1).double().mean())
        found[f"foreign: {name}"] = row = {"images": len(images), "AUROC": auroc(own, score), "unsure": unsure}
        print(f"foreign images, {name}: {row}")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


def test_logits(model: Predictor, data: Path) -> tuple[Tensor, Tensor]:
    """Logits and targets of the test images, in their order."""
    section = model.recipe.data.model_copy(update={"path": str(data), "source": "auto"})
    recipe: Recipe = model.recipe.model_copy(update={"data": section})
    dataset = open_split(recipe, data, "val")
    samples = [dataset[index] for index in range(len(dataset))]
    images = [np.asarray(sample.data) for sample in samples]
    return logits_of(model, images), torch.tensor([int(sample.target) for sample in samples])


def logits_of(model: Predictor, images: Sequence[np.ndarray]) -> Tensor:
    parts = [model.logits([model.read(image) for image in images[n : n + BATCH]]) for n in range(0, len(images), BATCH)]
    return torch.cat(parts).double()


def coverage_over_splits(logits: Tensor, targets: Tensor, coverage: float, splits: int) -> dict[str, float]:
    """Mean, standard deviation and range of the coverage of the other half, and what the sets are like."""
    covered, sizes, unsure = [], [], []
    for split in range(splits):
        order = torch.from_numpy(np.random.default_rng(split).permutation(len(targets)))
        first, second = order[: len(order) // 2], order[len(order) // 2 :]
        calibration = fit_confidence(logits[first], targets[first], coverage).calibration
        assert calibration is not None
        sets = prediction_sets(logits[second], calibration)
        covered.append(float(sets.gather(1, targets[second, None]).double().mean()))
        sizes.append(float(sets.sum(1).double().mean()))
        unsure.append(float((sets.sum(1) != 1).double().mean()))
    return {
        "mean": statistics.mean(covered),
        "deviation": statistics.stdev(covered),
        "lowest": min(covered),
        "highest": max(covered),
        "classes": statistics.mean(sizes),
        "unsure": statistics.mean(unsure),
        "judged": len(targets) - len(targets) // 2,
    }


def accuracy(logits: Tensor, targets: Tensor) -> float:
    return float((logits.argmax(1) == targets).double().mean())


def calibration_error(probabilities: Tensor, targets: Tensor, bins: int = 15) -> float:
    """Expected calibration error: the mean difference of confidence and accuracy over bins of equal width."""
    confidence, predicted = probabilities.max(1)
    is_right, number = (predicted == targets).double(), (confidence * bins).long().clamp(max=bins - 1)
    gaps = [
        float((confidence[number == n].mean() - is_right[number == n].mean()).abs()) * int((number == n).sum())
        for n in range(bins)
        if bool((number == n).any())
    ]
    return sum(gaps) / len(targets)


def auroc(own: Tensor, foreign: Tensor) -> float:
    """The chance that an own score is above a foreign one; ties count half."""
    ordered, _ = torch.sort(foreign)
    below = torch.searchsorted(ordered, own)
    up_to = torch.searchsorted(ordered, own, right=True)
    return float((below + up_to).double().mean() / 2 / len(foreign))


def foreign_images(size: int, folders: Sequence[str]) -> Iterator[tuple[str, list[np.ndarray]]]:
    digits = open_digits("train")
    enlarged = [Image.fromarray(np.asarray(digits[n].data).squeeze()).resize((size, size)) for n in range(len(digits))]
    yield "handwritten digits", [np.asarray(image.convert("RGB")) for image in enlarged]
    noise = np.random.default_rng(0).integers(0, 256, (1000, size, size, 3), dtype=np.uint8)
    yield "uniform noise", list(noise)
    for named in folders:
        name, _, folder = named.partition("=")
        files = [file.path for file in image_files(Path(folder))]
        squares = [Image.open(path).convert("RGB").resize((size, size), Image.Resampling.BICUBIC) for path in files]
        yield name, [np.asarray(image) for image in squares]


if __name__ == "__main__":
    main()
