"""Multi-label classification: loss, metrics, and a run from training to prediction."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from data_examples import encode

import reconv
from reconv.cli import reconv as command_line
from reconv.core.batch import Batch
from reconv.metrics.multilabel import MultilabelMetrics, average_precision
from reconv.tasks.binary_cross_entropy import BinaryCrossEntropy
from reconv.tasks.multilabel import MultilabelTask

NUM, CLASSES = 40, 6


def example(seed: int = 0) -> tuple[torch.Tensor, Batch]:
    generator = torch.Generator().manual_seed(seed)
    targets = (torch.rand(NUM, CLASSES, generator=generator) < 0.3).float()
    targets[:, 4] = 0  # a class that does not occur
    logits = torch.randn(NUM, CLASSES, generator=generator, dtype=torch.float64) + 1.5 * targets
    logits = (logits * 4).round() / 4  # with ties
    rows = torch.arange(NUM)
    return logits, Batch({"targets": targets, "indices": rows}, rows, (NUM,))


def brute_force_average_precision(scores: list[float], present: list[bool]) -> float:
    """The sum over the thresholds, from high to low, of precision x gain in recall."""
    total, before = 0.0, 0
    for threshold in sorted(set(scores), reverse=True):
        taken = [is_there for score, is_there in zip(scores, present, strict=True) if score >= threshold]
        total += (sum(taken) - before) / sum(present) * sum(taken) / len(taken)
        before = sum(taken)
    return total


def test_average_precision_equals_brute_force_with_ties() -> None:
    random = np.random.default_rng(1)
    for _ in range(50):
        scores, present = random.integers(0, 8, 20) / 8, random.random(20) < 0.4
        present[0] = True
        expected = brute_force_average_precision(scores.tolist(), present.tolist())
        assert average_precision(scores, present) == pytest.approx(expected, abs=1e-12)


def test_metrics_are_means_over_the_classes_that_occur() -> None:
    logits, batch = example()
    metrics = MultilabelMetrics(CLASSES)
    metrics.update(logits, batch)
    found, present = metrics.compute(), batch["targets"].bool()
    precisions, scores, counts = [], [], np.zeros(3)
    for c in (0, 1, 2, 3, 5):
        precisions.append(brute_force_average_precision(logits[:, c].tolist(), present[:, c].tolist()))
        pairs = list(zip((logits[:, c].sigmoid() > 0.5).tolist(), present[:, c].tolist(), strict=True))
        one = np.array([pairs.count(pair) for pair in ((True, True), (True, False), (False, True))])
        scores.append(2 * one[0] / (2 * one[0] + one[1] + one[2]))
        counts += one
    counts[1] += (logits[:, 4] > 0).sum().item()
    assert found["map"] == pytest.approx(np.mean(precisions))
    assert found["macro_f1"] == pytest.approx(np.mean(scores))
    assert found["micro_f1"] == pytest.approx(2 * counts[0] / (2 * counts[0] + counts[1] + counts[2]))
    assert found["loss"] == pytest.approx(F.binary_cross_entropy_with_logits(logits, present.double()).item())


def test_metrics_do_not_depend_on_batches_and_ranks() -> None:
    logits, batch = example()
    whole, ranks = MultilabelMetrics(CLASSES), [MultilabelMetrics(CLASSES) for _ in range(3)]
    whole.update(logits, batch)
    for start in range(0, NUM, 5):
        rows = slice(start, start + 5)
        part = Batch({name: t[rows] for name, t in batch.tensors.items()}, batch.positions[rows], (5,))
        ranks[start // 5 % 3].update(logits[rows], part)
    ranks[0].merge([rank.state() for rank in ranks])
    assert ranks[0].num_samples == NUM
    assert ranks[0].compute() == whole.compute()
    assert ranks[0].mistakes(5) == whole.mistakes(5)
    worst = whole.mistakes(5)[0]
    assert set(worst.labels) != set(worst.predicted)


def test_the_loss_smooths_towards_one_half_and_uses_mixed_targets() -> None:
    logits, batch = example()
    pos_weight = torch.linspace(0.5, 2, CLASSES)
    task = MultilabelTask(CLASSES, 0.2, BinaryCrossEntropy(pos_weight=pos_weight))
    mixed = 0.3 * batch["targets"] + 0.7 * batch["targets"].flip(0)
    for given, targets in ((batch, batch["targets"]), (batch.replace(soft_targets=mixed), mixed)):
        smoothed = targets.double() * 0.8 + 0.1
        expected = F.binary_cross_entropy_with_logits(logits, smoothed, pos_weight=pos_weight.double())
        sums = task.loss(logits, given)
        torch.testing.assert_close(sums.loss / task.weight(given), expected)
        logged = task.train_metrics({name: float(value) for name, value in sums.metrics.items()}, NUM)
        metrics = MultilabelMetrics(CLASSES)
        metrics.update(logits, batch)
        assert logged["micro_f1"] == pytest.approx(metrics.compute()["micro_f1"])


def write_images(folder: Path) -> Path:
    """Images that are bright on the left, on the right, on both sides or on none, labeled so."""
    lines = ["file,label,split"]
    for number in range(60):
        sides = [name for bit, name in enumerate(("left", "right")) if number >> bit & 1]
        pixels = np.random.default_rng(number).integers(0, 60, (8, 8, 1), dtype=np.uint8)
        for name in sides:
            pixels[:, slice(0, 4) if name == "left" else slice(4, 8)] += 180
        (folder / f"{number}.png").write_bytes(encode(np.repeat(pixels, 3, axis=2)))
        lines.append(f"{number}.png,{';'.join(sides)},{'train' if number < 48 else 'val'}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_a_run_learns_labels_and_its_model_predicts_them(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    settings = {
        "task": "multilabel",
        "expect": None,
        "data.source": "auto",
        "length": "12ep",
        "batch.size": 16,
        "augment.mixup.alpha": 0.1,
        "augment.hflip": 0,
        "loss.class_weights": "balanced",
    }
    overrides = [(field, value, "test") for field, value in settings.items()]
    run = reconv.train("quickstart", data=write_images(data), out=tmp_path / "run", overrides=overrides, device="cpu")
    assert run.summary["metric"] == "map"
    assert run.summary["value"] == 1
    [score] = reconv.evaluate(run.folder, device="cpu")
    assert score.metrics["map"] == 1
    predictions = reconv.predict(run.folder, [data / f"{number}.png" for number in range(48, 52)], device="cpu")
    assert [{found.name for found in each.classes} for each in predictions] == [
        set(),
        {"left"},
        {"right"},
        {"left", "right"},
    ]
    arguments = ["predict", str(run.folder), str(data / "48.png"), str(data / "51.png"), "--device", "cpu"]
    assert "none" in CliRunner().invoke(command_line, arguments).output
    result = CliRunner().invoke(command_line, [*arguments, "--min-score", "0", "--json", "-"])
    assert [len(each["classes"]) for each in json.loads(result.stdout)] == [2, 2]
    assert "left, right" in (run.folder / "report.html").read_text()
