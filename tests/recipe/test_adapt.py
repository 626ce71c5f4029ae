"""What a user did not write follows the length, the batch, the network and the data."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from reconv.build.model import detector_spec
from reconv.core.errors import RecipeError
from reconv.models import model_spec, option_names
from reconv.recipe.load.adapt import CHANGED, follow_precision, shorten_warmup
from reconv.recipe.load.resolved import Resolved, fit_to_data, fit_to_model
from reconv.recipe.loader import Override, dump, load
from reconv.recipe.parts.precision import PrecisionConfig
from reconv.recipe.plan import Facts, Plan, make_plan
from reconv.recipe.presets import preset_names
from reconv.recipe.schema import Recipe
from reconv.recipe.units import BatchPerDevice, Duration

IMAGENET = Facts(num_train=1_281_167, num_val=50_000, num_classes=1000)
FIELDS = {"--batch-size": "batch.size", "--model": "model.name", "--lr": "schedule.lr"}
OPTIONS = (
    *("--epochs 1", "--epochs 3", "--epochs 0.5", "--set length=500step"),
    *("--batch-size 1", "--batch-size 7", "--batch-size 32", "--batch-size 100000", "--batch-per-device 24"),
    *("--devices 3", "--model resnet18", "--lr 2^-11"),
)


Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a recipe and return its path."""

    def write(text: str, name: str = "my.yaml") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def parse(line: str) -> tuple[list[Override], int]:
    """The overrides and the number of devices of a command line."""
    overrides: list[Override] = []
    devices = 1
    words = shlex.split(line)
    for option, value in zip(words[::2], words[1::2], strict=True):
        if option == "--devices":
            devices = int(value)
        elif option == "--epochs":
            overrides.append(("length", f"{value}ep", option))
        elif option == "--batch-per-device":
            overrides.append(("batch.size", BatchPerDevice(int(value), devices), option))
        elif option == "--set":
            field, _, text = value.partition("=")
            overrides.append((field, text, option))
        else:
            overrides.append((FIELDS[option], value, option))
    return overrides, devices


def resolve(name: str, line: str = "", num_train: int = IMAGENET.num_train, num_classes: int = 1000) -> Resolved:
    resolved = load(name, parse(line)[0])
    resolved = fit_to_model(resolved, option_names(resolved.recipe.model.name))
    return fit_to_data(resolved, num_train, num_classes)


