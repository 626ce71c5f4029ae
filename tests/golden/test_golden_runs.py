"""Short trainings give the losses and weights that are stored in cpu.json.

The laws compare Reconv with Reconv; these see what changes all paths alike. After a change that is meant to change
results: `python tests/golden/accept.py`, and say why in the commit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from golden_runs import NEED_NATIVE_DECODER, RUNS, SLOW, machine_key, perform, read_values
from golden_values import compare


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("golden-data")


def _parameters() -> list[object]:
    marks = {**dict.fromkeys(SLOW, pytest.mark.slow), **dict.fromkeys(NEED_NATIVE_DECODER, pytest.mark.native)}
    return [pytest.param(name, marks=marks.get(name, ()), id=name) for name in RUNS]


@pytest.mark.parametrize("name", _parameters())
def test_losses_and_weights_equal_the_stored_ones(
    name: str, data_folder: Path, record_property: Callable[[str, object], None]
) -> None:
    outcome = perform(name, data_folder)
    how, differences = compare(name, asdict(outcome), read_values("cpu"), machine_key(), RUNS[name].tolerance)
    record_property("golden", how)
    assert differences == [], f"{how}; to accept the new numbers: python tests/golden/accept.py {name}"


def test_every_run_has_stored_values() -> None:
    values = read_values("cpu")
    assert len(RUNS) > 25 and len(values) >= 2  # AVX2 and AVX-512
    assert {key: sorted(set(RUNS) ^ set(runs)) for key, runs in values.items()} == {key: [] for key in values}


def test_a_difference_in_the_last_bit_is_seen() -> None:
    values = read_values("cpu")
    key = next(iter(values))
    stored = values[key]["quickstart"]
    changed = {**stored, "losses": [*stored["losses"][:-1], stored["losses"][-1] * (1 + 1e-15)]}
    assert compare("quickstart", stored, values, key, 0.01) == ("bit by bit", [])
    assert len(compare("quickstart", changed, values, key, 0.01)[1]) == 1
    assert len(compare("quickstart", {**stored, "digests": {}}, values, key, 0.01)[1]) == 1


def test_elsewhere_losses_are_compared_within_the_tolerance() -> None:
    values = read_values("cpu")
    stored = values[next(iter(values))]["quickstart"]
    near = {**stored, "losses": [loss * 1.005 for loss in stored["losses"]], "digests": {}}
    far = {**stored, "losses": [loss * 1.02 for loss in stored["losses"]]}
    how, differences = compare("quickstart", near, values, "torch 9, other", 0.01)
    assert (how, differences) == ("losses within 1 %, because there are no digests of torch 9, other", [])
    assert len(compare("quickstart", far, values, "torch 9, other", 0.01)[1]) == len(stored["losses"])
