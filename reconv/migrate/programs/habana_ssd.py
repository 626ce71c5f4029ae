"""Habana Model-References, TensorFlow SSD-ResNet34: ssd.py; and inference.py of PyTorch classification."""

from __future__ import annotations

from collections.abc import Sequence

from reconv.migrate.flag_tables import epochs, read_flags, steps
from reconv.migrate.programs.base import Program, missing_data, refuse_positional
from reconv.migrate.translation import Translation

_DEFAULT_DATA = "/data/tensorflow/coco2017/ssd_tf_records"
_COCO_TRAIN, _COCO_VAL = 117266, 5000

FLAGS = read_flags("habana_tensorflow", "ssd")


def translate(t: Translation, positional: Sequence[str]) -> None:
    """A command of ssd.py."""
    refuse_positional(t, positional)
    t.apply_table()
    _network(t)
    _training(t)
    if t["data_dir"]:
        t.data(t["data_dir"], "data_dir")
    elif not t["use_fake_data"]:
        missing_data(t, _DEFAULT_DATA)
    if t["no_hpu"]:
        t.explain("no_hpu", "no effect", "the device is chosen by --device; auto finds what this machine has")
    _mode(t)


def _network(t: Translation) -> None:
    t.set("task", "detection")
    t.set("model.name", "ssd_resnet34")
    t.set("data.drop_last", False)
    t.set("data.bad_boxes", "skip")
    t.set("data.empty_images", "drop")
    t.set("data.preprocess.size", 300)
    t.set("data.preprocess.resize", None)
    t.set("augment.crop", "ssd")
    jitter = {"implementation": "tensorflow", "brightness": 0.125, "contrast": 0.5, "saturation": 0.5, "hue": 0.05}
    for name, value in jitter.items():
        t.set(f"augment.color_jitter.{name}", value)
    t.set("detection.max_gt_boxes", 200)
    t.set("precision.mode", t["dtype"], "dtype")
    if t["resnet_checkpoint"]:
        t.set("model.init", t["resnet_checkpoint"], "resnet_checkpoint")
        text = "weights of the backbone: a TensorFlow checkpoint, a weights file or torchvision:resnet34"
        t.explain("resnet_checkpoint", "renamed", text)


