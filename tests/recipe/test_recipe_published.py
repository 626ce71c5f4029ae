"""The presets are what others published: each row of published.yaml against the recipe's fields and its plan."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from reconv.models import build_model
from reconv.recipe.loader import Resolved, load
from reconv.recipe.plan import Facts, Plan, make_plan
from reconv.recipe.presets import preset_names
from reconv.trainer.lr_schedule import learning_rate

FAMILIES = yaml.safe_load((Path(__file__).parent / "published.yaml").read_text())
ROWS = {row["name"]: family["common"] | row for family in FAMILIES for row in family["rows"]}
NAMES = list(ROWS)
OPTIONS = ("conv_init", "padding", "zero_gamma", "bn_momentum", "norm", "se_base", "group_dim", "expand_ratio")
ELSEWHERE = {"name", "batch", "epochs", "warmup", "peak", "steps", "rates", "exponent"} | {  # by the plan; as figures
    *("top1", "spread", "images_per_s", "hours", "twice", "uncertain"),
}
FACTS = {"cifar10": Facts(50_000, 10_000, 10), "auto": Facts(1_281_167, 50_000, 1000)}


@cache
def resolve(name: str) -> tuple[dict[str, Any], Resolved, Plan]:
    resolved = load(name)
    return ROWS[name], resolved, make_plan(resolved.recipe, FACTS[resolved.recipe.data.source])


def test_the_list_covers_what_is_published() -> None:
    assert len(NAMES) == sum(len(family["rows"]) for family in FAMILIES), "no name twice"
    assert len(NAMES) >= 88
    cards = [math.prod(row["batch"]) // math.prod(row["batch"][:-1]) for row in ROWS.values()]
    assert {1, 8, 16, 64} <= set(cards)
    assert {50, 90, 250} <= {row["epochs"] for row in ROWS.values()}
    assert {"fp32", "fp16", "bf16", "tf32", "16.16", "16.32"} == {row["precision"] for row in ROWS.values()}
    assert {"sgd", "lars", "rmsprop", "rmsprop-tf"} == {row["optimizer"] for row in ROWS.values()}


@pytest.mark.parametrize("name", NAMES)
def test_a_published_recipe_is_a_preset_with_the_published_values(name: str) -> None:
    assert name in preset_names()
    row, resolved, _ = resolve(name)
    recipe = resolved.recipe
    optimizer, augment = recipe.optimizer, recipe.augment
    found = {
        "network": recipe.model.name,
        "optimizer": optimizer.name,
        "momentum": optimizer.momentum,
        "decay": optimizer.weight_decay,
        "smoothing": recipe.loss.label_smoothing,
        "mixup": augment.mixup.alpha,
        "precision": recipe.precision.mode,
        "curve": recipe.schedule.name,
    }
    assert found == {key: row[key] for key in found}
    optional = {
        "form": recipe.loss.smooth_over,
        "update": recipe.schedule.interval,
        "origin": recipe.schedule.warmup_mode,
        "rule": optimizer.weight_decay_exclude,
        "alpha": optimizer.alpha,
        "alpha_exponent": optimizer.alpha_exponent,
        "epsilon": optimizer.eps,
        "cutmix": augment.cutmix.lam,
        "policy": augment.auto_augment,
        "size": recipe.data.preprocess.size,
        "interpolation": recipe.data.preprocess.interpolation,
        "average": recipe.checkpoint_average.decay,
        "end": recipe.schedule.end_lr,
        "aux": recipe.model.options.get("aux_heads"),
        **{option: recipe.model.options.get(option) for option in OPTIONS},
    }
    assert set(row) <= {*found, *optional, *ELSEWHERE}, "every published value is compared"
    assert {key: optional[key] for key in optional if key in row} == {key: row[key] for key in optional if key in row}


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_of_a_published_recipe_has_the_published_numbers(name: str) -> None:
    row, resolved, plan = resolve(name)
    schedule = plan.schedule
    assert plan.global_batch == math.prod(row["batch"])
    assert plan.steps_per_epoch == row["steps"]
    assert schedule.peak_lr == pytest.approx(row["peak"], rel=1e-12)
    assert schedule.warmup_steps == row["warmup"] * row["steps"]
    assert plan.total_steps == (64_000 if row["epochs"] is None else row["epochs"] * row["steps"])
    rates = {epoch: learning_rate(schedule, epoch * row["steps"]) for epoch in row["rates"]}
    assert rates == pytest.approx(row["rates"], rel=1e-9, abs=1e-15)
    text = "\n".join(plan.lines)
    factors = " x ".join(str(factor) for factor in row["batch"])
    assert f"published with a batch of {factors} = {plan.global_batch:,} " in text
    if "exponent" in row:
        assert f"lr 2^{row['exponent']} x {plan.global_batch} = {schedule.peak_lr:g}" in text
    elif resolved.recipe.schedule.base_batch_size == 256:
        assert f"lr {resolved.recipe.schedule.lr:g} x {plan.global_batch}/256 = {schedule.peak_lr:g}" in text


@pytest.mark.parametrize("name", NAMES)
def test_figures_are_the_published_ones_and_the_header_says_the_same(name: str) -> None:
    row, resolved, _ = resolve(name)
    recipe, header = resolved.recipe, " ".join(resolved.header.split())
    claim = recipe.published[0]
    percent = None if claim.value is None else 100 * claim.value
    assert percent == (None if row["top1"] is None else pytest.approx(row["top1"]))
    assert claim.hardware
    assert claim.batch == tuple(row["batch"])
    for field in ("images_per_s", "hours"):
        assert field not in row or getattr(claim, field) == row[field]
    if "spread" in row:
        assert claim.spread == pytest.approx(row["spread"] / 100)
    if claim.value is None:
        assert recipe.expect is None
        assert "expected: no promise" in header
    else:
        assert recipe.expect is not None and recipe.expect.value == claim.value
        assert f"top-1 {claim.value:.4f}".rstrip("0") in header
    if "twice" in row or "uncertain" in row:
        assert "may not carry over" in claim.caveat
        assert "may not carry over" in header
    if "twice" in row:
        assert recipe.optimizer.name == "lars"


def test_eight_and_sixteen_cards_have_their_tables_printed() -> None:
    eight = "\n".join(resolve("resnet50-habana-8card-bf16")[2].lines)
    assert "table: 0.1, 0.275 from 1ep, 0.45 from 2ep, 0.625 from 3ep, 0.8 from 4ep, 0.08 from 30ep" in eight
    sixteen = "\n".join(resolve("resnet50-habana-16card-bf16")[2].lines)
    assert "table: 0.1, 0.475 from 1ep, 0.85 from 2ep, 1.225 from 3ep, 1.6 from 4ep, 0.16 from 30ep" in sixteen


def test_a_recipe_for_many_cards_is_the_same_mathematics_on_one() -> None:
    recipe = load("resnet50-nv-90ep-16gpu-fp32").recipe
    plans = [
        make_plan(recipe, Facts(1_281_167, 50_000, 1000, world_size=process_group)) for process_group in (1, 2, 16)
    ]
    assert len({plan.group_sizes for plan in plans}) == 1
    assert len({plan.schedule for plan in plans}) == 1


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("resnet50-nv-90ep-8gpu-mixed", 25_557_032),
        ("resnext101-nv-90ep-8gpu-mixed", 44_177_704),
        ("efficientnet-b0-nv-400ep-8gpu-mixed", 5_288_548),
        ("efficientnet-b4-gc-g1-16ipu", 19_341_616),
        ("efficientnet-b4-gc-g16-16ipu", 19_328_168),
    ],
)
def test_a_published_network_has_the_published_number_of_parameters(name: str, num_parameters: int) -> None:
    model = load(name).recipe.model
    network = build_model(model.name, **model.options)
    assert sum(parameter.numel() for parameter in network.parameters()) == num_parameters
