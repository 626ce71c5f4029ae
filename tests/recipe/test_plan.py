from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reconv.core.errors import RecipeError, one_of
from reconv.recipe.batch_split import AUTO_MICRO_IMAGES, cut_groups
from reconv.recipe.plan import Every, Facts, Plan, make_plan
from reconv.recipe.plan_text import loss_note
from reconv.recipe.schema import Recipe


def plan_of(num_train: int = 10_000, *, world_size: int = 1, cores: int = 4, source: str = "", **sections: Any) -> Plan:
    return make_plan(Recipe(**sections), Facts(num_train, 100, 10, world_size=world_size, cores=cores, source=source))


@pytest.mark.parametrize(
    ("num_samples", "group", "sizes"),
    [(64, 64, (64,)), (64, 16, (16,) * 4), (40, 16, (16, 16, 8)), (33, 16, (16, 17)), (1, 4, (1,)), (5, 1, (1,) * 5)],
)
def test_a_batch_is_split_in_order_and_a_remainder_of_one_joins_its_neighbor(num_samples, group, sizes) -> None:
    assert cut_groups(num_samples, group) == sizes


@settings(deadline=None)
@given(st.data())
def test_every_sample_is_in_one_group_and_every_group_whole_in_one_micro_batch(data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, 4))
    size = data.draw(st.integers(world_size, 240))
    group = data.draw(st.sampled_from(["all", "micro"]) | st.integers(1, size))
    micro = data.draw(st.just("auto") | st.integers(1, 2 * size))
    try:
        plan = plan_of(batch={"size": size, "group": group, "micro": micro}, world_size=world_size)
    except RecipeError as error:
        assert error.hint
        return
    assert sum(plan.group_sizes) == size
    dealt = [plan.micro_batches(rank) for rank in range(world_size)]
    parts = [g for micro_batches in dealt for groups in micro_batches for g in groups]
    assert max(map(len, dealt)) == plan.num_micro_batches
    rows = [plan.rows(rank) for rank in range(world_size)]
    assert [row for of_rank in rows for row in range(size)[of_rank]] == list(range(size))
    if plan.devices_per_group > 1:
        assert [len(micro_batches) for micro_batches in dealt] == [1] * world_size
        each = plan.devices_per_group
        assert tuple(sum(parts[i : i + each]) for i in range(0, world_size, each)) == plan.group_sizes
        assert max(parts) - min(parts) <= 1 or len(set(plan.group_sizes)) > 1
        return
    assert tuple(parts) == plan.group_sizes
    assert max(map(len, plan.device_groups)) - min(map(len, plan.device_groups)) <= 1
    assert plan.micro_batch % plan.group == 0
    if micro != "auto" and micro < plan.batch_per_device:
        assert max(sum(groups) for groups in dealt[0]) <= max(micro + 1, 3)


@pytest.mark.parametrize(
    ("batch", "world_size", "micro_batch", "num_micro_batches"),
    [
        ({"size": 1024, "group": 64, "micro": 64}, 4, 64, 4),
        ({"size": 1024, "group": 32}, 1, 256, 4),
        ({"size": 1024}, 1, 1024, 1),
        ({"size": 512, "group": 512}, 1, 512, 1),
        ({"size": 96, "group": 32, "micro": 64}, 1, 64, 2),
        ({"size": 40, "group": 16, "micro": 500}, 1, 48, 1),
        ({"size": 40, "group": 8, "micro": 16}, 1, 16, 3),
        ({"size": 1024, "group": "micro"}, 2, 256, 2),
        ({"size": 100, "group": "micro", "micro": 33}, 1, 25, 4),
        ({"size": 257, "group": "micro"}, 1, 129, 2),
        ({"size": 3, "group": "micro", "micro": 2}, 1, 3, 1),
        ({"size": 1, "group": "micro"}, 1, 1, 1),
    ],
)
def test_micro_batches_are_whole_numbers_of_groups(batch, world_size, micro_batch, num_micro_batches) -> None:
    plan = plan_of(batch=batch, world_size=world_size)
    assert (plan.micro_batch, plan.num_micro_batches) == (micro_batch, num_micro_batches)


