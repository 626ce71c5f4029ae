"""torchvision's reference: references/classification/train.py."""

from __future__ import annotations

from collections.abc import Sequence

from reconv.core.errors import UsageError
from reconv.migrate.flag_tables import epochs, read_flags
from reconv.migrate.programs.base import (
    Program,
    missing_data,
    own_model,
    refuse_positional,
    resume_checkpoint,
    start_epoch,
    take_device,
)
from reconv.migrate.programs.habana import evaluate_weights
from reconv.migrate.programs.torchvision_names import WITH_V2_WEIGHTS
from reconv.migrate.translation import Translation
from reconv.recipe.model_names import MODEL_NAMES

_POLICIES = {"ta_wide": "ta_wide", "ra": "randaugment", "imagenet": "autoaugment"}

FLAGS = read_flags("torchvision", "classification")


def translate(t: Translation, positional: Sequence[str]) -> None:
    """A command of train.py."""
    refuse_positional(t, positional)
    t.apply_table()
    t.set("model.name", own_model(t["model"], MODEL_NAMES, "torchvision"), "model")
    t.set("length", epochs(t["epochs"]), "epochs")
    t.set("batch.size", t["batch_size"] * t.num_processes, "batch_size")
    t.set("batch.group", "all" if t["sync_bn"] else t["batch_size"], "sync_bn" if t["sync_bn"] else "batch_size")
    _optimizer(t)
    _schedule(t)
    _images(t)
    _ema(t)
    half = next((key for key in ("amp", "apex") if t[key]), None)
    t.set("precision.mode", "fp16" if half else "fp32", half or "amp")
    if t["data_path"]:
        t.data(t["data_path"], "data_path")
    else:
        missing_data(t)
    take_device(t)
    if t.is_typed("output_dir"):
        t.run_folder(t["output_dir"], "output_dir")
    _weights(t)
    if t["test_only"]:
        evaluate_weights(t, "resume", "test_only")
    else:
        resume_checkpoint(t)
    start_epoch(t)


def _weights(t: Translation) -> None:
    """Published weights: `--pretrained` are torchvision's first ones, and `.v2` here is its IMAGENET1K_V2."""
    name = t["model"]
    if t["pretrained"]:
        t.set("model.init", f"torchvision:{name}", "pretrained")
    if not t["weights"]:
        return
    version = t["weights"].rpartition(".")[2]
    has_v2 = name in WITH_V2_WEIGHTS
    suffixes = {"IMAGENET1K_V1": "", "DEFAULT": ".v2" if has_v2 else "", **({"IMAGENET1K_V2": ".v2"} if has_v2 else {})}
    if version in suffixes:
        t.set("model.init", f"torchvision:{name}{suffixes[version]}", "weights")
    else:
        t.explain("weights", "not supported", "are not downloaded; give their file: --init FILE")


def _optimizer(t: Translation) -> None:
    name = t["opt"]
    if not name.startswith("sgd") and name not in ("rmsprop", "adamw"):
        raise UsageError(f"train.py has no optimizer {name!r}", hint="it is sgd, sgd_nesterov, rmsprop or adamw")
    t.set("optimizer.name", "sgd" if name.startswith("sgd") else name, "opt")
    if "nesterov" in name:
        t.set("optimizer.nesterov", True, "opt")
    if name == "adamw":
        t.explain("momentum", "no effect", "adamw has betas")
    else:
        t.set("optimizer.momentum", t["momentum"], "momentum")
    if name == "rmsprop":
        t.set("optimizer.eps", 0.0316, "opt")
        t.set("optimizer.alpha", 0.9, "opt")
    norm, bias, all_ = t["norm_weight_decay"], t["bias_weight_decay"], t["wd"]
    exclude = "norm-bias" if norm == 0 and bias == 0 else "norm" if norm == 0 else "none"
    t.set("optimizer.weight_decay_exclude", exclude, "norm_weight_decay", "bias_weight_decay")
    for key, value in (("norm_weight_decay", norm), ("bias_weight_decay", bias)):
        if value not in (None, 0, all_) or (key == "bias_weight_decay" and value == 0 and norm != 0):
            t.settings.pop("optimizer.weight_decay_exclude", None)
            t.explain(key, "not supported", f"norms and biases have all of {all_} or none; see weight_decay_exclude")
    if t["clip_grad_norm"] is not None:
        t.set("optimizer.clip_grad", t["clip_grad_norm"], "clip_grad_norm")


