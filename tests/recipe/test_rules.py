"""Every rule on combinations of fields, and the wording of its message."""

from __future__ import annotations

from pathlib import Path

import pytest

from reconv.core.errors import RecipeError
from reconv.recipe.loader import dump, load
from reconv.recipe.schema import Recipe
from reconv.recipe.units import Duration

DETECTION = "task: detection\ndata: {preprocess: {resize: null, size: 300}}\naugment: {crop: ssd}\n"
PIPELINE = "parallel: {pipeline_stages: 2, pipeline_splits: [layer2.0]"
MESSAGES = [  # recipe, message without its line number
    ("length: 10%", "length: must be in epochs or steps"),
    ("length: 0ep", "length: must be longer than 0ep"),
    ("log: {every: 0step}", "log.every: must be longer than 0step"),
    ("save: {every: 0ep}", "save.every: must be longer than 0ep; write off to switch it off"),
    ("evaluate: {every: 5min}", "evaluate.every: cannot be in minutes (5min)"),
    ("schedule: {decay_until: 3min}", "schedule.decay_until: cannot be in minutes"),
    ("augment: {progressive_resizing: [[5min, 64]]}", "augment.progressive_resizing: cannot be in minutes"),
    ("save: {every: off, keep_at: [3ep]}", "save.keep_at: keeps checkpoints, but save.every: off writes none"),
    ("model: {freeze_backbone: true}", "model.freeze_backbone: would train a head on a random backbone"),
    ("model: {trainable: [fc.*]}", "model.trainable: would leave the other weights random"),
    ("model: {trainable: [fc.*], freeze_backbone: true, init: a.pth}", "model.freeze_backbone: trains only the head"),
    ("model: {freeze_until: 2ep}", "model.freeze_until: would train a head on a random backbone"),
    ("model: {freeze_until: 0ep, init: a.pth}", "model.freeze_until: must be longer than 0ep; write off"),
    ("model: {freeze_until: 2min, init: a.pth}", "model.freeze_until: cannot be in minutes (2min)"),
    ("model: {freeze_until: 2ep, freeze_backbone: true, init: a.pth}", "model.freeze_until: trains all parameters la"),
    ("model: {freeze_until: 2ep, trainable: [fc.*], init: a.pth}", "model.freeze_until: trains all parameters later"),
    ("distill: {teacher_recipe: resnet50}", "distill.teacher_recipe: is the recipe of a teacher"),
    ("loss: {class_weights: balanced}\ndistill: {teacher: runs/x}", "loss.class_weights: divides the loss by the wei"),
    ("loss: {options: {gamma: 2}}", "loss.options: is for a custom loss, by import path"),
    ("loss: {name: 'a:b', class_weights: balanced}", "loss.class_weights: is for cross_entropy and bce"),
    ("data: {options: {size: 2}}", "data.options: is for a custom dataset, by import path"),
    ("augment: {extra: ['a:b'], train_like_eval: true}", "augment.extra: changes training images, but"),
    ("evaluate: {best_metric: macro_f1}", "evaluate.best_metric: macro_f1 is neither top1 nor top5"),
    ("evaluate: {best_metric: loss}", "evaluate.best_metric: loss is better when smaller"),
    (DETECTION + "evaluate: {best_metric: ap50}", "evaluate.best_metric: is for task: classification"),
    (DETECTION + "metrics: ['a:b']", "metrics: is for task: classification"),
    (DETECTION.replace("ssd}", "ssd, extra: ['a:b']}"), "augment.extra: is for task: classification"),
    ("data: {source: synthetic-device, background_class: true}", "data.background_class: is not supported"),
    ("data: {preprocess: {channels: 1}}", "data.preprocess.mean: has 3 values, but data.preprocess.channels is 1"),
    ("data: {preprocess: {size: 300}}", "data.preprocess.resize: 256 is too small for a crop"),
    ("data: {preprocess: {divide_by: 1}}", "data.preprocess.mean: 0.485 is a mean of pixels from 0 to 1"),
    ("data: {preprocess: {mean: [123.68, 116.78, 103.94]}}", "data.preprocess.mean: 123.68 is above 1"),
    ("data: {source: digits, num_samples: 3}", "data.num_samples: is for synthetic data and scattered-digits"),
    ("data: {source: digits, num_classes: 3}", "data.num_classes: is for synthetic data"),
    ("data: {backend: dali}", "data.backend: dali is not supported"),
    ("data: {backend: processes, num_workers: 0}", "data.backend: processes needs data.num_workers above 0"),
    ("data: {backend: processes, cache: ram}", "data.cache: ram is a cache within one process"),
    ("data: {transfer_dtype: float32, preload: device}", "data.transfer_dtype: has no effect with data.preload"),
    ("augment: {scale: [0.5, 0.1]}", "augment.scale: must be [smallest, largest], not [0.5, 0.1]"),
    ("augment: {random_erasing: {scale: [0.3, 0.1]}}", "augment.random_erasing.scale: must be [smallest, largest]"),
    ("augment: {progressive_resizing: [[2ep, 64], [1ep, 96]]}", "augment.progressive_resizing: must increase"),
    ("augment: {crop: random, padding: 300, padding_mode: reflect}", "augment.padding: 300 must be smaller than"),
    ("augment: {train_like_eval: true, auto_augment: autoaugment}", "augment.auto_augment: changes training images"),
    ("augment: {train_like_eval: true, random_erasing: {probability: 0.1}}", "augment.random_erasing.probability: ch"),
    ("augment: {train_like_eval: true, repeats: 3}", "augment.repeats: changes training images"),
    ("augment: {randaugment: {magnitude_std: 0.5}}", "augment.randaugment.magnitude_std: is for timm, but"),
    ("augment: {randaugment: {magnitude: 11, implementation: timm}}", "augment.randaugment.magnitude: 11 is above 10"),
    ("augment: {cutmix: {lam: 0.5}}", "augment.cutmix.lam: is for augment.cutmix.mode fixed and random"),
    ("augment: {cutmix: {mode: fixed, alpha: 1.0}}", "augment.cutmix.alpha: is for augment.cutmix.mode beta"),
    ("augment: {combine: both, mixup: {alpha: 0.2}}", "augment.combine: both needs"),
    ("augment: {cutmix: {alpha: 1.0, roll: 2}}\nbatch: {size: 2}", "augment.cutmix.roll: 2 must be smaller than"),
    ("augment: {cutmix: {mode: random, lam: 0.8}}\nbatch: {group: 1}", "augment.cutmix.alpha: needs groups of at"),
    ("batch: {size: 8, group: 1}\naugment: {mixup: {alpha: 0.2}}", "augment.mixup.alpha: needs groups of at least two"),
    (
        "augment: {color_jitter: {hue: 0.1, implementation: tensorflow}}\n"
        "data: {preprocess: {per_image_standardization: true}}",
        "augment.color_jitter.implementation: tensorflow does not round",
    ),
    ("augment: {crop: ssd}", "augment.crop: is for task: detection"),
    ("augment: {zoom_out: {probability: 0.1}}", "augment.zoom_out.probability: is for task: detection"),
    ("data: {source: coco}", "data.source: is for task: detection"),
    ("task: detection\naugment: {crop: ssd}", "data.preprocess.resize: must be null for task: detection"),
    (DETECTION.replace("ssd", "random"), "augment.crop: random does not support boxes; use none or ssd"),
    (DETECTION.replace("ssd}", "ssd, mixup: {alpha: 0.2}}"), "augment.mixup.alpha: is for task: classification"),
    (DETECTION.replace("ssd}", "ssd, auto_augment: randaugment}"), "augment.auto_augment: is for task: classification"),
    (DETECTION.replace("ssd}", "ssd, random_erasing: {probability: 0.2}}"), "augment.random_erasing.probability: is f"),
    (DETECTION.replace("ssd}", "ssd, color_jitter: {hue: 0.1}}"), "augment.color_jitter.implementation: must be tens"),
    (DETECTION.replace("ssd}", "ssd, ssd_crop: {scale: [0.9, 0.3]}}"), "augment.ssd_crop.scale: must be [smallest, l"),
    (DETECTION.replace("ssd}", "ssd, size: 128}"), "augment.size: is not supported for task: detection"),
    (DETECTION.replace("ssd}", "ssd, progressive_resizing: [[0ep, 128]]}"), "augment.progressive_resizing: is not s"),
    (DETECTION.replace("data: {", "data: {background_class: true, "), "data.background_class: is for task: classif"),
    (DETECTION.replace("data: {", "data: {preload: device, "), "data.preload: is for task: classification"),
    (DETECTION.replace("data: {", "data: {source: cifar10, "), "data.source: cifar10 has no boxes; use one of auto"),
    ("task: multilabel\ndata: {source: folder}", "data.source: folder has one label per image; use one of auto, csv"),
    ("task: multilabel\ndata: {sampler: balanced}", "data.sampler: is for task: classification, with one class per im"),
    ("task: multilabel\ndata: {background_class: true}", "data.background_class: is for task: classification, with o"),
    ("task: multilabel\nloss: {name: cross_entropy}", "loss.name: is for task: classification, with one class"),
    ("task: multilabel\ndistill: {teacher: runs/x}", "distill.teacher: is for task: classification, with one cl"),
    ("task: multilabel\nexpect: {value: 0.5}", "expect.metric: top1 is not a metric of multilabel"),
    ("loss: {bce_sum: true}", "loss.bce_sum: is for bce, but loss.name is auto"),
    ("loss: {bce_target_threshold: 0.2}", "loss.bce_target_threshold: is for bce, but loss.name is auto"),
    (DETECTION + "loss: {name: bce}", "loss.name: is for task: classification"),
    (DETECTION + "loss: {class_weights: balanced}", "loss.class_weights: is for task: classification"),
    (DETECTION.replace("data: {", "data: {sampler: balanced, "), "data.sampler: is for task: classification"),
    (DETECTION + "loss: {label_smoothing: 0.1}", "loss.label_smoothing: is for task: classification"),
    (DETECTION + "distill: {teacher: runs/x}", "distill.teacher: is for task: classification"),
    (DETECTION + "evaluate: {tta: flip}", "evaluate.tta: is for task: classification"),
    (DETECTION + "expect: {metric: top1, value: 0.5}", "expect.metric: top1 is not a metric of detection"),
    (DETECTION + "expect: {metric: ap50, value: 0.5}", "expect.metric: ap50 differs from detection.metric ap"),
    ("detection: {anchors: {scales: [0.1, 0.2]}}", "detection.anchors.scales: has 2 values, but the 6 feature maps"),
    ("detection: {anchors: {aspect_ratios: [], scales: [0.1]}}", "detection.anchors.aspect_ratios: needs one list"),
    ("detection: {anchors: {aspect_ratios: [[1.0]], scales: [0.1, 0.2]}}", "detection.anchors.aspect_ratios: must not"),
    ("detection: {anchors: {aspect_ratios: [[]], scales: [0.3, 0.2]}}", "detection.anchors.scales: must increase"),
    ("batch: {size: 8, group: 16}", "batch.group: 16 is larger than batch.size 8"),
    ("schedule: {name: step}", "schedule.name: step needs schedule.period, as in 30ep"),
    ("schedule: {name: multistep}", "schedule.name: multistep needs schedule.milestones"),
    ("schedule: {name: one-cycle}", "schedule.name: one-cycle needs schedule.warmup"),
    ("schedule: {name: piecewise}", "schedule.name: piecewise needs schedule.milestone_lrs"),
    (
        "schedule: {name: multistep, milestones: [3ep, 2ep]}",
        "schedule.milestones: must increase, but 2ep follows 3ep",
    ),
    (
        "schedule: {name: piecewise, milestone_lrs: [1, 2], milestones: [3ep]}",
        "schedule.milestone_lrs: has 2 values, but schedule.milestones has 1",
    ),
    (
        "schedule: {name: piecewise, lr: 0.5, milestone_lrs: [1, 2], milestones: [0ep, 3ep]}",
        "schedule.lr: 0.5 has no effect: the first milestone is 0ep",
    ),
    ("schedule: {name: exponential, num_periods: 3, period: 2ep}", "schedule.num_periods: sets the period, as sched"),
    ("schedule: {end_lr: 0.1, end_lr_ratio: 0.1}", "schedule.end_lr_ratio: sets the final learning"),
    ("schedule: {warmup: 91ep}", "schedule.warmup: 91ep is longer than the run (length 90ep)"),
    (
        "schedule: {name: polynomial, anneal_strategy: linear}",
        "schedule.anneal_strategy: is for one-cycle, but schedule.name is polynomial",
    ),
    ("optimizer: {nesterov: true, momentum: 0}", "optimizer.nesterov: needs optimizer.momentum above 0"),
    ("optimizer: {nesterov: true, name: rmsprop}", "optimizer.nesterov: is for sgd and lars, but optimizer.name is"),
    ("optimizer: {alpha: 0.95}", "optimizer.alpha: is for rmsprop"),
    ("optimizer: {alpha_exponent: -14, name: lars}", "optimizer.alpha_exponent: is for rmsprop"),
    ("optimizer: {alpha_exponent: -14, alpha: 0.95, name: rmsprop}", "optimizer.alpha_exponent: sets alpha, as optimi"),
    ("optimizer: {eps: 0.1}", "optimizer.eps: is for rmsprop, lars, adamw and lamb"),
    ("optimizer: {trust_coefficient: 0.1}", "optimizer.trust_coefficient: is for lars"),
    ("optimizer: {lars_exclude: none, name: rmsprop-tf}", "optimizer.lars_exclude: is for lars"),
    ("optimizer: {implementation: fused, name: rmsprop}", "optimizer.implementation: is for sgd, lars and adamw"),
    ("optimizer: {implementation: fused, name: lamb}", "optimizer.implementation: is for sgd, lars and adamw"),
    ("optimizer: {clip_mode: agc}", "optimizer.clip_mode: agc needs a number in optimizer.clip_grad"),
    ("optimizer: {betas: [0.8, 0.9]}", "optimizer.betas: is for adamw and lamb, but optimizer.name is sgd"),
    (
        "optimizer: {nesterov: true, name: adamw}",
        "optimizer.nesterov: is for sgd and lars, but optimizer.name is adamw",
    ),
    ("optimizer: {norm_bias_lr_scale: 2, name: lars}", "optimizer.norm_bias_lr_scale: is for sgd"),
    ("optimizer: {weight_decay_exclude: norm, name: lars}", "optimizer.weight_decay_exclude: norm differs from"),
    ("checkpoint_average: {last: 5ep}\nsave: {every: off}", "checkpoint_average.last: averages checkpoints, but"),
    ("checkpoint_average: {last: 5ep}\nsave: {every: 10min}", "checkpoint_average.last: must not depend on the clock"),
    ("checkpoint_average: {last: 5min}", "checkpoint_average.last: cannot be in minutes"),
    ("checkpoint_average: {last: 0ep}", "checkpoint_average.last: must be longer than 0ep"),
    ("early_stopping: {target: 0.9}\nevaluate: {every: off}", "early_stopping.target: needs evaluations"),
    ("early_stopping: {patience: 3}\nevaluate: {every: off}", "early_stopping.patience: needs evaluations"),
    ("engine: {fused_kernels: on, compile: on}", "engine.fused_kernels: cannot be combined with engine.compile: on"),
    ("engine: {fused_kernels: on}\nprecision: {mode: '16.32'}", "engine.fused_kernels: needs a precision.mode"),
    ("engine: {cudnn_benchmark: on, deterministic: true}", "engine.cudnn_benchmark: may choose another algorithm"),
    ("profile: [5, 3]", "profile: ends at step 3, before its first step 5"),
    ("loggers: [csv, csv]", "loggers: contains a duplicate: csv, csv"),
    ("precision: {mode: bf16, loss_scale: 128}", "precision.loss_scale: is for fp16, 16.16 and 16.32"),
    ("precision: {rounding: nearest}", "precision.rounding: is for 16.16"),
    ("precision: {ops: {float32: [relu]}}", "precision.ops: is for modes with a dtype below fp32"),
    ("precision: {reduced_precision_reduction: on}", "precision.reduced_precision_reduction: is for modes"),
    (
        "precision: {mode: bf16, ops: {float32: [relu], low_precision: [relu]}}",
        "precision.ops.float32: relu is in prec",
    ),
    ("precision: {mode: bf16, ops: {low_precision: [nll_loss]}}", "precision.ops.low_precision: cannot contain nll_lo"),
    ("expect: {metric: map, value: 0.3}", "expect.metric: map is not a metric of classification, which has top1, top5"),
    ("expect: {value: 76.1}", "expect.value: must be a fraction between 0 and 1; for 76.1 percent write 0.761"),
    ("published: [{source: x, value: 77.2}]", "published: the value must be a fraction between 0 and 1"),
    ("memory: {activation_checkpointing: []}", "memory.activation_checkpointing: names no stage"),
    (
        "memory: {activation_checkpointing: all}\nengine: {compile: on}",
        "memory.activation_checkpointing: cannot be com",
    ),
    (
        "memory: {activation_checkpointing: all, checkpoint_segments: [layer2.0]}",
        "memory.activation_checkpointing: can",
    ),
    ("memory: {checkpoint_segments: [layer2.0]}\nengine: {compile: on}", "engine.compile: cannot be combined with mem"),
    ("memory: {shard_optimizer: true}\nprecision: {mode: '16.16'}", "memory.shard_optimizer: is not supported with"),
    ("memory: {shard_optimizer: true}\noptimizer: {momentum: 0}", "memory.shard_optimizer: has no effect"),
    ("memory: {offload_optimizer: true}\nengine: {cuda_graphs: on}", "memory.offload_optimizer: copies from host mem"),
    ("parallel: {pipeline_splits: [layer2.0]}", "parallel.pipeline_splits: splits the model over the devices"),
    ("parallel: {pipeline_stages: 2, pipeline_splits: [a, b]}", "parallel.pipeline_splits: names 2 stages, but 2"),
    (PIPELINE + ", reduce: ordered}", "parallel.reduce: is not supported with parallel.pipeline_stages above 1"),
    (PIPELINE + "}\nengine: {compile: on}", "engine.compile: is not supported with parallel.pipeline_stages above 1"),
    (PIPELINE + "}\nmemory: {checkpoint_segments: [layer2.0]}", "memory.checkpoint_segments: is not supported with"),
    (PIPELINE + "}\nbatch: {group: micro}", "batch.group: is not supported with parallel.pipeline_stages above 1"),
]


