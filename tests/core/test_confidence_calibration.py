"""The calibrated confidence of a classifier as plain data: nothing impossible is taken from a file."""

from __future__ import annotations

import math

import pytest

from reconv.core.confidence import ConfidenceCalibration

CALIBRATION = ConfidenceCalibration(1.25, 500, 0.9, 0.31, 400)


def test_plain_data_gives_the_same_calibration() -> None:
    assert ConfidenceCalibration.from_dict(CALIBRATION.to_dict()) == CALIBRATION
    without_sets = ConfidenceCalibration(0.8, 120)
    assert ConfidenceCalibration.from_dict(without_sets.to_dict()) == without_sets


@pytest.mark.parametrize(
    "changed",
    [
        {"temperature": 0.0},
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": "1"},
        {"temperature": None},
        {"temperature": True},
        {"threshold": 1.5},
        {"threshold": None},
        {"coverage": 1.0},
        {"coverage": math.inf},
        {"num_conformal": -1},
        {"num_temperature": 1.5},
    ],
)
def test_impossible_values_are_refused(changed: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"temperature|threshold|coverage|numbers"):
        ConfidenceCalibration.from_dict({**CALIBRATION.to_dict(), **changed})


def test_a_set_has_no_more_classes_than_probabilities_allow() -> None:
    assert CALIBRATION.most_classes(10) == 3
    assert CALIBRATION.most_classes(2) == 2
    assert ConfidenceCalibration(1, 100, 0.9, 0.0, 100).most_classes(10) == 10
    assert ConfidenceCalibration(1, 100).most_classes(10) == 0
