"""Graphcore's TensorFlow CNNs: train.py with its configurations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from reconv.errors import UsageError
from reconv.migrate.flags import ParsedWords, Typed
from reconv.migrate.programs.graphcore_configs import CONFIGURATIONS, configured
from reconv.migrate.programs.graphcore_flags import FLAGS
from reconv.migrate.programs.program import Program, epochs, missing_data, needs_weights, refuse_positional, steps
from reconv.migrate.translation import Translation
from reconv.recipe.model_names import MODEL_NAMES

_SIZES = {0: (0.2, 224), 1: (0.2, 240), 2: (0.3, 260), 3: (0.3, 300), 4: (0.4, 380), 5: (0.4, 456), 6: (0.5, 528)}
_EFFICIENTNETS = {f"B{number}": entry for number, entry in {**_SIZES, 7: (0.5, 600)}.items()}
_ONLY_EFFICIENTNET = (
    *("dropout_rate", "block_survival_prob", "no_se", "depth_divisor", "top_width", "use_relu", "expand_ratio"),
    *("norm_epsilon", "proxy_norm", "proxy_epsilon", "width_coefficient", "depth_coefficient"),
)
_ONLY_RESNEXT = ("convolution_groups", "widenet")


def translate(t: Translation, positional: Sequence[str]) -> None:
    """A command of train.py."""
    refuse_positional(t, positional)
    t.apply_table()
    is_cifar = _dataset(t)
    _network(t, is_cifar)
    total = _batch(t, is_cifar)
    _length(t, is_cifar)
    _optimizer(t, is_cifar)
    _schedule(t, is_cifar, total)
    _mixing(t)
    _precision(t)
    _checkpoints_and_logs(t)
    _mode(t)
    name = t.hint = t["config"] or ""
    if name and name not in CONFIGURATIONS and not any(found.origin for found in t.typed.values()):
        t.to_fill.append((name, "is not one of Graphcore's configurations: give its file by --config-path FILE"))
        t.explain("config", "not supported", f"{name} is not known here; give its file by --config-path FILE")
        t.notes.append(f"the values of {name} are not part of the result: it is not one of Graphcore's configurations")
    elif name:
        t.explain("config", "derived", "its values, listed below")
    if t["config_path"] and not Path(t["config_path"]).is_file():
        text = "is not a file here; the values are those of Graphcore's own configs.yml"
        t.explain("config_path", "not supported", text)
    else:
        t.explain("config_path", "derived", "the file of the configuration")


def _dataset(t: Translation) -> bool:
    """Set the data; whether it is CIFAR."""
    folder = (t["data_dir"] or "").lower()
    found = next((name for name in ("cifar-100", "cifar-10") if name in folder), "imagenet")
    name = t["dataset"] or found
    if name != "imagenet":
        t.set("data.source", name.replace("-", ""), "dataset")
        t.set("data.preprocess.size", 32)
        t.set("data.preprocess.resize", None)
        t.set("data.preprocess.per_image_standardization", True)
        t.set("augment.crop", "random")
        t.set("augment.padding", 4)
        t.explain("normalise_input", "no effect", "CIFAR images are standardized one by one")
        t.explain("image_size", "no effect", "CIFAR images have 32 pixels")
    else:
        t.explain("dataset", "no effect", "the format is detected from the files")
        t.set("augment.scale", [0.05, 1.0])
        t.set("augment.ratio", [0.75, 1.33])
        t.set("augment.attempts", 100)
        t.set("augment.fallback", "whole")
        if not t["normalise_input"]:
            t.set("data.preprocess.divide_by", 1, "normalise_input")
            t.set("data.preprocess.mean", [123.68, 116.78, 103.94], "normalise_input")
            t.set("data.preprocess.std", [1.0, 1.0, 1.0], "normalise_input")
        else:
            t.explain("normalise_input", "same", "divides by the standard deviation, as here")
    for key, source in (("generated_data", "synthetic"), ("synthetic_data", "synthetic-device")):
        if t[key]:
            t.set("data.source", source, key)
    if t["data_dir"]:
        t.data(t["data_dir"], "data_dir")
    elif not (t["generated_data"] or t["synthetic_data"]):
        missing_data(t, "$DATA_DIR, as Reconv does")
    return name != "imagenet"


def _network(t: Translation, is_cifar: bool) -> None:
    t.set("model.options.padding", "same")
    if t["model"] == "efficientnet":
        _efficientnet(t, is_cifar)
        return
    size = (t["model_size"] or ("20" if is_cifar else "18") if t["model"] == "resnet" else t["model_size"]) or (
        "11" if is_cifar else "14"
    )
    t.set("model.name", _resnet_name(t, size, is_cifar), "model_size", "model")
    t.set("model.options.conv_init", "tf_fan_in")
    t.set("model.options.linear_init", "glorot")
    if not is_cifar:
        t.set("model.options.project_first", True)
        t.set("model.options.zero_gamma", "no-projection")
    if t["model"] == "resnext":
        if t["convolution_groups"] not in (None, 32):
            t.set("model.options.groups", t["convolution_groups"], "convolution_groups")
        else:
            t.explain("convolution_groups", "no effect", "32 is what the network has")
        if t["group_dim"] not in (None, 4):
            t.set("model.options.width_per_group", t["group_dim"], "group_dim")
        else:
            t.explain("group_dim", "no effect", "4 is what the network has")
    else:
        for key in (*_ONLY_RESNEXT, "group_dim"):
            t.explain(key, "not supported", f"is for resnext, and the network is {t['model']}; leave it out")
    for key in _ONLY_EFFICIENTNET:
        t.explain(key, "not supported", f"is for efficientnet, and the network is {t['model']}; leave it out")
    _norm(t, is_cifar, default_groups=16 if is_cifar else 32)
    if t["image_size"] and not is_cifar:
        t.set("data.preprocess.size", t["image_size"], "image_size")
        if t["image_size"] != 224:
            t.set("data.preprocess.resize", "auto-ratio", "image_size")


def _resnet_name(t: Translation, size: str, is_cifar: bool) -> str:
    family, suffix = t["model"], "_32x4d" if t["model"] == "resnext" else ""
    if not is_cifar:
        name = f"{family}{size}{suffix}"
    elif family == "resnext":
        name = f"resnext{size}{'_wide' if t['widenet'] else ''}_cifar"
    else:
        name = f"resnet{size}_cifar"
        if name not in MODEL_NAMES or size == "56":  # theirs resolves 56 to the bottleneck form
            name = f"resnet{size}_bottleneck_cifar"
    if name not in MODEL_NAMES:
        raise UsageError(f"there is no {family} of size {size} for this data", then="see `reconv recipes --all`")
    if t["widenet"]:
        t.explain("widenet", "renamed", f"model.name={name}")
    return name


def _efficientnet(t: Translation, is_cifar: bool) -> None:
    size = t["model_size"] or "B0"
    size = f"B{size}" if size.isdigit() else size
    if size not in _EFFICIENTNETS and size != "CIFAR":
        raise UsageError(f"there is no EfficientNet of size {size}", then="it is one of B0 to B7, or cifar")
    dropout, pixels = _EFFICIENTNETS.get(size, (0.0, 32))
    t.set("model.name", f"efficientnet_{size.lower()}", "model_size", "model")
    t.set("model.options.conv_init", "tf_fan_out")
    t.set("model.options.dropout", dropout if t["dropout_rate"] is None else t["dropout_rate"], "dropout_rate")
    t.set("model.options.drop_connect", round(1 - t["block_survival_prob"], 12), "block_survival_prob")
    t.set("model.options.group_dim", t["group_dim"] or 1, "group_dim")
    t.set("model.options.expand_ratio", t["expand_ratio"], "expand_ratio")
    for key, name, value in (
        ("no_se", "se", False),
        ("use_relu", "activation", "relu"),
        ("depth_divisor", "depth_divisor", t["depth_divisor"]),
        ("top_width", "top_width", t["top_width"]),
        ("width_coefficient", "width_coefficient", t["width_coefficient"]),
        ("depth_coefficient", "depth_coefficient", t["depth_coefficient"]),
    ):
        if t.is_typed(key):
            t.set(f"model.options.{name}", value, key)
    for key in _ONLY_RESNEXT:
        t.explain(key, "not supported", "is for resnext, and the network is efficientnet; leave it out")
    _norm(t, is_cifar=False, default_groups=4)
    t.set("model.options.norm_eps", t["norm_epsilon"], "norm_epsilon")
    if t["proxy_norm"]:
        t.set("model.options.norm", "proxy", "proxy_norm")
        t.set("model.options.proxy_eps", t["proxy_epsilon"], "proxy_epsilon")
    else:
        t.explain("proxy_epsilon", "no effect", "without --proxy-norm there is no proxy")
    if not is_cifar:
        t.set("data.preprocess.size", t["image_size"] or pixels, "image_size")
        t.set("data.preprocess.resize", "auto-ratio", "image_size")


def _norm(t: Translation, is_cifar: bool, default_groups: int) -> None:
    is_batch = t["batch_norm"] or (is_cifar and not t["group_norm"])
    if is_batch:
        t.set("model.options.bn_momentum", round(1 - t["BN_decay"], 12), "BN_decay")
        t.explain("batch_norm", "same", "batch norm is the default here")
        t.explain("groups", "no effect", "batch norm has no groups")
        t.explain("group_norm", "no effect", "--batch-norm decides")
        return
    t.set("model.options.norm", "group", "group_norm")
    t.set("model.options.norm_groups", t["groups"] or default_groups, "groups")
    t.explain("BN_decay", "no effect", "group norm has no running statistics")
    t.explain("BN_span", "no effect", "group norm does not depend on the batch")


def _batch(t: Translation, is_cifar: bool) -> int:
    """Set the global batch and return it."""
    defaults = {"resnet": (4, 32), "resnext": (1, 8), "efficientnet": (4, 8)}[t["model"]]
    micro = t["batch_size"] or defaults[is_cifar]
    replicas = t.num_processes if t.num_processes > 1 else t["replicas"]
    total = int(micro * t["gradient_accumulation_count"] * replicas)
    t.set("batch.size", total, "batch_size", "gradient_accumulation_count", "replicas")
    if t.num_processes > 1:
        t.explain("replicas", "no effect", "poprun's --num-replicas counts")
    group = min(total, micro * t["BN_span"])
    t.set("batch.group", group, "batch_size", "BN_span")
    return total


def _length(t: Translation, is_cifar: bool) -> None:
    default = {"efficientnet": (350.0, 300.0)}.get(t["model"], (100.0, 160.0))[is_cifar]
    if t["iterations"] and not t["epochs"]:
        t.set("length", steps(t["iterations"]), "iterations")
    else:
        t.set("length", epochs(t["epochs"] or default), "epochs")
        t.explain("iterations", "no effect", "--epochs decides")


def _optimizer(t: Translation, is_cifar: bool) -> None:
    name = t["optimiser"]
    t.set(
        "optimizer.name",
        {"SGD": "sgd", "momentum": "sgd", "LARS": "lars", "RMSprop": "rmsprop-tf"}[name],
        "optimiser",
    )
    if name == "SGD":
        t.set("optimizer.momentum", 0.0, "optimiser")
        t.explain("momentum", "no effect", "SGD has no momentum there; --optimiser momentum has")
    else:
        t.set("optimizer.momentum", t["momentum"], "momentum")
    defaults = 1e-6 if is_cifar else 1e-5 if t["model"] == "efficientnet" else 1e-4
    if name == "LARS":
        decay = t["lars_weight_decay"] if t["lars_weight_decay"] is not None else 1e-4 if not is_cifar else 1e-6
        t.set("optimizer.weight_decay", decay, "lars_weight_decay")
        t.explain(
            "weight_decay", "no effect", "LARS decays weights once here, by --lars-weight-decay; theirs did twice"
        )
        t.set("optimizer.weight_decay_exclude", "none", "optimiser")
        t.set("optimizer.trust_coefficient", t["lars_eeta"], "lars_eeta")
        if t["lars_epsilon"]:
            t.set("optimizer.eps", t["lars_epsilon"], "lars_epsilon")
        else:
            t.explain("lars_epsilon", "no effect", "0 is the default here, too")
        skipped = set(t["lars_skip_list"])
        exclude = "norm-bias" if "bias" in skipped else "norm" if skipped & {"beta", "gamma"} else "none"
        t.set("optimizer.lars_exclude", exclude, "lars_skip_list")
    else:
        decay = defaults if t["weight_decay"] is None else t["weight_decay"]
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


def _schedule(t: Translation, is_cifar: bool, total: int) -> None:
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
    by_optimizer = {"SGD": -7.0, "momentum": -10.0, "RMSprop": -14.0} if t["model"] == "efficientnet" else None
    default = -6.0 if is_cifar else (by_optimizer or {"SGD": -8.0, "momentum": -11.0}).get(t["optimiser"])
    exponent = default if t["base_learning_rate_exponent"] is None else t["base_learning_rate_exponent"]
    if exponent is None:
        raise UsageError(
            f"{t['optimiser']} has no default learning rate in train.py",
            then="give --base-learning-rate-exponent or --abs-learning-rate",
        )
    t.set("schedule.lr", 2.0**exponent, "base_learning_rate_exponent")
    t.set("schedule.base_batch_size", 1, "base_learning_rate_exponent")


def _stepped(t: Translation, is_cifar: bool) -> None:
    points = t["learning_rate_schedule"] or ["0.5", "0.75"] if is_cifar else t["learning_rate_schedule"]
    points = points or ["0.3", "0.6", "0.8", "0.9"]
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
            then="write schedule.name piecewise with schedule.milestone_lrs in a recipe",
        )
    t.set("schedule.gamma", round(ratios[0], 12), "learning_rate_decay")


def _mixing(t: Translation) -> None:
    t.set("augment.mixup.alpha", t["mixup_alpha"], "mixup_alpha")
    if t["mixup_alpha"] > 0:
        t.set("augment.mixup.mode", "sample", "mixup_alpha")
        t.set("augment.mixup.partner", "roll", "mixup_alpha")
        t.set("augment.mixup.lam_at_least_half", True, "mixup_alpha")
    if t["cutmix_lambda"] < 1:
        t.set("augment.cutmix.mode", "random" if t["cutmix_version"] == 1 else "fixed", "cutmix_version")
        t.set("augment.cutmix.lam", t["cutmix_lambda"], "cutmix_lambda")
        t.set("augment.cutmix.roll", 2, "cutmix_lambda")
        if t["mixup_alpha"] > 0:
            t.set("augment.combine", "both", "mixup_alpha", "cutmix_lambda")
    else:
        t.explain("cutmix_lambda", "no effect", "1 keeps the whole image, as without CutMix")
        t.explain("cutmix_version", "no effect", "without --cutmix-lambda there is no CutMix")
    smoothing = t["label_smoothing"] or (0.1 if t["model"] == "efficientnet" else 0.0)
    t.set("loss.label_smoothing", smoothing, "label_smoothing")
    if smoothing:
        t.set("loss.smooth_over", "other-classes")


def _precision(t: Translation) -> None:
    mode = t["precision"]
    t.set("precision.mode", mode, "precision")
    if mode == "32.32":
        t.explain("loss_scaling", "no effect", "float32 needs no loss scale")
    else:
        t.set("precision.loss_scale", t["loss_scaling"], "loss_scaling")
    off = t["no_stochastic_rounding"] or t["stochastic_rounding"] == "OFF"
    key = "stochastic_rounding" if t["stochastic_rounding"] else "no_stochastic_rounding"
    if mode == "16.16" and off:
        t.set("precision.rounding", "nearest", key)
    for name in ("stochastic_rounding", "no_stochastic_rounding"):
        t.explain(name, "no effect", f"weights of mode {mode} are rounded that way already")
    if t["enable_half_partials"] and mode != "32.32" and t.is_on_command_line("enable_half_partials"):
        t.set("precision.reduced_precision_reduction", "on", "enable_half_partials")
    else:
        t.explain("enable_half_partials", "no effect", "torch reduces half-precision products that way by default")
    if t["saturate_on_overflow"]:
        t.set("engine.non_finite.policy", "skip", "saturate_on_overflow")
    if t["fp_exceptions"]:
        t.set("engine.non_finite.policy", "stop", "fp_exceptions")
    if t["rts"]:
        if mode == "16.16":
            t.explain("rts", "not supported", "sharded optimizers need float32 weights: --precision 16.32")
        else:
            t.set("memory.shard_optimizer", True, "rts")
    if t["enable_recomputation"]:
        t.set("memory.activation_checkpointing", "auto", "enable_recomputation")
    text = "splits the network, or with one shard only recomputes; see parallel.* and memory.activation_checkpointing"
    t.explain("pipeline", "no effect", text)
    size = t["max_cross_replica_buffer_size"] / 2**20
    t.set("parallel.bucket_cap_mb", round(size, 6), "max_cross_replica_buffer_size")


def _checkpoints_and_logs(t: Translation) -> None:
    every = epochs(t["epochs_per_ckpt"]) if t["epochs_per_ckpt"] else ""
    if not every:
        count = t["ckpts_per_epoch"]
        every = epochs(1 / count) if count else "off"
        t.set("save.every", every, "ckpts_per_epoch")
        t.explain("epochs_per_ckpt", "no effect", "0 leaves it to --ckpts-per-epoch")
    else:
        t.set("save.every", every, "epochs_per_ckpt")
        t.explain("ckpts_per_epoch", "no effect", "--epochs-per-ckpt decides")
    if t["no_validation"]:
        t.set("evaluate.every", "off", "no_validation")
    elif every != "off" and t.is_typed("epochs_per_ckpt"):
        t.set("evaluate.every", every, "epochs_per_ckpt")
    if t["no_validation"]:
        t.explain("ckpt_epochs_offset", "no effect", "there is no evaluation")
    else:
        t.set("evaluate.offset", epochs(t["ckpt_epochs_offset"]), "ckpt_epochs_offset")
    by_steps = bool(t["iterations"])
    interval = steps(t["log_freq"]) if by_steps else epochs(1 / max(1, t["logs_per_epoch"]))
    t.set("log.every", interval, "log_freq" if by_steps else "logs_per_epoch")
    t.explain("logs_per_epoch" if by_steps else "log_freq", "no effect", "is for the other unit of --iterations")
    loggers = {name: key for name, key in (("mlperf", "mlperf_logging"), ("wandb", "wandb")) if t[key]}
    if loggers:
        t.set("loggers", list(loggers), *loggers.values())
    folder = "logs_path" if t.is_typed("logs_path") else "log_dir"
    if t.is_typed(folder):
        t.run_folder(t[folder], folder)
    for key, kind, values in (
        ("weight_avg_exp", "exponential", t["weight_avg_exp"]),
        ("weight_avg_N", "mean", t["weight_avg_N"]),
    ):
        if values:
            last = "100%" if kind == "exponential" else epochs(values[0])
            t.set("checkpoint_average.last", last, key)
            t.set("checkpoint_average.mode", kind, key)
            if kind == "exponential":
                t.set("checkpoint_average.decay", values[0], key)
            if len(values) > 1:
                t.explain(key, "derived", f"the others by hand: reconv average RUN, for {values[1:]}")


def _mode(t: Translation) -> None:
    if t["restore_path"]:
        resume_run(t)
    elif t["dataset_benchmark"]:
        t.action.verb = "bench data"
        t.action.options = [option for option in t.action.options if option[0] == "--data"]
        t.explain("dataset_benchmark", "renamed", "reconv bench data")
    elif t["compile_only"]:
        t.option("--compile-only", None, "compile_only")


def resume_run(t: Translation) -> None:
    """Continue the run that --restore-path names."""
    t.action.verb, t.action.takes_recipe = "resume", False
    t.action.arguments = [t["restore_path"] or "RUN"]
    t.action.options = [option for option in t.action.options if option[0] == "--data"]
    t.explain("restore_path", "renamed", "reconv resume RUN, with the recipe that the run stores")
    t.notes.append("reconv resume takes a run of Reconv: their checkpoints hold no state that could be continued")


def graphcore_config(parsed: ParsedWords) -> list[Typed]:
    """The values of the configuration that --config names."""
    return configured(FLAGS, parsed)


GRAPHCORE_TRAIN = Program(
    "graphcore",
    "Graphcore examples, TensorFlow CNNs: train.py",
    "graphcore",
    ("train.py",),
    FLAGS,
    translate,
    launchers=("poprun",),
    path=r"tensorflow1?/cnns|cnns/(training|tensorflow1)",
    configure=graphcore_config,
)
