"""Graphcore's TensorFlow CNNs: the flags of the optimizer and of the learning rate."""

from __future__ import annotations

import itertools

from reconv.core.errors import UsageError
from reconv.migrate.flag_tables import epochs
from reconv.migrate.programs.base import needs_weights
from reconv.migrate.translation import Translation


def translate_optimizer(t: Translation, is_cifar: bool) -> None:
    """Set the optimizer, weight decay and the parameters that are trained."""
    name = t["optimiser"]
    ours = {"SGD": "sgd", "momentum": "sgd", "LARS": "lars", "RMSprop": "rmsprop-tf"}
    t.set("optimizer.name", ours[name], "optimiser")
    if name == "SGD":
        t.set("optimizer.momentum", 0.0, "optimiser")
        t.explain("momentum", "no effect", "SGD has no momentum there; --optimiser momentum has")
    else:
        t.set("optimizer.momentum", t["momentum"], "momentum")
    if name == "LARS":
        _lars(t, is_cifar)
    else:
        default = 1e-6 if is_cifar else 1e-5 if t["model"] == "efficientnet" else 1e-4
        decay = default if t["weight_decay"] is None else t["weight_decay"]
        t.set("optimizer.weight_decay", decay, "weight_decay")
        t.set("optimizer.weight_decay_exclude", "none" if is_cifar else "norm")
        for key in ("lars_weight_decay", "lars_eeta", "lars_epsilon", "lars_skip_list"):
            t.explain(key, "no effect", "the optimizer is not LARS")
    _rmsprop(t)
    if t["variable_filter"]:
        t.set("model.trainable", [f"*{part}*" for part in t["variable_filter"]], "variable_filter")
        t.explain("variable_filter", "derived", "names of parameters are torchvision's: check them")
        if not t["init_path"]:
            needs_weights(t, "variable_filter")


def _lars(t: Translation, is_cifar: bool) -> None:
    default = 1e-6 if is_cifar else 1e-4
    decay = default if t["lars_weight_decay"] is None else t["lars_weight_decay"]
    t.set("optimizer.weight_decay", decay, "lars_weight_decay")
    t.explain("weight_decay", "no effect", "LARS decays weights once here, by --lars-weight-decay; theirs did twice")
    t.set("optimizer.weight_decay_exclude", "none", "optimiser")
    t.set("optimizer.trust_coefficient", t["lars_eeta"], "lars_eeta")
    if t["lars_epsilon"]:
        t.set("optimizer.eps", t["lars_epsilon"], "lars_epsilon")
    else:
        t.explain("lars_epsilon", "no effect", "0 is the default here, too")
    skipped = set(t["lars_skip_list"])
    exclude = "norm-bias" if "bias" in skipped else "norm" if skipped & {"beta", "gamma"} else "none"
    t.set("optimizer.lars_exclude", exclude, "lars_skip_list")


def _rmsprop(t: Translation) -> None:
    if t["optimiser"] != "RMSprop":
        for key in ("rmsprop_decay", "rmsprop_base_decay_exp", "rmsprop_epsilon"):
            t.explain(key, "no effect", "the optimizer is not RMSprop")
        return
    t.set("optimizer.eps", t["rmsprop_epsilon"], "rmsprop_epsilon")
    exponent = t["rmsprop_base_decay_exp"]
    if t["rmsprop_decay"] is not None:
        t.set("optimizer.alpha", t["rmsprop_decay"], "rmsprop_decay")
        t.explain("rmsprop_base_decay_exp", "no effect", "--rmsprop-decay decides")
    elif exponent is not None or t["model"] == "efficientnet":
        t.set("optimizer.alpha_exponent", -14.0 if exponent is None else exponent, "rmsprop_base_decay_exp")


