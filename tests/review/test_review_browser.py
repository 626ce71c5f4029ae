"""The page of a review in Chromium: decisions by mouse and keyboard, and the list that is downloaded."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from chromium import open_chromium
from PIL import Image
from playwright.sync_api import Browser, Page
from review_examples import write_photos, write_predictions

from reconv.data.dataset import all_targets
from reconv.data.readers.dataset_factory import open_dataset
from reconv.recipe.parts.data import DataConfig
from reconv.review.page import render
from reconv.review.run import ReviewOptions, review

pytestmark = pytest.mark.browser

CLASSES = ("cat", '<img src=x onerror="document.title=1">', "línea")
SUSPECTS = {"train/cat/1.png": CLASSES[1], "train/cat/2.png": "línea", "train/línea/3.png": "cat"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_chromium() as chromium:
        yield chromium


@pytest.fixture
def page_file(tmp_path: Path) -> Path:
    photos = write_photos(tmp_path / "photos", num_train=6, num_val=3, classes=CLASSES)
    odd = photos / "train" / "cat" / '7, "x"\n\udcff.png'
    Image.open(photos / "val" / "línea" / "0.png").save(odd)
    table = write_predictions(tmp_path / "p.csv", photos, SUSPECTS, classes=CLASSES)
    result = review(ReviewOptions(str(photos), tmp_path / "out", predictions=(table,)), lambda text: None)
    assert [finding.kind for finding in result.findings] == ["label", "label", "label", "leak"]
    file = tmp_path / "out" / "review.html"
    file.write_text(render(result, limit=10), encoding="utf-8", errors="replace")
    return file


def opened(browser: Browser, file: Path, width: int = 1280) -> tuple[Page, list[str]]:
    page, problems = browser.new_page(viewport={"width": width, "height": 900}), []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: problems.append(request.url) if request.url.startswith("http") else None)
    page.goto(file.as_uri())
    return page, problems


def download(page: Page, to: Path) -> list[dict[str, str]]:
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download").click()
    waiting.value.save_as(to)
    with to.open(newline="", encoding="utf-8", errors="surrogateescape") as lines:
        return list(csv.DictReader(lines))


def test_decisions_become_a_list_that_recipes_take(browser: Browser, page_file: Path) -> None:
    page, problems = opened(browser, page_file)
    assert page.locator(".finding").count() == 4
    assert page.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
    page.keyboard.press("j")
    page.keyboard.press("a")  # and on to the next one
    page.keyboard.press("r")
    third = page.locator(".finding").nth(2)
    third.locator("input").fill(CLASSES[1])
    third.locator("input").press("Tab")
    page.locator(".finding").nth(3).get_by_role("button", name="Accept").click()
    assert page.locator(".progress").inner_text() == "3 accepted, 1 rejected, 0 to decide"
    listed = page_file.with_name("corrections.csv")
    rows = download(page, listed)
    assert [(row["kind"], row["action"]) for row in rows] == [
        ("label", "relabel"), ("label", "keep"), ("label", "relabel"), ("leak", "exclude"),
    ]  # fmt: skip
    assert rows[2]["label"] == CLASSES[1] and rows[3]["path"] == 'train/cat/7, "x"\n\udcff.png'
    data = DataConfig(exclude=str(listed), relabel=str(listed))
    photos = page_file.parents[1] / "photos"
    assert len(open_dataset("auto", photos, "train", DataConfig())) == 19
    corrected = open_dataset("auto", photos, "train", data)
    assert len(corrected) == 18 and sorted(np.bincount(all_targets(corrected)).tolist()) == [5, 5, 8]
    page.reload()
    assert page.locator(".progress").inner_text() == "3 accepted, 1 rejected, 0 to decide"  # kept by the browser
    assert page.title() != "1" and problems == []
    page.close()


def test_scores_are_accepted_at_once_and_can_be_taken_back(browser: Browser, page_file: Path) -> None:
    page, problems = opened(browser, page_file, width=400)
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    page.locator("#threshold").fill("0.5")
    page.get_by_role("button", name="Accept these").click()
    assert page.locator(".progress").inner_text().startswith("4 accepted")
    page.get_by_role("button", name="Hide decided").click()
    assert page.locator(".finding:visible").count() == 0
    page.get_by_role("button", name="Hide decided").click()
    page.locator(".finding").first.focus()
    page.keyboard.press("u")
    assert page.locator(".progress").inner_text() == "3 accepted, 0 rejected, 1 to decide"
    field = page.locator(".finding").nth(1).locator("input")
    field.fill("no such class")
    field.press("Tab")
    assert not field.evaluate("input => input.checkValidity()")
    field.fill("")
    field.press("Tab")
    rows = download(page, page_file.with_name("list.csv"))
    assert [row["action"] for row in rows] == ["", "exclude", "relabel", "exclude"]
    assert problems == []
    page.close()
