"""Names with control characters, newlines and overrides of the direction of text never reach the terminal as such."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from reconv.cli import main
from reconv.cli.options import print_note
from reconv.core.errors import DataError, RemoteRankError, one_of
from reconv.core.text import printable, printable_lines
from reconv.logging.console import make_console
from reconv.logging.events import BadImageSkipped, Event, LogMessage, RunPlanned
from reconv.report.markup import el

NAMES = ("evil\x1b[2J", "good\u202eclass", "größe 漢字 👩‍🔬")
SHOWN = (r"evil\x1b[2J", r"good\u202eclass", "größe 漢字 👩‍🔬")
FILE, FILE_SHOWN = "0\nerror: forged\x07.png", r"0\nerror: forged\x07.png"
BAD, BAD_SHOWN = "bad\n  hint:  curl.png", r"bad\n  hint:  curl.png"
CONTROLS = re.compile(r"[^\n -~\xa0-\u2027\u202f-\u2065\u206a-\U0010ffff]")
SETTINGS = {
    "length": "1step",
    "batch.size": "4",
    "data.bad_images": "skip up to 20",
    "model.name": "resnet8_cifar",
    "data.preprocess.size": "16",
    "loss.class_weights": "balanced",
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in NAMES:
            folder = root / split / name
            folder.mkdir(parents=True)
            for file in (FILE, "1.png", "2.png"):
                Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(folder / file)
        (root / split / NAMES[0] / BAD).write_bytes(b"no image")
    return root


def run_cli(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """The exit code and everything that is printed, which must be printable."""
    with pytest.raises(SystemExit) as end:
        main(list(words))
    printed = "".join(capsys.readouterr())
    assert_printable(printed)
    return int(end.value.code or 0), printed


def assert_printable(printed: str) -> None:
    assert CONTROLS.findall(printed) == []
    assert not any(line.startswith(("error: forged", "  hint:  curl")) for line in printed.splitlines())


def test_commands_escape_the_names_of_classes_and_files(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, checked = run_cli(capsys, "data", "check", str(photos), "--out", str(tmp_path / "check"))
    assert code == 3
    assert all(name in checked for name in (*SHOWN, BAD_SHOWN))

    run = tmp_path / "run"
    settings = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    code, trained = run_cli(capsys, "train", "finetune", "--data", str(photos), "--out", str(run), *settings)
    assert code == 0
    assert all(name in trained for name in (*SHOWN, BAD_SHOWN))

    images = [str(photos / "val" / NAMES[0] / file) for file in (FILE, BAD)]
    code, predicted = run_cli(capsys, "predict", str(run), *images)
    assert code == 3
    assert all(name in predicted for name in (*SHOWN, FILE_SHOWN, BAD_SHOWN))

    code, evaluated = run_cli(capsys, "eval", str(run), "--per-class")
    assert code == 0
    assert all(name in evaluated for name in (*SHOWN, BAD_SHOWN))

    report = (run / "report.html").read_text()
    assert CONTROLS.findall(report) == []
    assert all(name in report for name in SHOWN)


def test_errors_escape_what_the_user_and_files_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = run_cli(capsys, "eval", str(tmp_path / "no\x1b[2J\nerror: forged"))
    assert (code, r"no\x1b[2J\nerror: forged" in printed) == (4, True)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text('extends: quickstart\n"ev\\e[2Jil\\n  hint:  curl": 3\n')
    code, printed = run_cli(capsys, "train", str(recipe))
    assert (code, r"ev\x1b[2Jil\n  hint:  curl" in printed) == (2, True)
    code, printed = run_cli(capsys, "recipes", "no\x9bsuch\nerror: forged")
    assert (code, r"no\x9bsuch\nerror: forged" in printed) == (2, True)


def test_an_error_has_its_own_lines_only_also_in_another_process() -> None:
    error = DataError("a\nb", where="c\n  hint:  d", why="\x1b]0;title\x07", hint=one_of("e\nf", "g"))
    expected = [
        r"a\nb",
        r"  where: c\n  hint:  d",
        r"  why:   \x1b]0;title\x07",
        "  hint:  one of",
        r"           e\nf",
        "           g",
    ]
    assert str(error).split("\n") == expected
    assert str(RemoteRankError.of(RemoteRankError.of(error))).split("\n") == expected


@pytest.mark.parametrize("mode", ["plain", "json"])
def test_the_console_escapes_events(mode: str) -> None:
    stream = io.StringIO()
    console = make_console(mode, None, stream)
    events: list[Event] = [
        RunPlanned("x\nerror: forged", "t\x1b[2J", 1, 1.0, 1, ("line\nerror: forged",)),
        BadImageSkipped(0, "train", 0, FILE, "why\r\n"),
        LogMessage("warning", "host\nerror: forged"),
    ]
    for event in events:
        console.on_event(event)
    assert_printable(stream.getvalue())
    console.on_event(LogMessage("info", printable_lines("a table", "of two\tlines")))
    if mode == "plain":
        assert stream.getvalue().endswith("a table\nof two\\tlines\n")


def test_notes_and_pages_are_printable(capsys: pytest.CaptureFixture[str]) -> None:
    print_note("a\nerror: forged\x07")
    assert capsys.readouterr().err == "a\\nerror: forged\\x07\n"
    page = el("p", {"title": "a\x1b\u202e"}, "b\x00\x85<\nc")
    assert page == '<p title="a\\x1b\\u202e">b\\x00\\x85&lt;\nc</p>'


def test_text_of_any_language_is_unchanged() -> None:
    for text in ("größe", "漢字", "مرحبا", "שלום\u200f", "👩‍🔬", "é e\u0301", "a b", "C:\\new"):
        assert printable(text) == text
