"""Rules of the engine, precision, memory and pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from reconv.recipe.rules.contradiction import Contradiction

if TYPE_CHECKING:
    from reconv.recipe.schema import Recipe


def engine_rules(recipe: Recipe) -> Iterator[Contradiction]:
    engine = recipe.engine
    if engine.divergence.policy == "rewind" and (recipe.save.every == "off" or not recipe.save.keep_best):
        text = "needs the best checkpoint; set save.every and save.keep_best"
        yield Contradiction(("engine.divergence.policy", "save.every"), text)
    if engine.fused_kernels == "on" and engine.compile == "on":
        text = "cannot be combined with engine.compile: on; set one of them"
        yield Contradiction(("engine.fused_kernels", "engine.compile"), text)
    if engine.fused_kernels == "on" and not recipe.precision.follows_autocast:
        text = "needs a precision.mode and precision.ops that leave each operation's dtype to torch"
        yield Contradiction(("engine.fused_kernels", "precision.mode"), text)
    if engine.cudnn_benchmark == "on" and engine.deterministic:
        text = "may choose another algorithm in each run, but engine.deterministic needs the same one"
        yield Contradiction(("engine.cudnn_benchmark", "engine.deterministic"), text)
    if engine.verify != "off":
        yield from _verify_rules(recipe)
    if recipe.profile != "off" and recipe.profile[0] > recipe.profile[1]:
        text = f"ends at step {recipe.profile[1]}, before its first step {recipe.profile[0]}"
        yield Contradiction(("profile",), text)
    if len(set(recipe.loggers)) < len(recipe.loggers):
        yield Contradiction(("loggers",), f"contains a duplicate: {', '.join(recipe.loggers)}")


def _verify_rules(recipe: Recipe) -> Iterator[Contradiction]:
    """Find what cannot be computed again with the same bits from a copy of the state."""
    not_supported = {
        "engine.cudnn_benchmark": (
            recipe.engine.cudnn_benchmark == "on",
            "may choose another algorithm on each device",
        ),
        "parallel.pipeline_stages": (recipe.parallel.pipeline_stages > 1, "no rank has the whole model"),
        "memory.shard_optimizer": (recipe.memory.shard_optimizer, "each rank has another part of the state"),
        "memory.offload_optimizer": (recipe.memory.offload_optimizer, "the state is not on one device"),
        "data.preload": (recipe.data.preload == "device", "images on the device have no digests"),
        "model.freeze_until": (recipe.model.freeze_until != "off", "the run could not go back past that step"),
    }
    for other, (is_given, why) in not_supported.items():
        if is_given:
            yield Contradiction((other, "engine.verify"), f"is not supported with engine.verify: {why}")


def precision_rules(recipe: Recipe) -> Iterator[Contradiction]:
    precision, ops = recipe.precision, recipe.precision.ops
    low_precision = "modes with a dtype below fp32"
    given = {
        "loss_scale": (precision.loss_scale != "dynamic", precision.uses_loss_scale, "fp16, 16.16 and 16.32"),
        "rounding": (precision.rounding != "auto", precision.mode == "16.16", "16.16, with half-precision weights"),
        "ops": (bool(ops.float32 or ops.low_precision), precision.has_low_precision, low_precision),
        "reduced_precision_reduction": (
            precision.reduced_precision_reduction == "on",
            precision.has_low_precision,
            low_precision,
        ),
    }
    for name, (is_given, is_used, modes) in given.items():
        if is_given and not is_used:
            text = f"is for {modes}, but precision.mode is {precision.mode}"
            yield Contradiction((f"precision.{name}", "precision.mode"), text)
    for name in sorted(set(ops.float32) & set(ops.low_precision)):
        text = f"{name} is in precision.ops.low_precision, too; remove one of them"
        yield Contradiction(("precision.ops.float32", "precision.ops.low_precision"), text)
    for name in sorted(set(ops.low_precision) & {"cross_entropy", "nll_loss"}):
        yield Contradiction(("precision.ops.low_precision",), f"cannot contain {name}: the loss is always float32")


def memory_rules(recipe: Recipe) -> Iterator[Contradiction]:
    memory, compiles = recipe.memory, recipe.engine.compile == "on"
    checkpoints = memory.activation_checkpointing != "off"
    if memory.activation_checkpointing == ():
        yield Contradiction(("memory.activation_checkpointing",), "names no stage; write off to switch it off")
    if checkpoints and compiles:
        yield Contradiction(
            ("memory.activation_checkpointing", "engine.compile"),
            "cannot be combined with engine.compile: on, which chooses what to recompute itself",
        )
    for field, is_given in (("memory.activation_checkpointing", checkpoints), ("engine.compile", compiles)):
        if memory.checkpoint_segments and is_given:
            text = "cannot be combined with memory.checkpoint_segments, which chooses what to recompute"
            yield Contradiction((field, "memory.checkpoint_segments"), text)
    if memory.shard_optimizer and recipe.precision.mode == "16.16":
        yield Contradiction(("memory.shard_optimizer", "precision.mode"), "is not supported with precision.mode 16.16")
    if recipe.optimizer.momentum == 0 and recipe.optimizer.name in ("sgd", "lars"):
        for name in ("shard_optimizer", "offload_optimizer"):
            if getattr(memory, name):
                text = "has no effect: without optimizer.momentum the optimizer has no state"
                yield Contradiction((f"memory.{name}", "optimizer.momentum"), text)
    if recipe.engine.cuda_graphs == "on" and memory.offload_optimizer:
        text = "copies from host memory, which engine.cuda_graphs: on cannot capture"
        yield Contradiction(("memory.offload_optimizer", "engine.cuda_graphs"), text)


def pipeline_rules(recipe: Recipe) -> Iterator[Contradiction]:
    field, parallel = "parallel.pipeline_stages", recipe.parallel
    if parallel.pipeline_stages == 1:
        if parallel.pipeline_splits:
            yield Contradiction(
                ("parallel.pipeline_splits", field),
                f"splits the model over the devices of a pipeline, but {field} is 1; to recompute activations "
                "segment by segment on one device use memory.checkpoint_segments",
            )
        return
    if len(parallel.pipeline_splits) >= parallel.pipeline_stages:
        yield Contradiction(
            ("parallel.pipeline_splits", field),
            f"names {len(parallel.pipeline_splits)} stages, but {parallel.pipeline_stages} devices need "
            f"{parallel.pipeline_stages - 1}; several parts per device are not supported",
        )
    engine, memory, model = recipe.engine, recipe.memory, recipe.model
    frozen = "a frozen part has no gradients to send"
    not_supported = {
        "task": (recipe.task == "detection", "only classification is supported"),
        "parallel.reduce": (parallel.reduce == "ordered", "gradients cannot be summed group by group; use fast"),
        "parallel.gradient_compression": (parallel.gradient_compression != "off", "gradients are not compressed"),
        "memory.activation_checkpointing": (memory.activation_checkpointing != "off", "activations are kept"),
        "memory.checkpoint_segments": (bool(memory.checkpoint_segments), "activations are kept"),
        "engine.compile": (engine.compile == "on", "parts of a model are not compiled"),
        "engine.fused_kernels": (engine.fused_kernels == "on", "fused blocks pass on more than one tensor"),
        "engine.cuda_graphs": (engine.cuda_graphs == "on", "a pipeline cannot be captured"),
        "distill.teacher": (recipe.distill.teacher is not None, "the teacher is not split"),
        "model.freeze_backbone": (model.freeze_backbone, frozen),
        "model.freeze_until": (model.freeze_until != "off", frozen),
        "model.trainable": (bool(model.trainable), frozen),
        "data.bad_images": (recipe.data.bad_images.limit > 0, "several processes would count the same file"),
        "batch.group": (recipe.batch.group == "micro", "groups must not depend on the devices; give a size"),
    }
    for other, (is_given, why) in not_supported.items():
        if is_given:
            yield Contradiction((other, field), f"is not supported with {field} above 1: {why}")
