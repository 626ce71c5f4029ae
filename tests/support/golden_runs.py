"""Golden runs: short trainings whose losses and weights are stored, so that a change of all code paths alike is seen.

They use `reconv.train` and the files of a run alone, so that they run on another commit of Reconv, too.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from golden_data import write_photo_folder, write_voc
from ranks import in_ranks

import reconv

VALUES = Path(__file__).resolve().parent.parent / "golden"
# Of losses and scores, on machines without stored digests: other instructions round otherwise, and three steps with
# batch norms over a few samples magnify that.
TOLERANCE = 0.01
LOW_PRECISION_TOLERANCE = 0.05

Settings = Mapping[str, object]

BASE: Settings = {
    "length": "3step",
    "schedule.warmup": "1step",
    "log.every": "1step",
    "evaluate.every": "3step",
    "save.every": "3step",
    "engine.num_threads": 1,
    "data.num_workers": 0,
}
RANKS: Settings = {
    "data.subset_percent": 30,
    "batch.size": 48,
    "batch.group": 16,
    "batch.micro": 16,
    "augment.mixup.alpha": 0.3,
    "ema.decay": 0.9,
}
# 24 photographs at 32 pixels, three classes; everything about images is decided by the CPU and by Pillow.
PHOTOS: Settings = {
    "data.source": "folder",
    "data.preprocess.size": 32,
    "data.preprocess.resize": 36,
    "augment.decoder": "pillow",
    "batch.size": 12,
    "batch.group": "all",
    "evaluate.batch_size": 6,
    "schedule.lr": 0.02,
    "engine.compile": "off",
    "precision.mode": "fp32",
    "save.keep_at": [],
    "checkpoint_average.last": "off",
}
# Networks of each family at 32 pixels, narrow and with one block per stage, on random images.
SYNTHETIC: Settings = {
    **PHOTOS,
    "data.source": "synthetic",
    "data.num_samples": 16,
    "data.num_classes": 10,
    "data.preload": "off",
    "data.preprocess.resize": None,
    "batch.size": 8,
}
NARROW = {"depths": [1, 1, 1, 1], "width": 8}


@dataclass(frozen=True, kw_only=True)
class GoldenRun:
    """One training: a preset and what differs from it."""

    preset: str = "quickstart"
    settings: Settings = field(default_factory=dict)
    data: Literal["photos", "voc"] | None = None
    num_ranks: int = 1
    tolerance: float = TOLERANCE

    def overrides(self) -> list[tuple[str, object, str]]:
        return [(name, value, "golden") for name, value in {**BASE, **self.settings}.items()]


def _network(name: str, **options: object) -> Settings:
    return {**SYNTHETIC, "model.name": name, "model.options": options}


def _optimizer(name: str, lr: float, **more: object) -> Settings:
    options = {"nesterov": False, **more}
    return {"optimizer.name": name, "schedule.lr": lr, **{f"optimizer.{key}": value for key, value in options.items()}}


RUNS: Mapping[str, GoldenRun] = {
    "quickstart": GoldenRun(settings={"length": "12step", "evaluate.every": "6step", "save.every": "12step"}),
    "quickstart-detection": GoldenRun(
        preset="quickstart-detection",
        settings={"data.num_samples": 64, "batch.size": 8, "model.options.width": 8, "evaluate.batch_size": 16},
    ),
    "accumulation-groups-ema-mixing": GoldenRun(
        settings={
            "batch.group": 16,
            "batch.micro": 32,
            "augment.mixup.alpha": 0.2,
            "augment.cutmix.alpha": 1.0,
            "augment.random_erasing.probability": 0.5,
            "ema.decay": 0.9,
        }
    ),
    "mixup-and-cutmix": GoldenRun(
        settings={"augment.mixup.alpha": 0.2, "augment.cutmix.alpha": 1.0, "augment.combine": "both"}
    ),
    "ordered-ranks": GoldenRun(settings={**RANKS, "parallel.reduce": "ordered"}, num_ranks=2),
    "ddp-ranks": GoldenRun(settings=RANKS, num_ranks=2),
    "pipeline": GoldenRun(
        settings={**RANKS, "parallel.pipeline_stages": 2, "parallel.pipeline_splits": ["layer2.0"]}, num_ranks=2
    ),
    "preload": GoldenRun(settings={"data.preload": "device", "augment.padding_mode": "reflect"}),
    "activation-checkpointing": GoldenRun(settings={"memory.activation_checkpointing": "all"}),
    "sgd": GoldenRun(settings=_optimizer("sgd", 0.1, momentum=0.8, weight_decay_exclude="none", clip_grad=0.5)),
    "sgd-agc": GoldenRun(settings={"optimizer.clip_grad": 0.02, "optimizer.clip_mode": "agc"}),
    "lars": GoldenRun(settings=_optimizer("lars", 2.0)),
    "rmsprop": GoldenRun(settings=_optimizer("rmsprop", 0.005)),
    "rmsprop-tf": GoldenRun(settings=_optimizer("rmsprop-tf", 0.005)),
    "adamw": GoldenRun(settings=_optimizer("adamw", 0.01, weight_decay=0.05, layer_decay=0.8)),
    "lamb": GoldenRun(settings=_optimizer("lamb", 0.01, weight_decay=0.02)),
    "bf16": GoldenRun(settings={"precision.mode": "bf16"}, tolerance=LOW_PRECISION_TOLERANCE),
    "bf16-all": GoldenRun(settings={"precision.mode": "bf16-all"}, tolerance=LOW_PRECISION_TOLERANCE),
    "16.16": GoldenRun(settings={"precision.mode": "16.16"}, tolerance=LOW_PRECISION_TOLERANCE),
    "resnet": GoldenRun(preset="resnet50", settings=_network("resnet50", **NARROW)),
    "resnext": GoldenRun(
        preset="resnet50", settings=_network("resnext50_32x4d", **NARROW, groups=4, width_per_group=16)
    ),
    "se-resnext": GoldenRun(
        preset="resnet50", settings=_network("se_resnext101_32x4d", **NARROW, groups=4, width_per_group=16)
    ),
    "mobilenet": GoldenRun(
        preset="mobilenet-v2-habana-1card-fp32", settings=_network("mobilenet_v2", width_coefficient=0.25)
    ),
    "googlenet": GoldenRun(
        preset="googlenet-habana-1card-fp32",
        settings=_network("googlenet", conv_init="fan_out", linear_init="torch"),
        tolerance=LOW_PRECISION_TOLERANCE,
    ),
    "efficientnet": GoldenRun(
        preset="efficientnet-b0-nv-400ep-8gpu-fp32",
        settings={
            **_network("efficientnet_b0", width_coefficient=0.5, depth_coefficient=0.25, top_width=64),
            "schedule.lr": 0.002,
        },
    ),
    "fastnet": GoldenRun(
        preset="cifar10-fast",
        settings={
            **_network("fastnet_cifar", widths=[16, 32, 32]),
            "batch.size": 16,
            "data.num_samples": 64,
            "engine.cuda_graphs": "off",
            "precision.loss_scale": "dynamic",
            "length": "4step",
        },
        tolerance=LOW_PRECISION_TOLERANCE,
    ),
    "photos": GoldenRun(
        preset="resnet50",
        data="photos",
        settings={
            **PHOTOS,
            "model.name": "resnet8_cifar",
            "model.zero_init_last": False,
            "augment.auto_augment": "randaugment",
            "augment.random_erasing.probability": 0.5,
            "augment.color_jitter": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1},
            "augment.cutmix.alpha": 1.0,
            "augment.mixup.alpha": 0.0,
            "data.num_workers": 2,
        },
    ),
    "photos-device-jitter": GoldenRun(
        preset="resnet50",
        data="photos",
        settings={
            **PHOTOS,
            "model.name": "resnet8_cifar",
            "model.zero_init_last": False,
            "augment.auto_augment": "ta_wide",
            "augment.color_jitter": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1},
            "augment.color_jitter.implementation": "tensorflow",
            "augment.repeats": 2,
            "augment.train_like_eval": False,
            "ema.decay": 0.9,
        },
    ),
    "photos-native": GoldenRun(
        preset="resnet50",
        data="photos",
        settings={
            **PHOTOS,
            "augment.decoder": "native",
            "model.name": "resnet8_cifar",
            "model.zero_init_last": False,
        },
    ),
    "voc-ssd": GoldenRun(
        preset="ssd-resnet34-voc",
        data="voc",
        settings={
            "augment.decoder": "pillow",
            "data.preprocess.size": 128,
            "model.options": {"depths": [1, 1, 1], "width": 8, "num_halved": 5, "extra_widths": [8, 8, 8, 8, 8]},
            "precision.mode": "fp32",
            "augment.color_jitter": {"brightness": 0.2, "contrast": 0.4, "saturation": 0.4, "hue": 0.05},
            "batch.size": 4,
            "evaluate.batch_size": 3,
            "engine.compile": "off",
            "save.keep_at": [],
        },
    ),
}
NEED_NATIVE_DECODER = ("photos-native",)
# The same code as another run but for a few lines: `make slow`.
SLOW = ("sgd-agc", "rmsprop", "bf16-all", "resnext", "mixup-and-cutmix", "photos-device-jitter")

# On a GPU: fused kernels and CUDA graphs as they are by default, with algorithms that give the same bits again.
GPU_RUNS = (
    "quickstart",
    "accumulation-groups-ema-mixing",
    "preload",
    "activation-checkpointing",
    "lars",
    "adamw",
    "bf16",
    "resnet",
    "se-resnext",
    "mobilenet",
    "googlenet",
    "efficientnet",
    "fastnet",
    "voc-ssd",
)
GPU_SETTINGS: Settings = {"engine.deterministic": True, "length": "8step", "evaluate.every": "4step"}


@dataclass(frozen=True)
class Outcome:
    """Numbers of a finished run, at full precision."""

    losses: list[float]  # one per step
    grad_norms: list[float]
    scores: dict[str, float]  # of the last evaluation
    digests: dict[str, str]  # of the tensors of each part of the last checkpoint


def machine_key() -> str:
    """The torch version and the instructions of this CPU: equal keys give equal bits."""
    return f"torch {torch.__version__}, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def gpu_key() -> str:
    """The torch version and the name of the GPU."""
    return f"torch {torch.__version__}, {torch.cuda.get_device_name()}"


def digest(file: Path) -> str:
    """A digest of the names, types, shapes and bytes of the tensors of a file, not of its header."""
    result = hashlib.sha256()
    for name, tensor in sorted(safetensors.torch.load_file(file).items()):
        result.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        result.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return result.hexdigest()[:32]


def _train(run: GoldenRun, folder: str, data: str | None, device: str) -> int:
    return reconv.train(run.preset, out=folder, data=data, overrides=run.overrides(), device=device).exit_code


def perform(name: str, data_folder: Path, device: str = "cpu", more: Settings | None = None) -> Outcome:
    """Train a golden run in the current folder; `data_folder` is shared by the runs and filled at its first use."""
    run = RUNS[name]
    if more:
        run = GoldenRun(**{**vars(run), "settings": {**run.settings, **more}})
    folder, data = Path.cwd() / name, None
    if run.data is not None:
        data = data_folder / run.data
        if not data.is_dir():
            (write_voc if run.data == "voc" else write_photo_folder)(data)
    arguments = (run, str(folder), None if data is None else str(data), device)
    codes = [_train(*arguments)] if run.num_ranks == 1 else in_ranks(run.num_ranks, _train, *arguments)
    assert codes == [0] * run.num_ranks
    return read_outcome(folder)


def read_outcome(folder: Path) -> Outcome:
    """The numbers in the files of a finished run."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["kind"] == "train"]
    scores = [event["metrics"] for event in events if event["kind"] == "eval"][-1]
    [*_, newest] = sorted((folder / "checkpoints").glob("step-*"))
    return Outcome(
        [step["loss"] for step in steps],
        [step["grad_norm"] for step in steps],
        {metric: value for metric, value in sorted(scores.items()) if isinstance(value, float)},
        {file.stem: digest(file) for file in sorted(newest.glob("*.safetensors"))},
    )


def read_values(device: str) -> dict[str, dict[str, Any]]:
    """The stored numbers: machine, then run."""
    file = VALUES / f"{device}.json"
    values: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.is_file() else {}
    return values


def write_values(device: str, values: Mapping[str, Mapping[str, Any]]) -> None:
    (VALUES / f"{device}.json").write_text(json.dumps(values, indent=1) + "\n")
