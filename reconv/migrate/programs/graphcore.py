"""Graphcore's TensorFlow CNNs: train.py with its configurations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from reconv.migrate.flag_tables import epochs, read_flags, steps
from reconv.migrate.flags import ParsedWords, Typed
from reconv.migrate.programs.base import Program, missing_data, refuse_positional
from reconv.migrate.programs.graphcore_configs import CONFIGURATIONS, configured
from reconv.migrate.programs.graphcore_network import translate_network
from reconv.migrate.programs.graphcore_optimizer import translate_optimizer, translate_schedule
from reconv.migrate.translation import Translation

_TABLES = ("main", "model", "dataset", "training", "schedule", "ipu", "logging")
FLAGS = read_flags("graphcore", *_TABLES)


def translate(t: Translation, positional: Sequence[str]) -> None:
    """A command of train.py."""
    refuse_positional(t, positional)
    t.apply_table()
    is_cifar = _dataset(t)
    translate_network(t, is_cifar)
    _batch(t, is_cifar)
    _length(t, is_cifar)
    translate_optimizer(t, is_cifar)
    translate_schedule(t, is_cifar)
    _mixing(t)
    _precision(t)
    _memory(t)
    _checkpoints(t)
    _logs(t)
    _averages(t)
    _mode(t)
    _configuration(t)


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
        missing_data(t, "$DATA_DIR, as Reconv does", "DATA_DIR")
    return name != "imagenet"


def _batch(t: Translation, is_cifar: bool) -> None:
    defaults = {"resnet": (4, 32), "resnext": (1, 8), "efficientnet": (4, 8)}[t["model"]]
    micro = t["batch_size"] or defaults[is_cifar]
    replicas = t.num_processes if t.num_processes > 1 else t["replicas"]
    total = int(micro * t["gradient_accumulation_count"] * replicas)
    t.set("batch.size", total, "batch_size", "gradient_accumulation_count", "replicas")
    if t.num_processes > 1:
        t.explain("replicas", "no effect", "poprun's --num-replicas counts")
    t.set("batch.group", min(total, micro * t["BN_span"]), "batch_size", "BN_span")


def _length(t: Translation, is_cifar: bool) -> None:
    default = {"efficientnet": (350.0, 300.0)}.get(t["model"], (100.0, 160.0))[is_cifar]
    if t["iterations"] and not t["epochs"]:
        t.set("length", steps(t["iterations"]), "iterations")
    else:
        t.set("length", epochs(t["epochs"] or default), "epochs")
        t.explain("iterations", "no effect", "--epochs decides")


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


def _memory(t: Translation) -> None:
    if t["rts"]:
        if t["precision"] == "16.16":
            t.explain("rts", "not supported", "sharded optimizers need float32 weights: --precision 16.32")
        else:
            t.set("memory.shard_optimizer", True, "rts")
    if t["enable_recomputation"]:
        t.set("memory.activation_checkpointing", "auto", "enable_recomputation")
    text = "splits the network, or with one shard only recomputes; see parallel.* and memory.activation_checkpointing"
    t.explain("pipeline", "no effect", text)
    size = t["max_cross_replica_buffer_size"] / 2**20
    t.set("parallel.bucket_cap_mb", round(size, 6), "max_cross_replica_buffer_size")


def _checkpoints(t: Translation) -> None:
    if t["epochs_per_ckpt"]:
        every = epochs(t["epochs_per_ckpt"])
        t.set("save.every", every, "epochs_per_ckpt")
        t.explain("ckpts_per_epoch", "no effect", "--epochs-per-ckpt decides")
    else:
        every = epochs(1 / t["ckpts_per_epoch"]) if t["ckpts_per_epoch"] else "off"
        t.set("save.every", every, "ckpts_per_epoch")
        t.explain("epochs_per_ckpt", "no effect", "0 leaves it to --ckpts-per-epoch")
    if t["no_validation"]:
        t.set("evaluate.every", "off", "no_validation")
        t.explain("ckpt_epochs_offset", "no effect", "there is no evaluation")
        return
    if every != "off" and t.is_typed("epochs_per_ckpt"):
        t.set("evaluate.every", every, "epochs_per_ckpt")
    t.set("evaluate.offset", epochs(t["ckpt_epochs_offset"]), "ckpt_epochs_offset")


def _logs(t: Translation) -> None:
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


def _averages(t: Translation) -> None:
    for key, kind in (("weight_avg_exp", "exponential"), ("weight_avg_N", "mean")):
        values = t[key]
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


def _configuration(t: Translation) -> None:
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
