"""The code of docs/tutorials/onnxruntime.md runs as it stands."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import reconv
from reconv.exporters.run import ExportResult

PAGE = Path(__file__).parents[3] / "docs/tutorials/onnxruntime.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_python_code_predicts_as_reconv_does(exported: ExportResult, classifier: Path, tmp_path: Path) -> None:
    shutil.copytree(exported.folder, tmp_path / "digits")
    Image.fromarray(np.random.default_rng(3).integers(0, 256, (11, 9), "u1")).save(tmp_path / "digit.png")
    sources = blocks("python")
    assert len(sources) == 2
    printed = [
        subprocess.run([sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        for source in sources
    ]
    black = np.zeros((8, 8), np.uint8)
    labels = [
        prediction.label
        for prediction in reconv.load(classifier, device="cpu").predict([tmp_path / "digit.png", black])
    ]
    assert printed == [f"{labels[0]}\n", f"{[labels[1]] * 3}\n"]


@pytest.mark.slow
def test_the_cpp_program_prints_what_run_py_computes(classifier: Path, tmp_path: Path) -> None:
    [source], page = blocks("cpp"), PAGE.read_text()
    (tmp_path / "classify.cpp").write_text(source)
    folder = reconv.export(classifier, to="aoti", out=tmp_path / "digits-aoti", samples=20).folder
    images = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1), "u1")
    images.tofile(tmp_path / "pixels")
    [commands] = re.findall(r"((?:    .*\n)+)\nThe package is for", page)
    script = commands.replace("$(python ", f"$({sys.executable} ")
    done = subprocess.run(["sh", "-e", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sys.path.insert(0, str(folder))
    import run  # type: ignore[import-not-found]

    sys.path.remove(str(folder))
    logits = run.load_model(run.FOLDER, run.read_settings())(images)["logits"]
    found = [line.split() for line in done.stdout.splitlines()]
    assert [int(label) for label, _ in found] == logits.argmax(axis=1).tolist()
    np.testing.assert_allclose([float(best) for _, best in found], logits.max(axis=1), rtol=1e-4)
