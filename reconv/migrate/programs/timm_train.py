"""timm (pytorch-image-models): train.py."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from reconv.core.errors import UsageError
from reconv.migrate.command_line import unfilled
from reconv.migrate.config_file import read_config
from reconv.migrate.flag_tables import epochs, read_flags, steps
from reconv.migrate.flags import ParsedWords, Typed
from reconv.migrate.programs.base import Program, resume_checkpoint, start_epoch, take_data, take_device
from reconv.migrate.translation import Translation
from reconv.recipe.model_names import MODEL_NAMES

_OPTIMIZERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("sgd", {"nesterov": True}),
    "nesterov": ("sgd", {"nesterov": True}),
    "sgdp": ("", {}),
    "momentum": ("sgd", {}),
    "adamw": ("adamw", {}),
    "lamb": ("lamb", {}),
    "lars": ("lars", {}),
    "nlars": ("lars", {"nesterov": True}),
    "rmsprop": ("rmsprop", {}),
    "rmsproptf": ("rmsprop-tf", {}),
}
_SCHEDULES = {"cosine": "cosine", "step": "step", "multistep": "multistep", "poly": "polynomial", "none": "constant"}


FLAGS = read_flags("timm", "train")


def configure(parsed: ParsedWords) -> list[Typed]:
    """The values of the YAML file that -c names."""
    path = {item.flag.key: item.value for item in parsed.typed}.get("config")
    if not path:
        return []
    values = read_config(path)
    if values is None:
        return []
    by_key = {name.lstrip("-").replace("-", "_"): item for item in FLAGS for name in item.names}
    unknown = [key for key in values if key not in by_key]
    if unknown:
        raise UsageError(f"{unknown[0]!r} is no flag of timm's train.py", where=path, hint="correct the file")
    return [
        Typed(by_key[key], value, f"{key}: {value}", origin=path)
        for key, value in values.items()
        if value not in (None, "") and not (by_key[key].arity == 0 and value is False)
    ]


def translate(t: Translation, positional: Sequence[str]) -> None:
    """A command of train.py."""
    words = list(positional) or ([t["data_dir"]] if t["data_dir"] else [])
    t.apply_table()
    _network(t)
    per_process = t["batch_size"] * t["grad_accum_steps"]
    t.set("batch.size", per_process * t.num_processes, "batch_size", "grad_accum_steps")
    t.set("batch.group", "all" if t["sync_bn"] else t["batch_size"], "sync_bn" if t["sync_bn"] else "batch_size")
    length = t["epochs"] + t["cooldown_epochs"] + t["warmup_prefix"] * t["warmup_epochs"]
    t.set("length", epochs(length), "epochs", "cooldown_epochs", "warmup_prefix")
    _optimizer(t)
    _schedule(t, per_process * t.num_processes)
    _augmentation(t)
    _rest(t)
    if t["config"] and not any(found.origin for found in t.typed.values()):
        t.to_fill.append((t["config"], "the file is not here, so its values are not part of the result"))
    t.explain("config", "derived", "its values")
    take_data(t, words)
    t.explain("data_dir", "renamed", "--data")


def _network(t: Translation) -> None:
    name = t["model"].partition(".")[0]
    if not re.fullmatch(r"\w+|hf[-_]hub:.+|local-dir:.+", name) and unfilled(name) is None:
        raise UsageError(
            f"timm has no network {t['model']!r}", hint="names have no other signs than _ and a tag after ."
        )
    is_own = name in MODEL_NAMES and name.startswith(("resnet", "resnext", "wide_resnet"))
    t.set("model.name", name if is_own else f"timm:{t['model']}", "model")
    if is_own:
        t.set("model.options.zero_gamma", "always")
        rate = t["drop_path"]
        if rate is not None:
            t.set("model.options.drop_path_rate", rate, "drop_path")
    elif t["drop_path"] is not None:
        t.set("model.options.drop_path_rate", t["drop_path"], "drop_path")
    if t["drop"]:
        if is_own:
            t.explain("drop", "not supported", f"{name} has no dropout; use model.name timm:{name}")
        else:
            t.set("model.options.drop_rate", t["drop"], "drop")
    else:
        t.explain("drop", "no effect", "0 is off, as here")
    if t["pretrained"]:
        t.set("model.init", f"timm:{t['model']}", "pretrained")
    if not (is_own or t["img_size"] or t["input_size"]):
        t.notes.append(
            f"timm takes the input size from {t['model']} itself; 224 is assumed: check it, or give --img-size"
        )
    size = t["img_size"] or (t["input_size"] or [3, 224, 224])[1]
    t.set("data.preprocess.size", size, "img_size", "input_size")
    crop = t["crop_pct"] or (0.95 if is_own else 0.875)
    t.set("data.preprocess.resize", math.floor(size / crop), "crop_pct")
    kind = t["interpolation"] or "bicubic"
    t.set("data.preprocess.interpolation", kind if kind in ("bilinear", "nearest") else "bicubic", "interpolation")


def _optimizer(t: Translation) -> None:
    name, options = _OPTIMIZERS.get(t["opt"].removeprefix("fused"), ("", {}))
    if not name:
        raise UsageError(
            f"there is no optimizer {t['opt']!r} here",
            hint="use one of: " + ", ".join(key for key, value in _OPTIMIZERS.items() if value[0]),
        )
    t.set("optimizer.name", name, "opt")
    for key, value in options.items():
        t.set(f"optimizer.{key}", value, "opt")
    for key, field, users in (
        ("opt_eps", "optimizer.eps", ("adamw", "lamb", "lars", "rmsprop", "rmsprop-tf")),
        ("opt_betas", "optimizer.betas", ("adamw", "lamb")),
    ):
        if t[key] is not None and name in users:
            t.set(field, t[key], key)
        else:
            t.explain(key, "no effect", f"{name} does not use it")
    if name in ("adamw", "lamb"):
        t.explain("momentum", "no effect", f"{name} has betas")
    else:
        t.set("optimizer.momentum", t["momentum"], "momentum")
    t.set("optimizer.weight_decay_exclude", "none" if name == "lars" else "norm-bias")
    if t["clip_grad"] is not None:
        t.set("optimizer.clip_mode", t["clip_mode"], "clip_mode")
    else:
        t.explain("clip_mode", "no effect", "is for --clip-grad")


def _schedule(t: Translation, total: int) -> None:
    if t["sched"] not in _SCHEDULES:
        raise UsageError(
            f"there is no schedule {t['sched']!r} here", hint=f"use one of: {', '.join(_SCHEDULES)}, for --sched"
        )
    name = _SCHEDULES[t["sched"]]
    t.set("schedule.name", name, "sched")
    if t["lr"]:
        t.set("schedule.lr", t["lr"], "lr")
        for key in ("lr_base", "lr_base_size", "lr_base_scale"):
            t.explain(key, "no effect", "--lr decides")
    else:
        by_root = t["lr_base_scale"] == "sqrt" or (not t["lr_base_scale"] and re.search("ada|lamb", t["opt"]))
        ratio = total / t["lr_base_size"]
        keys = ("lr_base", "lr_base_size", "lr_base_scale")
        if by_root:
            t.set("schedule.lr", round(t["lr_base"] * math.sqrt(ratio), 12), *keys)
        else:
            t.set("schedule.lr", t["lr_base"], *keys)
            t.set("schedule.base_batch_size", t["lr_base_size"], "lr_base_size")
    decays = name in ("cosine", "polynomial")
    _warmup(t, total, name)
    after = t["warmup_prefix"] * t["warmup_epochs"]  # the schedule starts there
    if decays or t["warmup_epochs"]:
        t.set("schedule.interval", "step" if t["sched_on_updates"] else "epoch", "sched_on_updates")
    if decays:
        t.set("schedule.end_lr", t["min_lr"], "min_lr")
    else:
        t.explain("min_lr", "no effect", f"{t['sched']} does not use it")
    if decays and t["cooldown_epochs"]:
        t.set("schedule.decay_until", epochs(t["epochs"] + after), "cooldown_epochs")
    if name == "step" and after:
        every, end = int(t["decay_epochs"]), after + t["epochs"] + t["cooldown_epochs"]
        points = range(after + every, max(end, after + every + 1), every)
        t.set("schedule.name", "multistep", "sched", "warmup_prefix")
        t.set("schedule.milestones", [epochs(point) for point in points], "decay_epochs", "warmup_prefix")
    elif name == "step":
        t.set("schedule.period", epochs(t["decay_epochs"]), "decay_epochs")
    if name == "multistep":  # timm's MultiStepLRScheduler compares the next epoch with the milestones
        milestones = [epochs(point + after - (not t["sched_on_updates"])) for point in t["decay_milestones"]]
        t.set("schedule.milestones", milestones, "decay_milestones")
    if name in ("step", "multistep"):
        t.set("schedule.gamma", t["decay_rate"], "decay_rate")
    for key in ("decay_epochs", "decay_milestones", "decay_rate"):
        t.explain(key, "no effect", f"{t['sched']} does not use it")


def _warmup(t: Translation, total: int, name: str) -> None:
    t.set("schedule.warmup", epochs(t["warmup_epochs"]), "warmup_epochs")
    if not t["warmup_epochs"]:
        for key in ("warmup_lr", "warmup_prefix"):
            t.explain(key, "no effect", "there is no warm-up")
        return
    rate = t.settings["schedule.lr"].value
    base = t.settings.get("schedule.base_batch_size")
    share = t["warmup_lr"] / (rate if base is None else rate * total / base.value)
    if share <= 1:
        t.set("schedule.warmup_from", float(f"{share:.12g}"), "warmup_lr")
    else:
        t.explain("warmup_lr", "not supported", "a warm-up that falls to the learning rate")
    if not t["warmup_prefix"] and name != "constant":
        t.set("schedule.warmup_mode", "replace", "warmup_prefix")
    t.explain("warmup_prefix", "same", "the schedule begins after warm-up")


def _augmentation(t: Translation) -> None:
    policy = t["aa"]
    if t["no_aug"]:
        for key in ("color_jitter", "aa", "reprob", "scale", "ratio", "hflip"):
            t.explain(key, "no effect", "--no-aug overrides it")
        for name in ("random_erasing.probability", "scale", "ratio", "hflip"):
            t.settings.pop(f"augment.{name}", None)
    elif policy is None:
        strength = t["color_jitter"]
        for name in ("brightness", "contrast", "saturation"):
            t.set(f"augment.color_jitter.{name}", strength, "color_jitter")
    else:
        t.explain("color_jitter", "no effect", "timm does not jitter colors with --aa")
        _policy(t, policy)
    repeats = int(t["aug_repeats"])
    if repeats > 1:
        t.set("augment.repeats", repeats, "aug_repeats")
    else:
        t.explain("aug_repeats", "no effect", "images come once, as here")
    if t["remode"] != "const" and t["reprob"] > 0:
        t.notes.append("random erasing fills boxes with the mean color; timm's --remode pixel with noise")
    t.explain("remode", "no effect", "boxes are filled with the mean color")
    modes = {"batch": "batch", "elem": "sample"}
    if t["mixup_mode"] not in modes:
        t.explain("mixup_mode", "not supported", "it is batch or elem here")
    elif t["mixup"] > 0:
        t.set("augment.mixup.mode", modes[t["mixup_mode"]], "mixup_mode")
    else:
        t.explain("mixup_mode", "no effect", "there is no MixUp")
    kind = t["train_interpolation"]
    text = "random of bilinear and bicubic; here images are resized as in evaluation"
    if kind in ("random", ""):
        t.explain("train_interpolation", "no effect", text)
    else:
        t.set("augment.interpolation", kind, "train_interpolation")


def _policy(t: Translation, policy: str) -> None:
    """An AutoAugment policy by timm's name, as in rand-m7-mstd0.5-inc1."""
    first, *parts = policy.split("-")
    simple = {"v0": "autoaugment-v0", "original": "autoaugment", "3a": "3-augment"}
    if first in simple:
        t.set("augment.auto_augment", simple[first], "aa")
        return
    if first != "rand":
        raise UsageError(f"there is no policy {policy!r} here", hint="use rand-m9-mstd0.5-inc1, original, v0 or 3a")
    values = {"m": 10.0, "n": 2.0, "mstd": 0.0, "inc": 0.0}
    for part in parts:
        match = re.fullmatch(r"([a-z]+)([0-9.]+)?", part)
        if match is None or match[1] not in values:
            t.notes.append(f"the part {part!r} of --aa {policy} has no counterpart here")
            continue
        values[match[1]] = float(match[2] or 1)
    t.set("augment.auto_augment", "randaugment", "aa")
    t.set("augment.randaugment.implementation", "timm", "aa")
    t.set("augment.randaugment.num_ops", int(values["n"]), "aa")
    t.set("augment.randaugment.magnitude", int(values["m"]), "aa")
    t.set("augment.randaugment.magnitude_std", values["mstd"], "aa")
    t.set("augment.fill", [124, 116, 104], "aa")
    if not values["inc"]:
        t.notes.append("operations get stronger with their magnitude, as with -inc1")


