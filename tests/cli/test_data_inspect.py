"""`reconv data check` and `reconv data show` on the command line."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from reconv.cli import main


@pytest.fixture
def flowers(tmp_path: Path) -> Path:
    """Two classes, 12 training and 4 validation images."""
    rng = np.random.default_rng(0)
    root = tmp_path / "flowers"
    for split, count in (("train", 6), ("val", 2)):
        for name in ("daisy", "tulip"):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (40, 60, 3), np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number}.jpg")
    return root


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(args))
    return int(end.value.code or 0)


def size_of(path: Path) -> tuple[int, int]:
    with Image.open(io.BytesIO(path.read_bytes())) as image:
        image.load()
        assert image.format == "PNG"
        return image.size


def test_check_of_good_data_writes_a_table_json_and_an_image(
    flowers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run("data", "check", str(flowers), "--out", str(out)) == 0
    printed = capsys.readouterr().out
    assert "no errors" in printed
    assert "daisy" in printed
    assert json.loads((out / "check.json").read_text())["splits"]["val"]["classes"] == {"daisy": 2, "tulip": 2}
    assert size_of(out / "contact.png")[0] > 400


def test_check_of_bad_data_exits_with_3_and_names_the_files(
    flowers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = flowers / "train/daisy/3.jpg"
    bad.write_bytes(bad.read_bytes()[:300])
    assert run("data", "check", str(flowers), "--out", str(tmp_path / "out")) == 3
    assert str(bad) in capsys.readouterr().out
    assert run("data", "check", str(flowers), "--out", str(tmp_path / "out"), "--json") == 3
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["splits"]["train"]["bad"][0]["path"] == str(bad)


def test_results_are_not_written_into_the_dataset(flowers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(flowers.rglob("*"))
    assert run("data", "check", str(flowers), "--out", str(flowers / "check")) == 2
    assert run("data", "show", str(flowers), "--out", str(flowers / "x.png")) == 2
    assert "inside the data" in capsys.readouterr().err
    assert sorted(flowers.rglob("*")) == before


def test_show_draws_both_batches_of_the_recipe(
    flowers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "show.png"
    small = ["--set", "data.preprocess.size=32", "--set", "data.preprocess.resize=40"]
    assert run("data", "show", str(flowers), *small, "--out", str(out), "--images", "8") == 0
    assert "resnet50" in capsys.readouterr().out
    first = out.read_bytes()
    assert size_of(out)[0] == 8 * (96 + 8) + 8
    assert run("data", "show", str(flowers), *small, "--out", str(out), "--images", "8") == 0
    assert out.read_bytes() == first  # the same augmentation every time
    mixed = ["--set", "augment.mixup.alpha=0.9", "--recipe", "resnet18"]
    assert run("data", "show", str(flowers), *small, *mixed, "--out", str(out), "--images", "8") == 0
    assert out.read_bytes() != first


def test_show_draws_digits_and_refuses_bad_data(flowers: Path, tmp_path: Path) -> None:
    assert run("data", "show", "digits", "--out", str(tmp_path / "digits.png")) == 0
    assert size_of(tmp_path / "digits.png")[1] > 800
    for path in (flowers / "train").rglob("*.jpg"):
        path.write_bytes(b"")
    assert run("data", "show", str(flowers), "--out", str(tmp_path / "no.png")) == 3
    assert not (tmp_path / "no.png").exists()
