"""Training programs of other projects beside the migrated command: equal losses, rates and augmentation.

The programs are read where they are, unchanged, and are no part of this repository:

    git clone https://github.com/pytorch/vision https://github.com/pytorch/examples ...
    VENDOR_PROGRAMS=FOLDER VENDOR_PYTHON=venv/bin/python make external

VENDOR_PROGRAMS is a folder with clones of pytorch/vision, pytorch/examples, huggingface/pytorch-image-models and
NVIDIA/DeepLearningExamples (those that are missing are skipped). VENDOR_PYTHON, by default the interpreter of the
tests, needs torch, torchvision, timm, pyyaml and scipy. `vendor_program.py` names what is exchanged beneath a program.

Both sides start from the weights that the program made, read the same PNG files whole and in the same order, and
compute in float64, with SGD. Some programs normalize images in float32, which limits how far losses are equal: training
on batches of four images makes a difference of 1e-8 in the first step one of up to 3e-6 in the last.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner
from PIL import Image

import reconv
from reconv.cli import reconv as cli
from reconv.data.sampler import Sampler
from reconv.logging.event_log import read_events
from reconv.logging.events import TrainProgress
from reconv.recipe.loader import load

DRIVER = Path(__file__).with_name("vendor_program.py")
PYTHON = Path(os.environ.get("VENDOR_PYTHON", sys.executable)).absolute()
FOLDER = os.environ.get("VENDOR_PROGRAMS", "")
SIZE, IMAGES, BATCH, STEPS = 64, 20, 4, 20
TOLERANCE = 2e-5  # relative, of a loss after up to 20 steps
SCHEDULE_RATES = 1e-9
SMALL_SHARE = 1e-3  # of two samples of one distribution that differ by more


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command of a program; {data} is the folder of the images."""

    program: str  # its path in VENDOR_PROGRAMS
    migrate_as: str  # --program of `reconv migrate`
    arguments: str
    checkpoint: str = ""  # what it writes after its second epoch
    num_classes: int = 5
    size: int = SIZE

    @property
    def command(self) -> str:
        return f"python {Path(self.program).name} {self.arguments}"


TORCHVISION = "vision/references/classification/train.py"
_SIZES = "--train-crop-size 64 --val-crop-size 64 --val-resize-size 64"
_TORCHVISION = f"--data-path {{data}} --model resnet18 -b 4 --epochs 4 --lr 0.01 {_SIZES} -j 0 --device cpu"
NVIDIA = "DeepLearningExamples/PyTorch/Classification/ConvNets/main.py"
_NVIDIA = "--arch resnet50 -b 4 --epochs 4 --lr 0.001 --image-size 64 --data-backend pytorch --num_classes=5 -j 1"
TIMM = "pytorch-image-models/train.py"
_TIMM = "{data} --model resnet18 -b 4 --epochs 4 --opt sgd --lr 0.01 --img-size 64 --num-classes 5 -j 1 --device cpu"
CASES = {
    "torchvision-step": Case(
        program=TORCHVISION,
        migrate_as="torchvision",
        arguments=_TORCHVISION
        + " --lr-step-size 1 --lr-gamma 0.5 --lr-warmup-epochs 1 --lr-warmup-method linear --label-smoothing 0.1"
        " --norm-weight-decay 0 --clip-grad-norm 1 --output-dir .",
        checkpoint="model_1.pth",
    ),
    "torchvision-cosine": Case(
        program=TORCHVISION,
        migrate_as="torchvision",
        arguments=_TORCHVISION + " --lr-scheduler cosineannealinglr --lr-warmup-epochs 2 --opt sgd_nesterov",
    ),
    "nvidia-cosine": Case(
        program=NVIDIA,
        migrate_as="nvidia-convnets",
        arguments=_NVIDIA + " --label-smoothing 0.1 --warmup 2 --lr-schedule cosine --workspace . {data}",
        checkpoint="checkpoint_0001.pth.tar",
    ),
    "nvidia-linear": Case(
        program=NVIDIA,
        migrate_as="nvidia-convnets",
        arguments=_NVIDIA + " --lr-schedule linear --nesterov --bn-weight-decay --workspace . {data}",
    ),
    "timm-cosine": Case(
        program=TIMM,
        migrate_as="timm",
        arguments=_TIMM + " --no-aug --sched cosine --warmup-epochs 1 --smoothing 0.1 --weight-decay 1e-4 --output .",
        checkpoint="*/checkpoint-1.pth.tar",
    ),
    "timm-step": Case(
        program=TIMM,
        migrate_as="timm",
        arguments=_TIMM
        + " --no-aug --sched step --decay-epochs 1 --decay-rate 0.5 --warmup-epochs 2 --warmup-lr 1e-3 --output .",
    ),
    "pytorch-examples": Case(
        program="examples/imagenet/main.py",
        migrate_as="pytorch-examples",
        arguments="-a resnet18 -b 4 --epochs 1 --lr 0.01 -j 0 {data}",
        num_classes=1000,
        size=224,
    ),
}


