"""The playground in a real browser, with a real server: images come in as users bring them, predictions appear."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from chromium import open_chromium
from PIL import Image
from playwright.sync_api import Browser, Locator, Page, Route, expect
from server_process import ServerProcess

import reconv
from reconv.data.readers.digits import open_digits

pytestmark = pytest.mark.browser

TOKEN = "a-token-of-a-test"
expect.set_options(timeout=20_000)
CAMERA = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_chromium(*CAMERA) as chromium:
        yield chromium


@pytest.fixture(scope="module")
def playground(classifier: Path, detector: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of a classifier and a detector that needs a token."""
    folder = tmp_path_factory.mktemp("playground")
    tokens = folder / "tokens"
    tokens.write_text(TOKEN)
    runs = (f"digits={classifier}", f"boxes={detector}", "--token-file", tokens)
    with ServerProcess(folder / "log.txt", *runs) as process:
        yield process


class Visit:
    """The playground in a tab of its own, with what it logs and requests."""

    def __init__(
        self, browser: Browser, server: ServerProcess, *, width: int = 1280, scheme: str = "light", token: str = TOKEN
    ) -> None:
        self.origin = f"http://localhost:{server.port}"
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme="dark" if scheme == "dark" else "light"
        )
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        if token:
            self.page.add_init_script(f"sessionStorage.setItem('reconv-token', '{token}')")
        self.page.goto(self.origin)

    def use_model(self, name: str) -> None:
        self.page.get_by_label("Model", exact=True).select_option(name)
        expect(self.page.get_by_role("heading", level=1)).to_have_text(name)

    def choose(self, *files: Path) -> None:
        """Choose files with the button, and wait for their results."""
        with self.page.expect_file_chooser() as chooser:
            self.page.get_by_role("button", name="Choose images").click()
        chooser.value.set_files(list(files))
        self.wait(len(files))

    def wait(self, num_images: int) -> None:
        """Wait until so many images are in the gallery, and each has its result."""
        expect(self.thumbs).to_have_count(num_images)
        for thumb in self.thumbs.all():
            expect(thumb).not_to_have_text("…")
            expect(thumb).not_to_have_text("waiting")

    @property
    def thumbs(self) -> Locator:
        return self.page.get_by_role("listbox").get_by_role("option")

    @property
    def rows(self) -> list[str]:
        return self.page.locator("#list .name").all_inner_texts()

    def close(self, *expected_errors: str) -> None:
        """Close the tab: no other errors, and no request to anywhere else."""
        others = [error for error in self.errors if not any(known in error for known in expected_errors)]
        assert others == []
        left = [url for url in self.requests if not url.startswith((self.origin + "/", "data:", "blob:" + self.origin))]
        assert left == []
        assert len(self.requests) > 5
        self.context.close()


OpenVisit = Callable[..., Visit]


@pytest.fixture
def visit(browser: Browser, playground: ServerProcess) -> OpenVisit:
    return lambda **options: Visit(browser, playground, **options)