@pytest.mark.parametrize(
    ("batch", "world_size", "fits"),
    [
        ({"size": 100, "group": "micro"}, 8, ["--batch-size 96", "--batch-size 104", "--devices 5"]),
        ({"size": 3, "group": "micro"}, 8, ["--batch-size 8", "--devices 3"]),
        ({"size": 256, "micro": 64}, 1, [*(f"--set batch.micro={m}" for m in ("auto", 256)), "--set batch.group=64"]),
        (
            {"size": 256, "group": 32, "micro": 48},
            1,
            ["--set batch.micro=auto", "--set batch.micro=32", "--set batch.group=48"],
        ),
        (
            {"size": 96, "group": 32},
            4,
            ["--devices 3", "--batch-size 128 --set batch.group=32", "--set batch.group=24"],
        ),
        (
            {"size": 96, "group": 32},
            5,
            ["--devices 3", "--batch-size 160 --set batch.group=32", "--set batch.group=23"],
        ),
        ({"size": 3}, 8, ["--devices 3", "--batch-size 8"]),
    ],
)
def test_impossible_batch_sizes_are_rejected_with_possible_ones(batch, world_size, fits: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        plan_of(batch=batch, world_size=world_size)
    assert caught.value.hint == one_of(*fits)


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"parallel": {"reduce": "ordered"}}, "whole groups"),
        ({"augment": {"mixup": {"alpha": 0.2}}}, "MixUp"),
        ({"model": {"name": "efficientnet_b0", "options": {"drop_connect_per": "batch"}}}, "a whole group"),
    ],
)
def test_a_group_is_not_divided_where_it_must_be_whole(sections: dict[str, Any], why: str) -> None:
    with pytest.raises(RecipeError) as caught:
        plan_of(batch={"size": 256}, world_size=4, **sections)
    assert why in caught.value.why
    assert caught.value.hint == one_of("--devices 1", "--set batch.group=64")


@pytest.mark.parametrize(
    ("batch", "world_size", "on_devices"),
    [
        ({"size": 66, "group": 16}, 3, ((16, 16), (16, 16), (2,))),
        ({"size": 65, "group": 16}, 4, ((16,), (16,), (16,), (17,))),
        ({"size": 50}, 3, ((17,), (17,), (16,))),
        ({"size": 50, "group": 25}, 4, ((13,), (12,), (13,), (12,))),
        ({"size": 8}, 8, ((1,),) * 8),
    ],
)
def test_groups_are_assigned_in_order_and_divided_over_more_devices(batch, world_size, on_devices) -> None:
    plan = plan_of(batch=batch, world_size=world_size)
    assert plan.device_groups == on_devices
    assert plan.batch_per_device == sum(on_devices[0])


def test_drop_last_drops_or_fills_the_last_batch() -> None:
    assert plan_of(1000, batch={"size": 64}, length="2ep").total_steps == 2 * 15
    assert plan_of(1000, batch={"size": 64}, length="2ep", data={"drop_last": False}).total_steps == 2 * 16
    assert plan_of(1000, batch={"size": 100}, data={"drop_last": False}).steps_per_epoch == 10
    assert plan_of(10, batch={"size": 64}, data={"drop_last": False}).steps_per_epoch == 1


@pytest.mark.parametrize("num_train", [1, 63])
def test_less_data_than_one_batch_is_rejected(num_train: int) -> None:
    with pytest.raises(RecipeError, match=f"{num_train} training sample.* batch of 64") as caught:
        plan_of(num_train, batch={"size": 64})
    assert caught.value.hint == one_of(f"--batch-size {num_train}", "--set data.drop_last=false")


@pytest.mark.parametrize("drop_last", [True, False])
def test_no_data_is_rejected(drop_last: bool) -> None:
    with pytest.raises(RecipeError, match="no training samples"):
        plan_of(0, batch={"size": 64}, data={"drop_last": drop_last})


