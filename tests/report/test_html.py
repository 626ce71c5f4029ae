"""The report as text: escaping, determinism, size, and runs that went wrong."""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import json
import math
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from run_example import write_run

from reconv.core.errors import UsageError
from reconv.data.inspect.contact_sheet import grid
from reconv.logging.console import final_lines
from reconv.logging.event_log import EventLog, read_events
from reconv.logging.events import (
    AttemptStarted,
    EvalFinished,
    ImageLogged,
    LogMessage,
    RunPlanned,
    TrainProgress,
    encode,
)
from reconv.logging.json_lines import add_checksum
from reconv.report.charts import MAX_POINTS, Chart, Series, draw
from reconv.report.html import render, write_report
from reconv.report.images import BUDGET_BYTES, embed
from reconv.report.summary import write_summary

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


class Tags(HTMLParser):
    """Collects what a browser would find: elements, their attributes, and the plain text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def count(self, name: str) -> int:
        return sum(tag == name for tag, _ in self.elements)


def test_the_report_shows_result_curves_images_and_details(tmp_path: Path) -> None:
    run = write_run(tmp_path / "quickstart" / "1", resumes=[150], mixed=True, broken_steps=[90])
    tags = Tags(render([run]))
    text = " ".join(tags.text)
    for part in (
        *("Reached top-1 99.44 %; the recipe expects 99.0 ± 0.5 %.", "quickstart/1", "2026-02-02", "resnet8_cifar"),
        *("reconv train quickstart --lr 0.1", "digits, 1,437 train", "in 2 attempts", "global batch 64 ="),
        *(
            "Loss",
            "Accuracy, top-1",
            "close up",
            "Learning rate",
            "Throughput",
            "Data wait",
            "Gradient norm",
        ),
        *("training, on mixed images", "expected 99.0 ± 0.5 %", "resumed from step 150"),
        *("First training batch", "Worst mistakes", "predicted 8 (97 %)", "fell back"),
        *("checkpoints/step-000000440", "schedule.warmup", "data fingerprint", "7f3a90c2d1e4b586", "source: measured"),
        *("killed, or still running", "step 90: non-finite loss or gradient"),
    ):
        assert part in text, part
    assert tags.count("img") == 32 + 12


def test_the_same_run_directory_gives_the_same_bytes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "quickstart" / "1", resumes=[150])
    first = render([run])
    shutil.copytree(run, tmp_path / "elsewhere" / "quickstart" / "1")
    assert render([tmp_path / "elsewhere" / "quickstart" / "1"]) == first
    assert write_report(run).read_text(encoding="utf-8") == first
    assert render([run]) == first  # its own report does not change it


def test_nothing_in_the_events_becomes_markup(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "images").mkdir(parents=True)
    (run / "recipe.yaml").write_text(f"name: x\ndescription: {json.dumps(EVIL)}\nmodel: {{name: {json.dumps(EVIL)}}}\n")
    (run / "images" / "a.png").write_bytes(grid(torch.zeros(1, 3, 8, 8, dtype=torch.uint8)))
    log = [
        AttemptStarted(1, 0, (EVIL, EVIL), {EVIL: EVIL}),
        RunPlanned(EVIL, EVIL, 10, 5.0, 4, (EVIL,), 10, EVIL),
        TrainProgress(5, 1.0, 1.0, 0.1, {EVIL: 0.5}, EVIL, 1.0, 1.0, 1.0, 0.0, 1, None),
        EvalFinished(5, 1.0, EVIL, {EVIL: 0.5}, 10, 0.1, True),
        LogMessage(EVIL, EVIL),
        ImageLogged(EVIL, "images/a.png", (EVIL,), columns=1),
        ImageLogged("gone", EVIL),
    ]
    (run / "events.jsonl").write_text("".join(encode(event) + "\n" for event in log))
    clean = run.parent / "clean"
    shutil.copytree(run, clean)
    for path in (clean / "recipe.yaml", clean / "events.jsonl"):
        path.write_text(path.read_text().replace(json.dumps(EVIL)[1:-1], "plain"))
    for evil, good in (([run], [clean]), ([run, run], [clean, clean])):
        found, wanted = Tags(render(evil)), Tags(render(good))
        assert [tag for tag, _ in found.elements] == [tag for tag, _ in wanted.elements]
        assert [sorted(a) for _, a in found.elements] == [sorted(a) for _, a in wanted.elements]
        assert EVIL in "".join(found.text)


def test_the_page_has_no_links_and_forbids_the_network(tmp_path: Path) -> None:
    page = render([write_run(tmp_path / "run")])
    tags = Tags(page)
    policies = [
        a["content"] for t, a in tags.elements if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert len(policies) == 1
    assert policies[0] is not None
    assert policies[0].startswith("default-src 'none'; img-src data:;")
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'" for code in scripts]
    assert f"; script-src {hashes[0]};" in policies[0]
    assert len(hashes) == 1
    links = [v for _, attributes in tags.elements for k, v in attributes.items() if k in ("src", "href")]
    assert len(links) == 45
    assert all(link is not None and link.startswith("data:") for link in links)
    assert set(re.findall(r"https?://[^\"' ]+", page)) <= {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_a_run_that_has_just_started_has_a_report(tmp_path: Path, num_steps: int) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write(AttemptStarted(1, 0, ("reconv", "train", "x"), {}))
        log.write(RunPlanned("x", "classification", 10, 5.0, 4, ()))
        for step in range(1, num_steps + 1):
            log.write(TrainProgress(step, step / 5, 1.0, 0.1, {}, "", 1.0, None, None, 0.0, 0, None))
    text = " ".join(Tags(render([tmp_path])).text)
    assert "Not finished" in text
    assert "no evaluation" in text


def test_an_empty_event_log_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    assert "Not finished" in render([tmp_path])


def test_non_finite_values_break_the_line_and_are_never_drawn(tmp_path: Path) -> None:
    values = [1.0, 0.9, math.nan, 0.7, math.inf, 0.5, 0.4]
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write(AttemptStarted(1, 0, ("reconv",), {}))
        for step, loss in enumerate(values, 1):
            log.write(TrainProgress(step, float(step), loss, 0.1, {}, "", loss, loss, loss, 0.0, 0, None))
        log.write(EvalFinished(7, 7.0, "raw", {"top1": math.nan, "loss": math.nan}, 1, 0.1, False))
    page = render([tmp_path])
    paths = [a["d"] for t, a in Tags(page).elements if t == "path" and a["d"] and a["d"] != "M0 4H22"]
    assert paths
    assert all(re.fullmatch(r"([ML]-?[\d.]+ -?[\d.]+)+", path) for path in paths if path)
    assert paths[0] is not None
    assert paths[0].count("M") == 3
    assert "nan" not in " ".join(path for path in paths if path).lower()


def test_a_chart_without_finite_values_is_omitted(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write(AttemptStarted(1, 0, ("reconv",), {}))
        log.write(TrainProgress(1, 1.0, math.nan, 0.1, {}, "", math.nan, None, None, 0.0, 0, None))
    titles = re.findall(r"<h3>(.*?)</h3>", render([tmp_path]))
    assert titles == ["Learning rate", "Data wait, share of training time"]


def test_an_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    before = render([run])
    with (run / "events.jsonl").open("a") as file:
        file.write('{"kind":"train","step":4')
    assert render([run]) == before


def damage(run: Path, *numbers: int) -> None:
    """Change a digit of some lines of a run's event log."""
    lines = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    for number in numbers:
        found = re.search(rb"\d", lines[number - 1])
        assert found
        at = found.start()
        lines[number - 1] = lines[number - 1][:at] + b"%d" % (9 - int(found[0])) + lines[number - 1][at + 1 :]
    (run / "events.jsonl").write_bytes(b"".join(lines))


