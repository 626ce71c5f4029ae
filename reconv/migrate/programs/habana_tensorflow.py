"""Habana Model-References, TensorFlow ResNeXt: imagenet_main.py, whose flags are absl's."""

from __future__ import annotations

from collections.abc import Sequence

from reconv.core.errors import UsageError
from reconv.migrate.flag_tables import epochs, read_flags, steps
from reconv.migrate.programs.base import Program, missing_data, needs_weights, refuse_positional
from reconv.migrate.translation import Translation
from reconv.recipe.model_names import MODEL_NAMES

_MINI_PERCENT = 10  # how large the subset is depends on who made it
_DEFAULT_DATA = "/data/tensorflow/imagenet/tf_records"


FLAGS = read_flags("habana_tensorflow", "resnext")


def translate(t: Translation, positional: Sequence[str]) -> None:
    """A command of imagenet_main.py."""
    refuse_positional(t, positional)
    t.apply_table()
    _network(t)
    t.set("length", epochs(t["train_epochs"]), "train_epochs")
    t.set("batch.size", t["batch_size"] * t.num_processes, "batch_size")
    # Under Horovod the batch is that of a worker; a strategy of TensorFlow divides it among its GPUs.
    t.set("batch.group", max(1, t["batch_size"] // max(1, t["num_gpus"])), "batch_size", "num_gpus")
    if t["num_gpus"] == -1:
        t.notes.append("--num_gpus -1 divides the batch among all GPUs: set batch.group to the images of one")
    if t["enable_lars"]:
        _lars(t)
    else:
        _momentum(t)
    _precision(t)
    _data(t)
    _intervals(t)
    _mode(t)


def _network(t: Translation) -> None:
    size = t["resnet_size"]
    name = f"resnet{size}" if t["model_type"] == "resnet" else f"resnext{size}_32x4d"
    if name not in MODEL_NAMES:
        raise UsageError(
            f"there is no network {name}", hint="use --resnet_size 50, 101 or 152 with --model_type resnext"
        )
    t.set("model.name", name, "resnet_size", "model_type")
    for key, value in {"padding": "same", "conv_init": "tf_fan_in", "linear_init": "glorot"}.items():
        t.set(f"model.options.{key}", value)
    t.set("model.options.project_first", True)
    if t["resnet_version"] == "2":
        t.set("model.options.version", "v2", "resnet_version")
    else:
        t.explain("resnet_version", "no effect", "1 is the network with the stride in the 3x3, as here")
    t.set("data.background_class", True)
    t.set("data.preprocess.divide_by", 1)
    t.set("data.preprocess.mean", [123.68, 116.78, 103.94])
    t.set("data.preprocess.std", [1.0, 1.0, 1.0])
    t.set("augment.attempts", 100)
    t.set("augment.fallback", "whole")
    t.set("engine.channels_last", "on" if t["data_format"] == "channels_last" else "off", "data_format")
    if t["pretrained_model_checkpoint_path"]:
        t.set("model.init", t["pretrained_model_checkpoint_path"], "pretrained_model_checkpoint_path")
        t.explain("pretrained_model_checkpoint_path", "renamed", "their program parses it and does nothing")
    elif t["fine_tune"]:
        needs_weights(t, "fine_tune")


def _momentum(t: Translation) -> None:
    t.set("optimizer.weight_decay_exclude", "norm")
    cosine = t["use_cosine_lr"]
    low = t["fine_tune"] or t.num_processes > 16
    t.set("schedule.name", "cosine" if cosine else "multistep", "use_cosine_lr")
    t.set("schedule.lr", 0.256 if cosine else 0.1 if low else 0.128, "use_cosine_lr")
    t.set("schedule.base_batch_size", 256)
    if not cosine:
        t.set("schedule.milestones", ["30ep", "60ep", "80ep", "90ep"], "use_cosine_lr")
        t.set("schedule.gamma", 0.1, "use_cosine_lr")
    warms = 0.0 if t["fine_tune"] else t["warmup_epochs"]
    t.set("schedule.warmup", epochs(warms), "warmup_epochs")
    if warms:
        t.set("schedule.warmup_from", "zero")
        if cosine:
            t.set("schedule.warmup_mode", "replace")
    text = "their program accepts it and warms up all the same; --set schedule.warmup=0ep does not"
    t.explain("disable_warmup", "no effect", text)
    for key in ("epochs_for_lars", "start_learning_rate"):
        t.explain(key, "no effect", "the optimizer is not LARS")


def _lars(t: Translation) -> None:
    t.set("optimizer.name", "lars", "enable_lars")
    t.set("optimizer.weight_decay_exclude", "none", "enable_lars")
    t.set("optimizer.trust_coefficient", 0.001, "enable_lars")
    t.set("optimizer.lars_exclude", "norm-bias", "enable_lars")
    t.set("schedule.name", "polynomial", "enable_lars")
    t.set("schedule.power", 2.0, "enable_lars")
    t.set("schedule.lr", t["start_learning_rate"], "start_learning_rate")
    t.set("schedule.end_lr", 1e-4, "enable_lars")
    t.set("schedule.warmup", epochs(t["warmup_epochs"]), "warmup_epochs")
    t.set("schedule.warmup_from", "zero", "enable_lars")
    t.set("schedule.decay_until", epochs(t["epochs_for_lars"]), "epochs_for_lars")
    t.explain("use_cosine_lr", "no effect", "LARS has a polynomial schedule")
    t.explain("disable_warmup", "no effect", "their program accepts it and warms up all the same")


def _precision(t: Translation) -> None:
    t.set("precision.mode", t["dtype"], "dtype")
    dtypes = {"fp16": "float16", "fp32": "float32", "bf16": "bfloat16"}
    text = f"images travel as uint8, which is exact; --set data.transfer_dtype={dtypes[t['data_loader_image_type']]}"
    t.explain("data_loader_image_type", "no effect", f"{text} copies them in this type")
    scale = t["loss_scale"]
    if t["dtype"] == "fp16":
        if scale not in (None, "dynamic") and not _is_number(scale):
            raise UsageError(f"--loss_scale is a number or dynamic, not {scale!r}")
        t.set("precision.loss_scale", scale if scale == "dynamic" else float(scale or 128), "loss_scale")
    else:
        t.explain("loss_scale", "no effect", f"{t['dtype']} needs no loss scale")


def _is_number(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


def _data(t: Translation) -> None:
    if t["use_synthetic_data"]:
        t.set("data.source", "synthetic", "use_synthetic_data")
    if t["mini_imagenet"]:
        t.set("data.subset_percent", _MINI_PERCENT, "mini_imagenet")
        t.notes.append(
            f"--mini_imagenet reads records of your own in imagenet_train_subset/: here {_MINI_PERCENT} % of all "
            "images; --set data.subset_percent=100 with --data on a folder of yours reads that one"
        )
    # The hardware loader reads the JPEG files instead of the records.
    key = "jpeg_data_dir" if t["jpeg_data_dir"] else "data_dir"
    if t[key]:
        t.data(t[key], key)
    elif not t["use_synthetic_data"]:
        missing_data(t, _DEFAULT_DATA)
    if t["jpeg_data_dir"] and t["data_dir"]:
        t.explain("data_dir", "no effect", "--jpeg_data_dir is read instead")
    if t["no_hpu"]:
        t.explain("no_hpu", "no effect", "the device is chosen by --device; auto finds what this machine has")
    if t["intra_op_parallelism_threads"] > 0:
        t.set("engine.num_threads", t["intra_op_parallelism_threads"], "intra_op_parallelism_threads")
    else:
        t.explain("intra_op_parallelism_threads", "no effect", "0 uses all cores, as here")


def _intervals(t: Translation) -> None:
    if t["disable_eval"] or t["return_before_eval"]:
        t.set("evaluate.every", "off", "disable_eval", "return_before_eval")
        t.explain("epochs_between_evals", "no effect", "evaluation is off")
    else:
        t.set("evaluate.every", epochs(t["epochs_between_evals"]), "epochs_between_evals")
    if t["max_eval_steps"]:
        t.set("evaluate.num_samples", t["max_eval_steps"] * t["batch_size"], "max_eval_steps")
    if t["disable_checkpoints"]:
        t.set("save.every", "100%", "disable_checkpoints")
        t.explain("disable_checkpoints", "derived", "theirs saves only at the end; save.every=off saves nothing")
    elif t["save_checkpoint_steps"]:
        t.set("save.every", steps(t["save_checkpoint_steps"]), "save_checkpoint_steps")
    else:
        t.explain("save_checkpoint_steps", "no effect", "checkpoints are not saved but at the end")
    if t["stop_threshold"] is not None:
        t.set("early_stopping.target", t["stop_threshold"], "stop_threshold")
    for key in ("log_steps", "save_summary_steps"):
        t.explain(key, "no effect", "log.every decides, for all loggers; --display_steps sets it")
    if t["export_dir"]:
        text = "no SavedModel; after training: reconv export RUN --to onnx"
        t.explain("export_dir", "not supported", text, changes_result=False)


def _mode(t: Translation) -> None:
    hooks = [name for name in t["hooks"].split(",") if name]
    known = {
        "LoggingTensorHook": "progress is always logged",
        "ExamplesPerSecondHook": "images/s are always logged",
        "LoggingMetricHook": "metrics are always logged",
        "StepCounterHook": "steps are always logged",
        "ProfilerHook": "",
    }
    for name in hooks:
        if name not in known:
            raise UsageError(f"imagenet_main.py has no hook {name!r}", hint=f"the hooks are: {', '.join(known)}")
    if "ProfilerHook" in hooks:
        first, last = t["profile_steps"]
        t.option("--profile", f"{first},{last}", "hooks", "profile_steps")
    else:
        t.explain("hooks", "no effect", "; ".join(known[name] for name in hooks))
        t.explain("profile_steps", "no effect", "without --hooks ProfilerHook nothing is traced")
    if t["max_train_steps"]:
        t.option("--stop-after", steps(t["max_train_steps"]), "max_train_steps")
    if t["eval_only"]:
        t.action.verb, t.action.takes_recipe = "eval", False
        t.action.arguments = [t["model_dir"] or "RUN"]
        t.action.options = [option for option in t.action.options if option[0] == "--data"]
        t.option("--batch-size", str(t["batch_size"]), "batch_size")
        t.explain("eval_only", "renamed", "reconv eval")
        t.explain("model_dir", "renamed", "the argument of reconv eval")
        if not t["model_dir"]:
            t.to_fill.append(("RUN", "a run, a checkpoint or a weights file"))


HABANA_RESNEXT = Program(
    "habana-resnext",
    "Habana Model-References, TensorFlow ResNeXt: imagenet_main.py",
    "habana",
    ("imagenet_main.py",),
    FLAGS,
    translate,
    dialect="absl",
    usual=True,
)