def test_lengths_round_to_the_nearest_step() -> None:
    assert plan_of(1000, batch={"size": 100}, length="0.25ep").total_steps == 3
    assert plan_of(1000, batch={"size": 100}, length="0.24ep").total_steps == 2
    assert plan_of(1000, batch={"size": 100}, length="0.001ep").total_steps == 1
    assert plan_of(1000, batch={"size": 100}, length="7step").total_steps == 7


def due_steps(every: Every, total: int) -> list[int]:
    found = [done for done in range(total + 1) if every.due(done, total)]
    assert every.count(total) == len(found)
    return found


@pytest.mark.parametrize(
    ("evaluate", "expected"),
    [
        ({"every": "1ep"}, [7, 14, 21]),
        ({"every": "0.5ep"}, [4, 7, 11, 14, 18, 21]),
        ({"every": "2ep"}, [14, 21]),
        ({"every": "5step"}, [5, 10, 15, 20, 21]),
        ({"every": "50%"}, [11, 21]),
        ({"every": "1ep", "offset": "10step"}, [10, 17, 21]),
        ({"every": "2ep", "offset": "1ep"}, [7, 21]),
        ({"every": "1ep", "offset": "9ep"}, [21]),
        ({"every": "0.01ep"}, list(range(1, 22))),
    ],
)
def test_evaluation_is_due_at_its_interval_from_its_offset_and_at_the_end(evaluate, expected: list[int]) -> None:
    plan = plan_of(700, batch={"size": 100}, length="3ep", evaluate=evaluate)
    assert plan.evaluate is not None
    assert due_steps(plan.evaluate, plan.total_steps) == expected


def test_a_tenth_of_an_epoch_is_exact() -> None:
    every = plan_of(9700, batch={"size": 100}, length="10ep", save={"every": "0.1ep"}).save
    assert every is not None
    assert len(due_steps(every, 970)) == 100
    assert every.due(97, 970), "0.1 x 97 x 10 is 97.00000000000001 in binary fractions"


def test_intervals_in_minutes_and_off() -> None:
    plan = plan_of(700, batch={"size": 100}, length="1ep", save={"every": "15min"}, evaluate={"every": "off"})
    assert plan.evaluate is None
    assert plan.save is not None and plan.save.minutes == 15
    assert due_steps(plan.save, 7) == [7]
    assert plan_of(save={"every": "off"}).save is None
    assert due_steps(Every(steps=3, at_end=False), 7) == [3, 6]
    assert due_steps(Every(epoch_steps=Fraction(7, 2), at_end=False), 7) == [4, 7]


def test_checkpoints_to_keep_are_those_inside_the_run() -> None:
    plan = plan_of(1000, batch={"size": 100}, length="3ep", save={"keep_at": ["2ep", "5step", "50%", "9ep"]})
    assert plan.keep_steps == (5, 15, 20)