def translate_schedule(t: Translation, is_cifar: bool) -> None:
    """Set the learning rate, its warm-up and its schedule."""
    name = t["lr_schedule"]
    kinds = {"stepped": "multistep", "polynomial_decay_lr": "polynomial", "polynomial_decay": "polynomial"}
    t.set("schedule.name", kinds.get(name, name), "lr_schedule")
    _rate(t, is_cifar)
    warms = 0.0 if t["iterations"] and not t["epochs"] else t["warmup_epochs"]
    if warms != t["warmup_epochs"]:
        t.explain("warmup_epochs", "no effect", "their warm-up needs --epochs instead of --iterations")
    t.set("schedule.warmup", epochs(warms), "warmup_epochs" if warms else "iterations")
    if warms > 0:
        t.set("schedule.warmup_from", "zero")
        if kinds.get(name) != "polynomial":
            t.set("schedule.warmup_mode", "multiply")
    by_schedule = {
        "stepped": ("learning_rate_decay", "learning_rate_schedule"),
        "exponential": ("lr_decay_rate", "lr_drops"),
        "polynomial": ("poly_lr_decay_power", "poly_lr_end_ratio", "abs_end_learning_rate"),
    }
    for kind, keys in by_schedule.items():
        for key in keys:
            if kind not in (name, kinds.get(name)):
                t.explain(key, "no effect", f"the schedule is {name}")
    if name == "stepped":
        _stepped(t, is_cifar)
    elif name == "exponential":
        t.set("schedule.gamma", t["lr_decay_rate"] or 0.97, "lr_decay_rate")
        t.set("schedule.num_periods", t["lr_drops"] or 146, "lr_drops")
        t.set("schedule.staircase", True, "lr_schedule")
    elif kinds.get(name) == "polynomial":
        t.set("schedule.power", t["poly_lr_decay_power"], "poly_lr_decay_power")
        if t["abs_end_learning_rate"] is not None:
            t.set("schedule.end_lr", t["abs_end_learning_rate"], "abs_end_learning_rate")
            t.explain("poly_lr_end_ratio", "no effect", "--abs-end-learning-rate decides")
        else:
            t.set("schedule.end_lr_ratio", t["poly_lr_end_ratio"], "poly_lr_end_ratio")


def _rate(t: Translation, is_cifar: bool) -> None:
    """The learning rate: absolute, or 2^N per image with the default of the network and optimizer."""
    if t["abs_learning_rate"] is not None:
        t.set("schedule.lr", t["abs_learning_rate"], "abs_learning_rate")
        t.explain("base_learning_rate_exponent", "no effect", "--abs-learning-rate decides")
        return
    is_efficientnet = t["model"] == "efficientnet"
    by_optimizer = {"SGD": -7, "momentum": -10, "RMSprop": -14} if is_efficientnet else {"SGD": -8, "momentum": -11}
    default = -6 if is_cifar else by_optimizer.get(t["optimiser"])
    exponent = default if t["base_learning_rate_exponent"] is None else t["base_learning_rate_exponent"]
    if exponent is None:
        raise UsageError(
            f"{t['optimiser']} has no default learning rate in train.py",
            hint="give --base-learning-rate-exponent or --abs-learning-rate",
        )
    t.set("schedule.lr", 2.0**exponent, "base_learning_rate_exponent")
    t.set("schedule.base_batch_size", 1, "base_learning_rate_exponent")


def _stepped(t: Translation, is_cifar: bool) -> None:
    points = t["learning_rate_schedule"] or (["0.5", "0.75"] if is_cifar else ["0.3", "0.6", "0.8", "0.9"])
    try:
        fractions = [float(part) for text in points for part in text.split(",") if part]
    except ValueError:
        raise UsageError("--learning-rate-schedule has fractions of the run, as in 0.3,0.6,0.8") from None
    t.set("schedule.milestones", [f"{100 * part:g}%" for part in fractions], "learning_rate_schedule")
    t.set("schedule.milestone_when", "exceeded")
    factors = t["learning_rate_decay"] or [0.1]
    ratios = [after / before for before, after in itertools.pairwise(factors)] or factors
    if any(abs(ratio / ratios[0] - 1) > 1e-6 for ratio in ratios):
        raise UsageError(
            "--learning-rate-decay has unequal factors",
            why=f"multistep multiplies by one factor at each milestone, and these are {factors}",
            hint="write schedule.name piecewise with schedule.milestone_lrs in a recipe",
        )
    t.set("schedule.gamma", round(ratios[0], 12), "learning_rate_decay")
