"""Examples train with real Lightning and timm: as without kernels on a CPU, and resumed in the middle of an epoch.

Needs both packages in versions that fit torch: pip install 'reconv[timm]' lightning. Takes about a minute.
"""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from data_examples import write_image_tree

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, SAVED, END = 50, 7, 12  # an epoch has two batches: the seventh step ends in the middle of one
BATCH = 4
# torchvision's wheels are built for CUDA: beside a CPU torch their import needs the schemas of two operators.
PROGRAM = """
import runpy, sys, torch
if torch.version.cuda is None:
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SCRIPTS = {
    "timm_loop.py": ("timm", "test_resnet"),
    "lightning_fuse.py": ("lightning", "resnet8_cifar"),
}

pytestmark = pytest.mark.parametrize("script", SCRIPTS)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image_tree(tmp_path_factory.mktemp("data") / "photos")


@cache
def run(script: str, data: Path, *options: str) -> str:
    """The output of an example that trains on a CPU."""
    package, model = SCRIPTS[script]
    for name in (package, "torchvision"):
        if find_spec(name) is None:
            pytest.skip(f"pip install {name}, in a version that fits torch")
    small = ("--model", model, "--size", "32", "--batch-size", str(BATCH), "--workers", "0", "--print-every", "1")
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(EXAMPLES / script), str(data), *small, *options]
    environment = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(EXAMPLES.parent), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(output: str) -> dict[int, str]:
    return {int(step): loss for step, loss in re.findall(r"^step (\d+): loss (\S+)$", output, re.MULTILINE)}


def test_fusing_changes_no_loss_on_a_cpu(script: str, photos: Path) -> None:
    fused, plain = (run(script, photos, "--steps", str(STEPS), *more) for more in ((), ("--plain", "model")))
    assert "compute with fused kernels" in fused and "there is no CUDA GPU" in fused and "fused" not in plain
    assert losses(fused) == losses(plain) and list(losses(fused)) == [*range(1, STEPS + 1)]
    assert len(set(losses(fused).values())) == STEPS
    assert re.search(r"^[\d,.]+ images/s$", fused, re.MULTILINE)


def test_the_defaults_of_the_other_package_train_too(script: str, photos: Path) -> None:
    output = run(script, photos, "--steps", str(END), "--plain")
    assert len(losses(output)) == END and "fused" not in output
    assert re.search(r"^[\d,.]+ images/s$", output, re.MULTILINE)


def test_a_loop_continues_in_the_middle_of_an_epoch(script: str, photos: Path, tmp_path: Path) -> None:
    saving = ("--checkpoints", str(tmp_path), "--save-every", str(SAVED))
    whole = losses(run(script, photos, "--steps", str(STEPS)))
    first = losses(run(script, photos, "--steps", str(SAVED), *saving))
    resume = () if script == "timm_loop.py" else ("--resume", str(next(tmp_path.glob("*.ckpt"))))
    rest = losses(run(script, photos, "--steps", str(END), *saving, *resume))
    assert [*first] == [*range(1, SAVED + 1)] and [*rest] == [*range(SAVED + 1, END + 1)]
    assert first | rest == {step: whole[step] for step in range(1, END + 1)}