@pytest.fixture(autouse=True)
def _packages() -> None:
    if not FOLDER:
        pytest.skip("set VENDOR_PROGRAMS to a folder with clones of the programs: see the top of this file")
    needs = [PYTHON, "-c", "import torch, yaml, huggingface_hub, importlib.util as u; u.find_spec('torchvision').name"]
    if subprocess.run(needs, capture_output=True).returncode:
        pytest.skip(f"{PYTHON} lacks packages: pip install timm pyyaml, or set VENDOR_PYTHON")


def write_images(root: Path, count: int, num_classes: int, size: int, ramps: bool = False) -> Path:
    """A folder of PNG files, smooth noise or ramps whose red says x and green y; a few of them validate."""
    random = np.random.default_rng(0)
    for split, number in (("train", count), ("val", num_classes)):
        for i in range(number):
            file = root / split / f"class{i % num_classes:04d}" / f"{i:04d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            if ramps:
                ramp = np.linspace(0, 255, size)
                pixels = np.stack([*np.meshgrid(ramp, ramp), np.zeros((size, size))], axis=-1).round().astype(np.uint8)
                Image.fromarray(pixels).save(file)
            else:
                noise = Image.fromarray(random.integers(0, 256, (4, 4, 3), dtype=np.uint8))
                noise.resize((size, size), Image.Resampling.BICUBIC).save(file)
    return root


def their_run(case: Case, data: Path, folder: Path, **settings: Any) -> dict[str, Any]:
    """Losses and learning rates of the program's first steps; its weights and checkpoints are in the folder."""
    program = Path(FOLDER, case.program)
    if not program.is_file():
        pytest.skip(f"{program} is missing: clone {case.program.partition('/')[0]} there")
    folder.mkdir()
    chosen = {"seed": 1, "steps": STEPS, "order": [], "whole": False, "float64": False, "keep_batches": 0}
    chosen |= {"cpu": case.program.startswith("DeepLearningExamples"), **settings}
    (folder / "settings.json").write_text(json.dumps(chosen))
    words = shlex.split(case.arguments.format(data=data))
    done = subprocess.run(
        [PYTHON, DRIVER, "settings.json", program, *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    steps: dict[str, Any] = json.loads((folder / "steps.json").read_text())
    assert len(steps["losses"]) == chosen["steps"]
    return steps


def written_recipe(case: Case, data: Path, more: str = "") -> Path:
    """The recipe that the program's command is migrated to."""
    path = Path("migrated.yaml").absolute()
    command = case.command.format(data=data) + more
    done = CliRunner().invoke(cli, ["migrate", command, "--program", case.migrate_as, "--write", str(path)])
    assert done.exit_code == 0, done.output
    return path


def our_steps(recipe: Path, data: Path, size: int, *options: str) -> list[TrainProgress]:
    """Every step of the migrated run, in float64 and without augmentation."""
    changes = ("precision.mode=fp64", "augment.train_like_eval=true", f"data.preprocess.resize={size}")
    quick = ("log.every=1step", "evaluate.every=off", "save.every=off", "seed=0", "data.num_workers=0")
    words = ["train", str(recipe), "--data", str(data), "--device", "cpu", "--out", "ours", *options]
    done = CliRunner().invoke(cli, [*words, *(f"--set={change}" for change in (*changes, *quick))])
    assert done.exit_code == 0, done.output
    return [event for event in read_events(Path("ours/events.jsonl")) if isinstance(event, TrainProgress)]


def our_order(num_images: int) -> list[list[int]]:
    """The order of each epoch in a run of seed 0: a function of the step, which their samplers are given."""
    sampler, per_epoch = Sampler(num_images, BATCH, True, 0), num_images // BATCH
    steps = [sampler.indices(step).tolist() for step in range(max(per_epoch, STEPS))]
    return [[*chain(*steps[i : i + per_epoch])] for i in range(0, len(steps), per_epoch)]


@dataclass(frozen=True)
class TheirRun:
    """Twenty steps of a program in float64 and their data; `folder` has its weights and checkpoints."""

    data: Path
    folder: Path
    losses: list[float]
    rates: list[float]


@pytest.fixture(scope="module")
def twenty_steps(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TheirRun]:
    """The program's run of a case, made once for both tests that compare with it."""

    @cache
    def run(name: str) -> TheirRun:
        case, root = CASES[name], tmp_path_factory.mktemp(name)
        num_images = max(IMAGES, case.num_classes)
        data = write_images(root / "data", num_images, case.num_classes, case.size)
        steps = their_run(case, data, root / "theirs", order=our_order(num_images), whole=True, float64=True)
        return TheirRun(data, root / "theirs", steps["losses"], steps["rates"])

    return run


@pytest.mark.parametrize("name", CASES)
def test_twenty_steps_have_equal_losses_and_rates(name: str, twenty_steps: Callable[[str], TheirRun]) -> None:
    case, theirs = CASES[name], twenty_steps(name)
    recipe = written_recipe(case, theirs.data)
    weights = str(theirs.folder / "weights.pth")
    ours = our_steps(recipe, theirs.data, case.size, "--init", weights, "--stop-after", f"{STEPS}step")
    assert len(ours) == STEPS
    np.testing.assert_allclose([step.lr for step in ours], theirs.rates, rtol=SCHEDULE_RATES)
    np.testing.assert_allclose([step.loss for step in ours], theirs.losses, rtol=TOLERANCE)
    assert max(theirs.losses) > min(theirs.losses) * 1.1  # they are no constant


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.checkpoint])
def test_a_checkpoint_of_theirs_is_continued_with_equal_losses_and_rates(
    name: str, twenty_steps: Callable[[str], TheirRun]
) -> None:
    case, theirs, per_epoch = CASES[name], twenty_steps(name), IMAGES // BATCH
    (checkpoint,) = theirs.folder.glob(case.checkpoint)
    recipe = written_recipe(case, theirs.data, f" --resume {checkpoint}")
    ours = our_steps(recipe, theirs.data, case.size)
    assert [step.step for step in ours] == list(range(2 * per_epoch + 1, 4 * per_epoch + 1))
    np.testing.assert_allclose([step.lr for step in ours], theirs.rates[2 * per_epoch :], rtol=SCHEDULE_RATES)
    np.testing.assert_allclose([step.loss for step in ours], theirs.losses[2 * per_epoch :], rtol=TOLERANCE)


