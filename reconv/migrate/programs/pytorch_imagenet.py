"""pytorch/examples: imagenet/main.py."""

from __future__ import annotations

from collections.abc import Sequence

from reconv.migrate.flag_tables import epochs, read_flags
from reconv.migrate.programs.base import (
    Program,
    own_model,
    refuse_positional,
    resume_checkpoint,
    start_epoch,
    take_data,
)
from reconv.migrate.programs.habana import evaluate_weights
from reconv.migrate.translation import Translation
from reconv.recipe.model_names import MODEL_NAMES

_LAUNCHER = "is set by the launcher"
FLAGS = read_flags("pytorch_examples", "imagenet")


def translate(t: Translation, positional: Sequence[str]) -> None:
    """A command of main.py."""
    t.apply_table()
    t.set("model.name", own_model(t["arch"], MODEL_NAMES, "torchvision"), "arch")
    t.set("length", epochs(t["epochs"]), "epochs")
    _batch(t)
    t.set("schedule.name", "step")
    t.set("schedule.period", "30ep")
    t.set("schedule.gamma", 0.1)
    t.set("optimizer.weight_decay_exclude", "none")
    if t["pretrained"]:
        t.set("model.init", f"torchvision:{t['arch']}", "pretrained")
    if t["evaluate"]:
        evaluate_weights(t, "resume", "evaluate")
    else:
        resume_checkpoint(t)
    start_epoch(t)
    if t["dummy"]:
        t.set("data.source", "synthetic", "dummy")
        refuse_positional(t, positional[1:])
        for word in positional:
            t.positional(word, "no effect", "--dummy generates images")
    else:
        take_data(t, positional)


def _batch(t: Translation) -> None:
    """The global batch: `-b` is that of a process, or with --multiprocessing-distributed that of a machine."""
    if t["multiprocessing_distributed"]:
        machines = max(1, t["world_size"])
        t.set("batch.size", t["batch_size"] * machines, "batch_size", "world_size")
        t.set("batch.group", t["batch_size"], "batch_size")
        t.explain("multiprocessing_distributed", "renamed", "--devices N starts a process for each device")
        t.notes.append(
            f"theirs divides the batch of {t['batch_size']} among the GPUs of a machine, and batch norm sees only the "
            "images of one GPU: set batch.group to their number"
        )
        return
    t.explain("world_size", "no effect", _LAUNCHER)
    t.set("batch.size", t["batch_size"] * t.num_processes, "batch_size")
    t.set("batch.group", t["batch_size"], "batch_size")


PYTORCH_IMAGENET = Program(
    "pytorch-examples",
    "pytorch/examples, imagenet: main.py",
    "reconv",
    ("main.py",),
    FLAGS,
    translate,
    num_positional=1,
    launchers=("torchrun",),
    path=r"examples/imagenet|(^|/)imagenet/main\.py",
)