@pytest.mark.parametrize(("text", "message"), MESSAGES, ids=[message.split(":")[0] for _, message in MESSAGES])
def test_a_contradiction_has_its_message(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        load(str(path))
    found = [line.split(": ", 1)[1] for line in caught.value.what.splitlines()[1:]]
    assert any(line.startswith(message) for line in found), found


@pytest.mark.parametrize(
    "text",
    [
        "optimizer: {name: lars, weight_decay_exclude: norm-bias}",  # the same as lars_exclude
        "optimizer: {name: lars, lars_exclude: norm, weight_decay_exclude: norm, nesterov: true}",
        "optimizer: {name: rmsprop-tf, eps: 0.01, alpha: 0.95}",
        "optimizer: {weight_decay_exclude: nvidia-by-name, implementation: foreach}",
        "checkpoint_average: {last: off}\nearly_stopping: {target: off}\nsave: {every: off}\nevaluate: {every: off}",
        DETECTION.replace("ssd}", "ssd, zoom_out: {probability: 0.5}, color_jitter: {hue: 0.1, implementation: "
                          "tensorflow}}"),
        DETECTION.replace("ssd", "none"),
    ],
)  # fmt: skip
def test_compatible_fields_are_accepted(tmp_path: Path, text: str) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    assert isinstance(load(str(path)).recipe, Recipe)


def test_grayscale_images_have_no_hue_and_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(
        "data: {preprocess: {channels: 1}}\naugment: {color_jitter: {hue: 0.1, saturation: 0.2}, scale: [0.9, 0.1]}\n"
    )
    with pytest.raises(RecipeError) as caught:
        load(str(path))
    for part in ("5 problems", "mean: has 3", "std: has 3", "jitter.hue: needs", "jitter.saturation: needs", "scale:"):
        assert part in caught.value.what


def test_published_settings_are_accepted_and_written_back(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(
        """
data: {preprocess: {size: 380, resize: auto-ratio, divide_by: 1, mean: [123.68, 116.78, 103.94], std: [1, 1, 1]}}
augment:
  progressive_resizing: [[0ep, 192], [50%, 288]]
  attempts: 100
  scale: [0.05, 1.0]
  auto_augment: randaugment
  mixup: {alpha: 0.2, mode: sample, lam_at_least_half: true}
  cutmix: {mode: random, lam: 0.85, roll: 2}
  combine: both
batch: {size: 768, group: 3}
"""
    )
    recipe = load(str(path)).recipe
    assert recipe.augment.progressive_resizing == ((Duration(0, "ep"), 192), (Duration(50, "%"), 288))
    again = tmp_path / "again.yaml"
    again.write_text(dump(recipe))
    assert load(str(again)).recipe == recipe
    typed = load(str(path), [("augment.progressive_resizing", "[[1ep, 64]]", "--set")]).recipe
    assert typed.augment.progressive_resizing == ((Duration(1, "ep"), 64),)