def _schedule(t: Translation) -> None:
    kind = t["lr_scheduler"]
    names = {"steplr": "step", "cosineannealinglr": "cosine", "exponentiallr": "exponential"}
    t.set("schedule.name", names[kind], "lr_scheduler")
    t.set("schedule.lr", t["lr"], "lr")
    unused = {"steplr": ("lr_min",), "cosineannealinglr": ("lr_step_size", "lr_gamma")}
    for key in unused.get(kind, ("lr_min", "lr_step_size")):
        t.explain(key, "no effect", f"{kind} does not use it")
    warms = t["lr_warmup_epochs"]
    if kind == "steplr" and warms:  # StepLR counts from the end of the warm-up
        points = range(warms + t["lr_step_size"], max(t["epochs"], warms + t["lr_step_size"] + 1), t["lr_step_size"])
        t.set("schedule.name", "multistep", "lr_scheduler", "lr_warmup_epochs")
        t.set("schedule.milestones", [epochs(point) for point in points], "lr_step_size", "lr_warmup_epochs")
    elif kind == "steplr":
        t.set("schedule.period", epochs(t["lr_step_size"]), "lr_step_size")
    if kind != "cosineannealinglr":
        t.set("schedule.gamma", t["lr_gamma"], "lr_gamma")
    else:
        t.set("schedule.end_lr", t["lr_min"], "lr_min")
    if kind == "exponentiallr":
        t.set("schedule.staircase", True, "lr_scheduler")
    if warms or kind == "cosineannealinglr":
        t.set("schedule.interval", "epoch")
    t.set("schedule.warmup", epochs(warms), "lr_warmup_epochs")
    if warms:
        t.set("schedule.warmup_from", t["lr_warmup_decay"], "lr_warmup_decay")
        t.set("schedule.warmup_shape", t["lr_warmup_method"], "lr_warmup_method")
    else:
        for key in ("lr_warmup_method", "lr_warmup_decay"):
            t.explain(key, "no effect", "there is no warm-up")


def _images(t: Translation) -> None:
    t.set("data.preprocess.size", t["val_crop_size"], "val_crop_size")
    t.set("data.preprocess.resize", t["val_resize_size"], "val_resize_size")
    t.set("data.preprocess.interpolation", t["interpolation"], "interpolation")
    if t["train_crop_size"] != t["val_crop_size"]:
        t.set("augment.size", t["train_crop_size"], "train_crop_size")
    else:
        t.explain("train_crop_size", "same", "the size of evaluation")
    policy = t["auto_augment"]
    if policy is None:
        pass
    elif policy in _POLICIES:
        t.set("augment.auto_augment", _POLICIES[policy], "auto_augment")
        t.set("augment.fill", 0, "auto_augment")
    elif policy in ("augmix", "cifar10", "svhn"):
        t.explain("auto_augment", "not supported", f"there is no {policy}; ta_wide is the policy of the V2 weights")
    else:
        raise UsageError(f"train.py has no policy {policy!r}", hint="it is ra, ta_wide, imagenet or augmix")
    if policy == "ra":
        t.set("augment.randaugment.magnitude", t["ra_magnitude"], "ra_magnitude")
    else:
        t.explain("ra_magnitude", "no effect", "is for --auto-augment ra")
    if t["ra_sampler"]:
        t.set("augment.repeats", t["ra_reps"], "ra_sampler", "ra_reps")
    else:
        t.explain("ra_reps", "no effect", "is for --ra-sampler")


def _ema(t: Translation) -> None:
    if not t["model_ema"]:
        for key in ("model_ema_steps", "model_ema_decay"):
            t.explain(key, "no effect", "is for --model-ema")
        return
    every = t["model_ema_steps"]
    share = min(1.0, (1 - t["model_ema_decay"]) * t.num_processes * t["batch_size"] * every / t["epochs"])
    # Updated at every step, with the same decay over `every` steps.
    t.set("ema.decay", round((1 - share) ** (1 / every), 8), "model_ema", "model_ema_decay", "model_ema_steps")
    t.set("ema.warmup", False, "model_ema")


TORCHVISION_TRAIN = Program(
    "torchvision",
    "torchvision, references/classification: train.py",
    "torchvision",
    ("train.py",),
    FLAGS,
    translate,
    launchers=("torchrun",),
    path=r"references/classification|vision/references",
)