def _rest(t: Translation) -> None:
    if t["bce_loss"]:
        t.set("loss.name", "bce", "bce_loss")
        if t["bce_target_thresh"] is not None:
            t.set("loss.bce_target_threshold", t["bce_target_thresh"], "bce_target_thresh")
    else:
        t.settings.pop("loss.bce_sum", None)
        for key in ("bce_target_thresh", "bce_sum"):
            t.explain(key, "no effect", "is for --bce-loss")
    if t["model_ema"]:
        t.set("ema.decay", t["model_ema_decay"], "model_ema_decay", "model_ema")
        t.set("ema.warmup", bool(t["model_ema_warmup"]), "model_ema_warmup")
    else:
        for key in ("model_ema_decay", "model_ema_warmup"):
            t.explain(key, "no effect", "is for --model-ema")
    half = "bf16" if t["amp_dtype"] == "bfloat16" else "fp16"
    if t["model_dtype"] in ("float16", "bfloat16"):
        t.set("precision.mode", "bf16-all" if t["model_dtype"] == "bfloat16" else "16.32", "model_dtype")
    else:
        t.set("precision.mode", half if t["amp"] else "fp32", "amp", "amp_dtype")
        t.explain("model_dtype", "same", "weights are float32")
    t.set("engine.channels_last", "on" if t["channels_last"] else "auto", "channels_last")
    if t["torchcompile"]:
        t.set("engine.compile", "on", "torchcompile")
    if t["grad_checkpointing"]:
        t.set("memory.activation_checkpointing", "auto", "grad_checkpointing")
    if t["log_wandb"]:
        t.set("loggers", ["wandb"], "log_wandb")
    if t["recovery_interval"] > 0:
        t.set("save.every", steps(t["recovery_interval"]), "recovery_interval")
    else:
        t.explain("recovery_interval", "no effect", "0 is off; save.every decides")
    if t["eval_metric"] == "loss":
        t.explain("eval_metric", "not supported", "the best checkpoint is the one of the best accuracy")
    else:
        t.set("evaluate.best_metric", t["eval_metric"], "eval_metric")
    take_device(t)
    resume_checkpoint(t)
    start_epoch(t)


TIMM_TRAIN = Program(
    "timm",
    "timm (pytorch-image-models): train.py",
    "timm",
    ("train.py",),
    FLAGS,
    translate,
    num_positional=1,
    needs_data=True,
    launchers=("distributed_train.sh", "torchrun"),
    path=r"pytorch-image-models|timm",
    configure=configure,
)
