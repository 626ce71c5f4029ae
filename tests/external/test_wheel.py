"""The archives of `make wheel`: the same bytes twice, and a wheel that needs no compiler where it is installed.

Needs a C compiler to build, a Python with packaging/release-requirements.txt (RELEASE_PYTHON, default: that of
`make wheel`), and packages for pip: the installed environment is made anew, with packaging/constraints.txt.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent.parent
TOOLS = Path(os.environ.get("RELEASE_PYTHON", ROOT / ".venv-release" / "bin" / "python"))


def archives(checkout: Path, folder: Path) -> dict[str, bytes]:
    """Name and bytes of what a checkout is built to."""
    subprocess.run([TOOLS, "packaging/build_wheel.py", "--folder", folder], cwd=checkout, check=True)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not TOOLS.exists():
        pytest.skip("make wheel")
    folder = tmp_path_factory.mktemp("dist")
    archives(ROOT, folder)
    return folder


def readme_commands() -> list[str]:
    """The commands of README that install and try the wheel."""
    lines = (ROOT / "README.md").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("    pip install dist/"))
    block = lines[start : lines.index("", start)]
    return [line.partition("  #")[0].strip() for line in block]


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of a new environment, after what README says, word for word."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    programs = folder / "venv" / "bin"
    shutil.copytree(built, folder / "dist")
    constraints = ROOT / "packaging" / "constraints.txt"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # Nothing but the environment: no compiler. The tested set, as any torch may be installed before.
    environment |= {"PATH": str(programs), "PIP_CONSTRAINT": str(constraints), "PIP_ONLY_BINARY": ":all:"}
    for command in readme_commands():
        subprocess.run(["/bin/sh", "-e", "-c", command], check=True, cwd=folder, env=environment)
    return programs


def run(programs: Path, *arguments: str) -> str:
    environment = {**os.environ, "PATH": str(programs)}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [programs / "reconv", *arguments], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_two_builds_in_different_folders_are_byte_equal(built: Path, tmp_path: Path) -> None:
    subprocess.run(["git", "clone", "--quiet", ROOT, tmp_path / "other" / "checkout"], check=True)
    again = archives(tmp_path / "other" / "checkout", tmp_path / "dist")
    assert sorted(name.rpartition(".")[2] for name in again) == ["gz", "whl"]
    assert again == {path.name: path.read_bytes() for path in built.iterdir()}


def test_one_wheel_is_for_every_python_and_older_systems(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name.endswith("-py3-none-manylinux_2_28_x86_64.whl")


def test_without_a_compiler_the_doctor_finds_the_compiled_decoder(installed: Path) -> None:
    found = json.loads(run(installed, "doctor", "--json"))
    assert found["ok"] is True
    assert found["devices"]["jpeg_decoder"] == "native"


def test_the_commands_of_the_readme_train_quickstart(installed: Path) -> None:
    assert readme_commands() == ["pip install dist/reconv-*.whl", "reconv train quickstart"]
    run_folder = installed.parent.parent / "runs" / "quickstart" / "1"
    summary = json.loads((run_folder / "summary.json").read_text())
    assert summary["steps"] == summary["total_steps"]
    assert (run_folder / "report.html").exists()


def test_jpeg_files_are_decoded_by_the_compiled_decoder(installed: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for number in range(32):
        for split in ("train", "val"):
            folder = tmp_path / "photos" / split / f"class{number % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            pixels = random.integers(0, 256, (64, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.jpg")
    sets = ("length=2step", "schedule.warmup=1step", "batch.size=16", "data.preprocess.size=32", "evaluate.every=2step")
    options = [part for setting in sets for part in ("--set", setting)]
    run(installed, "train", "resnet18", "--data", str(tmp_path / "photos"), "--out", str(tmp_path / "run"), *options)
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert '"JPEG decoder":"native"' in events
