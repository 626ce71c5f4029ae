from __future__ import annotations

from typing import Any

import pytest

from reconv.recipe.loader import load
from reconv.recipe.plan import Facts, make_plan
from reconv.recipe.presets import preset_names
from reconv.recipe.schema import Recipe
from reconv.recipe.unused import unused_options


def notices(**sections: Any) -> list[str]:
    plan = make_plan(Recipe.model_validate(sections), Facts(10_000, 100, 10))
    return [line.removeprefix("has no effect: ") for line in plan.lines if line.startswith("has no effect")]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"augment": {"mixup": {"per": "sample"}}}, "augment.mixup.per (augment.mixup.alpha is 0)"),
        ({"augment": {"pad": 8}}, "augment.pad (augment.crop is resized)"),
        ({"augment": {"crop": "pad", "fallback": "whole"}}, "augment.fallback (augment.crop is pad)"),
        ({"augment": {"fill": 0}}, "augment.fill (augment.policy is none)"),
        (
            {"augment": {"policy": "autoaugment", "randaugment": {"n": 3}}},
            "augment.randaugment.n (augment.policy is autoaugment)",
        ),
        ({"augment": {"erase": {"area": [0.1, 0.2]}}}, "augment.erase.area (augment.erase.probability is 0)"),
        ({"augment": {"cutmix": {"roll": 2}}}, "augment.cutmix.roll (augment.cutmix.alpha is 0)"),
        ({"augment": {"cutmix": {"kind": "fixed"}}}, "augment.cutmix.kind (augment.cutmix.keep is 1)"),
        ({"augment": {"flip": 0, "flip_form": "alternating"}}, "augment.flip_form (augment.flip is 0)"),
        ({"augment": {"train_like_eval": True, "crop": "none"}}, "augment.crop (augment.train_like_eval is true)"),
        ({"loss": {"smoothing_form": "others"}}, "loss.smoothing_form (loss.label_smoothing is 0)"),
        ({"distill": {"temperature": 2}}, "distill.temperature (distill.teacher is null)"),
        ({"ema": {"ramp": False}}, "ema.ramp (ema.decay is 0)"),
        ({"average": {"kind": "exponential"}}, "average.kind (average.last is off)"),
        ({"average": {"last": "3ep", "decay": 0.5}}, "average.decay (average.kind is mean)"),
        ({"schedule": {"warmup_from": "zero"}}, "schedule.warmup_from (schedule.warmup is 0)"),
        (
            {"schedule": {"kind": "constant", "update": "epoch"}},
            "schedule.update (schedule.kind is constant, without warm-up)",
        ),
        (
            {"schedule": {"kind": "step", "period": "30ep", "warmup": "5ep", "origin": "start"}},
            "schedule.origin (schedule.kind step counts from step 0 always)",
        ),
        (
            {"data": {"preprocess": {"standardise": True, "std": [0.5, 0.5, 0.5]}}},
            "data.preprocess.std (data.preprocess.standardise is true)",
        ),
    ],
)
def test_an_option_whose_parent_is_off_is_said_to_have_no_effect(sections: dict[str, Any], said: str) -> None:
    assert notices(**sections) == [said]


def test_options_in_use_and_defaults_are_not_mentioned() -> None:
    assert notices() == []
    assert notices(augment={"mixup": {"alpha": 0.2, "per": "sample"}}, ema={"decay": 0.9, "ramp": False}) == []
    grey = {"channels": 1, "standardise": True, "mean": [0.5], "std": [0.5]}
    assert notices(data={"preprocess": grey}) == []


@pytest.mark.parametrize("device", ["cpu", "mps", "hpu"])
@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"autotune_limit": 8}, {"engine.autotune_limit": "no algorithms are tried on {}"}),
        ({"autotune_limit": 8, "autotune": "off"}, {"engine.autotune_limit": "no algorithms are tried"}),
        ({"autotune": "on"}, {"engine.autotune": "no algorithms are tried on {}"}),
        ({"graph": "on"}, {"engine.graph": "steps are not recorded on {}"}),
        ({"graph": "off", "autotune": "off", "kernels": "off", "compile": "off"}, {}),
    ],
)
def test_what_only_cuda_reads_is_said_to_have_no_effect_on_other_devices(
    engine: dict[str, Any], said: dict[str, str], device: str
) -> None:
    recipe = Recipe.model_validate({"engine": engine})
    expected = {field: why.format(device) for field, why in said.items()}
    assert dict(unused_options(recipe, device)) == expected
    lines = make_plan(recipe, Facts(10_000, 100, 10, device=device)).lines
    assert [line for line in lines if "has no effect" in line] == [
        f"has no effect: {field} ({why})" for field, why in expected.items()
    ]
    by_recipe = {field: why for field, why in said.items() if "{}" not in why}
    assert dict(unused_options(recipe, "cuda")) == dict(unused_options(recipe)) == by_recipe


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_sets_nothing_that_has_no_effect(name: str) -> None:
    assert list(unused_options(load(name).recipe)) == []
