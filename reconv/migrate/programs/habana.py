"""Habana Model-References, PyTorch classification: train.py, and main.py for GoogLeNet."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from reconv.core.errors import UsageError
from reconv.migrate.config_file import read_small_text
from reconv.migrate.flag_tables import epochs, read_flags, steps
from reconv.migrate.programs.base import (
    Program,
    missing_data,
    own_model,
    refuse_positional,
    resume_checkpoint,
    start_epoch,
)
from reconv.migrate.translation import Translation
from reconv.recipe.model_names import MODEL_NAMES
from reconv.recipe.parts.precision import OperationName

_DEFAULT_DATA = "/data/pytorch/imagenet/ILSVRC2012"
_UNLIMITED = 2**63 - 1
# The lists that come with the program: they name what bf16 computes in bfloat16 here, too.
_KNOWN_LISTS = {
    f"ops_{dtype}_{name}.txt" for dtype in ("bf16", "fp32") for name in ("Resnet", "Mobilenet", "googlenet")
}

TRAIN_FLAGS = read_flags("habana", "shared", "train")
GOOGLENET_FLAGS = read_flags("habana", "shared", "googlenet")


def translate_train(t: Translation, positional: Sequence[str]) -> None:
    """A command of train.py."""
    refuse_positional(t, positional)
    t.apply_table()
    _network_and_data(t, t["model"], {})
    if t["optimizer"] == "lars":
        _lars(t)
    else:
        t.explain("optimizer", "same", "SGD with momentum")
        _sgd_schedule(t)
    _evaluation(t)
    if t["sync_bn"]:
        t.set("batch.group", "all", "sync_bn")
    if t["save_checkpoint"]:
        t.set("save.every", "1ep", "save_checkpoint")
    if t["deterministic"]:
        t.explain("deterministic", "no effect", "data order and augmentation always follow the seed, as theirs then do")
    t.set("engine.channels_last", "on" if t["channels_last"] else "auto", "channels_last")
    if t["use_torch_compile"]:
        t.set("engine.compile", "on", "use_torch_compile")
    if t["enable_tensorboard_logging"]:
        t.set("loggers", ["tensorboard"], "enable_tensorboard_logging")
    if t["force_native_sgd"]:
        t.set("optimizer.implementation", "foreach", "force_native_sgd")
    if t.is_typed("output_dir"):
        t.run_folder(t["output_dir"], "output_dir")
    _profile(t)
    if t["test_only"]:
        evaluate_weights(t, "resume", "test_only")
    else:
        resume_checkpoint(t)
    start_epoch(t)


def translate_googlenet(t: Translation, positional: Sequence[str]) -> None:
    """A command of main.py."""
    refuse_positional(t, positional)
    t.apply_table()
    _network_and_data(t, t["model"], {"aux_heads": not t["no_aux_logits"]} if t["model"] == "googlenet" else {})
    if t["model"] != "googlenet":
        t.explain("no_aux_logits", "no effect", f"{t['model']} has no auxiliary heads")
    _step_schedule(t, "lr")
    every = t["save_checkpoint"]
    t.set("save.every", epochs(every) if every > 0 else "off", "save_checkpoint")
    if t.is_typed("gpu"):
        t.explain("gpu", "renamed", f"--device cuda:{t['gpu']}")
    if t["evaluate"]:
        evaluate_weights(t, "resume", "evaluate")
    else:
        resume_checkpoint(t)
    start_epoch(t)


def translate_demo(t: Translation, positional: Sequence[str]) -> None:
    """A command of demo_resnet.py or demo_mobilenet.py, which starts train.py in --world-size processes."""
    t.num_processes *= t["world_size"]
    translate_train(t, positional)
    t.explain("world_size", "derived", "the global batch; --devices on a machine that has as many")


def translate_googlenet_demo(t: Translation, positional: Sequence[str]) -> None:
    """A command of demo_googlenet.py, which starts main.py in --world-size processes."""
    t.num_processes *= t["world_size"]
    translate_googlenet(t, positional)
    t.explain("world_size", "derived", "the global batch; --devices on a machine that has as many")


def _network_and_data(t: Translation, model: str, options: dict[str, object]) -> None:
    """Fields common to both programs: network, batch, precision, optimizer, data, device."""
    t.set("model.name", own_model(model, MODEL_NAMES, "torchvision"), "model")
    for key, value in options.items():
        t.set(f"model.options.{key}", value, "no_aux_logits")
    t.set("length", epochs(t["epochs"]), "epochs")
    t.set("batch.size", t["batch_size"] * t.num_processes, "batch_size")
    t.set("batch.group", t["batch_size"], "batch_size")
    t.set("optimizer.weight_decay_exclude", "none")
    _precision(t)
    if t["data_path"]:
        t.data(t["data_path"], "data_path")
    else:
        missing_data(t, _DEFAULT_DATA)
    _device(t)
    kind = t["dl_worker_type"]
    text = "decodes in processes" if kind == "MP" else "decodes in Gaudi's own loader"
    t.explain("dl_worker_type", "no effect", f"{text}; data.backend decides here, and gives the same images")
    if t["num_train_steps"] != _UNLIMITED:
        t.option("--stop-after", steps(t["num_train_steps"]), "num_train_steps")
        if t["epochs"] > 1:
            text = f"--num-train-steps caps each of {t['epochs']} epochs; the new command ends after the first cap"
            t.notes.append(text)
    if t["pretrained"]:
        if model == "resnext101_32x4d":
            raise UsageError("there are no pretrained weights of resnext101_32x4d", hint="leave --pretrained out")
        t.set("model.init", f"torchvision:{model}", "pretrained")


def _device(t: Translation) -> None:
    """Their device, unless the machine has another."""
    if not t.is_typed("device"):
        return
    text = {"hpu": "--device hpu on Gaudi; auto finds what this machine has", "gpu": "--device cuda"}.get(t["device"])
    if t["device"] == "cpu":
        t.option("--device", "cpu", "device")
    else:
        t.explain("device", "no effect", text or f"--device {t['device']} where there is one; auto finds it")


def _precision(t: Translation) -> None:
    on = [key for key in ("hmp", "autocast") if t.values.get(key)]
    half = [key for key in ("apex", "amp") if t.values.get(key)]
    t.set("precision.mode", "bf16" if on else "fp16" if half else "fp32", *(on or half or ["hmp"]))
    for key, name, dtype in (("hmp_bf16", "low_precision", "bfloat16"), ("hmp_fp32", "float32", "float32")):
        if not t[key]:
            continue
        if not t["hmp"]:
            t.explain(key, "no effect", "without --hmp there is no mixed precision")
        elif Path(t[key]).is_file():
            t.set(f"precision.ops.{name}", _operations(t[key]), key)
        elif Path(t[key]).name in _KNOWN_LISTS:
            t.explain(key, "no effect", f"is Habana's list of {dtype} operations, and what precision.mode bf16 does")
        else:
            t.to_fill.append((t[key], f"list its operations in precision.ops.{name}"))
            t.explain(key, "not supported", f"is not a file here; list its operations in precision.ops.{name}")


def _operations(path: str) -> list[str]:
    """The operations that a list names."""
    names = read_small_text(path).split()
    unknown = [name for name in names if name not in get_args(OperationName)]
    if unknown:
        raise UsageError(
            f"the operation {unknown[0]!r} cannot be listed",
            where=path,
            hint="remove it from the file; the known ones are: " + ", ".join(get_args(OperationName)),
        )
    return list(dict.fromkeys(names))


def _sgd_schedule(t: Translation) -> None:
    for key in ("lars_base_learning_rate", "lars_end_learning_rate", "lars_warmup_epochs", "lars_decay_epochs", "lwd"):
        t.explain(key, "no effect", "the optimizer is not lars")
    values, milestones = t["custom_lr_values"], t["custom_lr_milestones"]
    if values is None and milestones is None:
        _step_schedule(t, "lr")
        return
    if values is None or milestones is None or len(values) != len(milestones):
        raise UsageError(
            "--custom-lr-values and --custom-lr-milestones need the same number of values",
            why=f"they have {len(values or [])} and {len(milestones or [])}",
            hint="give each milestone the learning rate from there on",
        )
    if any(later <= first for first, later in itertools.pairwise(milestones)):
        raise UsageError("--custom-lr-milestones must rise", why=f"they are {milestones}")
    t.set("schedule.name", "piecewise", "custom_lr_values")
    t.set("schedule.milestone_lrs", list(values), "custom_lr_values")
    t.set("schedule.milestones", [epochs(point) for point in milestones], "custom_lr_milestones")
    if milestones[0] == 0:
        t.set("schedule.lr", values[0], "custom_lr_values")
        t.explain("lr", "no effect", "the milestones begin at epoch 0, so no epoch uses it")
    else:
        t.set("schedule.lr", t["lr"], "lr")
    for key in ("lr_step_size", "lr_gamma"):
        t.explain(key, "no effect", "--custom-lr-values replace the step schedule")


def _step_schedule(t: Translation, key: str) -> None:
    t.set("schedule.name", "step")
    t.set("schedule.lr", t[key], key)
    t.set("schedule.period", epochs(t["lr_step_size"]), "lr_step_size")
    t.set("schedule.gamma", t["lr_gamma"], "lr_gamma")


def _lars(t: Translation) -> None:
    t.set("optimizer.name", "lars", "optimizer")
    t.set("optimizer.weight_decay", t["lwd"], "lwd")
    t.set("optimizer.trust_coefficient", 0.001, "optimizer")
    t.set("optimizer.lars_exclude", "norm-bias", "optimizer")
    t.set("schedule.name", "polynomial", "optimizer")
    t.set("schedule.power", 2.0, "optimizer")
    t.set("schedule.lr", t["lars_base_learning_rate"], "lars_base_learning_rate")
    t.set("schedule.end_lr", t["lars_end_learning_rate"], "lars_end_learning_rate")
    t.set("schedule.warmup", epochs(t["lars_warmup_epochs"]), "lars_warmup_epochs")
    t.set("schedule.warmup_from", "zero", "optimizer")
    t.set("schedule.decay_until", epochs(t["lars_decay_epochs"]), "lars_decay_epochs")
    for key in ("lr", "lr_step_size", "lr_gamma", "custom_lr_values", "custom_lr_milestones", "wd"):
        t.explain(key, "no effect", "lars has its own flags for this")


def _evaluation(t: Translation) -> None:
    if t.is_typed("epochs_between_evals"):
        t.set("evaluate.every", epochs(t["epochs_between_evals"]), "epochs_between_evals")
    if t.is_typed("eval_offset_epochs"):
        t.set("evaluate.offset", epochs(t["eval_offset_epochs"]), "eval_offset_epochs")
    if t["num_eval_steps"] != _UNLIMITED:
        images = t["num_eval_steps"] * t["batch_size"] * t.num_processes
        t.set("evaluate.num_samples", images, "num_eval_steps")


def _profile(t: Translation) -> None:
    """`--profile_steps warmup:active` as the first and last step."""
    first, _, count = t["profile_steps"].partition(":")
    if not t["profile"]:
        t.explain("profile_steps", "no effect", "without --profile nothing is traced")
        return
    if not (first.isdigit() and (count.isdigit() or not count)):
        raise UsageError(f"--profile_steps is WARMUP:STEPS, not {t['profile_steps']!r}")
    begin = int(first) + 1
    t.option("--profile", f"{begin},{begin + max(1, int(count or 1)) - 1}", "profile", "profile_steps")


def evaluate_weights(t: Translation, weights: str, mode: str) -> None:
    """Evaluation only: `reconv eval` of the weights."""
    t.action.verb, t.action.takes_recipe = "eval", False
    setting = t.settings.get("model.init")
    init = None if setting is None else setting.value
    t.action.arguments.append(t[weights] or init or "RUN")
    for key in () if setting is None or t[weights] else setting.flags:
        t.explain(key, "renamed", f"reconv eval {init}")
    if init and not t[weights] and init.startswith("torchvision:"):
        for key in ("val_crop_size", "val_resize_size", "train_crop_size", "interpolation"):
            t.explain(key, "no effect", f"{init} is evaluated with the preprocessing of its weights")
        for name in [name for name in t.settings if name.startswith("data.preprocess.")]:
            t.settings.pop(name)
    if not (t[weights] or init):
        t.to_fill.append(("RUN", "a run, a checkpoint or a weights file; theirs would evaluate random weights"))
    t.explain(mode, "renamed", "reconv eval, which counts every image once")
    if t[weights]:
        t.explain(weights, "renamed", f"reconv eval {t[weights]}")
    t.option("--batch-size", str(t["batch_size"]), "batch_size")


HABANA_TRAIN = Program(
    "habana",
    "Habana Model-References, PyTorch classification: train.py",
    "habana",
    ("train.py",),
    TRAIN_FLAGS,
    translate_train,
    launchers=("mpirun",),
    path=r"Model-References/PyTorch|classification/torchvision",
)
HABANA_GOOGLENET = Program(
    "habana-googlenet",
    "Habana Model-References, PyTorch classification: main.py (GoogLeNet)",
    "habana",
    ("main.py",),
    GOOGLENET_FLAGS,
    translate_googlenet,
    launchers=("mpirun",),
    path=r"Model-References/PyTorch|classification/torchvision",
)
HABANA_DEMO = Program(
    "habana-demo",
    "Habana Model-References, PyTorch classification: demo_resnet.py, demo_mobilenet.py",
    "habana",
    ("demo_resnet.py", "demo_mobilenet.py"),
    TRAIN_FLAGS,
    translate_demo,
)
HABANA_GOOGLENET_DEMO = Program(
    "habana-googlenet-demo",
    "Habana Model-References, PyTorch classification: demo_googlenet.py",
    "habana",
    ("demo_googlenet.py",),
    read_flags("habana", "shared", "googlenet", "googlenet_demo"),
    translate_googlenet_demo,
)
