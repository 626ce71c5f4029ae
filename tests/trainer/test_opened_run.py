"""Opening a run to resume it: each thing is looked for and read once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

import reconv

SETTINGS = {"evaluate.every": "off", "save.every": "2step", "length": "4step"}

# Counts which files of a run a process opens to read, but for its report, and how often it looks for runs.
COUNT = """
import json, os, sys
from pathlib import Path
run, opened, searched = Path(sys.argv[1]).resolve(), [], []
def is_report(frame):
    while frame is not None:
        if f"{os.sep}report{os.sep}" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
def audit(event, args):
    if event == "open" and isinstance(args[0], str | bytes) and not (args[2] & (os.O_WRONLY | os.O_RDWR)):
        path = Path(os.path.realpath(os.fsdecode(args[0])))
        if run in path.parents and not is_report(sys._getframe(1)):
            opened.append(str(path.relative_to(run)))
import reconv.api.training
import reconv.inference.predict
from reconv.trainer.opened_run import find_run
def profile(frame, event, arg):
    if event == "call" and frame.f_code is find_run.__code__:
        searched.append(1)
sys.addaudithook(audit)
sys.setprofile(profile)
if sys.argv[2] == "resume":
    settings = json.loads(sys.argv[3])
    reconv.train("quickstart", overrides={**settings, "length": "6step"}, out=run, resume=True, device="cpu")
else:
    reconv.predict(run, [sys.argv[3]], device="cpu")
print(json.dumps([opened, len(searched)]))
"""


def count(run: Path, command: str, argument: str) -> tuple[Counter[str], int]:
    """How often a process opens each file of a run that it resumes or predicts with, and looks for the run."""
    words = [sys.executable, "-c", COUNT, str(run), command, argument]
    out = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    opened, num_searches = json.loads(out.splitlines()[-1])
    return Counter(opened), num_searches


def reads_of(opened: Counter[str]) -> dict[str, int]:
    """How often each file of the checkpoint was opened, but for its manifest, which retention reads, too."""
    folder = "checkpoints/step-000000004/"
    files = {name.removeprefix(folder): times for name, times in opened.items() if name.startswith(folder)}
    assert files.pop("manifest.json")
    return files


@pytest.fixture
def run(tmp_path: Path) -> Path:
    reconv.train("quickstart", overrides=SETTINGS, out=tmp_path / "run", device="cpu")
    return tmp_path / "run"


def test_a_resume_reads_its_recipe_and_its_checkpoint_once(run: Path) -> None:
    opened, num_searches = count(run, "resume", json.dumps(SETTINGS))
    assert reads_of(opened) == {"state.json": 1, "model.safetensors": 1, "optimizer.safetensors": 1}
    assert opened["recipe.yaml"] == 1
    assert num_searches == 1


def test_a_prediction_reads_the_checkpoint_once(run: Path, tmp_path: Path) -> None:
    Image.new("L", (8, 8)).save(tmp_path / "image.png")
    opened, _ = count(run, "predict", str(tmp_path / "image.png"))
    assert reads_of(opened) == {"state.json": 1, "model.safetensors": 1, "optimizer.safetensors": 1}
