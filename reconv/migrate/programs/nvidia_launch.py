"""NVIDIA ConvNets: launch.py with its configurations, and the training scripts by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from reconv.core.errors import UsageError
from reconv.migrate.config_file import read_config
from reconv.migrate.flag_tables import read_flags
from reconv.migrate.flags import ParsedWords, Typed
from reconv.migrate.programs.base import Program
from reconv.migrate.programs.nvidia import ARCHITECTURES, FLAGS_CONVNETS, translate_convnets
from reconv.migrate.translation import Translation
from reconv.recipe.presets import nearest

_PRECISIONS: Mapping[str, Mapping[str, Any]] = {
    "AMP": {"static_loss_scale": 128, "amp": True},
    "FP32": {"amp": False},
    "TF32": {"amp": False},
}
_V100 = {"workers": 8, "prefetch": 4, "gpu_affinity": "socket_unique_contiguous"}
_PLATFORMS: Mapping[str, Mapping[str, Any]] = {
    "T4": {"workers": 8},
    **dict.fromkeys(("DGX1V", "DGX1V-16G", "DGX1V-32G", "DGX2V"), _V100),
    "DGXA100": {**_V100, "workers": 10},
}
_BENCHMARK = {"print_freq": 1, "epochs": 3, "training_only": True, "evaluate": False, "save_checkpoints": False}
_MODE_VALUES: Mapping[str, Mapping[str, Any]] = {
    "benchmark_training": _BENCHMARK,
    "benchmark_training_short": {**_BENCHMARK, "epochs": 1, "data_backend": "synthetic", "prof": 100},
    "benchmark_inference": {**_BENCHMARK, "epochs": 1, "training_only": False, "evaluate": True},
    "evaluate": {"print_freq": 20, "training_only": False, "evaluate": True, "save_checkpoints": False},
    "convergence": {"print_freq": 20, "training_only": False, "evaluate": False, "save_checkpoints": True},
}
_RESNET = {
    "label_smoothing": 0.1,
    "mixup": 0.2,
    "lr_schedule": "cosine",
    "momentum": 0.875,
    "warmup": 8,
    "epochs": 250,
    "data_backend": "pytorch",
    "num_classes": 1000,
    "image_size": 224,
    "interpolation": "bilinear",
}
_SMALL_DECAY, _LARGE_DECAY = 3.0517578125e-05, 6.103515625e-05
_BY_BATCH: Mapping[int, Mapping[str, Any]] = {
    896: {**_RESNET, "optimizer_batch_size": 896, "lr": 0.896, "weight_decay": _LARGE_DECAY},
    1024: {**_RESNET, "optimizer_batch_size": 1024, "lr": 1.024, "weight_decay": _LARGE_DECAY},
    2048: {**_RESNET, "optimizer_batch_size": 2048, "lr": 2.048, "weight_decay": _SMALL_DECAY},
    4096: {**_RESNET, "optimizer_batch_size": 4096, "lr": 4.096, "weight_decay": _SMALL_DECAY},
}
_EFFICIENTNET = {
    "optimizer": "rmsprop",
    "rmsprop_alpha": 0.9,
    "rmsprop_eps": 0.01,
    "label_smoothing": 0.1,
    "mixup": 0.2,
    "lr_schedule": "cosine",
    "momentum": 0.9,
    "warmup": 16,
    "epochs": 400,
    "data_backend": "pytorch",
    "augmentation": "autoaugment",
    "num_classes": 1000,
    "interpolation": "bicubic",
    "optimizer_batch_size": 4096,
}
_B0 = {**_EFFICIENTNET, "lr": 0.08, "weight_decay": 1e-05, "image_size": 224}
_B4 = {**_EFFICIENTNET, "lr": 0.16, "weight_decay": 5e-06, "image_size": 380}


def _resnet(platforms: Mapping[str, Mapping[str, tuple[int, int]]], arch: str) -> dict[str, Any]:
    """Platform -> precision -> values, from (global batch, batch per GPU)."""
    return {
        platform: {
            precision: {**_BY_BATCH[total], "arch": arch, "batch_size": size}
            for precision, (total, size) in table.items()
        }
        for platform, table in platforms.items()
    }


def _efficientnet(base: Mapping[str, Any], arch: str, small: int, a100: tuple[int, int]) -> dict[str, Any]:
    """Platform -> precision -> values; `small` is the batch per GPU of 16 GB in AMP."""
    sizes = {
        **{name: {"AMP": small, "FP32": small // 2} for name in ("T4", "DGX1V-16G")},
        "DGX1V-32G": {"AMP": 2 * small, "FP32": small},
        "DGXA100": {"AMP": a100[0], "TF32": a100[1]},
    }
    return {
        platform: {precision: {**base, "arch": arch, "batch_size": size} for precision, size in table.items()}
        for platform, table in sizes.items()
    }


def _models() -> dict[str, Any]:
    volta = ("DGX1V", "DGX1V-16G", "DGX1V-32G")
    return {
        "resnet50": _resnet(
            {
                **{key: {"AMP": (2048, 256), "FP32": (896, 112)} for key in volta},
                "DGX2V": {"AMP": (4096, 256), "FP32": (4096, 256)},
                "DGXA100": {"AMP": (2048, 256), "TF32": (2048, 256)},
                "T4": {"AMP": (2048, 256), "FP32": (2048, 128)},
            },
            "resnet50",
        ),
        "resnext101-32x4d": _resnet(
            {
                **{key: {"AMP": (1024, 128), "FP32": (1024, 64)} for key in (*volta, "T4")},
                "DGXA100": {"AMP": (1024, 128), "TF32": (1024, 128)},
            },
            "resnext101-32x4d",
        ),
        "se-resnext101-32x4d": _resnet(
            {
                **{key: {"AMP": (896, 112), "FP32": (1024, 64)} for key in volta},
                "T4": {"AMP": (1024, 128), "FP32": (1024, 64)},
                "DGXA100": {"AMP": (1024, 128), "TF32": (1024, 128)},
            },
            "se-resnext101-32x4d",
        ),
        **{
            name: _efficientnet(base, name, small, a100)
            for kind in ("efficientnet", "efficientnet-widese", "efficientnet-quant")
            for name, base, small, a100 in (
                (f"{kind}-b0", _B0, 128, (256, 256)),
                (f"{kind}-b4", _B4, 32, (128, 64)),
            )
        },
    }


CONFIGURATION: Mapping[str, Mapping[str, Any]] = {
    "precision": _PRECISIONS,
    "platform": _PLATFORMS,
    "mode": _MODE_VALUES,
    "models": _models(),
}


def _chosen(config: Mapping[str, Any], section: str, name: object) -> Mapping[str, Any]:
    if name is None:
        option = section.removesuffix("s")
        raise UsageError(f"launch.py needs --{option}", hint=f"one of: {', '.join(config[section])}")
    if name not in config.get(section, {}):
        near = nearest(str(name), config.get(section, {}))
        known = ", ".join(config.get(section, {}))
        raise UsageError(
            f"launch.py has no {section.removesuffix('s')} {name!r}",
            hint=f"did you mean {near}?" if near else f"it is one of: {known}",
        )
    found = config[section][name]
    return found if isinstance(found, Mapping) else {}


def _values_of_model(by_precision: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values of a model on a platform in a precision."""
    if given["precision"] not in by_precision:
        raise UsageError(
            f"configs.yml has no {given['precision']} of {given['model']} on {given['platform']}",
            hint=f"--precision is one of: {', '.join(by_precision)}",
        )
    found: Mapping[str, Any] = by_precision[given["precision"]]
    return found