def test_lines_that_could_not_be_verified_are_named_in_report_comparison_and_summary(tmp_path: Path) -> None:
    run, whole = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    damage(run, 1, 12, 40)
    text = "3 lines of events.jsonl could not be verified; left out: lines 1, 12, 40"
    warnings: list[str] = []
    assert text in render([run], warn=warnings.append)
    assert text in render([whole, run])
    assert warnings == [f"{run}: {text}"]
    assert "verified" not in render([whole])
    assert write_summary(run)["unverified_lines"] == [1, 12, 40]
    assert write_summary(whole)["unverified_lines"] == []


def test_lines_without_a_checksum_are_marked(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    events = read_events(run / "events.jsonl")
    (run / "events.jsonl").write_text("".join(encode(event) + "\n" for event in events))
    assert f"{len(events):,} lines of events.jsonl have no checksum and could not be verified" in render([run])


def test_no_value_of_an_event_ends_a_report_or_a_summary(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=1, with_images=False)
    lines = (run / "events.jsonl").read_text().splitlines()
    first = {kind: next(line for line in lines if f'"kind":"{kind}"' in line) for kind in ("attempt", "plan", "end")}
    values = (
        None,
        "x",
        [],
        {},
        {"steps": "x", "peak_memory_bytes": None},
        "nan",
        "inf",
        1e308,
        0,
        -1,
        2**63 - 1,
        10**400,
    )
    for kind, line in first.items():
        record = json.loads(line)
        del record["crc32c"]
        for name in record:
            for value in values:
                changed = add_checksum(json.dumps(record | {name: value}, separators=(",", ":")).encode()).decode()
                replaced = [changed if other == line else other for other in lines]
                (run / "events.jsonl").write_text("\n".join(replaced) + "\n")
                summary = write_summary(run)
                assert summary["steps"] >= -1, (kind, name, value)
                assert final_lines(summary, run), (kind, name, value)
                assert "<main>" in render([run]), (kind, name, value)


def test_a_long_run_stays_small_and_keeps_its_extremes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=250, log_every=1)
    assert len((run / "events.jsonl").read_text().splitlines()) > 5_000
    page = render([run])
    assert len(page.encode()) < 1_500_000