AUGMENTED = {
    "torchvision": Case(
        program=TORCHVISION,
        migrate_as="torchvision",
        arguments="--data-path {data} --model resnet18 -b 50 --epochs 1 --lr 0.01 --train-crop-size 32"
        " --val-crop-size 32 --val-resize-size 32 -j 0 --device cpu",
        size=32,
    ),
    "nvidia": Case(
        program=NVIDIA,
        migrate_as="nvidia-convnets",
        arguments="--arch resnet50 -b 50 --epochs 1 --lr 0.001 --image-size 32 --data-backend pytorch --num_classes=5"
        " -j 1 --workspace . {data}",
        size=32,
    ),
    "timm": Case(
        program=TIMM,
        migrate_as="timm",
        arguments="{data} --model resnet18 -b 50 --epochs 1 --opt sgd --lr 0.01 --img-size 32 --num-classes 5 -j 1"
        " --device cpu --color-jitter 0 --train-interpolation bilinear --output .",
        size=32,
    ),
}


@pytest.mark.parametrize("name", AUGMENTED)
def test_crops_and_flips_have_the_same_distribution(name: str, tmp_path: Path) -> None:
    stats = pytest.importorskip("scipy.stats")
    case, steps = AUGMENTED[name], 12
    data = write_images(tmp_path / "data", 50 * steps, case.num_classes, 96, ramps=True)
    their_run(case, data, tmp_path / "theirs", steps=steps, keep_batches=steps)
    recipe = load(str(written_recipe(case, data))).recipe
    settings = {f"augment.{key}": value for key, value in recipe.augment.model_dump(exclude_defaults=True).items()}
    mean, std = (np.reshape(values, (3, 1, 1)) for values in (recipe.data.preprocess.mean, recipe.data.preprocess.std))
    loader = reconv.ImageLoader(data, 50, size=case.size, workers=0, settings=settings)
    ours = np.concatenate([images.numpy() for images, _ in loader])
    theirs = np.load("theirs/images.npy").reshape(-1, 3, case.size, case.size)
    assert len(ours) == len(theirs) == 50 * steps
    for mine, yours in zip(views(ours * std + mean), views(theirs * std + mean), strict=True):
        assert stats.ks_2samp(mine, yours).pvalue > SMALL_SHARE


def views(images: npt.NDArray[np.floating[Any]]) -> list[npt.NDArray[np.floating[Any]]]:
    """Area, aspect ratio, center and flip of each image's view, from its ramps."""
    size = images.shape[-1]
    inner = slice(size // 4, size - size // 4)
    across = np.gradient(images[:, 0].mean(axis=1), axis=1)[:, inner].mean(axis=1) * size
    down = np.gradient(images[:, 1].mean(axis=2), axis=1)[:, inner].mean(axis=1) * size
    centers = [images[:, channel].mean(axis=(1, 2)) for channel in (0, 1)]
    return [np.abs(across * down), np.abs(across / down), *centers, (across < 0).astype(float)]
