"""Graphcore's TensorFlow CNNs: the tools beside train.py."""

from __future__ import annotations

from collections.abc import Sequence

from reconv.migrate.flag_tables import epochs, read_flags
from reconv.migrate.programs.base import Program, nothing_to_do, refuse_positional
from reconv.migrate.programs.graphcore import FLAGS, graphcore_config, resume_run
from reconv.migrate.programs.graphcore_network import translate_network
from reconv.migrate.translation import Translation


def _restore(t: Translation, positional: Sequence[str]) -> None:
    refuse_positional(t, positional)
    resume_run(t)
    if not t["restore_path"]:
        t.to_fill.append(("RUN", "a run directory"))


RESTORE = Program(
    "graphcore-restore",
    "Graphcore examples, TensorFlow CNNs: restore.py",
    "graphcore",
    ("restore.py",),
    read_flags("graphcore", "restore"),
    _restore,
    usual=True,
    help_verb="resume",
)


def _validate(t: Translation, positional: Sequence[str]) -> None:
    refuse_positional(t, positional)
    t.action.verb, t.action.takes_recipe = "eval", False
    path = t["restore_path"] or "RUN"
    t.action.arguments = [path]
    if not t["restore_path"]:
        t.to_fill.append(("RUN", "a run, a checkpoint or a weights file"))
    is_file = "ckpt" in path.rpartition("/")[2]
    if not is_file:
        t.option("--all", None)
    t.explain("restore_path", "renamed", f"reconv eval {path}{'' if is_file else ' --all: every checkpoint'}")
    if t["inference"]:
        t.action.verb, t.action.options = "bench infer", []
        t.explain("inference", "renamed", "reconv bench infer")
        t.explain("repeat", "no effect", "several windows are always measured")
    if t["data_dir"] and not t["inference"]:
        t.data(t["data_dir"], "data_dir")
    if t["inference"]:
        t.explain("data_dir", "no effect", "inference is measured on generated images")
    if t["batch_size"]:
        name = "--batches" if t["inference"] else "--batch-size"
        t.option(name, str(t["batch_size"]), "batch_size")
    for item in FLAGS:
        if t.is_typed(item.key) and item.key not in ("restore_path", "data_dir", "batch_size") and not item.none:
            t.explain(item.key, "no effect", "is stored with the run")


VALIDATION = Program(
    "graphcore-validation",
    "Graphcore examples, TensorFlow CNNs: validation.py",
    "graphcore",
    ("validation.py",),
    (*FLAGS, *read_flags("graphcore", "validation")),
    _validate,
    configure=graphcore_config,
    usual=True,
    help_verb="eval",
)


def _serve(t: Translation, positional: Sequence[str]) -> None:
    """inference_embedded.py: threads that send batches to a compiled network."""
    refuse_positional(t, positional)
    t.action.verb = "bench infer"
    if t["restore_path"]:
        t.action.takes_recipe, t.action.arguments = False, [t["restore_path"]]
        t.explain("restore_path", "renamed", "the argument of reconv bench infer: a run of Reconv")
    else:
        translate_network(t, is_cifar=(t["dataset"] or "").startswith("cifar"))
    t.explain("data_dir", "no effect", "inference is measured on generated images; --data DIR reads files")
    if t["num_inference_thread"]:
        t.option("--concurrency", str(t["num_inference_thread"]), "num_inference_thread")
    if t["batch_size"]:
        t.option("--batches", str(t["batch_size"]), "batch_size")
    for item in FLAGS:
        if t.is_typed(item.key) and item.key not in ("restore_path", "data_dir", "batch_size") and not item.none:
            t.explain(item.key, "no effect", "is for training, or stored with the run")


EMBEDDED = Program(
    "graphcore-inference",
    "Graphcore examples, TensorFlow CNNs: inference_embedded.py",
    "graphcore",
    ("inference_embedded.py",),
    (*FLAGS, *read_flags("graphcore", "inference")),
    _serve,
    configure=graphcore_config,
    usual=True,
    help_verb="bench infer",
)


def _average(t: Translation, positional: Sequence[str]) -> None:
    refuse_positional(t, positional)
    t.action.verb, t.action.takes_recipe = "average", False
    t.action.arguments = [t["restore_path"] or "RUN"]
    t.explain("restore_path", "renamed", "the argument of reconv average: a run directory")
    t.option("--mode", t["mode"], "mode")
    if t["mode"] == "exponential":
        t.option("--decay", f"{t['decay']:g}", "decay")
        t.explain("N", "no effect", "the exponential average is over all checkpoints")
    else:
        t.option("--last", epochs(t["N"]), "N")
        t.explain("decay", "no effect", "is for --mode exponential")
    if t["filename"]:
        t.option("--out", t["filename"], "filename")
    if t["discard_last"]:
        t.option("--discard-last", str(t["discard_last"]), "discard_last")
    else:
        t.explain("discard_last", "no effect", "0 leaves out none, as here")


WEIGHT_AVERAGE = Program(
    "graphcore-average",
    "Graphcore examples, TensorFlow CNNs: weight_avg.py",
    "graphcore",
    ("weight_avg.py",),
    read_flags("graphcore", "average"),
    _average,
    usual=True,
    help_verb="average",
)


def _upload(t: Translation, positional: Sequence[str]) -> None:
    refuse_positional(t, positional)
    note = "W&B is written during training: reconv train RECIPE --set loggers=wandb"
    nothing_to_do(t, ("base_folder", "name", "project"), "is for uploading afterwards", note)


UPLOAD = Program(
    "graphcore-upload",
    "Graphcore examples, TensorFlow CNNs: upload_run.py",
    "graphcore",
    ("upload_run.py",),
    read_flags("graphcore", "upload"),
    _upload,
    usual=True,
)