def test_the_learning_rate_scales_with_the_global_batch() -> None:
    assert plan_of(batch={"size": 1024}, schedule={"lr": 0.256, "base_batch_size": 256}).schedule.peak_lr == 1.024
    assert plan_of(batch={"size": 1024}, schedule={"lr": 0.256}).schedule.peak_lr == 0.256


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({"warmup": "2ep"}, "schedule.warmup 2ep is 200 steps"),
        ({"lr": 0.1, "end_lr": 0.2}, "schedule.end_lr 0.2 is above"),
    ],
)
def test_an_impossible_schedule_is_rejected(schedule, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        plan_of(batch={"size": 100}, length="150step", schedule=schedule)


@pytest.mark.parametrize("kind", ["multistep", "piecewise"])
@pytest.mark.parametrize("points", [["50%", "3ep"], ["250step", "2ep"], ["50%", "499step"]])
def test_milestones_of_several_units_must_increase_in_this_run(kind: str, points: list[str]) -> None:
    schedule = {"name": kind, "milestones": points, **({"milestone_lrs": [0.5, 0.25]} if kind == "piecewise" else {})}
    with pytest.raises(RecipeError, match=f"must increase, but {points[1]} .* follows {points[0]}"):
        plan_of(10_000, batch={"size": 100}, length="10ep", schedule=schedule)
    longer = plan_of(10_000, batch={"size": 100}, length="10ep", schedule=schedule | {"milestones": points[::-1]})
    assert list(longer.schedule.milestone_steps) == sorted(longer.schedule.milestone_steps)


def test_workers_and_threads_follow_the_cores_unless_set() -> None:
    assert [plan_of(cores=n).workers for n in (2, 8, 16, 64)] == [2, 8, 16, 32]
    assert plan_of(cores=64, data={"backend": "threads"}).workers == 8
    assert plan_of(cores=64).threads == 64
    assert plan_of(cores=64, source="cifar10").workers == 0
    assert plan_of(cores=64, source="cifar10", data={"num_workers": 3}).workers == 3
    assert plan_of(cores=64, engine={"num_threads": 2}).threads == 2


def test_the_plan_shows_its_arithmetic() -> None:
    plan = plan_of(
        1_281_167,
        world_size=4,
        cores=16,
        batch={"size": 1024, "group": 64, "micro": 64},
        schedule={"lr": 0.256, "base_batch_size": 256, "warmup": "5ep"},
        save={"keep_at": ["10ep"]},
    )
    assert plan.lines[0] == "global batch 1024 = 4 devices x 64 x 4 micro-batches; lr 0.256 x 1024/256 = 1.024"
    assert "1,251 steps per epoch (143 samples dropped); 90ep = 112,590 steps" in plan.lines[1]
    assert plan.lines[2].startswith("16 groups of 64 samples")
    assert plan.lines[3] == "lr schedule: warm-up over 6,255 steps, then cosine to 0"
    assert plan.lines[4] == "evaluation every 1ep (90 times); checkpoints every 1ep (90 times), kept at step 12,510"
    assert plan.lines[5] == "image size: 224 px in training, 224 px in evaluation"
    assert plan.lines[6] == (
        "16 torch threads, 16 decoding workers, prefetch 2 steps: at most 154 MB of decoded images, "
        "plus 60 MB in evaluation"
    )


def test_the_plan_uses_the_singular_for_one() -> None:
    plan = plan_of(2, cores=1, batch={"size": 1}, length="1step", data={"prefetch": 1})
    text = " ".join(plan.lines)
    assert "1 device x 1 x 1 micro-batch;" in text
    assert "1 step;" in text
    assert "1 torch thread, 1 decoding worker, prefetch 1 step:" in text
    assert "(1 time)" in text


def test_the_plan_shows_uneven_micro_batches_and_groups() -> None:
    text = " ".join(plan_of(batch={"size": 41, "group": 8, "micro": 16}).lines)
    assert "global batch 41 = 1 device x 41, in 3 micro-batches of 16, the last 9" in text
    assert "5 groups of 8, the last 9 samples" in text

    text = " ".join(plan_of(batch={"size": 342, "group": "micro", "micro": 100}).lines)
    assert "in 4 micro-batches of 86 or 85;" in text


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 2000), st.just("auto") | st.integers(1, 600))
def test_automatic_groups_give_few_and_even_micro_batches(world_size: int, per_device: int, micro: int | str) -> None:
    plan = plan_of(batch={"size": world_size * per_device, "group": "micro", "micro": micro}, world_size=world_size)
    limit = AUTO_MICRO_IMAGES if micro == "auto" else int(micro)
    sizes = [sum(groups) for groups in plan.micro_batches(world_size - 1)]
    assert sum(sizes) == per_device
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= max(limit, 3)
    assert len(sizes) <= math.ceil(per_device / limit)
    assert min(sizes) > 1 or per_device == 1
    assert plan.micro_batch == max(sizes)


def test_groups_that_depend_on_the_hardware_are_mentioned() -> None:
    assert "batch.group: micro makes results depend on the hardware" in "\n".join(
        plan_of(batch={"group": "micro"}).lines
    )
    assert "depend on the hardware" not in " ".join(plan_of().lines)


def lines_of(num_train: int, *, world_size: int = 1, **sections: Any) -> str:
    return "\n".join(plan_of(num_train, world_size=world_size, **sections).lines)