def plan(name: str, line: str = "", num_train: int = IMAGENET.num_train) -> Plan:
    resolved = resolve(name, line, num_train)
    recipe = resolved.recipe
    if recipe.task == "detection":
        detector_spec(recipe)
    else:
        model_spec(recipe.model.name, **recipe.model.options)
    facts = Facts(num_train, num_train // 20 + 1, 1000, world_size=parse(line)[1])
    return make_plan(recipe, facts, resolved.lines)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_preset_plans_with_one_option_or_lists_options_that_work(option: str) -> None:
    names = preset_names()
    refused = 0
    for name in names:
        try:
            plan(name, option)
        except RecipeError as error:
            refused += 1
            cures = [line.strip() for line in error.hint.splitlines() if line.strip().startswith("--")]
            assert cures, f"{name} {option}: {error}"
            for cure in cures:
                plan(name, f"{option} {cure}")
    assert len(names) >= 97
    assert refused < len(names) / 3


@pytest.mark.parametrize("name", ["resnet50", "ssd-resnet34", "quickstart", "cifar10-fast"])
def test_an_unchanged_preset_stays_as_it_is(name: str) -> None:
    resolved = resolve(name, num_classes=80 if "ssd" in name else 1000)
    assert dump(resolved.recipe) == dump(load(name).recipe)
    assert resolved.lines == ()


def test_durations_in_epochs_keep_their_share_of_the_run() -> None:
    resolved = resolve("ssd-resnet34", "--epochs 5")
    schedule = resolved.recipe.schedule
    assert str(schedule.warmup) == "0.3906ep"  # 5 of 64
    assert [str(point) for point in schedule.milestones] == ["3.125ep", "3.906ep"]  # 40 and 50 of 64
    assert "changed to fit: schedule.warmup 5ep -> 0.3906ep (keeps its share of the run, 64ep -> 5ep)" in resolved.lines
    assert resolved.recipe.evaluate.every == Duration(4, "ep")  # an interval
    assert load("resnet50", [("length", "180ep", "--epochs")]).recipe.schedule.warmup == Duration(16, "ep")


def test_percent_stay_and_a_period_of_an_epoch_is_written_out() -> None:
    assert resolve("cifar10-fast", "--epochs 3").recipe.schedule.warmup == Duration(23, "%")
    schedule = [("schedule.name", "exponential", "--set"), ("schedule.gamma", "0.9", "--set")]
    assert load("resnet50", schedule).recipe.schedule.period is None
    fitted = load("resnet50", [*schedule, ("length", "45ep", "--epochs")]).recipe
    assert fitted.schedule.warmup == Duration(4, "ep")


def test_a_length_in_another_unit_is_fitted_once_the_data_is_known() -> None:
    resolved = resolve("cifar10-resnet20", "--epochs 1", num_train=50_000)
    steps = 50_000 // resolved.recipe.batch.size
    assert steps == 390
    assert [str(point) for point in resolved.recipe.schedule.milestones] == ["195step", "293step"]
    few = resolve("cifar10-resnet20", "--set length=1step", num_train=50_000).recipe
    assert [str(point) for point in few.schedule.milestones] == ["1step", "2step"]


def test_fields_of_a_replaced_schedule_do_not_come_back() -> None:
    for name, schedule in (("resnet18", "constant"), ("ssd-resnet34", "cosine")):
        recipe = resolve(name, f"--set length=500step --set schedule.name={schedule}").recipe
        assert recipe.schedule.period is None and recipe.schedule.milestones == ()


def test_a_resumed_run_keeps_its_durations_unless_others_are_given() -> None:
    run = resolve("resnet50", "--epochs 5").recipe
    longer = resolve("resnet50", "--epochs 10").with_durations_of(run)
    assert longer.recipe.schedule.warmup == run.schedule.warmup
    assert longer.lines == ()
    written = resolve("resnet50", "--epochs 10 --set schedule.warmup=1ep").with_durations_of(run)
    assert written.recipe.schedule.warmup == Duration(1, "ep")
    shorter = resolve("resnet50", "--epochs 2")
    assert shorter.with_durations_of(run) == shorter  # will be refused
    other = resolve("resnet18", "--set schedule.name=constant").with_durations_of(resolve("resnet18").recipe)
    assert other.recipe.schedule.period is None


def test_what_cannot_be_fitted_to_the_data_lists_options_that_work() -> None:
    with pytest.raises(RecipeError, match="needs groups of at least two samples") as caught:
        plan("resnet50-nv-250ep-8gpu-mixed", num_train=1)
    plan("resnet50-nv-250ep-8gpu-mixed", "--set augment.mixup.alpha=0", num_train=1)
    assert "--set augment.mixup.alpha=0" in caught.value.hint


def test_a_warm_up_in_steps_is_shortened_to_the_run(write: Write) -> None:
    recipe = Recipe.model_validate({"length": "1ep", "schedule": {"warmup": "500step"}})
    changes = list(shorten_warmup(recipe, warmup_steps=500, total_steps=10, explicit=()))
    assert [str(change) for change in changes] == ["schedule.warmup 500step -> 10step (the run has 10 steps)"]
    path = write("schedule: {name: cosine, warmup: 50000step}\nlength: 1ep\n")
    with pytest.raises(RecipeError, match="50,000 steps, but the run has only 5004") as caught:
        plan(path)  # the user wrote it
    for cure in ("--set schedule.warmup=5004step", "--set schedule.warmup=5%", "--set length=50000step"):
        assert cure in caught.value.hint
        plan(path, cure)


def test_what_the_user_wrote_never_changes(write: Write) -> None:
    path = write("extends: resnet50\nlength: 5ep\nschedule: {warmup: 2ep}\n")
    resolved = resolve(path)
    assert resolved.recipe.schedule.warmup == Duration(2, "ep")
    assert resolved.lines == ()
    with pytest.raises(RecipeError, match=r"schedule\.warmup: 2ep is longer than the run") as caught:
        resolve(path, "--epochs 1")
    for cure in ("--epochs 2", "--set schedule.warmup=1ep", "--set schedule.warmup=5%"):
        assert cure in caught.value.hint
        resolve(path, f"--epochs 1 {cure}")


def test_a_file_that_extends_a_preset_is_fitted_like_options(write: Write) -> None:
    by_file = resolve(write("extends: resnet50\nlength: 9ep\nbatch: {size: 64}\n")).recipe
    by_options = resolve("resnet50", "--epochs 9 --batch-size 64").recipe
    assert by_file.schedule == by_options.schedule
    assert by_file.batch == by_options.batch
    assert str(by_file.schedule.warmup) == "0.8ep"


@pytest.mark.parametrize(
    ("line", "size", "group"),
    [
        ("--batch-size 32", 32, 32),
        ("--batch-size 512", 512, 256),
        ("--devices 8 --batch-per-device 32", 256, 32),
        ("--devices 2 --batch-per-device 384", 768, 384),
        ("--devices 2 --batch-per-device 512", 1024, 256),  # two groups on each device
        ("--batch-size 32 --set batch.group=16", 32, 16),
    ],
)
def test_groups_follow_the_batch(line: str, size: int, group: int) -> None:
    resolved = resolve("resnet50", line)
    assert (resolved.recipe.batch.size, resolved.recipe.batch.group) == (size, group)
    moved = [text for text in resolved.lines if "batch.group 256 ->" in text]
    assert len(moved) == (group not in (256, 16))


def test_the_peak_learning_rate_follows_the_batch_if_the_recipe_scales_it() -> None:
    line = "changed to fit: peak learning rate 2.048 -> 0.032 (0.256 per 256, linear in the batch size)"
    assert line in resolve("resnet50", "--batch-size 32").lines
    assert plan("resnet50", "--batch-size 32").schedule.peak_lr == 0.032
    stays = resolve("resnet50-habana-lars-8card-bf16", "--batch-size 64")
    assert stays.recipe.schedule.lr == 9
    assert any("schedule.lr stays 9" in text and "--lr 0.2812" in text for text in stays.lines)


def test_a_rate_that_the_user_wrote_is_the_rate_that_is_used(write: Write) -> None:
    assert plan("resnet50", "--lr 0.1").schedule.peak_lr == 0.1
    assert plan("resnet50", "--lr 2^-11").schedule.peak_lr == 2**-11
    assert plan("resnet50", "--lr '0.1 per 256'").schedule.peak_lr == 0.8
    assert plan("resnet50", "--lr 0.1 --set schedule.base_batch_size=256").schedule.peak_lr == 0.8
    path = write("extends: resnet50\nschedule: {lr: 2^-3}\n")
    assert plan(path).schedule.peak_lr == 0.125
    assert plan(write("extends: resnet50\nschedule: {lr: 0.5 per 512}\n", "per.yaml")).schedule.peak_lr == 2
    assert load("resnet50", [("schedule.lr", "0.256", "--lr")]).recipe.expect is None


def test_milestone_lrs_that_the_user_wrote_are_used_as_written() -> None:
    points = "--set schedule.name=piecewise --set 'schedule.milestones=[1ep, 2ep]'"
    result = plan("resnet50", f"{points} --set 'schedule.milestone_lrs=[2^-3, 0.01]'")
    assert result.schedule.milestone_lrs == (0.125, 0.01)
    assert result.schedule.peak_lr == 2.048  # inherited: 0.256 per 256
    assert plan("resnet50", "--set schedule.end_lr=2^-11").schedule.end_lr == 2**-11


def test_an_inherited_lr_that_no_step_uses_is_no_error() -> None:
    given = "--set schedule.name=piecewise --set 'schedule.milestones=[0ep, 2ep]' --set schedule.warmup=0ep"
    assert plan("resnet50", f"{given} --set 'schedule.milestone_lrs=[0.2, 0.02]'").schedule.peak_lr == 0.2
    with pytest.raises(RecipeError, match=r"schedule\.lr: 0\.3 has no effect"):
        plan("resnet50", f"{given} --set 'schedule.milestone_lrs=[0.2, 0.02]' --lr 0.3")


def test_a_dataset_smaller_than_the_batch_gets_a_smaller_one() -> None:
    resolved = resolve("resnet50", num_train=1000)
    assert resolved.recipe.batch.size == 64  # at least eight steps per epoch
    assert resolved.recipe.batch.group == 64
    assert plan("resnet50", num_train=1000).schedule.peak_lr == 0.064
    assert "changed to fit: batch.size 2048 -> 64 (the dataset has 1,000 training samples)" in resolved.lines
    assert resolve("resnet50", num_train=3).recipe.batch.size == 2
    with pytest.raises(RecipeError, match="fewer than the global batch of 2048"):
        resolve("resnet50", "--batch-size 2048", num_train=1000)


def test_another_network_drops_what_was_written_for_the_old_one() -> None:
    name = "efficientnet-b4-nv-400ep-8gpu-mixed"
    before = load(name).recipe
    resolved = resolve(name, "--model resnet18")
    recipe = resolved.recipe
    assert before.data.preprocess.size == 380 and recipe.data.preprocess.size == 224
    assert set(recipe.model.options) < set(before.model.options)
    assert any("data.preprocess.size 380 -> 224 (380 px are for efficientnet_b4)" in text for text in resolved.lines)
    assert resolve("quickstart", "--model resnet18").recipe.data.preprocess.size == 8  # the size of the data
    kept = resolve(name, "--model resnet18 --set data.preprocess.size=380").recipe
    assert kept.data.preprocess.size == 380


def test_a_changed_recipe_claims_nothing_that_no_longer_holds() -> None:
    changed = resolve("resnet50", "--epochs 5 --model resnet18").recipe
    assert changed.expect is None
    assert changed.description == f"{CHANGED}length 5ep, model.name resnet18"
    small = resolve("resnet50", num_train=1000, num_classes=5).recipe
    assert small.expect is None and small.description.startswith(f"{CHANGED}batch.size 64")
    other_data = resolve("resnet50", num_classes=5).recipe
    assert other_data.expect is None and other_data.description == f"{CHANGED}other data, with 5 classes"
    neutral = resolve("resnet50", "--set data.num_workers=2 --set seed=3").recipe
    assert neutral.expect is not None and neutral.description.startswith("ImageNet")


def test_a_fitted_recipe_is_read_back_equal(write: Write) -> None:
    resolved = resolve("ssd-resnet34", "--epochs 3 --batch-size 7")
    path = write(dump(resolved.recipe))
    assert load(path).recipe == resolved.recipe
    assert resolve(path, num_classes=80).lines == ()


def test_the_precision_mode_of_every_preset_can_be_changed_alone() -> None:
    """In one `--set`; the plan says what was dropped, and which dtypes there are now."""
    num_dropped = 0
    for name in preset_names():
        preset = load(name).recipe
        for mode in get_args(PrecisionConfig.model_fields["mode"].annotation):
            changed = load(name, [("precision.mode", mode, "--set")])
            precision = changed.recipe.precision
            assert precision.mode == mode
            dropped = preset.precision.loss_scale != "dynamic" and not precision.uses_loss_scale
            expected = "dynamic" if dropped else preset.precision.loss_scale
            assert precision.loss_scale == expected, (name, mode)
            named = [line for line in changed.lines if "precision.loss_scale" in line]
            assert len(named) == dropped, (name, mode)
            assert any(f"-> {mode}: " in line for line in changed.lines) == (mode != preset.precision.mode)
            num_dropped += dropped
    assert num_dropped > 200


def test_a_loss_scale_that_the_user_wrote_contradicts_a_mode_without() -> None:
    overrides: list[Override] = [("precision.mode", "bf16", "--set"), ("precision.loss_scale", 64, "--set")]
    with pytest.raises(RecipeError, match=r"precision\.loss_scale: is for fp16"):
        load("resnet50-nv-90ep-8gpu-mixed", overrides)


def test_what_a_mode_does_not_have_is_dropped_from_a_preset_of_another(write: Write) -> None:
    base = write(
        "extends: resnet50-gc-mk1-16ipu\nmemory: {shard_optimizer: true}\n"
        "precision: {mode: fp16, ops: {float32: [conv2d]}, reduced_precision_reduction: 'on', loss_scale: 8}\n"
    )
    text = Path(base).read_text()
    with pytest.raises(RecipeError, match=r"precision\.loss_scale"):  # the user's own file is not changed
        load(base, [("precision.mode", "fp32", "--set")])
    preset = load(base).recipe
    config = PrecisionConfig.model_validate({"mode": "16.16"})
    assert {change.field for change in follow_precision(preset, config, ())} == {"memory.shard_optimizer"}
    config = PrecisionConfig.model_validate({"mode": "fp32"})
    assert [change.field for change in follow_precision(preset, config, ("precision.loss_scale",))] == [
        "precision.ops.float32",
        "precision.reduced_precision_reduction",
    ]
    assert Path(base).read_text() == text
