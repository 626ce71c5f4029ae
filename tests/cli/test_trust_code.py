"""The commands that use a run import its code only when the user agrees."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from own_code import Net

import reconv
from reconv import cli
from reconv.cli import options
from reconv.core import custom_code
from reconv.core.errors import ExitCode

CODE = "from own_code import Net\nfrom pathlib import Path\nPath('imported').touch()\n"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run whose recipe names nets_p:Net, in a process that has never imported it."""
    Path("nets_p.py").write_text(CODE)
    settings = {"model.name": "nets_p:Net", "length": "2step", "schedule.warmup": "1step", "save.every": "2step"}
    path = list(sys.path)
    reconv.train("quickstart", out="run", overrides=[(name, value, "test") for name, value in settings.items()])
    assert Net is sys.modules["nets_p"].Net
    del sys.modules["nets_p"]
    Path("imported").unlink()
    yield Path("run")
    sys.path[:] = path
    sys.modules.pop("nets_p", None)
    custom_code._roots.clear()


def code(*args: str) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(list(args))
    assert isinstance(end.value.code, int)
    return end.value.code


@pytest.mark.parametrize(
    "command", [("eval", "run"), ("predict", "run", "."), ("resume", "run"), ("bench", "infer", "run")]
)
def test_without_a_terminal_the_code_is_refused(
    run: Path, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.png").write_bytes(b"")
    assert code(*command) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert "model.name: nets_p:Net" in error and str(Path.cwd() / "nets_p.py") in error and "--trust-code" in error
    assert not Path("imported").exists()


def test_the_option_or_a_yes_at_the_terminal_imports_it(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert code("eval", "run", "--trust-code") == ExitCode.OK
    assert Path("imported").exists()
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    asked: list[str] = []
    for answer, expected in ((False, ExitCode.USAGE), (True, ExitCode.OK)):
        monkeypatch.setattr(options.click, "confirm", lambda text, answer=answer, **_: asked.append(text) or answer)
        assert code("eval", "run") == expected
    assert asked == ["Import it?"] * 2
    assert "nets_p:Net" in capsys.readouterr().err


def test_showing_the_recipe_and_the_report_import_nothing(run: Path) -> None:
    assert code("recipes", "show", "run/recipe.yaml") == ExitCode.OK
    assert code("report", "run") == ExitCode.OK
    assert not Path("imported").exists()


def test_weights_that_name_their_network_are_trusted_before_it_is_imported(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--set", "data.source=digits", "--init", "run", "--out", "tuned", "--stop-after", "1step")
    assert code("train", "finetune", *options) == ExitCode.USAGE
    gray = "--set augment.color_jitter.saturation=0"
    assert gray in capsys.readouterr().err, "the weights are of gray images: the cure is a line to type"
    options += tuple(gray.split())
    assert code("train", "finetune", *options) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert "model.name: nets_p:Net" in error and "--trust-code" in error
    assert not Path("imported").exists() and not Path("tuned").exists()
    assert code("train", "finetune", *options, "--trust-code") == ExitCode.OK
    assert Path("imported").exists()


def test_a_recipe_whose_values_are_derived_from_data_is_shown_without_importing_its_network(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("theirs.yaml").write_text("extends: finetune\nmodel: {name: nets_p:Net}\ndata: {source: synthetic}\n")
    assert code("recipes", "show", "theirs.yaml", "--data", ".") == ExitCode.OK
    assert "nets_p:Net" in capsys.readouterr().out and not Path("imported").exists()