@pytest.mark.parametrize(
    ("batch", "schedule", "expected"),
    [
        (2048, {"lr": 0.256, "base_batch_size": 256}, "lr 0.256 x 2048/256 = 2.048"),
        (768, {"lr": "2^-11 per image"}, "lr 2^-11 x 768 = 0.375"),
        (3040, {"lr": "2^-9.5 per image"}, "lr 2^-9.5 x 3040 = 4.19845"),
        (1024, {"lr": "0.003 per 32"}, "lr 0.003 x 1024/32 = 0.096"),
        (1920, {"lr": 3.824}, "lr 3.824"),
    ],
)
def test_the_plan_shows_the_learning_rate_as_published(batch: int, schedule: dict[str, Any], expected: str) -> None:
    assert expected in lines_of(1_281_167, batch={"size": batch}, schedule=schedule)


def test_the_plan_shows_the_published_batch_and_any_other_of_this_run() -> None:
    claim = {"source": "someone", "batch": [20, 6, 16]}
    text = lines_of(1_281_167, batch={"size": 1920}, published=[claim, claim])
    assert text.count("published with a batch of 20 x 6 x 16 = 1,920 (samples x accumulation x devices)") == 1
    assert "this run uses" not in text
    assert "= 1,920 (samples x accumulation x devices); this run uses 256" in lines_of(1_281_167, published=[claim])
    two = {"source": "someone", "batch": [256, 8]}
    assert "256 x 8 = 2,048 (samples x devices)" in lines_of(1_281_167, batch={"size": 2048}, published=[two])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (
            {"name": "piecewise", "milestone_lrs": [0.275, 0.8], "milestones": ["1ep", "4ep"]},
            "piecewise: 0.1, 0.275 from 1ep, 0.8 from 4ep",
        ),
        (
            {"name": "piecewise", "milestone_lrs": [0.2, 0.3], "milestones": ["0ep", "95ep"]},
            "0.3 from 95ep (1 value after the end)",
        ),
        ({"name": "cosine", "warmup": "1ep", "warmup_mode": "replace"}, "then cosine to 0 from step 0"),
        (
            {"name": "cosine", "warmup": "1ep", "warmup_from": "zero", "warmup_mode": "multiply"},
            "warm-up from 0 over 39 steps, times cosine to 0 from step 0",
        ),
        (
            {"name": "polynomial", "decay_until": "36ep", "end_lr": 1e-4},
            "polynomial of power 2 to 0.0001 at step 1,404",
        ),
        (
            {"name": "exponential", "num_periods": 146, "staircase": True},
            "x 0.1 146 times in the run, staircase",
        ),
        ({"name": "linear", "interval": "epoch"}, "linear to 0, updated every epoch"),
        ({"name": "one-cycle", "warmup": "10%"}, "one-cycle, cosine: 0.004 to 0.1 in 351 steps, then to 0"),
    ],
)
def test_the_plan_describes_the_schedule(schedule: dict[str, Any], expected: str) -> None:
    assert expected in lines_of(10_000, schedule=schedule)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"milestone_lrs": [0.2, 0.02], "milestones": ["0ep", "30ep"]}, "; lr 0.2, 0.02"),
        (
            {"milestone_lrs": [0.2, 0.02], "milestones": ["0ep", "30ep"], "base_batch_size": 128},
            "; lr 0.2, 0.02 x 256/128 = 0.4, 0.04",
        ),
        ({"milestone_lrs": [0.2, 0.02], "milestones": ["1ep", "30ep"], "lr": 0.5}, "; lr 0.5 until 1ep"),
        ({"milestone_lrs": [0.2], "milestones": ["0ep"], "lr": 0.5, "warmup": "1ep"}, "; lr 0.5 after warm-up"),
    ],
)
def test_the_plan_shows_the_rates_of_a_piecewise_schedule(schedule: dict[str, Any], expected: str) -> None:
    assert plan_of(schedule=schedule | {"name": "piecewise"}).lines[0].endswith(expected)


