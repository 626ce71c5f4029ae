"""The report in a real browser: Chromium, without a window and without a network."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import open_chromium
from classification_analysis_example import classification_example
from detection_analysis_example import example_analysis
from playwright.sync_api import Browser, Page
from run_example import write_run

from reconv.report.evaluation_files import write_classification_analysis, write_detection_analysis
from reconv.report.html import render, write_report
from reconv.report.page import LivePage

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_chromium() as chromium:
        yield chromium


class Visit:
    """A page in the browser, with its console errors and requests."""

    def __init__(self, browser: Browser, path: Path, *, width: int = 1280, scheme: str = "light") -> None:
        self.page: Page = browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme="dark" if scheme == "dark" else "light"
        )
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.address = path.as_uri()

    def check(self) -> None:
        """No errors, and no request but the page itself."""
        assert self.errors == []
        assert [url for url in self.requests if not url.startswith("data:")] == [self.address]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "quickstart" / "1"
    return write_report(write_run(folder, resumes=[150], broken_steps=[90]))


@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1280, "light")])
def test_the_report_renders(browser: Browser, report: Path, width: int, scheme: str) -> None:
    visit = Visit(browser, report, width=width, scheme=scheme)
    page = visit.page
    assert page.locator(".verdict").is_visible()
    assert "Reached top-1 99.44 %" in page.locator(".verdict").inner_text()
    lengths = page.eval_on_selector_all("figure.chart .series path", "paths => paths.map(p => p.getTotalLength())")
    assert len(lengths) >= 10
    assert all(length > 20 for length in lengths)
    widths = page.eval_on_selector_all("img", "images => images.map(i => i.naturalWidth)")
    assert len(widths) == 44
    assert all(width > 0 for width in widths)
    assert page.locator("figure.chart .tick").first.is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    visit.check()
    page.close()


@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1280, "light")])
def test_the_detector_section_renders(browser: Browser, tmp_path: Path, width: int, scheme: str) -> None:
    run = write_run(tmp_path / "ssd" / "1", epochs=2)
    write_detection_analysis(run, example_analysis())
    visit = Visit(browser, write_report(run), width=width, scheme=scheme)
    page = visit.page
    section = page.locator("section", has_text="Detection analysis").first
    assert section.locator("table").count() == 3
    for number, x_name in enumerate(("recall", "score")):
        chart = section.locator("figure.chart").nth(number)
        chart.locator(":scope > svg").hover()
        assert chart.locator(".tip").inner_text().startswith(f"{x_name} ")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    visit.check()
    page.close()


@pytest.mark.parametrize(("width", "scheme", "num_classes"), [(400, "dark", 30), (1280, "light", 31)])
def test_the_classifier_section_renders(
    browser: Browser, tmp_path: Path, width: int, scheme: str, num_classes: int
) -> None:
    run = write_run(tmp_path / "photos" / "1", epochs=2)
    write_classification_analysis(run, classification_example(num_classes))
    visit = Visit(browser, write_report(run), width=width, scheme=scheme)
    page = visit.page
    section = page.locator("section", has_text="Classification analysis").first
    assert section.locator(".matrix").count() == (num_classes <= 30)
    assert section.locator("table").count() == 2
    assert page.evaluate("document.documentElement.scrollWidth") == width
    visit.check()
    page.close()


def test_a_click_on_a_column_sorts_the_table_of_classes(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "photos" / "1", epochs=2)
    write_classification_analysis(run, classification_example(12))
    visit = Visit(browser, write_report(run))
    table = visit.page.locator("table.sortable")

    def column(number: int) -> list[str]:
        return table.locator(f"tbody td:nth-child({number})").all_inner_texts()

    names = column(1)
    assert len(names) == 12
    table.get_by_role("button", name="class").click()
    assert column(1) == [f"class {n}" for n in range(12)] != names  # class 10 comes after class 9
    recall = table.get_by_role("button", name="recall")
    recall.click()
    values = [float(text.removesuffix(" %")) for text in column(5)]
    assert values == sorted(values)
    assert values[0] < values[-1]
    recall.click()
    assert [float(text.removesuffix(" %")) for text in column(5)] == values[::-1]
    visit.check()
    visit.page.close()


def test_the_report_of_a_running_run_reloads_itself_until_the_run_has_ended(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "quickstart" / "1", stop_at=200, exit_code=None)
    path = write_report(run, LivePage(time.time(), reload_s=1, stale_s=60))
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(path.as_uri())
    assert "running" in page.locator(".verdict").inner_text()
    assert page.get_by_text("resume", exact=True).count() == 0
    page.locator("summary", has_text="Resolved recipe").click()
    page.evaluate("window.scrollTo(0, 700)")
    with page.expect_navigation():
        pass
    page.wait_for_function("scrollY === 700")
    assert page.locator("details", has_text="Resolved recipe").get_attribute("open") is not None
    write_report(run)  # the last one, without `live`
    page.wait_for_selector(".badge.warn")
    page.evaluate("window.isSamePage = true")
    page.wait_for_timeout(1500)
    assert page.evaluate("window.isSamePage")
    page.close()


def test_the_report_of_a_killed_run_stops_reloading(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "quickstart" / "1", stop_at=200, exit_code=None)
    page = browser.new_page()
    page.goto(write_report(run, LivePage(time.time() - 100, reload_s=0.1, stale_s=50)).as_uri())
    page.get_by_text("it may have been killed").wait_for()
    page.evaluate("window.isSamePage = true")
    page.wait_for_timeout(400)
    assert page.evaluate("window.isSamePage")
    page.close()


def test_hovering_over_a_chart_shows_values(browser: Browser, report: Path) -> None:
    visit = Visit(browser, report)
    chart = visit.page.locator("figure.chart", has_text="Accuracy, top-1").first
    assert not chart.locator(".tip").is_visible()
    chart.locator(":scope > svg").hover()
    tip = chart.locator(".tip")
    assert tip.is_visible()
    assert tip.inner_text().startswith("epoch ")
    assert "validation, EMA" in tip.inner_text()
    assert " %" in tip.inner_text()
    assert chart.locator(".cursor circle").count() == 3
    visit.page.mouse.move(2, 2)
    assert not tip.is_visible()
    visit.check()
    visit.page.close()


def test_the_arrow_keys_show_values(browser: Browser, report: Path) -> None:
    visit = Visit(browser, report)
    chart = visit.page.locator("figure.chart").first
    svg, tip = chart.locator(":scope > svg"), chart.locator(".tip")
    svg.focus()
    svg.press("ArrowLeft")
    assert "epoch 20 · step 440" in tip.inner_text()
    svg.press("ArrowLeft")
    before_last = tip.inner_text()
    assert "step 435" in before_last
    svg.press("Home")
    assert "step 5\n" in tip.inner_text()
    svg.press("ArrowRight")
    assert "step 10\n" in tip.inner_text()
    svg.press("Escape")
    assert not tip.is_visible()
    visit.check()
    visit.page.close()


def test_clicking_a_legend_name_hides_its_line(browser: Browser, report: Path) -> None:
    visit = Visit(browser, report)
    chart = visit.page.locator("figure.chart").first
    button, line = chart.locator(".legend button").first, chart.locator('.series[data-series="0"]')
    assert line.is_visible()
    button.click()
    assert not line.is_visible()
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    assert line.is_visible()
    visit.check()
    visit.page.close()


def test_the_content_security_policy_blocks_requests(browser: Browser, report: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(report.read_text().replace("</main>", '<img src="http://localhost:9/x.png"></main>'))
    visit = Visit(browser, page)
    assert any("Content Security Policy" in error for error in visit.errors)
    visit.page.close()


def test_only_the_scripts_of_the_page_run(browser: Browser, report: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    foreign = '<script>window.wasRun = true</script><p onclick="window.wasRun = true">click</p></main>'
    page.write_text(report.read_text().replace("</main>", foreign))
    visit = Visit(browser, page)
    visit.page.get_by_text("click", exact=True).click()
    assert not visit.page.evaluate("window.wasRun")
    assert sum("Content Security Policy" in error for error in visit.errors) == 2
    visit.page.locator("figure.chart").first.locator(":scope > svg").hover()
    assert visit.page.locator("figure.chart .tip").first.is_visible()
    visit.page.close()


def test_the_comparison_renders(browser: Browser, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "quickstart" / str(n), seed=n, lr=0.1 * n) for n in (1, 2, 3)]
    path = tmp_path / "comparison.html"
    path.write_text(render(runs), encoding="utf-8")
    for width in (400, 1280):
        visit = Visit(browser, path, width=width)
        assert visit.page.locator(".verdicts li").count() == 3
        assert visit.page.locator("figure.chart").first.locator(".series path").count() == 3
        assert visit.page.evaluate("document.documentElement.scrollWidth") == width
        visit.check()
        visit.page.close()
