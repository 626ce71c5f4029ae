"""Training of detectors: NVIDIA's SSD300 (main.py) and torchvision's references/detection/train.py.

Both train networks that are not here. The one detector here, SSD with a ResNet-34 backbone, takes their place where
theirs is an SSD, too, and the row of the network says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from reconv.core.errors import UsageError
from reconv.migrate.flag_tables import epochs, read_flags, steps
from reconv.migrate.programs.base import Program, missing_data, refuse_positional, take_device
from reconv.migrate.translation import Translation

_OURS = "the detector here is SSD300 with a ResNet-34 backbone: other accuracy, other weights"
_OTHER_WEIGHTS = "has weights of another network"
_JITTER = {"brightness": 0.125, "contrast": 0.5, "saturation": 0.5, "hue": 0.05}
_TORCHVISION_SSDS = ("ssd300_vgg16", "ssdlite320_mobilenet_v3_large")


def _detector(t: Translation, model: str, group: int | str, *keys: str) -> None:
    """Settings common to every SSD here, and the global batch."""
    t.set("task", "detection")
    t.set("model.name", "ssd_resnet34", model)
    t.set("data.drop_last", False)
    t.set("data.bad_boxes", "skip")
    t.set("data.empty_images", "drop")
    t.set("data.preprocess.size", 300)
    t.set("data.preprocess.resize", None)
    t.set("detection.max_gt_boxes", 200)
    t.set("length", epochs(t["epochs"]), "epochs")
    t.set("batch.size", t["batch_size"] * t.num_processes, "batch_size")
    t.set("batch.group", group, *keys)


def _evaluate(t: Translation, weights: str, mode: str, batch_size: int) -> None:
    """Evaluation only: of a run of Reconv, since their checkpoints are of another network."""
    t.action.verb, t.action.takes_recipe, t.action.arguments = "eval", False, ["RUN"]
    t.to_fill.append(("RUN", f"a run or a checkpoint of Reconv: theirs {_OTHER_WEIGHTS}"))
    t.explain(mode, "renamed", "reconv eval, with all of COCO's metrics")
    t.explain(weights, "not supported", _OTHER_WEIGHTS)
    t.option("--batch-size", str(batch_size))


def _color_jitter(t: Translation, *keys: str) -> None:
    t.set("augment.color_jitter.implementation", "tensorflow", *keys)
    for name, value in _JITTER.items():
        t.set(f"augment.color_jitter.{name}", value, *keys)


def translate_nvidia(t: Translation, positional: Sequence[str]) -> None:
    """A command of NVIDIA's main.py."""
    refuse_positional(t, positional)
    t.apply_table()
    _detector(t, "backbone", t["batch_size"], "batch_size")
    t.explain("backbone", "not supported", _OURS)
    t.notes.append(f"theirs is SSD300 with {t['backbone']}; {_OURS}")
    t.set("augment.crop", "ssd")
    _color_jitter(t)
    t.set("schedule.base_batch_size", 32, "learning_rate")
    t.set("schedule.name", "multistep")
    t.set("schedule.milestones", [epochs(point) for point in t["multistep"]], "multistep")
    t.set("schedule.gamma", 0.1)
    t.set("schedule.warmup", "0ep" if t["warmup"] is None else steps(t["warmup"]), "warmup")
    if t["warmup"]:
        t.set("schedule.warmup_from", "zero")
    t.set("optimizer.weight_decay_exclude", "norm-bias")
    full = "fp32" if t["no_allow_tf32"] else "tf32"
    mode = full if t["no_amp"] else "fp16"
    t.set("precision.mode", mode, "no_amp" if t["no_amp"] else "amp", "no_allow_tf32")
    t.explain("allow_tf32", "no effect", "is their default; with --no-amp, precision.mode tf32")
    t.set("engine.channels_last", "on" if t["data_layout"] == "channels_last" else "off", "data_layout")
    if t["backbone_path"]:
        t.set("model.init", t["backbone_path"], "backbone_path")
        t.explain("backbone_path", "renamed", "weights of a ResNet-34")
    else:
        t.set("model.init", "torchvision:resnet34", "torchvision_weights_version")
    if t.is_typed("evaluation"):
        text = "evaluation is at regular intervals: --set evaluate.every=5ep, with evaluate.offset"
        t.explain("evaluation", "not supported", text, changes_result=False)
    if t["json_summary"]:
        t.option("--json", t["json_summary"], "json_summary")
    if t["no_cuda"]:
        t.option("--device", "cpu", "no_cuda")
    if t["data"]:
        t.data(t["data"], "data")
    else:
        missing_data(t)
    _nvidia_mode(t)