def test_one_drop_one_sample_and_one_evaluation_are_singular() -> None:
    text = lines_of(
        10_000,
        schedule={"name": "multistep", "milestones": ["1step"]},
        batch={"size": 4, "group": 1},
        early_stopping={"patience": 1},
    )
    assert "x 0.1 at step 1" in text and "1 steps" not in text
    assert "4 groups of 1 sample:" in text
    assert "stops early when 1 evaluation in a row does not improve" in text
    assert "x 0.1 1 time in the run" in lines_of(10_000, schedule={"name": "exponential", "num_periods": 1})


def test_a_decay_that_ends_inside_warm_up_is_rejected() -> None:
    with pytest.raises(RecipeError, match="before warm-up ends at step"):
        plan_of(schedule={"warmup": "5ep", "decay_until": "3ep"})


def test_epoch_samples_sets_the_length_of_an_epoch() -> None:
    plan = plan_of(1000, data={"epoch_samples": 300}, batch={"size": 100}, length="4ep")
    assert (plan.steps_per_epoch, plan.total_steps) == (3, 12)
    assert any("3 steps per epoch of 300 samples" in line for line in plan.lines)
    wrapped = plan_of(1000, data={"epoch_samples": 1170, "drop_last": False}, batch={"size": 100}, length="4ep")
    assert wrapped.steps_per_epoch == 12
    with pytest.raises(RecipeError, match=r"data\.epoch_samples 99 is smaller") as refusal:
        plan_of(1000, data={"epoch_samples": 99}, batch={"size": 100})
    assert "data.epoch_samples=100" in refusal.value.hint


def test_a_partial_evaluation_is_mentioned() -> None:
    plan = make_plan(Recipe(), Facts(1000, 100, 10, num_val_left_out=260))
    assert (plan.num_val, plan.num_val_left_out) == (100, 260)
    assert any("100 of 360 validation samples (partial evaluation)" in line for line in plan.lines)


@pytest.mark.parametrize(
    ("group", "world_size", "num_micro"),
    [(2, 2, 8), (2, 4, 8), (8, 2, 8), (16, 2, 4), ("all", 2, 1)],  # of 64 samples: groups of 2 come four at a time
)
def test_an_automatic_micro_batch_keeps_the_devices_of_a_pipeline_busy(
    group: int | str, world_size: int, num_micro: int
) -> None:
    parallel = {"pipeline_stages": 2, "pipeline_splits": ["layer2.0"]}
    plan = plan_of(batch={"size": 64, "group": group}, parallel=parallel, world_size=world_size)
    assert plan.num_micro_batches == num_micro
    assert any("most of them will be idle" in line for line in plan.lines) == (num_micro < 2)


def test_the_devices_of_a_pipeline_shard_the_optimizer_state() -> None:
    parallel = {"pipeline_stages": 2, "pipeline_splits": ["layer2.0"]}
    plan = plan_of(batch={"size": 64, "group": 8}, parallel=parallel, memory={"shard_optimizer": True}, world_size=2)
    assert "optimizer state sharded over 2 devices" in plan.lines


def test_alpha_falls_with_the_batch_when_given_as_an_exponent() -> None:
    optimizer = {"name": "rmsprop-tf", "alpha_exponent": -14}
    plan = plan_of(batch={"size": 768}, optimizer=optimizer)
    assert plan.alpha == 1 - 768 / 16384 == 0.953125
    assert "rmsprop-tf: alpha 1 - 768 x 2^-14 = 0.953125" in plan.lines
    with pytest.raises(RecipeError, match="alpha_exponent=-10") as caught:
        plan_of(batch={"size": 768}, optimizer=optimizer | {"alpha_exponent": -9})
    assert "--batch-size 512\n" in caught.value.hint


