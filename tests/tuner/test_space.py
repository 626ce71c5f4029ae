"""Search spaces: what --space writes, what it refuses, and the recipe values that parameters stand for."""

from __future__ import annotations

import pytest

from reconv.core.errors import RecipeError, UsageError
from reconv.recipe.loader import load
from reconv.tuner.space import Dimension, check_space, default_params, default_space, parse_space, trial_overrides


@pytest.mark.parametrize(
    ("text", "ends", "whole", "log"),
    [
        ("schedule.lr=1e-3:1e-1:log", (0.001, 0.1), False, True),
        ("schedule.lr=2^-9:2^-5:log", (2**-9, 2**-5), False, True),
        ("schedule.lr=0.1 per 256:1 per 256", ("0.1 per 256", "1.0 per 256"), False, False),
        ("optimizer.weight_decay=0:1e-3", (0.0, 0.001), False, False),
        ("batch.size=16:70:16", (16, 64), True, False),
        ("schedule.warmup=0ep:5ep", ("0ep", "5ep"), True, False),
        ("schedule.warmup=0.5ep:5ep", ("0.5ep", "5.0ep"), False, False),
        ("length=100step:200step", ("100step", "200step"), True, False),
        ("model.options.width=1:4", (1, 4), True, False),
        ("model.options.width=1.0:4", (1.0, 4.0), False, False),
        ("optimizer.name=sgd|lars", ("sgd", "lars"), False, False),
        ("optimizer.nesterov=true|false", ("true", "false"), False, False),
    ],
)
def test_a_dimension_has_the_units_and_kind_of_its_field(
    text: str, ends: tuple[object, ...], whole: bool, log: bool
) -> None:
    dimension = Dimension.parse(text)
    assert (dimension.ends(), dimension.is_whole, dimension.is_log) == (ends, whole, log)
    assert str(dimension) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("schedule.lr", "names no field and its values"),
        ("=1:2", "names no field and its values"),
        ("schedule.lr=0.1", "neither a range nor a list of choices"),
        ("schedule.lr=a:b", "neither a range nor a list of choices"),
        ("schedule.lr=1:0.1", "the lower end must come first"),
        ("schedule.lr=0:1:log", "begins above 0"),
        ("schedule.lr=1:2:lag", "is not `log`"),
        ("schedule.lr=1:2:3", "is not `log`"),
        ("batch.size=16:32.5", "takes whole numbers"),
        ("schedule.warmup=1ep:10%", "different units"),
        ("optimizer.name=sgd|sgd", "neither a range nor a list of choices"),
        ("optimizer.name=sgd|", "neither a range nor a list of choices"),
    ],
)
def test_what_is_no_space_is_an_error(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_space([text])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("schedule.lrr=1e-3:1e-1", "unknown key; did you mean schedule.lr"),
        ("optimizer.momentum=0.9:2", "must be a number below 1"),
        ("schedule.warmup=0:5", "must be a duration with its unit"),
        ("schedule.name=cosine|liner", "did you mean linear"),
        ("schedule.power=1:2", "schedule.power"),  # of another schedule
    ],
)
def test_values_that_the_recipe_refuses_are_its_own_error_before_any_trial(text: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words) as caught:
        check_space("quickstart", [], parse_space([text]))
    assert "--space" in str(caught.value)


@pytest.mark.parametrize("field", ["seed=1:9", "data.fold=1/2|2/2", "data.split_seed=0:9", "log.every=1step:9step"])
def test_fields_that_choose_luck_or_other_images_or_nothing_are_refused(field: str) -> None:
    with pytest.raises(UsageError, match="cannot be searched"):
        parse_space([field])


def test_a_field_is_fixed_or_searched_once() -> None:
    with pytest.raises(UsageError, match=r"names schedule\.lr twice"):
        parse_space(["schedule.lr=1:2", "schedule.lr=1:3"])
    with pytest.raises(UsageError, match=r"schedule\.lr is both fixed and searched") as caught:
        check_space("quickstart", [("schedule.lr", 0.1, "--lr")], parse_space(["schedule.lr=1:2"]))
    assert "--lr sets it" in caught.value.why


def test_values_are_rounded_within_the_range_and_read_back_equal() -> None:
    space = parse_space(["schedule.lr=0.01234449:0.5:log", "schedule.warmup=0ep:3ep", "optimizer.nesterov=true|false"])
    low = trial_overrides(space, {"schedule.lr": 0.01234449, "schedule.warmup": 2, "optimizer.nesterov": "false"})
    assert low == {"schedule.lr": 0.01234449, "schedule.warmup": "2ep", "optimizer.nesterov": "false"}
    assert trial_overrides(space, {"schedule.lr": 0.123456789}) == {"schedule.lr": 0.1235}
    recipe = load("quickstart", [(name, value, "--space") for name, value in low.items()]).recipe
    assert (recipe.schedule.lr, str(recipe.schedule.warmup), recipe.optimizer.nesterov) == (0.01234449, "2ep", False)


def test_trial_0_has_the_parameters_of_the_recipe_that_are_in_the_space() -> None:
    space = parse_space(
        [
            "schedule.lr=0.01:1:log",
            "optimizer.momentum=0.1:0.5",
            "schedule.warmup=0ep:3ep",
            "optimizer.nesterov=true|false",
        ]
    )
    params = default_params(load("quickstart"), space)
    assert params == {"schedule.lr": 0.1, "schedule.warmup": 1, "optimizer.nesterov": "true"}
    assert default_params(load("finetune"), parse_space(["schedule.lr=0.01:1:log"])) == {}  # follows from the data


def test_default_spaces_are_around_the_recipe_or_those_of_fine_tuning() -> None:
    assert default_space("quickstart", []) == ("schedule.lr=0.01:1:log", "optimizer.weight_decay=5e-05:0.005:log")
    assert default_space("quickstart", [("schedule.lr", 0.1, "--lr")]) == ("optimizer.weight_decay=5e-05:0.005:log",)
    tuned = default_space("finetune", [("model.init", "weights.pth", "--init")])
    assert [text.partition("=")[0] for text in tuned] == [
        "schedule.lr",
        "optimizer.weight_decay",
        "optimizer.backbone_lr_scale",
    ]
    check_space("finetune", [("model.init", "weights.pth", "--init")], parse_space(tuned))
    check_space("finetune", [], parse_space(default_space("finetune", [])))


def test_a_position_on_an_axis_follows_the_scale() -> None:
    log, linear, choice = parse_space(
        ["schedule.lr=0.01:1:log", "loss.label_smoothing=0:0.2", "optimizer.name=sgd|lars"]
    )
    assert log.position(0.1) == pytest.approx(0.5)
    assert linear.position(0.05) == pytest.approx(0.25)
    assert [choice.position(name) for name in ("sgd", "lars")] == [0.0, 1.0]
