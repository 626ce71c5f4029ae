"""The table of `make matrix`: its rows are those of matrix.toml, and a new row replaces the old one."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from reconv.core.compat import ranges_of, release_numbers

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def matrix() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "packaging" / "matrix.py")))


def test_the_environments_reach_from_the_oldest_tested_torch_to_the_newest(matrix: SimpleNamespace) -> None:
    found = matrix.environments(())
    (torch_range,) = ranges_of("torch")
    releases = [release_numbers(each.torch)[:2] for each in found if each.python == "3.11"]
    assert (min(releases), max(releases)) == (release_numbers(torch_range.oldest), release_numbers(torch_range.newest))
    assert {each.python for each in found} == {"3.11", "3.12", "3.13"}
    assert [each.name for each in matrix.environments(["3.11:2.15"])] == ["py3.11-torch2.15.0"]


def test_the_page_has_a_row_for_each_environment(matrix: SimpleNamespace) -> None:
    page = matrix.PAGE.read_text()
    assert matrix.with_rows(page, matrix.environments(()), {}) == page
    assert page.count("\n| 3.") == len(matrix.environments(()))


def test_a_new_row_replaces_that_of_its_environment_alone(matrix: SimpleNamespace) -> None:
    first, second = matrix.Environment("3.11", "2.11.0", "0.26.0"), matrix.Environment("3.12", "2.13.0")
    empty = f"before\n{matrix.START}{matrix.table([])}{matrix.END}after\n"
    once = matrix.with_rows(empty, [first, second], {("3.11", "2.11.0"): first.row("3.6.0", 7, 1, 0, 60, "2026-01-01")})
    rows = once.splitlines()[4:6]
    assert rows[0] == "| 3.11 | 2.11.0 | 0.26.0 | 3.6.0 | 7 | 1 | 0 | 60 | 2026-01-01 |"
    assert rows[1] == "| 3.12 | 2.13.0 | – |  | not run |  |  |  |  |"
    twice = matrix.with_rows(
        once, [first, second], {("3.12", "2.13.0"): second.row("3.9.0", 8, 0, 0, 50, "2026-01-02")}
    )
    assert twice.splitlines()[4] == rows[0]
    assert "| 3.9.0 | 8 |" in twice.splitlines()[5]
    assert twice.startswith("before\n") and twice.endswith("after\n")


def test_outcomes_count_errors_as_failures_and_leave_out_what_was_skipped(
    matrix: SimpleNamespace, tmp_path: Path
) -> None:
    report = tmp_path / "report.xml"
    report.write_text('<testsuites><testsuite tests="10" failures="2" errors="1" skipped="3"/></testsuites>')
    assert matrix.Outcome.of(report) == matrix.Outcome(4, 3)
