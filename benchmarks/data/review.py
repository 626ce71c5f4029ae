"""Flip labels, find them again, and train on what is left: precision, recall, and the accuracy that comes back.

python -m benchmarks.data.review SOURCE [--recipe RECIPE] [--init WEIGHTS] [--split train] [--flipped 0.1] [--seeds 3]
    [--first-seed 0] [--folds 5] [--train] [--set A.B=V] [--json FILE]

The labels that are flipped get any other class with equal probability. With --train, RECIPE is trained on the true
labels, on the flipped ones and on those that `--accept-above 0.5` gives, and evaluated on the true validation labels.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import reconv
from reconv.cli.options import parse_settings
from reconv.data.dataset import I64, all_targets
from reconv.data.readers.dataset_factory import open_dataset
from reconv.recipe.loader import Override, load
from reconv.recipe.parts.data import NEED_NO_PATH, DataConfig
from reconv.review import evidence as gather
from reconv.review.evidence import Training
from reconv.review.images import ReviewedImages
from reconv.review.labels import LabelScores, judge_labels
from reconv.review.network import FeatureNetwork

LIKELY = 0.5
PRECISION, RECALL = 0.8, 0.9


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("--recipe", default="finetune")
    parser.add_argument("--init")
    parser.add_argument("--split", choices=["train", "val"], default="train")
    parser.add_argument("--flipped", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="A.B=V")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(args)
    measured = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            measured.append(measure(options, seed, Path(folder)))
        print(json.dumps(measured[-1]), flush=True)
    if options.json is not None:
        content = {"source": options.source, "recipe": options.recipe, "runs": measured}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


def measure(options: argparse.Namespace, seed: int, folder: Path) -> dict[str, float]:
    """Everything measured with one seed."""
    overrides = parse_settings(options.settings)
    section = load(options.recipe, overrides).recipe.data
    path = None if options.source in NEED_NO_PATH else options.source
    section = section.model_copy(update={"source": options.source if path is None else section.source})
    truth = opened(section, path, options.split)
    flips = folder / "flips.csv"
    true, wrong = flip(truth, options.split, options.flipped, seed, flips)
    noisy: list[Override] = [*overrides, ("data.relabel", str(flips), "flipped")]
    images = opened(section.model_copy(update={"relabel": str(flips)}), path, options.split)
    start_s, cpu_start_s = time.perf_counter(), time.process_time()
    if options.init is not None:
        data = [*overrides, ("data.path", options.source, "source")]
        network = FeatureNetwork.of_weights(options.init, data, options.device, len(images.class_names))
        found = gather.from_weights(images, network, options.folds, seed, options.init)
    else:
        training = Training(options.recipe, [*noisy, ("seed", seed, "seed")], path, options.device, folder)
        found = gather.from_folds(images, training, options.folds, section.split_seed, print)
    assert found.probs is not None
    scores = judge_labels(images.labels, found.probs)
    result = {
        **precision_and_recall(scores.wrong, wrong),
        "right class": float((scores.best == true)[wrong & (scores.wrong >= LIKELY)].mean()),
        "estimated flips": scores.num_wrong / len(wrong),
        "wall_s": time.perf_counter() - start_s,
        "cpu_s": time.process_time() - cpu_start_s,
    }
    if options.train:
        corrected = folder / "corrected.csv"
        corrected.write_text(flips.read_text() + corrections(images, scores, options.split))
        result |= accuracies(options, path, overrides, flips, corrected, seed, folder)
    return result


def opened(section: DataConfig, path: str | None, split: Any) -> ReviewedImages:
    """One split as the training set of a review."""
    root = None if path is None else Path(path)
    return ReviewedImages.of({"train": open_dataset(section.source, root, split, section)}, root)


def flip(images: ReviewedImages, split: str, share: float, seed: int, file: Path) -> tuple[I64, np.ndarray]:
    """Write a list that gives a share of the images another class; the true classes, and which are flipped."""
    rng, num_classes = np.random.default_rng(seed), len(images.class_names)
    wrong = np.zeros(len(images), bool)
    wrong[rng.permutation(len(images))[: round(share * len(images))]] = True
    true = all_targets(images.datasets["train"])
    labels = (true + rng.integers(1, num_classes, len(images))) % num_classes
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(("path", "split", "action", "label"))
        rows = np.flatnonzero(wrong).tolist()
        writer.writerows((images.paths[row], split, "relabel", images.class_names[labels[row]]) for row in rows)
    return true, wrong


def corrections(images: ReviewedImages, scores: LabelScores, split: str) -> str:
    """Rows of a list with the most likely class of each label that is likely wrong."""
    rows = np.flatnonzero((scores.wrong >= LIKELY) & (scores.best != images.labels)).tolist()
    return "".join(f'"{images.paths[row]}",{split},relabel,{images.class_names[scores.best[row]]}\n' for row in rows)


def precision_and_recall(score: np.ndarray, wrong: np.ndarray) -> dict[str, float]:
    """Precision and recall of the flips: at fixed values of the other, and where labels are likely wrong."""
    hits = np.cumsum(wrong[np.argsort(-score, kind="stable")])
    precision, recall = hits / np.arange(1, len(hits) + 1), hits / wrong.sum()
    enough, likely = precision >= PRECISION, score >= LIKELY
    return {
        "found at 80 % precision": float(recall[enough].max(initial=0.0)),
        "precision at 90 % found": float(precision[np.searchsorted(recall, RECALL)]),
        "found at score 0.5": float((wrong & likely).sum() / wrong.sum()),
        "precision at score 0.5": float(wrong[likely].mean()),
    }


def accuracies(
    options: argparse.Namespace,
    path: str | None,
    overrides: Sequence[Override],
    flips: Path,
    corrected: Path,
    seed: int,
    folder: Path,
) -> dict[str, float]:
    """Validation accuracy after training on the true, the flipped and the corrected labels."""
    values = {}
    for name, file in (("true", None), ("flipped", flips), ("corrected", corrected)):
        relabel: list[Override] = [] if file is None else [("data.relabel", str(file), name)]
        result = reconv.train(
            options.recipe,
            data=path,
            seed=seed,
            overrides=[*overrides, *relabel, ("evaluate.every", "100%", "benchmark"), ("expect", None, "benchmark")],
            out=folder / name,
            device=options.device,
        )
        values[f"accuracy, {name} labels"] = float(result.value or 0.0)
    return values


if __name__ == "__main__":
    main()