def test_the_plan_prints_the_constants_of_adamw() -> None:
    plan = plan_of(optimizer={"name": "adamw", "weight_decay": 0.05, "weight_decay_exclude": "norm-bias"})
    assert "adamw: betas 0.9 and 0.999, eps 1e-08, weight decay 0.05, none for norm-bias" in plan.lines


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({}, []),
        ({"name": "lamb"}, ["gradients clipped: norm at most 1"]),
        ({"name": "lamb", "clip_grad": "off"}, []),
        ({"clip_grad": 0.5, "clip_mode": "value"}, ["gradients clipped: each value at most 0.5"]),
    ],
)
def test_the_plan_prints_how_gradients_are_clipped(optimizer: dict[str, Any], expected: list[str]) -> None:
    assert [line for line in plan_of(optimizer=optimizer).lines if "clipped" in line] == expected


def test_the_plan_prints_the_learning_rates_of_layers_and_backbone() -> None:
    lines = plan_of(optimizer={"layer_decay": 0.7, "backbone_lr_scale": 0.1}).lines
    assert "learning rate x 0.7 for each layer before the last (layer_decay)" in lines
    assert "learning rate x 0.1 for all parameters but the head's" in lines


def test_an_average_takes_the_regular_checkpoints_of_the_last_epochs() -> None:
    average = {"checkpoint_average": {"last": "2ep"}, "save": {"every": "50step"}}
    plan = plan_of(76_800, batch={"size": 768}, length="4ep", **average)
    window = plan.average
    assert window is not None and plan.total_steps == 400
    assert [step for step in range(401) if window.holds(step, 400)] == [250, 300, 350, 400]
    assert [step for step in range(401) if window.holds(step, 130)] == [50, 100, 130]  # stopped early: the last counts
    assert "at the end: mean of the checkpoints of the last 200 steps" in plan.lines


def test_the_plan_shows_when_a_run_may_stop_early() -> None:
    plan = plan_of(early_stopping={"target": 0.759, "patience": 5})
    assert "stops early when the metric reaches 0.759 or 5 evaluations in a row do not improve" in plan.lines


def test_a_frozen_backbone_is_planned_in_steps_and_must_end_before_the_run() -> None:
    model = {"init": "weights.pth", "freeze_until": "10%"}
    plan = plan_of(2560, length="4ep", model=model)
    assert (plan.total_steps, plan.freeze_steps) == (40, 4)
    assert (
        "model.freeze_until 10%: the first 4 steps train only the head, then all parameters are trained" in plan.lines
    )
    with pytest.raises(RecipeError, match=r"model.freeze_until 4ep is 40 steps, but the run has only 40"):
        plan_of(2560, length="4ep", model=model | {"freeze_until": "4ep"})


def test_the_plan_says_how_often_images_come() -> None:
    recipe = Recipe.model_validate({"augment": {"repeats": 3}, "data": {"sampler": "balanced"}, "batch": {"size": 64}})
    lines = make_plan(recipe, Facts(1000, 100, 10)).lines
    assert "repeated augmentation: 320 images per epoch, 3 times each" in lines
    assert any(line.startswith("balanced sampling") for line in lines)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, ""),
        ({"loss": {"label_smoothing": 0.1}}, "training loss includes label smoothing, validation loss does not"),
        (
            {"loss": {"label_smoothing": 0.1}, "augment": {"mixup": {"alpha": 0.2}, "cutmix": {"alpha": 1.0}}},
            "training loss includes label smoothing, mixup and cutmix, validation loss does not",
        ),
        (
            {"task": "multilabel", "loss": {"label_smoothing": 0.1}},
            "training loss includes label smoothing, validation loss does not",
        ),
        ({"task": "multilabel", "loss": {"name": "bce"}}, ""),
        (
            {"task": "multilabel", "loss": {"name": "my_pkg.losses:focal"}},
            "training loss is my_pkg.losses:focal, validation loss is binary cross-entropy",
        ),
        ({"loss": {"name": "bce"}}, "training loss is binary cross-entropy, validation loss is cross-entropy"),
    ],
)
def test_the_plan_says_why_training_and_validation_loss_cannot_be_compared(
    sections: dict[str, Any], expected: str
) -> None:
    assert loss_note(Recipe(**sections)).partition(": they")[0] == expected
    assert any(line.startswith("training loss") for line in plan_of(**sections).lines) == bool(expected)
