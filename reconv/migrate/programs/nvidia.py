"""NVIDIA DeepLearningExamples, PyTorch/Classification: main.py of 2019 (RN50v1.5) and of ConvNets."""

from __future__ import annotations

from collections.abc import Sequence

from reconv.migrate.flag_tables import epochs, read_flags, steps
from reconv.migrate.programs.base import Program, resume_checkpoint, start_epoch, take_data
from reconv.migrate.translation import Translation

# Their name -> ours and options.
ARCHITECTURES: dict[str, tuple[str, dict[str, object]]] = {
    **{f"resnet{depth}": (f"resnet{depth}", {}) for depth in (18, 34, 50, 101, 152)},
    "resnext50-32x4d": ("resnext50_32x4d", {}),
    "resnext101-32x4d": ("resnext101_32x4d", {}),
    "resnext101-32x8d": ("resnext101_32x8d", {}),
    "se-resnext101-32x4d": ("se_resnext101_32x4d", {}),
    "efficientnet-b0": ("efficientnet_b0", {"dropout": 0.2, "drop_connect": 0.0}),
    "efficientnet-b4": ("efficientnet_b4", {"dropout": 0.4, "drop_connect": 0.2}),
    "efficientnet-widese-b0": ("efficientnet_b0", {"dropout": 0.2, "drop_connect": 0.0, "se_base": "expanded"}),
    "efficientnet-widese-b4": ("efficientnet_b4", {"dropout": 0.4, "drop_connect": 0.2, "se_base": "expanded"}),
    "efficientnet-quant-b0": ("efficientnet_b0", {"dropout": 0.2, "drop_connect": 0.0}),
    "efficientnet-quant-b4": ("efficientnet_b4", {"dropout": 0.4, "drop_connect": 0.2}),
}
FLAGS_2019 = read_flags("nvidia", "shared", "main_2019")
FLAGS_CONVNETS = read_flags("nvidia", "shared", "convnets")
_DALI = "chooses what decodes images; --set data.backend=gpu uses the GPU's JPEG decoder, the default is as exact"


def translate_2019(t: Translation, positional: Sequence[str]) -> None:
    """A command of the program of 2019."""
    init = "fan_in" if t["model_config"] in ("fanin", "grp-fanin") else "fan_out"
    t.set("model.options.conv_init", init, "model_config")
    _translate(t, positional)
    if t.is_typed("gather_checkpoints"):
        t.set("save.keep_last", 10, "gather_checkpoints")


def translate_convnets(t: Translation, positional: Sequence[str]) -> None:
    """A command of the later program, which trains EfficientNets, too."""
    config = {"classic": "fan_out", "fanin": "fan_in"}.get(t["model_config"] or "")
    t.set("model.options.conv_init", config or t["conv_init"], "model_config" if config else "conv_init")
    if config and t.is_typed("conv_init"):
        t.explain("conv_init", "no effect", "--model-config decides")
    _translate(t, positional)
    _convnets_network(t)
    _convnets_training(t)


def _translate(t: Translation, positional: Sequence[str]) -> None:
    """Translate what both programs share."""
    set_network(t)
    t.apply_table()
    t.set("length", epochs(t["epochs"]), "epochs")
    set_batch(t)
    _schedule(t)
    t.set("optimizer.weight_decay_exclude", "none" if t["bn_weight_decay"] else "norm", "bn_weight_decay")
    t.set("augment.mixup.alpha", t["mixup"], "mixup")
    if t["mixup"] > 0:
        t.set("augment.mixup.mode", "batch", "mixup")
        t.set("augment.mixup.partner", "permutation", "mixup")
    _precision(t)
    if t.is_on_command_line("raport_file"):
        t.option("--json", t["raport_file"], "raport_file")
    if t["no_checkpoints"]:
        t.set("save.every", "off", "no_checkpoints")
    if t["training_only"]:
        t.set("evaluate.every", "off", "training_only")
    _mode(t)
    take_data(t, positional)


def set_network(t: Translation) -> None:
    """The network that --arch names, with its options."""
    name, options = ARCHITECTURES[t["arch"]]
    t.set("model.name", name, "arch")
    for key, value in options.items():
        t.set(f"model.options.{key}", value, "arch")


def set_image_size(t: Translation) -> None:
    """The size of images: --image-size, or that of the network."""
    size = t["image_size"] or (380 if t["arch"].endswith("b4") else 224)
    t.set("data.preprocess.size", size, "image_size")
    default = size == 224 and not t["arch"].startswith("efficientnet")
    t.set("data.preprocess.resize", 256 if default else "auto-plus32", "image_size")