def _training(t: Translation) -> None:
    t.set("batch.size", t["batch_size"] * t.num_processes, "batch_size")
    t.set("batch.group", t["batch_size"], "batch_size")
    if t["distributed_bn"]:
        t.set("batch.group", "all", "distributed_bn")
    per_epoch = -(-t["num_examples_per_epoch"] // (t["batch_size"] * t.num_processes))
    if t["steps"] > per_epoch * t["epochs"]:
        t.set("length", steps(t["steps"]), "steps")
        t.explain("epochs", "no effect", "--steps is longer")
    else:
        t.set("length", epochs(t["epochs"]), "epochs")
        if t["steps"] > 0:  # the learning rate follows the step, not the length
            t.option("--stop-after", steps(t["steps"]), "steps")
        else:
            t.explain("steps", "no effect", "0 leaves the length to --epochs")
    t.set("optimizer.momentum", 0.9)
    t.set("optimizer.weight_decay_exclude", "none")
    shift = 1 + t["k"] / 10
    t.set("schedule.name", "multistep")
    t.set("schedule.lr", t["base_lr"], "base_lr")
    t.set("schedule.base_batch_size", 32, "base_lr")
    t.set("schedule.gamma", 0.1)
    t.set("schedule.milestones", [epochs(40 * shift), epochs(50 * shift)], "k")
    t.set("schedule.warmup", epochs(t["lr_warmup_epoch"]), "lr_warmup_epoch")
    t.set("schedule.warmup_from", "zero")
    if t["num_examples_per_epoch"] != _COCO_TRAIN:
        t.set("data.epoch_samples", t["num_examples_per_epoch"], "num_examples_per_epoch")
    else:
        t.explain("num_examples_per_epoch", "no effect", "is counted in the data")
    if t["eval_samples"] != _COCO_VAL:
        t.set("evaluate.num_samples", t["eval_samples"], "eval_samples")
    else:
        t.explain("eval_samples", "no effect", "every image of the validation set counts")
    if t["use_fake_data"]:
        t.set("data.source", "scattered-digits", "use_fake_data")
        t.explain("use_fake_data", "derived", "generated images with boxes")
    if t.is_typed("save_summary_steps"):
        t.set("loggers", ["tensorboard"], "save_summary_steps")
        t.explain("save_summary_steps", "derived", "log.every says how often")


def _mode(t: Translation) -> None:
    first, last = t["profile"]
    if last > 0:
        t.option("--profile", f"{max(1, first)},{last}", "profile")
    else:
        t.explain("profile", "no effect", "0,0 traces nothing, as here")
    t.explain("mode", "same", "reconv train, without evaluations: theirs is --mode eval, afterwards")
    t.always("evaluate.every", "off", "ssd.py evaluates with --mode eval only")
    if t["vis_dataloader"]:
        data = [value for name, value in t.action.options if name == "--data"]
        t.action.verb, t.action.arguments = "data show", [str(data[0] if data else "DATA")]
        if not data:
            t.to_fill.append(("DATA", "the folder of the dataset: generated images cannot be shown"))
        t.action.options = []
        t.explain("vis_dataloader", "renamed", "reconv data show")
    elif t["inference"]:
        _with_weights(t, "predict")
        t.action.arguments.append(t["inference"])
        t.action.options = [("--save-images", "boxes/")]
        t.explain("inference", "renamed", "reconv predict, with the preprocessing of training")
    elif t["mode"] == "eval":
        _with_weights(t, "eval")
        t.action.options = [option for option in t.action.options if option[0] == "--data"]
        t.option("--all", None)
        if t.is_typed("batch_size"):
            t.option("--batch-size", str(t["batch_size"]), "batch_size")
        t.explain("mode", "renamed", "reconv eval --all: every checkpoint in order; without --all the newest")


def _with_weights(t: Translation, verb: str) -> None:
    t.action.verb, t.action.takes_recipe = verb, False
    t.action.arguments = [t["model_dir"] or "RUN"]
    if t["model_dir"]:
        t.explain("model_dir", "renamed", f"the argument of reconv {verb}: a run directory")
    else:
        t.to_fill.append(("RUN", "a run, a checkpoint or a weights file"))


HABANA_SSD = Program(
    "habana-ssd",
    "Habana Model-References, TensorFlow SSD-ResNet34: ssd.py",
    "habana",
    ("ssd.py",),
    FLAGS,
    translate,
    usual=True,
)


def translate_inference(t: Translation, positional: Sequence[str]) -> None:
    """A command of inference.py."""
    refuse_positional(t, positional)
    t.set("model.name", t["model"], "model")
    weights = t["checkpoint_path"] or t["model_path"]
    precision = "bf16" if t["dtype"] == "bfloat16" else "fp32"
    for key in ("checkpoint_path", "model_path"):
        t.explain(key, "renamed", "the argument of the command")
    if t["benchmark"] and not t["accuracy"]:
        t.action.verb = "bench infer"
        if weights:
            t.action.takes_recipe, t.action.arguments = False, [weights]
        t.option("--batches", str(t["batch_size"]), "batch_size")
        t.set("precision.mode", precision, "dtype")
        t.explain("benchmark", "renamed", "reconv bench infer")
        t.explain("dataset_path", "no effect", "images are made on the device; reading is not measured")
        return
    t.action.verb, t.action.takes_recipe = "eval", False
    t.action.arguments = [weights or "RUN"]
    if not weights:
        t.to_fill.append(("RUN", "a run, a checkpoint or a weights file"))
    t.option("--batch-size", str(t["batch_size"]), "batch_size")
    t.option("--precision", precision, "dtype")
    t.explain("accuracy", "renamed", "reconv eval")
    t.explain("benchmark", "renamed", "reconv bench infer, as a second command")
    if t["dataset_path"]:
        t.data(t["dataset_path"], "dataset_path")


HABANA_INFERENCE = Program(
    "habana-inference",
    "Habana Model-References, PyTorch classification: inference.py",
    "habana",
    ("inference.py",),
    read_flags("habana", "inference"),
    translate_inference,
    usual=True,
    help_verb="eval",
)
