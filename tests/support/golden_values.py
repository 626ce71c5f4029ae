"""Comparison of golden runs with the stored numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def compare(
    name: str, outcome: Mapping[str, Any], values: Mapping[str, Mapping[str, Any]], machine: str, tolerance: float
) -> tuple[str, list[str]]:
    """How the numbers of a run were compared with the stored ones, and each difference."""
    if machine in values:
        return "bit by bit", _differences(values[machine][name], outcome)
    stored = next(iter(values.values()))[name]
    how = f"losses within {tolerance:.0%}, because there are no digests of {machine}".replace("%", " %")
    if len(stored["losses"]) != len(outcome["losses"]):
        return how, [f"{len(outcome['losses'])} steps instead of {len(stored['losses'])}"]
    return how, [
        f"loss of step {step}: {expected!r}, now {loss!r}"
        for step, (expected, loss) in enumerate(zip(stored["losses"], outcome["losses"], strict=True), 1)
        if abs(loss - expected) > tolerance * abs(expected)
    ]


def _differences(stored: Mapping[str, Any], outcome: Mapping[str, Any]) -> list[str]:
    """Each stored number that is another one now; of a list the first, because the others follow from it."""
    differences = []
    for part, expected in stored.items():
        actual = outcome[part]
        if isinstance(expected, list):
            pairs = enumerate(zip(expected, actual, strict=False), 1)
            step = next((number for number, (one, other) in pairs if one != other), None)
            if step is not None:
                differences.append(f"{part} of step {step}: {expected[step - 1]!r}, now {actual[step - 1]!r}")
            elif len(expected) != len(actual):
                differences.append(f"{part}: {len(expected)} steps, now {len(actual)}")
        else:
            changed = [key for key in {**expected, **actual} if expected.get(key) != actual.get(key)]
            differences += [f"{part}: {key} is {actual.get(key)}, was {expected.get(key)}" for key in changed[:1]]
    return differences
