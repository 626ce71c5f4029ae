"""All presets load, plan and state their results, and agree with what their vendors published (published.yaml)."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from reconv.models import build_model
from reconv.recipe.load.unused import unused_options
from reconv.recipe.loader import Resolved, load
from reconv.recipe.parts.schedule import learning_rate
from reconv.recipe.plan import Facts, Plan, make_plan
from reconv.recipe.presets import PRESETS, nearest, preset_names, preset_path

NUM_TRAIN = {"digits": 1437, "cifar10": 50_000, "cifar100": 50_000, "auto": 1_281_167, "synthetic": 256}
NUM_TRAIN |= {"scattered-digits": 2000, "voc": 5011}
FAMILIES = yaml.safe_load((Path(__file__).parent / "published.yaml").read_text())
ROWS = {row["name"]: family["common"] | row for family in FAMILIES for row in family["rows"]}
OPTIONS = (
    "conv_init",
    "padding",
    "zero_gamma",
    "bn_momentum",
    "norm",
    "se_base",
    "group_dim",
    "expand_ratio",
    "drop_path_rate",
)
ELSEWHERE = {"name", "batch", "epochs", "warmup", "peak", "steps", "rates", "exponent"} | {  # by the plan; as results
    *("top1", "spread", "images_per_s", "hours", "twice", "uncertain"),
}


@cache
def resolve(name: str) -> tuple[Resolved, Plan]:
    resolved = load(name)
    return resolved, make_plan(resolved.recipe, Facts(NUM_TRAIN[resolved.recipe.data.source], 1000, 10, cores=2))


def check_each(names: Iterable[str], check: Callable[[str], None]) -> None:
    """Run a cheap check for each preset; the failure names every preset that breaks it."""
    broken = {}
    for name in names:
        try:
            check(name)
        except Exception as error:
            broken[name] = f"{type(error).__name__}: {error}"
    assert not broken, "\n\n".join(f"{name}: {text}" for name, text in broken.items())


def test_a_broken_preset_is_named() -> None:
    def check(name: str) -> None:
        assert name != "b"

    with pytest.raises(AssertionError, match=r"^b: AssertionError"):
        check_each("abc", check)


def test_presets_are_found_by_name_in_the_folders_of_their_vendors() -> None:
    files = sorted(PRESETS.rglob("*.yaml"))
    assert {path.parent.name for path in files} == {"nvidia", "habana", "graphcore", "torchvision", "timm", "reconv"}
    assert preset_names() == sorted(path.stem for path in files), "no name twice"
    assert len(files) > 90
    assert [preset_path(path.stem) for path in files] == files


def test_a_preset_is_valid_states_its_results_and_can_be_planned() -> None:
    def check(name: str) -> None:
        resolved, plan = resolve(name)
        recipe, header = resolved.recipe, " ".join(resolved.header.split())
        assert recipe.name == name
        assert recipe.description
        assert all(f"{word}:" in header for word in ("command", "hardware", "expected", "published", "measured by us"))
        assert f"reconv train {name}" in header
        if recipe.expect is not None:
            assert recipe.expect.source
            assert f"{recipe.expect.value:.4f}".rstrip("0") in header, "header and field expect the same"
            assert [result.value for result in (*recipe.published, *recipe.measured)], "it rests on a result"
        for claim in recipe.published:
            assert claim.value is None or f"{claim.value:.4f}".rstrip("0") in header, "header and field cite the same"
        assert ("measured by us: not" in header) == (not recipe.measured)
        for found in recipe.measured:
            assert all(text in header for text in (found.date, f"n = {found.n}", f"{found.value:.4f}".rstrip("0")))
        assert plan.total_steps > 0 and plan.lines
        assert list(unused_options(recipe)) == [], "it sets nothing without effect"

    check_each(preset_names(), check)


def test_any_preset_accepts_another_schedule() -> None:
    def check(name: str) -> None:
        assert load(name, [("schedule.name", "constant", "--set")]).recipe.schedule.name == "constant"

    check_each(preset_names(), check)


def test_the_published_list_covers_devices_lengths_precisions_and_optimizers() -> None:
    assert len(ROWS) == sum(len(family["rows"]) for family in FAMILIES), "no name twice"
    assert len(ROWS) >= 88
    cards = [row["batch"][-1] for row in ROWS.values()]
    assert {1, 8, 16, 64} <= set(cards)
    assert {50, 90, 250} <= {row["epochs"] for row in ROWS.values()}
    assert {"fp32", "fp16", "bf16", "tf32", "16.16", "16.32"} == {row["precision"] for row in ROWS.values()}
    assert {"sgd", "lars", "rmsprop", "rmsprop-tf", "lamb"} == {row["optimizer"] for row in ROWS.values()}


def test_a_published_recipe_is_a_preset_with_the_published_values() -> None:
    def check(name: str) -> None:
        row, recipe = ROWS[name], resolve(name)[0].recipe
        optimizer, augment = recipe.optimizer, recipe.augment
        found: dict[str, Any] = {
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
            "loss": recipe.loss.name,
            "resize": recipe.data.preprocess.resize,
            "train_size": augment.size,
            "repeats": augment.repeats,
            "erasing": augment.random_erasing.probability,
            "cutmix_alpha": augment.cutmix.alpha,
            "rand": [augment.randaugment.num_ops, augment.randaugment.magnitude, augment.randaugment.magnitude_std],
            "aux": recipe.model.options.get("aux_heads"),
            **{option: recipe.model.options.get(option) for option in OPTIONS},
        }
        assert set(row) <= {*found, *optional, *ELSEWHERE}, "every published value is compared"
        given = [key for key in optional if key in row]
        assert {key: optional[key] for key in given} == {key: row[key] for key in given}

    check_each(ROWS, check)


def test_the_plan_of_a_published_recipe_has_the_published_numbers() -> None:
    def check(name: str) -> None:
        row, (resolved, plan) = ROWS[name], resolve(name)
        schedule = plan.schedule
        assert plan.global_batch == math.prod(row["batch"])
        assert plan.steps_per_epoch == row["steps"]
        assert schedule.peak_lr == pytest.approx(row["peak"], rel=1e-12)
        assert schedule.warmup_steps == row["warmup"] * row["steps"]
        assert plan.total_steps == (64_000 if row["epochs"] is None else row["epochs"] * row["steps"])
        rates = {epoch: learning_rate(schedule, epoch * row["steps"]) for epoch in row["rates"]}
        assert rates == pytest.approx(row["rates"], rel=1e-9, abs=1e-15)
        text = "\n".join(plan.lines)
        assert f"{' x '.join(map(str, row['batch']))} = {plan.global_batch:,} " in text
        if "exponent" in row:
            assert f"lr 2^{row['exponent']} x {plan.global_batch} = {schedule.peak_lr:g}" in text
        elif resolved.recipe.schedule.base_batch_size == 256:
            assert f"lr {resolved.recipe.schedule.lr:g} x {plan.global_batch}/256 = {schedule.peak_lr:g}" in text

    check_each(ROWS, check)


def test_results_are_the_published_ones_and_the_header_says_the_same() -> None:
    def check(name: str) -> None:
        row, resolved = ROWS[name], resolve(name)[0]
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

    check_each(ROWS, check)


def test_the_resnet50_preset_is_the_published_recipe() -> None:
    recipe = load("resnet50").recipe
    plan = make_plan(recipe, Facts(1_281_167, 50_000, 1000, world_size=8, cores=8))
    assert plan.schedule.peak_lr == 2.048
    assert plan.group == plan.batch_per_device == 256
    assert (recipe.optimizer.momentum, recipe.optimizer.weight_decay) == (0.875, 2**-15)
    assert plan.schedule.warmup_steps == 8 * 625


@pytest.mark.parametrize(
    ("name", "devices", "steps_per_epoch", "total", "peak"),
    [("ssd-resnet34", 1, 917, 58_688, 0.012), ("ssd-resnet34-habana-8card-bf16", 8, 115, 7_360, 0.096)],
)
def test_the_ssd_presets_are_the_published_recipes(
    name: str, devices: int, steps_per_epoch: int, total: int, peak: float
) -> None:
    recipe = load(name).recipe
    plan = make_plan(recipe, Facts(117_266, 5000, 80, world_size=devices, cores=8))
    assert (plan.steps_per_epoch, plan.total_steps, plan.schedule.peak_lr) == (steps_per_epoch, total, peak)
    assert plan.group == plan.batch_per_device == 128
    assert plan.schedule.warmup_steps == 5 * steps_per_epoch
    optimizer = recipe.optimizer
    assert (optimizer.momentum, optimizer.weight_decay, optimizer.weight_decay_exclude) == (0.9, 5e-4, "none")
    rates = [learning_rate(plan.schedule, epoch * steps_per_epoch) for epoch in (0, 5, 39, 40, 50, 63)]
    assert rates == pytest.approx([0, peak, peak, peak / 10, peak / 100, peak / 100])


def test_house_recipes_start_residual_blocks_at_zero_and_vendor_presets_as_published() -> None:
    started = {name for name in preset_names() if load(name).recipe.model.zero_init_last}
    assert started == {"finetune", *(f"resnet{depth}" for depth in (18, 34, 50, 101, 152))}
    assert {preset_path(name).parent.name for name in started} == {"reconv"}


def test_a_preset_that_extends_another_changes_only_what_it_sets() -> None:
    shallow, deep = load("resnet18"), load("resnet152")
    assert deep.recipe.schedule == shallow.recipe.schedule
    assert deep.origins["schedule.lr"].startswith("resnet18.yaml:")
    assert deep.origins["model.name"].startswith("resnet152.yaml:")
    assert load("cifar100-resnet20").recipe.expect is None


def test_a_recipe_for_many_devices_computes_the_same_on_one() -> None:
    recipe = load("resnet50-nv-90ep-16gpu-fp32").recipe
    plans = [make_plan(recipe, Facts(1_281_167, 50_000, 1000, world_size=world_size)) for world_size in (1, 2, 16)]
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
    import torch

    model = load(name).recipe.model
    with torch.device("meta"):
        network = build_model(model.name, **model.options)
    assert sum(parameter.numel() for parameter in network.parameters()) == num_parameters


def test_the_nearest_name_is_found_or_none() -> None:
    assert nearest("resnet5", ["resnet50", "quickstart"]) == "resnet50"
    assert nearest("COSINE", ["cosine"]) == "cosine"
    assert nearest("zzz", ["resnet50"]) is None


def test_names_import_neither_pydantic_nor_yaml_and_recipes_not_torch() -> None:
    check = (
        "import sys, reconv.recipe.presets\n"
        "assert not {'pydantic', 'yaml', 'torch', 'numpy'} & set(sys.modules)\n"
        "import reconv.recipe.loader, reconv.recipe.plan\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