def test_downsampling_keeps_peaks_troughs_ends_and_gaps() -> None:
    points = [(float(x), math.sin(x / 900)) for x in range(20_000)]
    points[7777] = (7777.0, 50.0)
    points[8888] = (8888.0, -50.0)
    points[9999] = (9999.0, math.nan)
    figure = draw(Chart("t", "number", (Series("s", tuple(points), 0),), 20_000.0))
    (data,) = re.findall(r'<script type="application/json">(.*?)</script>', figure)
    kept = json.loads(data)["series"][0]["points"]
    assert len(kept) <= MAX_POINTS
    assert [7777.0, 50.0] in kept
    assert [8888.0, -50.0] in kept
    assert kept[0][0] < 100
    assert kept[-1][0] == 19_999
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    (path,) = [a["d"] for t, a in Tags(figure).elements if t == "path" and a["d"] != "M0 4H22"]
    assert path is not None
    assert path.count("M") == 2


@pytest.mark.parametrize(
    "values", [(0.0, 0.0), (1.0, 1.0), (-3.0, -3.0), (1e-12, 2e-12), (1e30, 1.0), (5.0, 5.0 + 1e-15)]
)
def test_an_axis_contains_any_two_values(values: tuple[float, float]) -> None:
    for kind, log in itertools.product(("number", "percent", "count"), (False, True)):
        chart = Chart("t", kind, (Series("s", ((0.0, values[0]), (1.0, values[1])), 0),), 1.0, may_be_log=log)
        tags = Tags(draw(chart))
        (path,) = [a["d"] for t, a in tags.elements if t == "path" and a["d"] != "M0 4H22"]
        assert path is not None
        heights = [float(y) for y in re.findall(r" (-?[\d.]+)", path)]
        assert len(heights) == 2
        assert all(15 <= y <= 261 for y in heights)
        assert 2 <= sum("grid" in (a.get("class") or "") for _, a in tags.elements) <= 12