def photo(name: str, width: int = 90, height: int = 60, seed: int = 0) -> Path:
    """An image file in the test's folder."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(name)
    return Path(name).absolute()


def image_size(page: Page, selector: str) -> list[int]:
    size: list[int] = page.eval_on_selector(selector, "image => [image.naturalWidth, image.naturalHeight]")
    return size


def test_a_chosen_image_is_shown_with_its_prediction_and_what_the_network_saw(
    visit: OpenVisit, classifier: Path
) -> None:
    tab = visit()
    page = tab.page
    tab.choose(photo("cat's.png"))
    predictor = reconv.load(classifier, device="cpu", log=lambda text: None)
    expected = predictor.predict([Path("cat's.png")])[0]
    assert tab.rows == [item.name for item in expected.classes]
    assert page.locator("#list .score").first.inner_text() == f"{100 * expected.score:.1f} %"
    size = predictor.recipe.data.preprocess.size
    assert image_size(page, "#image") == [90, 60]
    assert image_size(page, "#input") == image_size(page, "#map") == [size, size]
    expect(page.locator("#map-class")).to_have_text(expected.classes[0].name)
    first_map = page.locator("#map").get_attribute("src")
    third = page.locator("#list button").nth(2)
    third.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#map-class")).to_have_text(expected.classes[2].name)
    assert page.locator("#map").get_attribute("src") != first_map
    assert third.get_attribute("aria-pressed") == "true"
    page.get_by_label("Opacity").focus()
    page.keyboard.press("Home")
    assert page.eval_on_selector("#map", "map => getComputedStyle(map).opacity") == "0"
    times = page.locator("#stage-names").inner_text()
    assert all(name in times for name in ("read", "queue", "network", "round trip"))
    command = page.locator("#curl").inner_text()
    assert "predict?model=digits" in command and "@cat'\\''s.png" in command and "$TOKEN" in command
    assert TOKEN not in command
    assert page.locator("#classes li").count() == 10
    expect(page.locator("#announcer")).to_contain_text(expected.classes[0].name)
    tab.close()


def test_boxes_are_drawn_where_the_detector_found_them(visit: OpenVisit, playground: ServerProcess) -> None:
    tab = visit()
    page = tab.page
    tab.use_model("boxes")
    tab.choose(photo("wide.png", 200, 80))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    query = "?model=boxes&min_score=0.05"
    answer = playground.request("POST", f"/predict{query}", Path("wide.png").read_bytes(), headers=headers)
    found = answer.json["predictions"][0]["boxes"]
    page.get_by_label("Minimum score").focus()
    page.keyboard.press("Home")
    expect(page.locator("#list-title")).to_have_text(f"{len(found)} objects")
    assert page.locator(".box").count() == len(found) > 3
    image = page.locator("#image").bounding_box()
    assert image is not None and image["width"] / image["height"] == pytest.approx(2.5, rel=0.01)
    scale = image["width"] / 200
    for number, box in enumerate(found[:20]):
        drawn = page.locator(f".box[data-number='{number}']").bounding_box()
        assert drawn is not None
        corners = [drawn["x"] - image["x"], drawn["y"] - image["y"]]
        corners += [corners[0] + drawn["width"], corners[1] + drawn["height"]]
        assert corners == pytest.approx([edge * scale for edge in box["box_xyxy"]], abs=5.1)  # two borders at least
        assert corners[:2] == pytest.approx([edge * scale for edge in box["box_xyxy"][:2]], abs=1)
    page.locator("#list button").nth(1).focus()
    active = page.locator(".box.active")
    assert [active.count(), active.get_attribute("data-number")] == [1, "1"]
    page.get_by_label("Minimum score").press("End")
    assert page.locator(".box").count() == sum(box["score"] >= 0.95 for box in found)
    tab.close()


def test_images_are_dropped_and_pasted(visit: OpenVisit) -> None:
    tab = visit()
    page = tab.page
    expect(page.get_by_role("heading", level=1)).to_have_text("digits")
    files = [str(photo("first.png")), str(photo("second.png", seed=1))]
    devtools = tab.context.new_cdp_session(page)
    drag = {"x": 300, "y": 300, "data": {"items": [], "files": files, "dragOperationsMask": 1}}
    devtools.send("Input.dispatchDragEvent", {"type": "dragEnter", **drag})
    expect(page.get_by_text("Drop to predict")).to_be_visible()
    devtools.send("Input.dispatchDragEvent", {"type": "drop", **drag})
    tab.wait(2)
    expect(page.get_by_text("Drop to predict")).to_be_hidden()
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=tab.origin)
    page.evaluate(
        """async () => {
          const canvas = new OffscreenCanvas(40, 30);
          canvas.getContext("2d").fillRect(0, 0, 20, 30);
          await navigator.clipboard.write([new ClipboardItem({ "image/png": canvas.convertToBlob() })]);
        }"""
    )
    page.keyboard.press("Control+V")
    tab.wait(3)
    assert image_size(page, "#image") == [40, 30]
    tab.close()


def test_a_photo_is_taken_with_the_camera(visit: OpenVisit) -> None:
    tab = visit()
    page = tab.page
    page.get_by_role("button", name="Take a photo").click()
    capture = page.get_by_role("button", name="Capture")
    expect(capture).to_be_focused()
    page.keyboard.press("Enter")
    tab.wait(1)
    expect(page.locator("#list li")).to_have_count(5)
    assert page.evaluate("document.getElementById('video').srcObject") is None
    page.get_by_role("button", name="Take a photo").click()
    page.keyboard.press("Escape")
    expect(page.locator("#camera-dialog")).to_be_hidden()
    assert tab.thumbs.count() == 1
    tab.close()


def test_the_gallery_works_by_keyboard(visit: OpenVisit) -> None:
    tab = visit()
    page = tab.page
    Path("broken.jpg").write_bytes(b"\xff\xd8 this is no image")
    tab.choose(photo("a.png"), Path("broken.jpg"), photo("c.png", seed=2))
    assert page.locator(".thumb.failed").count() == 1
    page.get_by_role("button", name="Take a photo").focus()
    page.keyboard.press("Tab")
    expect(tab.thumbs.nth(0)).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(tab.thumbs.nth(1)).to_be_focused()
    expect(page.locator("#failure")).to_contain_text("image does not decode")
    assert page.locator("#list li").count() == 0
    with page.expect_response("**/predict*") as again:
        page.get_by_role("button", name="Try again").press("Space")
    assert again.value.status == 400
    tab.thumbs.nth(1).press("End")
    expect(page.locator("#image-name")).to_have_text("c.png")
    expect(page.locator("#failure")).to_be_hidden()
    assert page.locator("#list li").count() == 5
    page.keyboard.press("Delete")
    expect(tab.thumbs).to_have_count(2)
    page.keyboard.press("Home")
    expect(tab.thumbs.nth(0)).to_have_attribute("aria-selected", "true")
    assert tab.thumbs.nth(1).get_attribute("aria-selected") == "false"
    page.get_by_role("button", name="Clear").press("Enter")
    expect(page.get_by_role("button", name="Choose images")).to_be_focused()
    expect(page.locator("#result")).to_be_hidden()
    tab.close("status of 400")


def test_a_token_is_asked_for_and_kept_in_the_tab(visit: OpenVisit) -> None:
    tab = visit(token="")
    page = tab.page
    token = page.get_by_role("textbox", name="Token")
    token.fill("wrong")
    page.keyboard.press("Enter")
    expect(token).to_have_value("")
    expect(token).to_be_visible()
    token.fill(TOKEN)
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("digits")
    page.reload()
    expect(page.get_by_role("heading", level=1)).to_have_text("digits")
    expect(token).to_be_hidden()
    tab.close("status of 401")


def test_a_busy_server_is_tried_again(visit: OpenVisit) -> None:
    tab = visit()
    page = tab.page
    busy = {"error": {"code": "overloaded", "message": "the queue is full"}}
    tries: list[str] = []

    def answer(route: Route) -> None:
        tries.append(route.request.url)
        if len(tries) > 1:
            route.continue_()
            return
        route.fulfill(status=429, headers={"Retry-After": "1"}, body=json.dumps(busy), content_type="application/json")

    page.route("**/predict*", answer)
    page.set_input_files("#files", photo("a.png"))
    expect(page.locator("#failure")).to_contain_text("the queue is full. Trying again in 1 s")
    expect(page.locator("#list li")).to_have_count(5)
    assert len(tries) == 2
    tab.close("status of 429")


def test_a_server_that_is_gone_is_an_error_of_the_page_and_all_images_are_tried_again(visit: OpenVisit) -> None:
    tab = visit()
    page = tab.page
    tab.choose(photo("a.png"))
    page.route("**/predict*", lambda route: route.abort())
    page.set_input_files("#files", [photo("b.png", seed=1), photo("c.png", seed=2)])
    expect(page.locator("#page-error")).to_contain_text("The server cannot be reached")
    expect(page.get_by_role("listbox").get_by_text("failed")).to_have_count(2)
    page.unroute("**/predict*")
    page.locator("#page-error").get_by_role("button", name="Try again").click()
    expect(page.locator("#page-error")).to_be_hidden()
    expect(page.get_by_role("listbox").get_by_text("failed")).to_have_count(0)
    tab.wait(3)
    tab.close("Failed to load resource")


def test_the_page_says_what_the_model_is_unsure_about(visit: OpenVisit, classifier: Path) -> None:
    predictor = reconv.load(classifier, device="cpu", log=lambda text: None)
    digits = open_digits("val")
    blends = [(digits[n].data.astype(int) + digits[n + 1].data) // 2 for n in range(40)]
    known = [digits[n].data for n in range(5)]
    found = predictor.predict([image[0].astype(np.uint8) for image in (*blends, *known)])
    chosen = [n for n, prediction in enumerate(found) if prediction.unsure][:3]
    chosen += [n for n, prediction in enumerate(found) if not prediction.unsure][-2:]
    assert len(chosen) == 5
    files = [Path(f"{n}.png").absolute() for n in chosen]
    for file, n in zip(files, chosen, strict=True):
        Image.fromarray([*blends, *known][n][0].astype(np.uint8)).save(file)
    predictions = predictor.predict(files)
    tab = visit()
    tab.choose(*files)
    assert [prediction.unsure for prediction in predictions] == [True, True, True, False, False]
    for thumb, prediction in zip(tab.thumbs.all(), predictions, strict=True):
        thumb.click()
        if not prediction.unsure:
            expect(tab.page.locator("#unsure")).to_be_hidden()
            continue
        expect(thumb).to_contain_text("?")
        named = ", ".join(prediction.prediction_set or ()) or "no class is probable enough"
        expect(tab.page.locator("#unsure")).to_contain_text(f"Unsure: {named}")
    tab.close()


@pytest.mark.parametrize(("width", "scheme", "model"), [(400, "dark", "digits"), (400, "light", "boxes")])
def test_the_page_fits_a_phone_and_follows_the_color_scheme(
    visit: OpenVisit, width: int, scheme: str, model: str
) -> None:
    tab = visit(width=width, scheme=scheme)
    page = tab.page
    tab.use_model(model)
    tab.choose(*(photo(f"a-photo-with-a-very-long-name-that-does-not-fit-{seed}.png", seed=seed) for seed in range(6)))
    assert page.evaluate("document.documentElement.scrollWidth") == width
    wide = page.eval_on_selector_all(
        "main > *, .panel, .frame, #list li",
        "all => all.filter(e => e.getBoundingClientRect().right > innerWidth).length",
    )
    assert wide == 0
    color = page.evaluate("getComputedStyle(document.body).backgroundColor")
    channels = [int(part) for part in color.removeprefix("rgb(").removesuffix(")").split(",")]
    assert (max(channels) < 64) if scheme == "dark" else (min(channels) > 192)
    tab.close()


def test_an_image_that_only_the_server_can_read_is_shown_as_the_network_saw_it(
    visit: OpenVisit, tmp_path: Path
) -> None:
    file = io.BytesIO()
    Image.new("RGB", (50, 40), "orange").save(file, "TIFF")
    tab = visit()
    (tmp_path / "scan.tiff").write_bytes(file.getvalue())
    tab.choose(tmp_path / "scan.tiff")
    expect(tab.page.locator("#image")).to_have_attribute("src", tab.page.locator("#input").get_attribute("src") or "-")
    assert tab.page.locator("#list li").count() == 5
    tab.close()
