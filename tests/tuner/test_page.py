"""The pages of a study and of a range test, in a real browser: what they show, and that they load nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from chromium import open_chromium
from playwright.sync_api import Browser, Page

from reconv.trainer.lr_range import analyze
from reconv.tuner.page import render_lr_range, render_study
from reconv.tuner.result import Confirmation, TuneResult
from reconv.tuner.space import parse_space
from reconv.tuner.study import Settings, TrialRecord

SPACE = parse_space(["schedule.lr=0.01:1:log", "optimizer.name=sgd|lars"])
SETTINGS = Settings("quickstart", "0" * 32, None, tuple(map(str, SPACE)), 0, "tpe", 2, 3, 3)


def trial(number: int, lr: float, scores: dict[int, float], state: str = "pruned", failure: str = "") -> TrialRecord:
    params = {"schedule.lr": lr, "optimizer.name": "sgd" if number % 2 else "lars"}
    return TrialRecord(number, state, {} if number == 0 else params, params, scores, failure)


def study(failure: str = "exit code 5: diverged") -> TuneResult:
    trials = (
        trial(0, 0.1, {0: 0.7, 1: 0.9}, "complete"),
        trial(1, 0.3, {0: 0.8, 1: 0.95}, "complete"),
        trial(2, 0.02, {0: 0.4}),
        trial(3, 0.9, {}, "failed", failure),
    )
    return TuneResult(
        folder=Path("/runs/quickstart-tune"),
        recipe="quickstart",
        metric="top1",
        settings=SETTINGS,
        space=SPACE,
        trials=trials,
        best=1,
        confirmation=Confirmation((0.90, 0.91, 0.92), (0.95, 0.96, 0.97), (1, 2, 3)),
        importance={"schedule.lr": 0.8, "optimizer.name": 0.2},
        costs=(4.0, 4.0, 2.0, 0.0),
        command="reconv tune quickstart --trials 4",
    )


def test_the_verdict_and_the_table_say_what_the_study_has_found() -> None:
    result = study()
    assert result.kept == 1
    assert (
        "better than the default: top-1 96.00 % against 91.00 % (5.00 points, standard error 0.82 points"
        in result.verdict
    )
    head, rows = result.rows
    assert head == ["trial", "state", "top-1", "rung", "epochs", "schedule.lr", "optimizer.name", "failure"]
    assert [row[0] for row in rows] == ["1", "0", "2", "3"]
    assert (rows[3][1:4], rows[3][-1]) == (["failed", "–", "0 of 2"], "exit code 5: diverged")
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["trials"][2]["rungs"] == {"1": 0.4}
    same = replace(result, confirmation=Confirmation((0.9, 0.95), (0.9, 0.96), (1, 2)))
    assert (same.kept, same.verdict[:19]) == (0, "the default stands:")


def test_a_loss_is_better_when_it_is_lower() -> None:
    trials = (trial(0, 0.1, {0: -2.0, 1: -1.0}, "complete"), trial(1, 0.3, {0: -1.5, 1: -0.5}, "complete"))
    result = replace(
        study(),
        metric="loss",
        trials=trials,
        confirmation=Confirmation((1.0, 1.1), (0.5, 0.6), (1, 2), lower_is_better=True),
    )
    assert result.kept == 1
    assert result.value_of(trials[1]) == 0.5
    assert "loss 0.55 against 1.05 (0.5, standard error 0.0707" in result.verdict
    assert render_study(result, "") == render_study(result, "")


def test_text_of_a_study_is_only_text_on_the_page() -> None:
    text = render_study(study(failure="<script>alert(1)</script>"), "name: <b>")
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "name: &lt;b&gt;" in text
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]  # a name, never a request


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_chromium() as chromium:
        yield chromium


def visit(browser: Browser, path: Path, width: int) -> tuple[Page, list[str]]:
    page, problems = browser.new_page(viewport={"width": width, "height": 900}), []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: problems.append(request.url) if not request.url.startswith("data:") else None)
    page.goto(path.as_uri())
    return page, problems


@pytest.mark.browser
@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_of_a_study_renders(browser: Browser, tmp_path: Path, width: int) -> None:
    file = tmp_path / "report.html"
    file.write_text(render_study(study(), "extends: quickstart\n"))
    page, problems = visit(browser, file, width)
    assert problems == [file.as_uri()]
    assert page.locator(".verdict").inner_text().startswith("better")
    assert page.locator(".parallel .trial").count() == 3
    kept = page.locator(".parallel .trial.kept path")
    assert page.locator(".parallel .trial.kept title").text_content().startswith("trial 1: 95.00 %")
    assert kept.evaluate("path => getComputedStyle(path).strokeWidth") == "3.2px"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    column = page.locator("table.sortable th", has_text="epochs").locator("button")
    column.click()
    assert page.locator("table.sortable tbody tr td").first.inner_text() == "3"


@pytest.mark.browser
def test_the_page_of_a_range_test_renders(browser: Browser, tmp_path: Path) -> None:
    lrs = [10 ** (-4 + n / 20) for n in range(100)]
    losses = [2.3 - 1.5 * min(1.0, n / 50) if n < 70 else 2.0 + n / 10 for n in range(98)] + [float("inf")] * 2
    found = analyze("quickstart", 0.1, lrs, losses)
    file = tmp_path / "lr.html"
    file.write_text(render_lr_range(found, "reconv tune quickstart --lr-range"))
    page, problems = visit(browser, file, 1280)
    assert problems == [file.as_uri()]
    assert page.locator(".parallel text", has_text="suggested").count() == 1
    assert page.locator(".parallel text", has_text="diverges").count() == 1