def configure(parsed: ParsedWords) -> list[Typed]:
    """The values of configs.yml: precision, then platform, model and mode, each over the ones before."""
    given = {item.flag.key: item.value for item in parsed.typed}
    config: Mapping[str, Any] = CONFIGURATION
    if given.get("cfg_file"):
        config = read_config(given["cfg_file"]) or CONFIGURATION
    precision, platform = given.get("precision"), given.get("platform")
    by_platform = _chosen(config, "models", given.get("model"))
    values: dict[str, Any] = {
        **_chosen(config, "precision", precision),
        **_chosen(config, "platform", platform),
        **_values_of_model(_chosen({"platforms": by_platform}, "platforms", platform), given),
        **_chosen(config, "mode", given.get("mode")),
    }
    if not values.get("arch"):
        values["arch"] = given.get("model")
    values["no_checkpoints"] = not values.pop("save_checkpoints", True)
    by_key = {item.key: item for item in FLAGS_CONVNETS}
    unknown = [key for key in values if key not in by_key]
    if unknown:
        raise UsageError(f"configs.yml has {unknown[0]!r}, which is no flag of main.py", hint="correct the file")
    return [
        Typed(by_key[key], value, f"{key}: {value}", origin="configs.yml")
        for key, value in values.items()
        if value is not None and not (by_key[key].arity == 0 and value is False)
    ]


