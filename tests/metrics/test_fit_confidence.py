"""Temperature and prediction sets keep their promises on data whose probabilities are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reconv.metrics.confidence import fit_confidence, fit_temperature, lac_threshold, prediction_sets


def draw(count: int, seed: int, temperature: float = 1.0, classes: int = 10) -> tuple[Tensor, Tensor]:
    """Logits, and targets drawn from softmax(logits / temperature)."""
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(random.normal(0, 2.5, (count, classes)))
    chances = (logits / temperature).softmax(dim=1).cumsum(dim=1)
    targets = (chances < torch.from_numpy(random.random((count, 1)))).sum(dim=1)
    return logits, targets.clamp(max=classes - 1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_temperature_that_the_targets_were_drawn_with_is_found(temperature: float) -> None:
    logits, targets = draw(8000, 1, temperature)
    found = fit_temperature(logits, targets)
    assert found == pytest.approx(temperature, rel=0.06)
    least = F.cross_entropy(logits / found, targets)
    assert all(least <= F.cross_entropy(logits / (found * factor), targets) for factor in (0.9, 0.99, 1.01, 1.1))


def test_separable_logits_have_a_bounded_temperature() -> None:
    logits = 5 * torch.eye(4, dtype=torch.float64).repeat(50, 1)
    assert 0.0497 < fit_temperature(logits, torch.arange(200) % 4) < 0.2
    assert fit_temperature(torch.zeros(200, 4, dtype=torch.float64), torch.arange(200) % 4) > 0


def test_the_threshold_is_the_quantile_with_the_correction_for_a_finite_sample() -> None:
    right = np.linspace(0.01, 1.0, 100)
    assert lac_threshold(right, 0.9) == pytest.approx(0.10, abs=2e-6)  # the 10th of 100: floor(101 x 0.1)
    assert lac_threshold(right[:8], 0.9) == 0.0  # nine are needed
    assert lac_threshold(right[::-1], 0.9) == lac_threshold(right, 0.9)


@pytest.mark.parametrize("coverage", [0.8, 0.9, 0.95])
def test_sets_have_the_right_class_as_often_as_promised(coverage: float) -> None:
    covered = []
    for seed in range(20):
        logits, targets = draw(4000, seed, temperature=1.5)
        fitted = fit_confidence(logits[:2000], targets[:2000], coverage).calibration
        assert fitted is not None and fitted.coverage == coverage
        sets = prediction_sets(logits[2000:], fitted)
        covered.append(float(sets.gather(1, targets[2000:, None]).double().mean()))
    assert np.mean(covered) == pytest.approx(coverage, abs=0.01)


def test_temperature_and_sets_are_fitted_on_other_images() -> None:
    logits, targets = draw(1000, 5)
    fitted = fit_confidence(logits, targets, 0.9).calibration
    assert fitted is not None and fitted.num_temperature + fitted.num_conformal == 1000
    changes = set()
    for row in range(0, 1000, 7):  # one wrong image at a time changes the one or the other
        worse = logits.clone()
        worse[row] = 0
        worse[row, targets[row]] = -8
        other = fit_confidence(worse, targets, 0.9).calibration
        assert other is not None
        changes.add((other.temperature != fitted.temperature, other.temperature == fitted.temperature))
    assert changes == {(True, False), (False, True)}


def test_too_few_images_promise_nothing_and_say_so() -> None:
    logits, targets = draw(900, 2)
    none = fit_confidence(logits[:198], targets[:198], 0.9)
    assert none.calibration is None and "198 validation images, and 200 are needed" in none.note
    broken = fit_confidence(logits.clone().index_fill_(0, torch.tensor([3]), float("nan")), targets, 0.9)
    assert broken.calibration is None and "not finite" in broken.note
    alone = fit_confidence(logits, targets, 0.99)
    assert alone.calibration is not None and alone.calibration.coverage is None
    assert "900 validation images, and 2,000 are needed for 0.99" in alone.note
