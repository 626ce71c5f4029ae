"""The examples of docs/how-to/custom-code.md work: the recipe and the script of the page train with its code."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import reconv
from reconv.logging.event_log import read_events
from reconv.logging.events import LogMessage, ScalarLogged

PAGE = Path(__file__).resolve().parent.parent / "docs" / "how-to" / "custom-code.md"
FILE = re.compile(r"^# (my_pkg/\w+\.py|my\.yaml|train\.py)$")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the files of the page and 40 images, as the current one."""
    found = {}
    for block in re.findall(r"^```(?:python|yaml)\n(.*?)^```", PAGE.read_text(), re.S | re.M):
        first, _, text = block.partition("\n")
        header = FILE.match(first)
        assert header is not None, f"a block must start with the name of its file: {first}"
        found[header[1]] = text
    assert len(found) == 8
    for name, text in found.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
        assert len([line for line in text.splitlines() if line.strip()]) <= 30, name
    Path("images").mkdir()
    labels = {}
    for number in range(40):
        pixels = np.random.default_rng(number).integers(0, 100, (12, 12), dtype=np.uint8)
        pixels[:, :6] += np.uint8(100 * (number % 2))
        Image.fromarray(pixels).save(f"images/{number}.png")
        labels[f"{number}.png"] = ("right", "left")[number % 2]
    Path("images/labels.json").write_text(json.dumps(labels))
    path, modules = list(sys.path), set(sys.modules)
    yield Path.cwd()
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] == "my_pkg":
            del sys.modules[name]


def test_the_recipe_of_the_page_trains_evaluates_and_warns_of_changed_code(example: Path) -> None:
    reconv.train("my.yaml", out="run", stop_after="1ep")
    losses = example / "my_pkg" / "losses.py"
    losses.write_text(losses.read_text() + "\n")
    result = reconv.train("my.yaml", out="run", resume=True)
    assert result.summary["metric"] == "macro_f1"
    events = read_events(example / "run" / "events.jsonl")
    assert [event.name for event in events if isinstance(event, ScalarLogged)] == ["best so far"] * 2
    warnings = [event.text for event in events if isinstance(event, LogMessage) and event.level == "warning"]
    assert [text for text in warnings if "my_pkg/losses.py has changed" in text]
    [evaluated] = reconv.evaluate("run", trust_code=True)
    assert evaluated.metrics["macro_f1"] == pytest.approx(result.summary["value"])
    [predicted] = reconv.predict("run", ["images/0.png"], trust_code=True)
    assert {found.name for found in predicted.classes} == {"left", "right"}
    assert "best so far" in (example / "run" / "report.html").read_text()


def test_the_script_of_the_page_runs(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sys.path.insert(0, str(example))
    runpy.run_path("train.py", run_name="__main__")
    assert "macro_f1" in capsys.readouterr().out