def _nvidia_mode(t: Translation) -> None:
    benchmarks = {"benchmark-training": "bench train", "benchmark-inference": "bench infer"}
    t.explain("mode", "renamed", "reconv train")
    if t["mode"] in benchmarks:
        t.action.verb = benchmarks[t["mode"]]
        t.action.options = []
        if t["mode"] == "benchmark-inference":
            t.option("--batches", str(t["eval_batch_size"]), "eval_batch_size")
        t.explain("mode", "renamed", f"reconv {t.action.verb}, on generated images")
        t.explain("data", "no effect", "is measured on generated images")
    elif t["mode"] == "evaluation":
        _evaluate(t, "checkpoint", "mode", t["eval_batch_size"])
    elif t["checkpoint"]:
        t.explain("checkpoint", "not supported", _OTHER_WEIGHTS)
    t.explain("benchmark_iterations", "no effect", "reconv bench measures several windows; --iterations sets them")


def translate_torchvision(t: Translation, positional: Sequence[str]) -> None:
    """A command of torchvision's train.py."""
    refuse_positional(t, positional)
    if t["model"] not in _TORCHVISION_SSDS:
        raise UsageError(
            f"{t['model']} cannot be trained here",
            why="the only detector is SSD300 with a ResNet-34 backbone",
            hint="reconv train ssd-resnet34 --data DIR, or finetune-detection for boxes of your own",
        )
    t.apply_table()
    _detector(t, "model", "all")
    t.explain("model", "not supported", _OURS)
    t.notes.append(f"theirs is {t['model']}; {_OURS}")
    t.explain("dataset", "no effect", "the format is detected from the files")
    _torchvision_training(t)
    if t["data_augmentation"] in ("ssd", "ssdlite"):
        t.set("augment.crop", "ssd", "data_augmentation")
        if t["data_augmentation"] == "ssd":
            t.set("augment.zoom_out.probability", 0.5, "data_augmentation")
            _color_jitter(t, "data_augmentation")
    else:
        t.set("augment.crop", "none", "data_augmentation")
        if t["data_augmentation"] != "hflip":
            t.explain(
                "data_augmentation", "not supported", "only flips are left of it: it is hflip, ssd or ssdlite here"
            )
    t.set("precision.mode", "fp16" if t["amp"] else "fp32", "amp")
    if t["weights_backbone"]:
        t.set("model.init", "torchvision:resnet34", "weights_backbone")
    take_device(t)
    if t.is_typed("output_dir"):
        t.run_folder(t["output_dir"], "output_dir")
    if t["data_path"]:
        t.data(t["data_path"], "data_path")
    else:
        missing_data(t)
    if t["test_only"]:
        _evaluate(t, "resume", "test_only", t["batch_size"])
    elif t["resume"]:
        t.explain("resume", "not supported", _OTHER_WEIGHTS)


def _torchvision_training(t: Translation) -> None:
    t.set("optimizer.name", t["opt"], "opt")
    if t["opt"] == "adamw":
        t.explain("momentum", "no effect", "adamw has betas")
    else:
        t.set("optimizer.momentum", t["momentum"], "momentum")
    norm = t["norm_weight_decay"]
    t.set("optimizer.weight_decay_exclude", "norm" if norm == 0 else "none", "norm_weight_decay")
    if norm not in (None, 0, t["wd"]):
        t.settings.pop("optimizer.weight_decay_exclude")
        t.explain(
            "norm_weight_decay", "not supported", f"norms have all of {t['wd']} or none; see weight_decay_exclude"
        )
    if t["lr_scheduler"] == "multisteplr":
        t.set("schedule.name", "multistep", "lr_scheduler")
        t.set("schedule.milestones", [epochs(point) for point in t["lr_steps"]], "lr_steps")
        t.set("schedule.gamma", t["lr_gamma"], "lr_gamma")
    else:
        t.set("schedule.name", "cosine", "lr_scheduler")
        for key in ("lr_steps", "lr_gamma"):
            t.explain(key, "no effect", "cosineannealinglr does not use it")
    # Theirs warms up for 1,000 steps of the first epoch, from a thousandth.
    t.set("schedule.warmup", steps(1000))
    t.set("schedule.warmup_from", "zero")


NVIDIA_SSD = Program(
    "nvidia-ssd",
    "NVIDIA DeepLearningExamples, SSD300: main.py",
    "nvidia",
    ("main.py",),
    read_flags("nvidia_ssd", "ssd"),
    translate_nvidia,
    required="data",
    launchers=("torchrun",),
    path=r"Detection/SSD",
)
TORCHVISION_DETECTION = Program(
    "torchvision-detection",
    "torchvision, references/detection: train.py",
    "torchvision",
    ("train.py",),
    read_flags("torchvision", "detection"),
    translate_torchvision,
    required="model",
    launchers=("torchrun",),
    path=r"references/detection",
)