def test_only_images_inside_the_run_directory_are_embedded(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "secret.png")
    (run / "text.png").write_text("no image")
    with EventLog(run / "events.jsonl") as log:
        log.write(ImageLogged("outside", "../secret.png"))
        log.write(ImageLogged("absolute", str(tmp_path / "secret.png")))
        log.write(ImageLogged("text", "text.png"))
        log.write(ImageLogged("missing", "images/missing.png"))
    tags = Tags(render([run]))
    assert tags.count("img") == 0
    assert sum(a.get("class") == "gone" for _, a in tags.elements) == 4


def test_large_images_do_not_make_a_large_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", with_images=False)
    photos = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (64, 3, 128, 128), dtype=np.uint8))
    (run / "first.png").write_bytes(grid(photos, 8))
    with EventLog(run / "events.jsonl") as log:
        for number in range(5):
            log.write(ImageLogged(f"sheet {number}", "first.png", tuple(map(str, range(64))), columns=8))
    page = render([run])
    assert Tags(page).count("img") >= 64
    assert len(page.encode()) < 5_000_000


def test_photographs_become_jpeg_and_smooth_images_stay_png(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", with_images=False)
    y, x = np.mgrid[0:96, 0:96]
    gradient = np.stack([x * 2 + y * 3, x + y * 7, x * 5 + y * y // 9]).astype(np.uint8)[None]
    photo = np.random.default_rng(0).integers(0, 256, (1, 3, 96, 96), dtype=np.uint8)
    kinds = []
    for images in (gradient, photo):
        (run / "grid.png").write_bytes(grid(torch.from_numpy(images.copy()), 1))
        [uri] = embed(run, ImageLogged("a tile", "grid.png", ("one",), columns=1), BUDGET_BYTES) or []
        kinds.append(uri.partition(";")[0])
    assert kinds == ["data:image/png", "data:image/jpeg"]


@pytest.mark.parametrize(("channels", "num_images"), [(1, 1), (3, 5), (1, 32)])
def test_the_tiles_of_a_grid_are_its_images(tmp_path: Path, channels: int, num_images: int) -> None:
    images = np.random.default_rng(1).integers(0, 256, (num_images, channels, 8, 6), dtype=np.uint8)
    (tmp_path / "s.png").write_bytes(grid(torch.from_numpy(images), 8, min_tile_px=8))
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write(ImageLogged("s", "s.png", tuple(map(str, range(num_images))), columns=8))
    sources = [a["src"] for t, a in Tags(render([tmp_path])).elements if t == "img"]
    assert len(sources) == num_images
    for source, image in zip(sources, images, strict=True):
        assert source is not None
        tile = np.asarray(Image.open(io.BytesIO(base64.b64decode(source.split(",")[1]))))
        assert np.array_equal(tile.reshape(8, 6, channels), image.transpose(1, 2, 0))


def test_several_runs_are_compared(tmp_path: Path) -> None:
    first = write_run(tmp_path / "quickstart" / "1")
    second = write_run(tmp_path / "quickstart" / "2", seed=7, lr=0.2, expected=0.9999)
    third = write_run(tmp_path / "quickstart" / "3", stop_at=100, exit_code=75)
    tags = Tags(render([first, second, third]))
    text = " ".join(tags.text)
    for part in (
        *(
            "Reached top-1 99.44 %; the recipe expects 99.0 ± 0.5 %.",
            "below the 99.99 ± 0.5 %",
            "Stopped at step 100",
        ),
        *("schedule.lr", "expect.value", "seed", "quickstart/1", "quickstart/2", "quickstart/3 (EMA)"),
    ):
        assert part in text, part
    assert "optimizer" not in text
    assert "batch.size" not in text


def test_runs_of_one_recipe_have_no_differences(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(n)) for n in range(2)]
    assert "All fields that determine the result are equal." in render(runs)


def test_fields_that_determine_no_result_are_folded(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(n)) for n in range(2)]
    recipe = runs[1] / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("source: digits", "source: digits\n  num_workers: 3"))
    page = render(runs)
    assert "All fields that determine the result are equal." in page
    assert "Fields that do not determine the result: 1" in page
    assert "data.num_workers" in page


