"""Conversion, check, predictions and averages started by Open MPI's mpirun: the output of one process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

LIMIT_S = 300
RECONV = (sys.executable, "-m", "reconv")


@pytest.fixture(autouse=True)
def _has_mpirun() -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("needs Open MPI: apt-get install openmpi-bin")


def one(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RECONV, *map(str, args)], capture_output=True, text=True, timeout=LIMIT_S)


def mpirun(size: int, *args: object) -> subprocess.CompletedProcess[str]:
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(size), *RECONV, *map(str, args)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=variables)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random, root = np.random.default_rng(0), tmp_path_factory.mktemp("images")
    for split, count in (("train", 60), ("val", 20)):
        for name in ("ant", "bee"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 255, (20, 24), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number:03}.png")
    return root


@pytest.mark.parametrize("size", [2, 3])
def test_conversion_and_check_are_those_of_one_process(images: Path, tmp_path: Path, size: int) -> None:
    options = ("--to", "packed", "--per-shard", "9")
    for command, words in (("convert", (images, "DIR", *options)), ("check", (images, "--out", "DIR"))):
        alone = one("data", command, *(tmp_path / f"{command}1" if word == "DIR" else word for word in words))
        shared = mpirun(size, "data", command, *(tmp_path / f"{command}2" if word == "DIR" else word for word in words))
        assert (alone.returncode, shared.returncode) == (0, 0), shared.stderr
        assert len(re.findall(r"is complete|no errors", shared.stdout)) == 1  # mpirun gives ranks a terminal
        assert contents(tmp_path / f"{command}1") == contents(tmp_path / f"{command}2")


@pytest.mark.parametrize("size", [2, 3])
def test_predictions_evaluation_and_average_are_those_of_one_process(images: Path, tmp_path: Path, size: int) -> None:
    run = tmp_path / "run"
    settings = ("--set", "save.every=11step", "--set", "save.keep_last=4", "--epochs", "1")
    assert one("train", "quickstart", "--out", run, *settings).returncode == 0
    for command, words in (
        ("predict", (run, images, "--json", "FILE.json")),
        ("average", (run, "--out", "FILE.safetensors")),
        ("eval", (run, "--json", "FILE.json", "--device", "cpu")),
    ):
        alone = one(command, *(str(word).replace("FILE", f"{tmp_path}/{command}1") for word in words))
        shared = mpirun(size, command, *(str(word).replace("FILE", f"{tmp_path}/{command}2") for word in words))
        assert (alone.returncode, shared.returncode) == (0, 0), shared.stderr
        [first] = tmp_path.glob(f"{command}1.*")
        second = first.with_name(first.name.replace("1.", "2."))
        if command == "eval":  # has the speed
            assert first.read_text().partition("images_per_s")[0] == second.read_text().partition("images_per_s")[0]
        else:
            assert first.read_bytes() == second.read_bytes()
