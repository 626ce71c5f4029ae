"""An evaluation that was killed continues, with the result of an undisturbed one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rank_commands import command_in_ranks, run_command
from ranks import in_ranks

import reconv
from reconv.inference import eval_journal

NUM_BATCHES = 8


@pytest.fixture(autouse=True)
def _keep_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval_journal, "KEEP_EVERY_S", 0.0)


def evaluate(run: Path, journal: Path | None, **options: Any) -> Any:
    [result] = reconv.evaluate(
        run, batch_size=50, per_class=True, device="cpu", backend="eager", journal_dir=journal, **options
    )
    return result


def parts(journal: Path) -> dict[str, int]:
    """The parts, and when each was written."""
    return {path.name: path.stat().st_mtime_ns for path in journal.glob("*.part")}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_only_the_batches_that_are_not_finished_are_evaluated(classifier: Path, tmp_path: Path, ranks: int) -> None:
    journal, whole = tmp_path / "journal", evaluate(classifier, None)
    assert evaluate(classifier, journal) == whole
    first = parts(journal)
    assert len(first) == NUM_BATCHES
    (journal / "0000000001.part").unlink()
    damaged = journal / "0000000004.part"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    results = [evaluate(classifier, journal)] if ranks == 1 else in_ranks(ranks, evaluate, classifier, journal)
    for result in results:
        assert (result, result.analysis, result.wall_s) == (whole, whole.analysis, None)
    changed = {name for name, written_ns in parts(journal).items() if first.get(name) != written_ns}
    assert changed == {"0000000001.part", "0000000004.part"}


def test_a_detector_continues(detector: Path, tmp_path: Path) -> None:
    def run(journal: Path | None) -> Any:
        [result] = reconv.evaluate(detector, batch_size=2, per_class=True, backend="eager", journal_dir=journal)
        return result

    journal, whole = tmp_path / "journal", run(None)
    assert run(journal) == whole
    written = sorted(parts(journal))
    assert len(written) > 2
    (journal / written[1]).unlink()
    result = run(journal)
    assert (result, result.analysis, result.wall_s) == (whole, whole.analysis, None)


def test_parts_of_other_weights_or_options_are_not_used(classifier: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    evaluate(classifier, journal, weights="ema")
    for options in ({"weights": "raw"}, {"weights": "raw", "samples": 200}):
        assert evaluate(classifier, journal, **options).wall_s is not None
    assert evaluate(classifier, journal, weights="raw", samples=200).wall_s is None


@pytest.mark.slow
def test_a_batch_with_an_unreadable_image_is_evaluated_again(tmp_path: Path) -> None:
    images, random = tmp_path / "images", np.random.default_rng(0)
    for split, name in product(("train", "val"), ("ant", "bee")):
        (images / split / name).mkdir(parents=True)
        for number in range(60):
            pixels = random.integers(0, 255, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(images / split / name / f"{number:03}.png")
    run = train(tmp_path, {"data.source": "auto", "data.bad_images": "skip up to 1"}, data=images)
    bad, other = images / "val/ant/030.png", images / "val/bee/030.png"  # in the batches 1 and 4
    content = other.read_bytes()
    bad.write_bytes(bytes(bad.stat().st_size))
    command = ["eval", str(run), "--batch-size", "20", "--backend", "eager", "--json"]
    whole = run_command([*command, str(tmp_path / "whole.json")])
    assert whole.code == 0 and "skipped" in whole.err
    other.write_bytes(bytes(len(content)))  # one more than is tolerated
    assert run_command([*command, str(tmp_path / "cut.json")]).code == 3
    assert sorted(parts(tmp_path / ".cut.json.evaluating")) == [f"{number:010}.part" for number in (0, 2, 3)]
    other.write_bytes(content)
    again = run_command([*command, str(tmp_path / "cut.json")])
    assert (again.code, again.err) == (0, whole.err)
    assert without_rate(tmp_path / "cut.json") == without_rate(tmp_path / "whole.json")
    assert not list(tmp_path.glob(".*evaluating"))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_evaluation_that_was_killed_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    monkeypatch.chdir(tmp_path)
    module = f"stuck_images_{ranks}"  # Python imports a name once
    Path(f"{module}.py").write_text(_STUCK_IMAGES)
    run = train(tmp_path, {"data.source": f"{module}.py:make"})
    command = ["eval", str(run), "--trust-code", "--batch-size", "20", "--json"]
    assert run_command([*command, "whole.json"]).code == 0
    Path("stuck").touch()
    start = f"import sys; from reconv.inference import eval_journal as j; j.KEEP_EVERY_S = 0; {_MAIN}"
    killed = subprocess.Popen([sys.executable, "-c", start, *command, "cut.json"], stderr=subprocess.DEVNULL)
    journal, deadline_s = Path(".cut.json.evaluating"), time.monotonic() + 60
    while len(parts(journal)) < 5:
        assert killed.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not Path("cut.json").exists()
    Path("stuck").unlink()
    Path("read.txt").unlink()
    assert [result.code for result in command_in_ranks(ranks, *command, "cut.json")] == [0] * ranks
    assert sorted(map(int, Path("read.txt").read_text().split())) == list(range(100, 120))
    assert without_rate(tmp_path / "cut.json") == without_rate(tmp_path / "whole.json")
    assert not journal.exists()


def test_an_evaluation_of_all_checkpoints_leaves_no_journal(classifier: Path) -> None:
    (classifier / "evaluations.csv").unlink(missing_ok=True)
    assert len(reconv.evaluate(classifier, all=True)) == 3
    assert not (classifier / ".evaluating").exists()


_MAIN = "from reconv.cli import main; main(sys.argv[1:])"
_STUCK_IMAGES = """
import time
from pathlib import Path
import numpy as np

class Images:
    classes = ["a", "b", "c"]
    def __init__(self, split, count):
        self.split, self.count = split, count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        while self.split == "val" and index >= 100 and Path("stuck").exists():
            time.sleep(0.02)
        if self.split == "val":
            with open("read.txt", "a") as log:
                log.write(f"{index}\\n")
        return np.random.default_rng(index).integers(0, 255, (8, 8, 3), dtype=np.uint8), index % 3

def make(split, path=None):
    return Images(split, 60 if split == "train" else 120)
"""


def train(folder: Path, settings: dict[str, str], data: Path | None = None) -> Path:
    """A run of one step."""
    short = {"length": "1step", "schedule.warmup": "0ep", "batch.size": "30", "evaluate.every": "off"}
    overrides = [(name, value, "--set") for name, value in {**short, "data.num_workers": "0", **settings}.items()]
    return reconv.train("quickstart", data=data, out=folder / "run", overrides=overrides).folder


def without_rate(file: Path) -> Any:
    return [{**result, "images_per_s": None} for result in json.loads(file.read_text())]
