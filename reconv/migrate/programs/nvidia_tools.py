"""NVIDIA ConvNets: the tools beside main.py."""

from __future__ import annotations

from collections.abc import Sequence

from reconv.migrate.flag_tables import read_flags
from reconv.migrate.programs.base import Program, nothing_to_do, refuse_positional
from reconv.migrate.programs.nvidia import set_image_size, set_network
from reconv.migrate.translation import Translation


def _network(t: Translation) -> None:
    """The network of the weights, and the size of its images."""
    set_network(t)
    set_image_size(t)
    if t["arch"].startswith("efficientnet"):
        t.set("model.options.norm_eps", 1e-3, "arch")


def _classify(t: Translation, positional: Sequence[str]) -> None:
    refuse_positional(t, positional)
    t.action.verb, t.action.takes_recipe = "predict", False
    _network(t)
    t.action.arguments = [t["pretrained_from_file"] or "WEIGHTS", t["image"] or "IMAGE"]
    for key in ("pretrained_from_file", "image"):
        t.explain(key, "renamed", "an argument of reconv predict")
    if t["pretrained_from_file"] is None:
        t.to_fill.append(("WEIGHTS", "a run, a checkpoint or a weights file"))
    if t["image"] is None:
        t.to_fill.append(("IMAGE", "an image or a folder of images"))
    t.option("--precision", "fp16" if t["precision"] in ("AMP", "FP16") else "fp32", "precision")
    if t["cpu"]:
        t.option("--device", "cpu", "cpu")


CLASSIFY = Program(
    "nvidia-classify",
    "NVIDIA DeepLearningExamples, ConvNets: classify.py",
    "nvidia",
    ("classify.py",),
    read_flags("nvidia", "classify"),
    _classify,
    help_verb="predict",
)


def _to_onnx(t: Translation, positional: Sequence[str]) -> None:
    refuse_positional(t, positional)
    t.action.verb, t.action.takes_recipe = "export", False
    _network(t)
    t.action.arguments = [t["pretrained_from_file"] or "RUN"]
    if t["pretrained_from_file"] is None:
        t.to_fill.append(("RUN", "a run, a checkpoint or a weights file"))
    t.explain("pretrained_from_file", "renamed", "the argument of reconv export")
    t.option("--to", "onnx")
    if t["output"]:
        t.option("--out", t["output"], "output")
    if t.is_typed("batch_size"):
        t.option("--batch", str(t["batch_size"]), "batch_size")


MODEL_TO_ONNX = Program(
    "nvidia-onnx",
    "NVIDIA DeepLearningExamples, ConvNets: model2onnx.py",
    "nvidia",
    ("model2onnx.py",),
    read_flags("nvidia", "onnx"),
    _to_onnx,
    help_verb="export",
)


def _extract(t: Translation, positional: Sequence[str]) -> None:
    refuse_positional(t, positional)
    why = "every checkpoint has model.safetensors, and ema.safetensors with EMA"
    note = "nothing to do: weights are files of their own in every checkpoint"
    nothing_to_do(t, ("checkpoint_path", "weight_path", "ema"), why, note)


CHECKPOINT_TO_MODEL = Program(
    "nvidia-weights",
    "NVIDIA DeepLearningExamples, ConvNets: checkpoint2model.py",
    "nvidia",
    ("checkpoint2model.py",),
    read_flags("nvidia", "weights"),
    _extract,
)