def set_batch(t: Translation) -> None:
    """The global batch: per process times processes, or the batch of the optimizer."""
    size, target = t["batch_size"], t["optimizer_batch_size"]
    total = size * t.num_processes
    if target > 0:
        total = max(1, target // total) * total
        t.set("batch.size", total, "optimizer_batch_size", "batch_size")
        if total != target:
            t.notes.append(f"{target} is not a multiple of {size} x {t.num_processes}: their step has {total} images")
    else:
        t.set("batch.size", total, "batch_size")
    t.set("batch.group", size, "batch_size")


def _schedule(t: Translation) -> None:
    name = t["lr_schedule"]
    t.set("schedule.name", "multistep" if name == "step" else name, "lr_schedule")
    if name == "step":
        t.set("schedule.milestones", ["30ep", "60ep", "80ep"], "lr_schedule")
        t.set("schedule.gamma", 0.1, "lr_schedule")
    t.set("schedule.interval", "epoch")
    t.set("schedule.warmup", epochs(t["warmup"]), "warmup")


def _precision(t: Translation) -> None:
    half = [key for key in ("fp16", "amp") if t.values.get(key)]
    t.set("precision.mode", "fp16" if half else "fp32", *(half or ["amp"]))
    scale = "dynamic" if t["dynamic_loss_scale"] else t["static_loss_scale"]
    if half:
        key = "dynamic_loss_scale" if t["dynamic_loss_scale"] else "static_loss_scale"
        t.set("precision.loss_scale", scale, key)
        if t["dynamic_loss_scale"]:
            t.explain("static_loss_scale", "no effect", "--dynamic-loss-scale overrides it")
        return
    for key in ("static_loss_scale", "dynamic_loss_scale"):
        t.explain(key, "no effect", "without --amp or --fp16 there is no loss scale")


def _mode(t: Translation) -> None:
    """Evaluation, a few steps, or a resumed run."""
    start_epoch(t)
    if t["evaluate"]:
        _evaluate(t)
        return
    if t["prof"] > 0:
        t.option("--stop-after", steps(t["prof"]), "prof")
        t.notes.append("to measure speed, rather than train: reconv bench train")
    elif t.is_typed("prof"):
        t.explain("prof", "no effect", "-1 runs all steps, as here")
    resume_checkpoint(t)


def _evaluate(t: Translation) -> None:
    weights = t["resume"] or t.values.get("pretrained_from_file") or t.values.get("pretrained_weights")
    if weights is None and not t.values.get("pretrained"):
        t.action.verb = "bench infer"
        t.option("--batches", str(t["batch_size"]), "batch_size")
        t.explain("evaluate", "renamed", "reconv bench infer: without a checkpoint only the speed means something")
        if t["prof"] > 0:
            t.option("--iterations", str(t["prof"]), "prof")
        return
    t.action.verb, t.action.takes_recipe = "eval", False
    t.action.arguments.append(weights or "RUN")
    t.option("--batch-size", str(t["batch_size"]), "batch_size")
    t.explain("evaluate", "renamed", "reconv eval, which counts every image once")
    if t["resume"]:
        t.explain("resume", "renamed", f"reconv eval {t['resume']}")
    if t["prof"] > 0:
        t.option("--samples", str(t["prof"] * t["batch_size"] * t.num_processes), "prof")


def _convnets_network(t: Translation) -> None:
    is_efficientnet = t["arch"].startswith("efficientnet")
    if is_efficientnet:
        t.set("model.options.bn_momentum", t["bn_momentum"] or 0.01, "bn_momentum")
        t.set("model.options.norm_eps", t["bn_epsilon"] or 1e-3, "bn_epsilon")
        t.set("model.options.drop_connect_per", "batch", "arch")
        t.settings.pop("model.options.conv_init", None)  # theirs and ours are the same scheme for EfficientNets
        t.explain("conv_init", "no effect", "EfficientNets here always have fan_in for depthwise convolutions")
        t.explain("model_config", "no effect", "EfficientNets have one initialization")
        if t["survival_prob"] is not None:
            t.set("model.options.drop_connect", round(1 - t["survival_prob"], 12), "survival_prob")
        if t["dropout"] is not None:
            t.set("model.options.dropout", t["dropout"], "dropout")
    else:
        for key in ("bn_momentum", "bn_epsilon", "survival_prob", "dropout"):
            t.explain(key, "not supported", f"is for EfficientNets, and {t['arch']} is none; leave it out")
    if t["last_bn_0_init"]:
        t.set("model.options.zero_gamma", "always", "last_bn_0_init")
    else:
        t.explain("last_bn_0_init", "no effect", "is off here, too")
    if t["pretrained"]:
        t.explain("pretrained", "not supported", "NVIDIA's weights are not downloaded; use --init FILE")
    if t["arch"].startswith("efficientnet-quant"):
        t.notes.append(
            "quantization-aware training is not supported: reconv export --precision int8 quantizes a trained network"
        )
    set_image_size(t)
    t.set(
        "data.preprocess.interpolation",
        "bicubic" if t["interpolation"] == "bicubic" else "bilinear",
        "interpolation",
    )


def _convnets_training(t: Translation) -> None:
    if "synt" in t["data_backend"]:
        t.set("data.source", "synthetic", "data_backend")
        t.explain("data_backend", "renamed", "the folder is not read")
    else:
        t.explain("data_backend", "no effect", _DALI)
    if t["lr_schedule"] in ("cosine", "linear"):
        t.set("schedule.end_lr", t["end_lr"], "end_lr")
    else:
        t.explain("end_lr", "no effect", "the step schedule has no final learning rate")
    t.set("optimizer.name", t["optimizer"], "optimizer")
    if t["optimizer"] == "rmsprop":
        t.set("optimizer.alpha", t["rmsprop_alpha"], "rmsprop_alpha")
        t.set("optimizer.eps", t["rmsprop_eps"], "rmsprop_eps")
    else:
        for key in ("rmsprop_alpha", "rmsprop_eps"):
            t.explain(key, "no effect", "the optimizer is not rmsprop")
    if t["augmentation"]:
        t.set("augment.auto_augment", "autoaugment-v0", "augmentation")
    if t["use_ema"] is not None:
        t.set("ema.decay", t["use_ema"], "use_ema")
    if t["early_stopping_patience"] > 0:
        t.set("early_stopping.patience", t["early_stopping_patience"], "early_stopping_patience")
    else:
        t.explain("early_stopping_patience", "no effect", "-1 is off, as here")
    if t["run_epochs"] > 0 and t.action.verb == "train":
        t.option("--stop-after", epochs(t["run_epochs"]), "run_epochs")
    else:
        t.explain("run_epochs", "no effect", "-1 runs all epochs, as here")
    keeps = t["gather_checkpoints"]
    if keeps > 0:
        t.set("save.keep_last", keeps, "gather_checkpoints")
    else:
        t.explain("gather_checkpoints", "no effect", "save.keep_last decides; the best and the last are kept")
    t.set("engine.channels_last", "on" if t["memory_format"] == "nhwc" else "auto", "memory_format")
    if t["jit"] == "script":
        t.set("engine.compile", "on", "jit")
    else:
        t.explain("jit", "no effect", "TorchScript is off here, too; engine.compile decides")
    affinity = t["gpu_affinity"]
    t.set("engine.cpu_affinity", "any" if affinity == "none" else "near", "gpu_affinity")


def translate_quantized(t: Translation, positional: Sequence[str]) -> None:
    """Quantization-aware training, which is not supported: the network is trained without."""
    translate_convnets(t, positional)
    t.notes.append("after training, reconv export RUN --to onnx --precision int8 quantizes the network")


NVIDIA_2019 = Program(
    "nvidia",
    "NVIDIA DeepLearningExamples, RN50v1.5 (2019): main.py",
    "nvidia",
    ("main.py",),
    FLAGS_2019,
    translate_2019,
    path=r"RN50v1\.5",
    num_positional=1,
    launchers=("multiproc.py",),
    usual=True,
)
NVIDIA_CONVNETS = Program(
    "nvidia-convnets",
    "NVIDIA DeepLearningExamples, ConvNets: main.py",
    "nvidia",
    ("main.py",),
    FLAGS_CONVNETS,
    translate_convnets,
    path=r"ConvNets",
    num_positional=1,
    launchers=("multiproc.py",),
)
NVIDIA_QUANTIZED = Program(
    "nvidia-quantized",
    "NVIDIA DeepLearningExamples, ConvNets: quant_main.py",
    "nvidia",
    ("quant_main.py",),
    read_flags("nvidia", "shared", "convnets", "quantized"),
    translate_quantized,
    num_positional=1,
    usual=True,
)
