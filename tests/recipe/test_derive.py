"""Values derived from facts about the data: each rule, what is set wins, and any size of data gives a valid plan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reconv.core.errors import RecipeError
from reconv.recipe.derive import AnchorFacts, DataFacts, Derivation, HeadFacts, SecondMoment, WeightFacts
from reconv.recipe.derive_rules import RULES, derive
from reconv.recipe.load.resolved import Resolved
from reconv.recipe.loader import load
from reconv.recipe.plan import Facts, Plan, make_plan
from reconv.recipe.schema import DerivedField

DOCS = Path(__file__).parents[2] / "docs"
BALANCED = (100, 100)
IMAGENET = WeightFacts("torchvision:resnet50", "resnet50")


def derived(
    data: DataFacts,
    weights: WeightFacts | None = None,
    recipe: str = "finetune",
    head: HeadFacts | None = None,
    **given: Any,
) -> tuple[Resolved, dict[str, Derivation]]:
    """The recipe with its derived values, loaded as a run does, and the derivations by field."""
    overrides = [(name.replace("__", "."), value, "--set") for name, value in given.items()]
    if weights is not None:
        overrides.append(("model.init", "w.pth", "--init"))
    resolved = load(recipe, overrides)
    found = derive(resolved.recipe, resolved.fixed, data, weights, lambda derived: head)
    return load(recipe, overrides, [(d.name, d.value, f"derived: {d.why}") for d in found]), {d.name: d for d in found}


def plan_of(resolved: Resolved, num_train: int, world_size: int = 1) -> Plan:
    return make_plan(resolved.recipe, Facts(num_train, 10, 2, world_size=world_size))


def value(found: Mapping[str, Derivation], name: str) -> str:
    return str(found[name].value)


@pytest.mark.parametrize(
    ("num_train", "side", "expected"),
    [  # network, size, batch, group, length, rate
        (40, 300, ("resnet18", "128", "8", "all", "200ep", "0.018")),
        (480, 100, ("resnet18", "96", "16", "all", "67ep", "0.025")),
        (3_200, 500, ("resnet18", "160", "128", "32", "80ep", "0.071")),
        (8_000, 50, ("resnet34", "64", "128", "32", "32ep", "0.071")),
        (100_000, 500, ("resnet50", "224", "128", "32", "30ep", "0.071")),
        (600, 28, ("resnet20_cifar", "32", "32", "all", "106ep", "0.035")),
    ],
)
def test_values_from_scratch_follow_from_the_number_and_size_of_images(num_train, side, expected) -> None:
    _, found = derived(DataFacts(num_train, BALANCED, side))
    fields = ("model.name", "data.preprocess.size", "batch.size", "batch.group", "length", "schedule.lr")
    assert tuple(value(found, field) for field in fields) == expected
    assert "model.freeze_until" not in found


@pytest.mark.parametrize(
    ("num_train", "length", "lr"), [(40, "60ep", "0.018"), (480, "14ep", "0.025"), (100_000, "5ep", "0.071")]
)
def test_weights_shorten_the_run_and_freeze_the_backbone_first(num_train: int, length: str, lr: str) -> None:
    resolved, found = derived(DataFacts(num_train, BALANCED, 90), IMAGENET)
    assert (value(found, "model.name"), value(found, "data.preprocess.size")) == ("resnet50", "224")
    assert (value(found, "length"), value(found, "schedule.lr")) == (length, lr)
    assert resolved.recipe.optimizer.backbone_lr_scale == 0.2
    plan = plan_of(resolved, num_train)
    assert plan.freeze_steps == round(plan.total_steps / 10)
    assert value(found, "model.freeze_until") == "10%"


MOBILENET_96 = HeadFacts("classifier.1", 32, 96, SecondMoment(1380.4, 2968.2), SecondMoment(383.4, 1038.7))
SMALL_FEATURES = HeadFacts("fc", 32, 32, SecondMoment(11.4, 21.3), SecondMoment(14.2, 20.1))


def test_the_rate_from_weights_is_at_most_what_the_inputs_of_the_last_layer_allow() -> None:
    resolved, found = derived(DataFacts(480, BALANCED, 90), IMAGENET, head=MOBILENET_96)
    assert str(found["schedule.lr"]) == (
        "schedule.lr 0.0031: 1 / (1,380 / 15.2 + 2,970 / 12.8), from the largest eigenvalue and the trace of the "
        "second moment of classifier.1's input (32 images of 96 px, running statistics), momentum 0.9 and the batch of "
        "16; 0.05 x sqrt(16 / 64) = 0.025 is above that"
    )
    assert resolved.recipe.optimizer.backbone_lr_scale == 0.2  # of the limited rate
    halved = replace(MOBILENET_96, running=MOBILENET_96.batch)
    recipe = derived(DataFacts(480, BALANCED, 90), IMAGENET, head=halved)[0].recipe
    assert (recipe.schedule.lr, recipe.optimizer.backbone_lr_scale) == (0.0094, 0.2)
    resolved, found = derived(DataFacts(480, BALANCED, 90), IMAGENET, head=SMALL_FEATURES)
    assert (resolved.recipe.schedule.lr, resolved.recipe.optimizer.backbone_lr_scale) == (0.025, 0.2)
    assert found["schedule.lr"].why.startswith("0.05 x sqrt(16 / 64), below 0.4 = 1 / (14.2 / 15.2 + 20.1 / 12.8)")


@pytest.mark.parametrize(
    ("given", "lr"),
    [  # a larger batch has less noise; the shorter bound of Nesterov's step; a smaller momentum; a rule of its own
        ({"batch__size": 128}, 0.0083),
        ({"optimizer__nesterov": True}, 0.0021),
        ({"optimizer__momentum": 0.0}, 0.0051),
        ({"optimizer__name": "adamw"}, 2.5e-4),
        ({"schedule__lr": 0.3}, 0.3),
    ],
)
def test_the_largest_rate_of_the_last_layer_follows_from_the_batch_and_the_optimizer(given, lr: float) -> None:
    assert derived(DataFacts(480, BALANCED), IMAGENET, head=MOBILENET_96, **given)[0].recipe.schedule.lr == lr


def test_each_value_shows_its_arithmetic() -> None:
    _, found = derived(DataFacts(600, (500, 100), 150))
    assert str(found["batch.size"]) == ("batch.size 32: 600 images / 16 = 37, down to a power of two from 8 to 128")
    assert found["length"].why == "from scratch: 2,000 steps / 19 per epoch = 106 epochs, from 30 to 200"
    assert found["schedule.lr"].why == "0.05 x sqrt(32 / 64)"
    assert found["ema.decay"].why == "1 - 20 / 2,014 steps"
    assert found["loss.class_weights"].why == "largest class 500 / smallest 100 = 5.0, above 3"


def test_what_is_set_wins_and_later_values_follow_from_it() -> None:
    resolved, found = derived(
        DataFacts(600, BALANCED, 150), batch__size=12, length="10ep", schedule__lr=0.3, model__name="efficientnet_b0"
    )
    recipe = resolved.recipe
    assert not {"batch.size", "length", "schedule.lr", "model.name"} & set(found)
    assert (recipe.batch.size, str(recipe.length), recipe.schedule.lr) == (12, "10ep", 0.3)
    assert found["schedule.warmup"].why == "5% of 500 = 25 steps"
    assert "ema.decay" not in found, "500 steps are too few"
    assert resolved.origins["batch.size"] == "--set"
    assert resolved.origins["schedule.warmup"] == "derived: 5% of 500 = 25 steps"


def test_a_file_that_extends_the_recipe_sets_values_and_derive_overrides_those_it_extends(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("extends: finetune\nbatch: {size: 20}\n")
    assert derived(DataFacts(600, BALANCED), recipe=str(own))[0].recipe.batch.size == 20
    own.write_text("extends: resnet50\nderive: [batch.size, batch.group, schedule.warmup]\n")
    resolved, found = derived(DataFacts(600, BALANCED), recipe=str(own))
    assert set(found) == {"batch.size", "batch.group", "schedule.warmup"}
    assert (resolved.recipe.batch.size, str(resolved.recipe.length)) == (32, "90ep")


@pytest.mark.parametrize(
    ("counts", "expected"),
    [((90, 30), None), ((100, 30), "balanced"), ((1000, 5), [0.5025, 10.0]), ((10, 0, 90), "balanced")],
)
def test_class_weights_are_balanced_above_a_ratio_and_limited(counts: tuple[int, ...], expected: object) -> None:
    _, found = derived(DataFacts(sum(counts), counts))
    assert (found["loss.class_weights"].value if expected else found.get("loss.class_weights")) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss__name", "my_pkg.losses:focal"),
        ("loss__name", "bce"),
        ("data__sampler", "balanced"),
        ("distill__teacher", "runs/a/1"),
    ],
)
def test_no_class_weights_where_the_loss_or_the_sampler_leaves_no_place_for_them(name: str, value: str) -> None:
    resolved, found = derived(DataFacts(600, (500, 100)), **{name: value})
    assert "loss.class_weights" not in found and resolved.recipe.loss.class_weights == "none"


def test_layer_decay_takes_the_place_of_the_lower_rate_of_the_backbone() -> None:
    assert derived(DataFacts(600, BALANCED), IMAGENET)[0].recipe.optimizer.backbone_lr_scale == 0.2
    assert (
        derived(DataFacts(600, BALANCED), IMAGENET, optimizer__layer_decay=0.7)[0].recipe.optimizer.backbone_lr_scale
        == 1
    )


def test_the_images_of_a_run_are_those_its_weights_were_trained_on() -> None:
    preprocess = {"size": 96, "resize": 110, "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
    weights = WeightFacts("runs/a/1", "resnet18", {"width": 32}, preprocess)
    resolved, found = derived(DataFacts(600, BALANCED, 500), weights)
    assert resolved.recipe.data.preprocess.mean == (0.5, 0.5, 0.5)
    assert (resolved.recipe.data.preprocess.size, resolved.recipe.data.preprocess.resize) == (96, 110)
    assert resolved.recipe.model.options == {"width": 32}
    larger, _ = derived(DataFacts(600, BALANCED, 500), weights, data__preprocess__size=320)
    assert larger.recipe.data.preprocess.resize == "auto-ratio"
    assert found["data.preprocess.mean"].why == "as runs/a/1 was trained"


def test_freezing_for_the_whole_run_leaves_nothing_to_unfreeze() -> None:
    resolved, found = derived(DataFacts(600, BALANCED), IMAGENET, model__freeze_backbone=True)
    assert resolved.recipe.model.freeze_until == "off"
    assert "model.freeze_until" not in found


def test_the_rate_of_an_optimizer_without_a_rule_must_be_given() -> None:
    with pytest.raises(RecipeError, match="learning rate of lars is not derived") as caught:
        derived(DataFacts(600, BALANCED), optimizer__name="lars")
    assert caught.value.hint == "give it: --lr X"
    assert derived(DataFacts(600, BALANCED), optimizer__name="lars", schedule__lr=2.0)[0].recipe.schedule.lr == 2
    assert derived(DataFacts(600, BALANCED), optimizer__name="adamw")[0].recipe.schedule.lr == 7.1e-4


ANCHORS = AnchorFacts((0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7), ((2.0,), (2.0, 3.0)) * 3, 0.8, 0.7, 900)


def test_a_detector_gets_the_backbone_of_its_weights_and_the_proposed_anchors() -> None:
    data = DataFacts(200, (), 400, max_boxes=19, anchors=ANCHORS)
    resolved, found = derived(data, IMAGENET, "finetune-detection")
    recipe = resolved.recipe
    assert recipe.model.options == {"backbone": "resnet50", "extra_norms": True}
    assert (recipe.model.name, recipe.data.preprocess.size, recipe.data.preprocess.resize) == (
        "ssd_resnet34",
        300,
        None,
    )
    assert recipe.detection.anchors.scales == ANCHORS.scales
    assert recipe.detection.max_gt_boxes == 24
    assert "mean IoU with the best anchor 0.800, 0.700 with SSD's" in found["detection.anchors.scales"].why
    worse = DataFacts(200, (), 400, 19, AnchorFacts(*(ANCHORS.scales, ANCHORS.aspect_ratios), 0.6, 0.7, 900))
    assert "detection.anchors.scales" not in derived(worse, None, "finetune-detection")[1]


def test_a_detector_that_starts_from_a_detector_keeps_its_anchors_and_options() -> None:
    anchors = {"scales": [0.1, 0.5, 0.9], "aspect_ratios": [[2.0], [2.0]]}
    options = {"backbone": "resnet18", "extra_widths": [64]}
    weights = WeightFacts("runs/ssd/1", "ssd_resnet34", options, {"size": 128, "resize": None}, anchors)
    resolved, _ = derived(DataFacts(200, (), 400, 9, ANCHORS), weights, "finetune-detection")
    assert resolved.recipe.model.options == options
    assert resolved.recipe.detection.anchors.scales == (0.1, 0.5, 0.9)
    assert resolved.recipe.data.preprocess.size == 128


@settings(deadline=None, max_examples=60)
@given(
    num_train=st.integers(1, 200_000),
    side=st.integers(1, 4000),
    weights=st.sampled_from([None, IMAGENET]),
    recipe=st.sampled_from(["finetune", "finetune-detection"]),
    world_size=st.sampled_from([1, 2, 4, 8]),
    length=st.sampled_from([None, "1ep", "1step", "7step", "0.5ep", "40ep"]),
)
def test_any_amount_of_data_gives_a_valid_plan_on_one_to_eight_devices(
    num_train, side, weights, recipe, world_size, length
) -> None:
    resolved, found = derived(
        DataFacts(num_train, (num_train,), side), weights, recipe, **({} if length is None else {"length": length})
    )
    if resolved.recipe.batch.size >= world_size:
        plan = plan_of(resolved, num_train, world_size)
        assert plan.schedule.warmup_steps < max(plan.total_steps, 2)
        assert plan.freeze_steps < plan.total_steps
        assert sum(map(sum, plan.device_groups)) == resolved.recipe.batch.size
    assert resolved.recipe.derive == () and len(found) > 5


def test_rules_and_derivable_fields_are_the_same() -> None:
    assert [rule.name for rule in RULES] == list(get_args(DerivedField))
    for recipe in ("finetune", "finetune-detection"):
        assert set(load(recipe).recipe.derive) <= {rule.name for rule in RULES}


def test_the_table_in_the_docs_has_every_rule() -> None:
    rows = re.findall(
        r"^\| `([a-z_.]+)` \| (.+) \| (.*) \|$", (DOCS / "how-to" / "finetune.md").read_text(), re.MULTILINE
    )
    assert rows == [(rule.name, rule.text, rule.detection or "the same") for rule in RULES]
