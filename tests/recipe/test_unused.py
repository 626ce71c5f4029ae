from __future__ import annotations

from typing import Any

import pytest

from reconv.recipe.load.unused import unused_options
from reconv.recipe.plan import Facts, make_plan
from reconv.recipe.schema import Recipe


def notices(**sections: Any) -> list[str]:
    plan = make_plan(Recipe.model_validate(sections), Facts(10_000, 100, 10))
    return [line.removeprefix("no effect: ") for line in plan.lines if line.startswith("no effect")]


@pytest.mark.parametrize(
    ("sections", "notice"),
    [
        ({"augment": {"mixup": {"mode": "sample"}}}, "augment.mixup.mode (augment.mixup.alpha is 0)"),
        ({"augment": {"padding": 8}}, "augment.padding (augment.crop is random_resized)"),
        ({"augment": {"crop": "random", "fallback": "whole"}}, "augment.fallback (augment.crop is random)"),
        ({"augment": {"fill": 0}}, "augment.fill (augment.auto_augment is none)"),
        (
            {"augment": {"auto_augment": "autoaugment", "randaugment": {"num_ops": 3}}},
            "augment.randaugment.num_ops (augment.auto_augment is autoaugment)",
        ),
        (
            {"augment": {"random_erasing": {"scale": [0.1, 0.2]}}},
            "augment.random_erasing.scale (augment.random_erasing.probability is 0)",
        ),
        ({"augment": {"cutmix": {"roll": 2}}}, "augment.cutmix.roll (augment.cutmix.alpha is 0)"),
        ({"augment": {"cutmix": {"mode": "fixed"}}}, "augment.cutmix.mode (augment.cutmix.lam is 1)"),
        ({"augment": {"hflip": 0, "hflip_mode": "alternating"}}, "augment.hflip_mode (augment.hflip is 0)"),
        ({"augment": {"train_like_eval": True, "crop": "none"}}, "augment.crop (augment.train_like_eval is true)"),
        ({"loss": {"smooth_over": "other-classes"}}, "loss.smooth_over (loss.label_smoothing is 0)"),
        ({"distill": {"temperature": 2}}, "distill.temperature (distill.teacher is null)"),
        ({"optimizer": {"clip_grad": "off", "clip_mode": "agc"}}, "optimizer.clip_mode (optimizer.clip_grad is off)"),
        (
            {"optimizer": {"layer_decay": 0.7}, "model": {"freeze_backbone": True, "init": "weights.safetensors"}},
            "optimizer.layer_decay (model.freeze_backbone is true)",
        ),
        ({"optimizer": {"name": "lamb", "momentum": 0.8}}, "optimizer.momentum (optimizer.name is lamb)"),
        ({"ema": {"warmup": False}}, "ema.warmup (ema.decay is 0)"),
        ({"checkpoint_average": {"mode": "exponential"}}, "checkpoint_average.mode (checkpoint_average.last is off)"),
        (
            {"checkpoint_average": {"last": "3ep", "decay": 0.5}},
            "checkpoint_average.decay (checkpoint_average.mode is mean)",
        ),
        ({"schedule": {"warmup_from": "zero"}}, "schedule.warmup_from (schedule.warmup is 0)"),
        (
            {"schedule": {"name": "constant", "interval": "epoch"}},
            "schedule.interval (schedule.name is constant, without warm-up)",
        ),
        (
            {"schedule": {"name": "step", "period": "30ep", "warmup": "5ep", "warmup_mode": "replace"}},
            "schedule.warmup_mode (schedule.name step always counts from step 0)",
        ),
        (
            {"data": {"preprocess": {"per_image_standardization": True, "std": [0.5, 0.5, 0.5]}}},
            "data.preprocess.std (data.preprocess.per_image_standardization is true)",
        ),
    ],
)
def test_a_field_without_effect_is_listed(sections: dict[str, Any], notice: str) -> None:
    assert notices(**sections) == [notice]


def test_fields_in_use_and_defaults_are_not_listed() -> None:
    assert notices() == []
    assert notices(augment={"mixup": {"alpha": 0.2, "mode": "sample"}}, ema={"decay": 0.9, "warmup": False}) == []
    gray = {"channels": 1, "per_image_standardization": True, "mean": [0.5], "std": [0.5]}
    assert notices(data={"preprocess": gray}) == []


@pytest.mark.parametrize("device", ["cpu", "mps", "hpu"])
@pytest.mark.parametrize(
    ("engine", "reasons"),
    [
        ({"cudnn_benchmark_limit": 8}, {"engine.cudnn_benchmark_limit": "{} does not use cuDNN"}),
        (
            {"cudnn_benchmark_limit": 8, "cudnn_benchmark": "off"},
            {"engine.cudnn_benchmark_limit": "engine.cudnn_benchmark is off"},
        ),
        ({"cudnn_benchmark": "on"}, {"engine.cudnn_benchmark": "{} does not use cuDNN"}),
        ({"cuda_graphs": "on"}, {"engine.cuda_graphs": "{} has no CUDA graphs"}),
        ({"cuda_graphs": "off", "cudnn_benchmark": "off", "fused_kernels": "off", "compile": "off"}, {}),
    ],
)
def test_cuda_fields_have_no_effect_on_other_devices(
    engine: dict[str, Any], reasons: dict[str, str], device: str
) -> None:
    recipe = Recipe.model_validate({"engine": engine})
    expected = {field: why.format(device) for field, why in reasons.items()}
    assert dict(unused_options(recipe, device)) == expected
    lines = make_plan(recipe, Facts(10_000, 100, 10, device=device)).lines
    assert [line for line in lines if "no effect" in line] == [
        f"no effect: {field} ({why})" for field, why in expected.items()
    ]
    by_recipe = {field: why for field, why in reasons.items() if "{}" not in why}
    assert dict(unused_options(recipe, "cuda")) == dict(unused_options(recipe)) == by_recipe


def test_fields_of_detection_have_no_effect_on_classification() -> None:
    sections = {"data": {"bad_boxes": "skip"}, "augment": {"ssd_crop": {"trials": 3}}, "detection": {"nms_iou": 0.3}}
    assert dict(unused_options(Recipe.model_validate(sections))) == {
        "data.bad_boxes": "task is classification",
        "augment.ssd_crop.trials": "augment.crop is random_resized",
        "detection.nms_iou": "task is classification",
    }
    sections |= {"task": "detection", "augment": {"crop": "ssd", "ssd_crop": {"trials": 3}}}
    sections["data"] = {"bad_boxes": "clip", "preprocess": {"resize": None, "size": 300}}
    assert not dict(unused_options(Recipe.model_validate(sections)))
