"""The learning rate range test: its rule, and that it leaves nothing."""

from __future__ import annotations

import math

import pytest

from reconv.trainer.lr_range import analyze, smooth

LRS = [10 ** (-5 + 6 * n / 119) for n in range(120)]


def curve(fall: float, rise: float, depth: float = 1.5) -> list[float]:
    """A loss of 2.3 that falls by `depth` around one rate and rises around another one."""
    return [
        2.3
        - depth / (1 + math.exp(-8 * (math.log10(lr) - math.log10(fall))))
        + 30 / (1 + math.exp(-8 * (math.log10(lr) - math.log10(rise))))
        for lr in LRS
    ]


def test_the_suggestion_is_where_the_loss_falls_fastest() -> None:
    found = analyze("recipe", 0.1, LRS, curve(1e-3, 3.0))
    assert found.suggestion is not None and found.lowest is not None and found.diverged is not None
    assert 1e-3 < found.suggestion < 4e-3  # smoothing lags behind by half a decade
    assert found.suggestion < found.lowest < found.diverged
    assert 0.5 < found.diverged < 4.0


def test_a_loss_that_never_falls_gives_no_suggestion_and_one_that_stays_low_no_divergence() -> None:
    flat = analyze("recipe", 0.1, LRS, [2.3] * len(LRS))
    assert (flat.suggestion, flat.diverged) == (None, None)
    assert "no suggestion" in " ".join(flat.lines)
    low = analyze("recipe", 0.1, LRS, curve(1e-3, 1e6))
    assert low.suggestion is not None
    assert low.diverged is None


def test_a_loss_that_is_not_finite_has_diverged() -> None:
    losses = [*curve(1e-3, 1e6)[:80], math.inf]
    found = analyze("recipe", 0.1, LRS[:81], losses)
    assert found.diverged == LRS[80]
    assert found.to_dict()["losses"][-1] is None
    whole_run = analyze("recipe", 0.1, LRS[:1], [math.inf])
    assert (whole_run.suggestion, whole_run.lowest, whole_run.diverged) == (None, None, None)


def test_smoothing_is_corrected_for_its_start() -> None:
    assert smooth([2.0] * 5) == pytest.approx([2.0] * 5)
    assert smooth([1.0, 0.0])[1] == pytest.approx(0.09 / 0.19)