def test_mistakes_can_be_filtered_by_class(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    [mistakes] = [e for e in read_events(run / "events.jsonl") if isinstance(e, ImageLogged) and "mistakes" in e.path]
    classes = tuple(str(number % 3) for number in range(len(mistakes.captions)))
    assert "target class" not in render([run])
    with EventLog(run / "events.jsonl") as log:
        log.write(replace(mistakes, classes=classes))
    page = render([run])
    assert f'<option value="" selected>all ({len(classes)})</option>' in page
    assert f'<option value="1">1 ({classes.count("1")})</option>' in page
    assert page.count('<figure data-class="1">') == classes.count("1")


def test_frozen_parameters_are_not_called_trained(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=2)
    assert '<dd class="value">77.85 k</dd><dd class="detail">all trained</dd>' in render([run])
    plan = next(event for event in read_events(run / "events.jsonl") if isinstance(event, RunPlanned))
    with EventLog(run / "events.jsonl") as log:
        log.write(replace(plan, num_trained=650))
    assert '<dd class="detail">650 trained, 77.2 k frozen</dd>' in render([run])


def test_the_chart_of_the_loss_says_what_is_not_comparable(tmp_path: Path) -> None:
    note = "Training loss includes mixup, validation loss does not: they cannot be compared."
    assert note in render([write_run(tmp_path / "mixed", epochs=2, mixed=True)])
    assert note not in render([write_run(tmp_path / "plain", epochs=2)])


def test_runs_with_the_same_name_and_number_are_told_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / user / "quickstart" / "1", epochs=2, with_images=False) for user in ("ann", "bob")]
    page = render(runs)
    assert page.count("<b>ann/quickstart/1</b>") == page.count("<b>bob/quickstart/1</b>") == 1
    other = write_run(tmp_path / "ann" / "quickstart" / "2", epochs=2, with_images=False)
    assert "<b>quickstart/2</b>" in render([runs[0], other])  # two parts are enough


def test_twelve_runs_have_distinct_lines(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(n), seed=n, epochs=2, with_images=False) for n in range(12)]
    figure = render(runs).split("Training loss</h3>")[1].split("</figure>")[0]
    looks = re.findall(r'class="series (c\d)" data-series="\d+"><path d="[^"]*"( stroke-dasharray="[^"]*")?', figure)
    assert len(looks) == len(set(looks)) == 12


def test_a_report_without_a_run_is_rejected() -> None:
    with pytest.raises(UsageError):
        render([])


def test_an_image_logged_again_replaces_the_first(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    mistakes = ImageLogged("Worst mistakes", "images/mistakes.png", ("a", "b"))
    with EventLog(run / "events.jsonl") as log:
        log.write(replace(mistakes, captions=("only", "these")))
    page = render([run])
    assert page.count("<h2>Worst mistakes</h2>") == 1
    assert "predicted 8" not in page


def test_a_caption_with_a_file_name_that_is_not_utf8_is_shown_escaped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with EventLog(run / "events.jsonl") as log:
        log.write(LogMessage("warning", "cannot read caf\udce9.png", 3))
    text = write_report(run).read_text(encoding="utf-8")
    assert "cannot read caf\\udce9.png" in text
