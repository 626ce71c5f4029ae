"""The documentation site in a browser: nothing is requested from elsewhere, phones can show it, and search answers.

Needs the extra `docs`, and Chromium.
"""

from __future__ import annotations

import functools
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import open_chromium

pytestmark = pytest.mark.external

ROOT = Path(__file__).resolve().parents[2]
# What users ask, as they would type it, and a page that answers it.
QUESTIONS = {
    "image size": "how-to/augmentation/",
    "adamw": "how-to/optimizers/",
    "per class accuracy": "how-to/evaluate/",
    "imbalance": "how-to/losses/",
    "export onnx": "how-to/export/",
    "resume fewer GPUs": "how-to/resume/",
    "own dataset": "how-to/custom-code/",
    "data loading slow": "how-to/data-speed/",
    "reproduce a run": "concepts/exact-resume/",
    "learning rate schedule": "how-to/train/",
    "pretrained weights": "how-to/pretrained-weights/",
    "out of memory": "how-to/memory/",
    "tensorboard": "how-to/loggers/",
    "several machines": "how-to/distributed/",
    "serve http": "how-to/serve/",
    "exit code 75": "reference/exit-codes/",
    "compare runs": "how-to/evaluate/",
    "skip unreadable images": "how-to/prepare-data/",
}


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    handler = functools.partial(_QuietHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


def test_no_page_requests_anything_from_elsewhere_or_is_wider_than_a_phone(site: Path, address: str) -> None:
    pages = [str(file.parent.relative_to(site)) for file in sorted(site.rglob("index.html"))]
    assert len(pages) > 80
    outside, wide = [], []
    with open_chromium() as browser:
        page = browser.new_page(viewport={"width": 400, "height": 900})
        page.on("request", lambda request: outside.append(request.url) if not request.url.startswith(address) else None)
        for name in pages:
            page.goto(f"{address}{name}/")
            if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                wide.append(name)
    assert [url for url in outside if not url.startswith(("data:", "blob:"))] == []
    assert wide == []


def test_one_search_answers_what_users_ask(address: str) -> None:
    unanswered = {}
    with open_chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        for question, answer in QUESTIONS.items():
            page.goto(address)
            page.fill(".md-search__input", question)
            page.wait_for_selector(".md-search-result__link")
            page.wait_for_timeout(400)
            links = page.eval_on_selector_all(
                ".md-search-result__item > .md-search-result__link", "links => links.map(link => link.href)"
            )
            found = [link.removeprefix(address).partition("?")[0].partition("#")[0] for link in links[:5]]
            if answer not in found:
                unanswered[question] = found
    assert unanswered == {}


def test_a_click_sorts_a_table_by_number(address: str) -> None:
    with open_chromium() as browser:
        page = browser.new_page()
        page.goto(f"{address}results/training/")
        table = page.locator("table").first
        table.locator("th", has_text="Reconv").click()
        cells = table.locator("tbody tr td:nth-child(2)").all_inner_texts()
    numbers = [float(cell.split()[0].replace(",", "")) for cell in cells if cell]
    assert len(numbers) > 10
    assert numbers == sorted(numbers)