def translate_launch(t: Translation, positional: Sequence[str]) -> None:
    """launch.py: main.py with a configuration."""
    translate_convnets(t, positional)
    for key in ("model", "platform", "mode"):
        t.explain(key, "derived", f"its values in configs.yml: {t[key]}")
    if t["precision"] == "TF32":
        t.set("precision.mode", "tf32", "precision")
    else:
        t.explain("precision", "derived", "precision.mode, and the loss scale of configs.yml")


LAUNCH = Program(
    "nvidia-launch",
    "NVIDIA DeepLearningExamples, ConvNets: launch.py",
    "nvidia",
    ("launch.py",),
    read_flags("nvidia", "launch", "shared", "convnets"),
    translate_launch,
    num_positional=1,
    configure=configure,
    usual=True,
)

_NETWORKS = {
    "RN50": "resnet50",
    "RNXT101-32x4d": "resnext101-32x4d",
    "SE-RNXT101-32x4d": "se-resnext101-32x4d",
    "SE_RNXT101-32x4d": "se-resnext101-32x4d",
}
_SCRIPT = re.compile(
    r"(?P<platform>DGX1V|DGX1|DGX2V|DGX2|DGXA100|T4)(?P<memory>-16G|-32G)?_"
    r"(?P<network>[A-Za-z0-9_.-]+?)_(?P<precision>AMP|FP16|FP32|TF32)(?:_(?P<epochs>\d+)E)?\.sh"
)


def script_command(path: str, arguments: Sequence[str]) -> list[str] | None:
    """The command in one of NVIDIA's scripts, as in DGX1_RN50_AMP_90E.sh; None: not one of them."""
    match = _SCRIPT.fullmatch(path.rpartition("/")[2])
    if match is None:
        return None
    network = _NETWORKS.get(match["network"], match["network"])
    if network not in ARCHITECTURES:
        near = nearest(network, ARCHITECTURES)
        raise UsageError(
            f"NVIDIA has no script for the network {network!r}", hint=f"did you mean {near}?" if near else ""
        )
    processes = "16" if match["platform"].startswith("DGX2") else "8"
    start = ["python", "./multiproc.py", "--nproc_per_node", processes]
    end = ["--workspace", *(arguments[:1] or ["./"]), *arguments[1:]]
    if match["network"] in _NETWORKS:
        return [*start, "./main.py", "/imagenet", *_flags_of_script(match, network), *end]
    platform = {"DGX1": "DGX1V", "DGX2": "DGX2V"}.get(match["platform"], match["platform"]) + (match["memory"] or "")
    mode = "benchmark_inference" if "/inference/" in path else "convergence"
    length = ["--epochs", match["epochs"]] if match["epochs"] else []
    mixing = ["--mixup", "0.0"] if match["epochs"] in ("50", "90") else []
    precision = match["precision"].replace("FP16", "AMP")
    choice = ["--model", network, "--precision", precision, "--mode", mode, "--platform", platform]
    return [*start, "./launch.py", *choice, "/imagenet", *length, *mixing, *end]


def _flags_of_script(match: re.Match[str], network: str) -> list[str]:
    """The flags of main.py in the scripts of 2019 and 2020."""
    half = match["precision"] in ("AMP", "FP16")
    is_resnet, many = network == "resnet50", match["platform"].startswith("DGX2")
    total = (4096 if many else 2048) if is_resnet else 1024
    size = (256 if half or match["precision"] == "TF32" else 128) if is_resnet else 128 if half else 64
    decay = _SMALL_DECAY if is_resnet else _LARGE_DECAY
    precision = {"AMP": ["--amp"], "FP16": ["--fp16"]}.get(match["precision"], [])
    return [
        *("--arch", network, "-c", "fanin", "--label-smoothing", "0.1", "--lr-schedule", "cosine", "--mom", "0.875"),
        *("--wd", repr(decay), "--lr", f"{total / 1000:g}", "--optimizer-batch-size", str(total), "-b", str(size)),
        *("--warmup", "16" if many else "8", "-j8", "-p", "100", "--raport-file", "raport.json"),
        *("--epochs", match["epochs"] or "90"),
        *(["--mixup", "0.2"] if match["epochs"] == "250" else []),
        *([*precision, "--static-loss-scale", "128"] if precision else []),
    ]
