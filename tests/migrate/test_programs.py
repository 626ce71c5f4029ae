"""Flags of other programs: none is dropped, each is explained, and unknown ones are errors."""

from __future__ import annotations

import math
import random
import re

import click
import pytest
import torch
from torch.optim import lr_scheduler as scheduler
from torch.optim.lr_scheduler import LRScheduler

from reconv.checkpoint.download_weights import TORCHVISION
from reconv.cli import reconv
from reconv.core.errors import UsageError
from reconv.migrate.flag_reference import REQUIRED, documented_flags, example_words
from reconv.migrate.flags import Flag
from reconv.migrate.migration import Migration, finish, migrate_command, wanted_recipe
from reconv.migrate.programs import PROGRAMS
from reconv.migrate.programs.base import Program
from reconv.migrate.programs.torchvision_names import WITH_V2_WEIGHTS
from reconv.migrate.translation import OVERRULED
from reconv.recipe.loader import load
from reconv.recipe.parts.schedule import learning_rate
from reconv.recipe.plan import Facts, make_plan

BY_NAME = {program.name: program for program in PROGRAMS}
# Flags that refuse others of the same program by what they mean, so that random subsets cannot have them.
CHOOSY = {
    *(
        "custom_lr_values",
        "custom_lr_milestones",
        "optimiser",
        "model_size",
        "model",
        "widenet",
        "dataset",
        "opt",
        "lr",
    ),
    *("image_size", "img_size", "input_size", "fine_tune", "variable_filter", "resnet_size", "model_type", "hooks"),
    *(
        "config",
        "config_path",
        "pretrained",
        "freeze",
        "no_aug",
        "val_crop_size",
        "val_resize_size",
        "crop_pct",
        "sched",
    ),
}


def words_of(program: Program, items: list[Flag]) -> list[str]:
    """A command of a program with these flags."""
    return [word for item in items for word in example_words(program, item)]


def rows_of(migration: Migration, name: str) -> list[str]:
    return [row.text for row in migration.rows if re.match(rf"{re.escape(name)}($|[ =])", row.typed)]


def test_every_flag_alone_is_mapped_or_explained() -> None:
    count = 0
    for program in PROGRAMS:
        for item in documented_flags(program):
            words = [*REQUIRED.get(program.name, []), *item.beside, *words_of(program, [item])]
            migration = migrate_command(" ".join([program.script, *words]), program.name)
            texts = rows_of(migration, item.name)
            assert len(texts) == 1 and texts[0] not in ("", OVERRULED), (program.name, item.name, texts)
            if migration.settings:
                wanted_recipe(migration)
            count += 1
    assert count > 500


def test_every_option_that_a_migrated_flag_becomes_exists() -> None:
    checked = set()
    for program in PROGRAMS:
        for item in documented_flags(program):
            words = [*REQUIRED.get(program.name, []), *item.beside, *words_of(program, [item])]
            action = migrate_command(" ".join([program.script, *words]), program.name).action
            if action.verb in ("nothing", "help"):
                continue
            command: click.Command | None = reconv
            for word in action.verb.split():
                assert isinstance(command, click.Group)
                command = command.get_command(click.Context(command), word)
            assert command is not None, action.verb
            known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
            assert {name for name, _ in action.options} <= known, (program.name, item.name, action)
            checked |= {(action.verb, name) for name, _ in action.options}
    assert {("bench infer", "--concurrency"), ("average", "--discard-last")} <= checked


def random_flags(program: Program, seed: int, most: int) -> list[Flag]:
    """Some flags of a program; the same ones for a seed."""
    draw = random.Random(f"{program.name} {seed}")
    possible = [item for item in documented_flags(program) if item.key not in CHOOSY]
    return draw.sample(possible, draw.randint(0, min(most, len(possible))))


def test_no_flag_of_a_random_subset_is_dropped() -> None:
    for program in PROGRAMS:
        for seed in range(10):
            chosen = random_flags(program, seed, 8)
            words = [program.script, *REQUIRED.get(program.name, []), *words_of(program, chosen)]
            migration = migrate_command(" ".join(words), program.name)
            for item in chosen:
                assert len(rows_of(migration, item.name)) == 1, words


@pytest.mark.parametrize("name", ["nvidia", "habana", "habana-resnext", "graphcore", "torchvision", "timm"])
def test_preset_and_changes_are_the_wanted_recipe(name: str) -> None:
    program = BY_NAME[name]
    num_compared = 0
    for seed in range(4):
        migration = migrate_command(
            " ".join([program.script, *words_of(program, random_flags(program, seed, 6))]), name
        )
        try:
            finish(migration)
        except UsageError:
            continue  # the flags contradict each other
        assert migration.match is not None
        if migration.action.verb != "train":
            continue
        overrides = [(key, value, "test") for key, value in migration.match.changes.items()]
        recipe = load(migration.match.preset, overrides).recipe
        assert recipe == migration.match.recipe
        for field, setting in migration.settings.items():
            loaded = ("schedule.lr", "schedule.base_batch_size", "model.init", "model.resume_from")  # whole paths
            if setting.is_typed and field not in loaded:
                assert _value(recipe, field) == _value(migration.wanted, field), field
                num_compared += 1
    assert num_compared > 0


def _value(recipe: object, field: str) -> object:
    for key in field.split("."):
        recipe = recipe.get(key) if isinstance(recipe, dict) else getattr(recipe, key)
    return recipe


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python main.py --arch resnet50 --warmupp 5 /imagenet", "--warmupp"),
        ("python train.py --dl-worker-type HABANA --hpm", "--hpm"),
        ("python imagenet_main.py -bsz 3", "-bsz"),
        ("python ssd.py --lerning_rate 3", "--lerning_rate"),
        ("mpirun -n 8 --bind-too core python train.py --hmp", "--bind-too"),
        ("poprun --num-replica-s 3 python train.py", "--num-replica-s"),
        ("torchrun --nproc 8 --nonsense 3 train.py --ra-sampler", "--nonsense"),
    ],
)
def test_an_unknown_flag_is_an_error_that_names_it(command: str, name: str) -> None:
    with pytest.raises(UsageError, match=re.escape(name)):
        migrate_command(command)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("python main.py --epochs ninety /imagenet", "--epochs cannot be 'ninety'"),
        ("python main.py --lr-schedule linea /imagenet", "--lr-schedule is one of step, linear, cosine"),
        ("python main.py /imagenet /other", "main.py"),
        ("python train.py --hmp --custom-lr-values 0.1 0.2 --custom-lr-milestones 3", "the same number of values"),
        ("python train.py --config mk2_resnet50_mlperf_pod16_bs2", "mk2_resnet50_mlperf_pod16_bs20"),
        ("python train.py --config resnet50_mlperf_pod16_bs20 --data-dir /d", "mk2_resnet50_mlperf_pod16_bs20"),
        ("python main.py --arch resnet-50 /imagenet", "did you mean resnet50?"),
        ("python train.py --model resnet5O --hmp", "did you mean resnet50?"),
        ("python train.py /imagenet --model resnet-50", "timm has no network"),
        ("python main.py --arch resnet50 \u2013epochs 90 /imagenet", "typeset text"),
        ("python ssd.py -b 0", "--batch_size must be above 0"),
        ("python train.py --config mk2_resnet50_mlperf_pod16_bs20 --batch-size 0", "--batch-size must be above 0"),
        ("torchrun train.py --model resnet50 --ra-sampler --model-ema --epochs 0", "--epochs must be above 0"),
        ("python train.py /imagenet --model resnet50 --lr-base-size 0", "--lr-base-size must be above 0"),
        ("python launch.py --model resnet50 --precision TF32 --mode convergence --platform DGX1V /i", "no TF32 of"),
        ("torchrun references/detection/train.py --model fasterrcnn_resnet50_fpn", "cannot be trained here"),
        ("DGX2}_RN50_{FP16, FP32}_{50,90}E.sh", "is not a program"),
        ("{a,b}" * 30 + ".sh", "more than 64 scripts"),
        ("x" * 1000, "x" * 100 + "...' is not a program"),
        ("mpirun -np 8 bash -c 'cd x; python train.py --hmp'", "a text of several commands"),
        ("python train.py", "several programs are called train.py"),
        ("python unheard_of.py", "is not a program"),
        ("python main.py 'unclosed", "a quote is not closed"),
        ("", "there is no command"),
        ("export A=1", "starts no program"),
        ("python launch.py --model resnet51 --precision AMP --mode convergence --platform DGX1V /i", "resnet50"),
        ("python train.py --optimiser LARS --data-dir /imagenet", "LARS has no default learning rate"),
    ],
)
def test_a_command_that_cannot_be_read_says_why(command: str, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        migrate_command(command)


def test_flags_are_read_as_their_own_parser_reads_them() -> None:
    migration = migrate_command("python main.py --mom=0.8 -j8 -b64 --lr 1 --lr 2 --nesterov /imagenet", "nvidia")
    values = {name: setting.value for name, setting in migration.settings.items()}
    assert values["optimizer.momentum"] == 0.8  # a shortened name
    assert values["data.num_workers"] == 8  # attached to a short one
    assert values["batch.size"] == 64
    assert values["schedule.lr"] == 2  # the last one counts
    assert [row.status for row in migration.rows if row.typed == "--lr 1"] == ["no effect"]
    absl = migrate_command("python imagenet_main.py --nouse_cosine_lr -te=5 --warmup_epochs 1", "habana-resnext")
    assert absl.settings["schedule.name"].value == "multistep"
    assert absl.settings["length"].value == "5ep"


@pytest.mark.parametrize(
    ("program", "fields"),
    [
        ("nvidia", {"model.name": "resnet50", "batch.size": 256, "schedule.lr": 0.1, "length": "90ep"}),
        ("nvidia", {"schedule.milestones": ["30ep", "60ep", "80ep"], "optimizer.weight_decay": 1e-4}),
        ("nvidia", {"model.options.conv_init": "fan_out", "precision.mode": "fp32", "loss.label_smoothing": 0}),
        ("nvidia-convnets", {"model.options.conv_init": "fan_in", "optimizer.name": "sgd"}),
        ("habana", {"model.name": "resnet18", "batch.size": 128, "schedule.name": "step", "schedule.period": "30ep"}),
        ("habana", {"optimizer.weight_decay_exclude": "none", "precision.mode": "fp32", "length": "90ep"}),
        ("habana-googlenet", {"model.options.aux_heads": True, "batch.size": 256}),
        ("habana-resnext", {"model.name": "resnext101_32x4d", "batch.size": 32, "length": "10ep"}),
        ("habana-resnext", {"schedule.lr": 0.256, "schedule.base_batch_size": 256, "schedule.warmup": "8ep"}),
        ("habana-resnext", {"optimizer.weight_decay": 6.103515625e-05, "optimizer.momentum": 0.875}),
        ("habana-ssd", {"length": "50ep", "schedule.lr": 3e-3, "schedule.base_batch_size": 32, "batch.size": 128}),
        ("habana-ssd", {"precision.mode": "bf16", "optimizer.weight_decay": 5e-4, "schedule.warmup": "5ep"}),
        ("graphcore", {"model.name": "resnet18", "batch.size": 4, "schedule.lr": 2**-8, "length": "100ep"}),
        ("graphcore", {"model.options.norm": "group", "model.options.norm_groups": 32, "optimizer.momentum": 0}),
        ("graphcore", {"precision.mode": "16.16", "precision.loss_scale": 128, "schedule.gamma": 0.1}),
        ("graphcore", {"schedule.milestones": ["30%", "60%", "80%", "90%"], "schedule.warmup": "5ep"}),
        ("torchvision", {"model.name": "resnet18", "batch.size": 32, "optimizer.weight_decay": 1e-4}),
        ("timm", {"schedule.name": "cosine", "optimizer.nesterov": True, "optimizer.weight_decay": 2e-5}),
        ("pytorch-examples", {"model.name": "resnet18", "batch.size": 256, "schedule.period": "30ep"}),
    ],
)
def test_without_flags_a_program_has_its_defaults(program: str, fields: dict[str, object]) -> None:
    migration = migrate_command(BY_NAME[program].script, program)
    values = {name: setting.value for name, setting in migration.settings.items()}
    assert {name: values.get(name) for name in fields} == fields
    finish(migration)
    assert migration.match is not None


@pytest.mark.parametrize("value", ["-1", "99999999999999999999"])
def test_a_duration_that_no_recipe_takes_is_an_error_with_its_flag(value: str) -> None:
    migration = migrate_command(f"python main.py --arch resnet50 --warmup {value} /imagenet")
    with pytest.raises(UsageError, match=rf"schedule\.warmup cannot be(?s:.*)--warmup {value}"):
        finish(migration)


@pytest.mark.parametrize(
    ("command", "size", "group"),
    [
        ("mpirun -np 8 python train.py --hmp --batch-size 16", 128, 16),
        ("mpirun --npernode 8 -H a,b python train.py --hmp --batch-size 16", 256, 16),
        ("mpirun -np 1 -H localhost:8 python train.py --hmp --batch-size 16", 16, 16),
        ("mpirun -H a:4,b:4 python train.py --hmp --batch-size 16", 128, 16),
        ("mpirun -np 8 bash -c 'python train.py --hmp --batch-size 16'", 128, 16),
        ("torchrun --nnodes 2 --nproc-per-node 4 train.py --model resnet50 --ra-sampler -b 16", 128, 16),
        ("python demo_resnet.py --world-size 8 -b 16", 128, 16),
        ("python demo_googlenet.py --world-size 8 -b 16", 128, 16),
        ("python imagenet_main.py --num_gpus 8 -bs 128", 128, 16),
        ("mpirun -np 8 python imagenet_main.py --use_horovod -bs 16", 128, 16),
        ("python main.py --dist-backend nccl --multiprocessing-distributed --world-size 2 -b 64 /i", 128, 64),
        ("torchrun --nproc_per_node=8 main.py --data /coco --bs 16", 128, 16),
        ("torchrun --nproc_per_node=8 train.py --model ssd300_vgg16 -b 16", 128, "all"),
    ],
)
def test_the_global_batch_is_that_of_all_processes(command: str, size: int, group: int | str) -> None:
    values = migrate_command(command).settings
    assert (values["batch.size"].value, values["batch.group"].value) == (size, group)


@pytest.mark.parametrize(
    "launch", ["mpirun -np $N", "torchrun --nproc_per_node gpu", "mpirun --hostfile hosts", "srun -n <tasks>"]
)
def test_a_number_of_processes_that_is_not_known_has_to_be_filled_in(launch: str) -> None:
    migration = migrate_command(f"{launch} python train.py --hmp --data-path /d")
    assert len(migration.to_fill) == 1


def test_a_detector_that_is_not_here_becomes_the_one_that_is_and_the_table_says_so() -> None:
    command = "python main.py --backbone resnet50 --warmup 300 --bs 64 --amp --data /coco --mode training"
    migration = migrate_command(command)
    finish(migration)
    assert migration.match is not None
    recipe = migration.match.recipe
    assert (recipe.model.name, str(recipe.schedule.warmup), recipe.schedule.base_batch_size) == (
        *("ssd_resnet34", "300step", 32),
    )
    assert [row.status for row in migration.rows if row.typed == "--backbone resnet50"] == ["not supported"]


def test_custom_learning_rates_are_not_scaled_and_have_no_warmup() -> None:
    command = (
        "mpirun -n 8 python train.py --hmp --batch-size 256 --data-path /imagenet --epochs 90 --model resnet50 "
        "--custom-lr-values 0.275 0.45 0.8 0.08 --custom-lr-milestones 1 2 4 30"
    )
    migration = migrate_command(command)
    finish(migration)
    assert migration.match is not None
    schedule = migration.match.recipe.schedule
    assert schedule.milestone_lrs == (0.275, 0.45, 0.8, 0.08)
    assert schedule.base_batch_size is None
    assert schedule.warmup.value == 0


def test_a_few_steps_of_a_run_keep_its_schedule() -> None:
    migration = migrate_command("python ./main.py --arch resnet50 --training-only --epochs 90 --prof 100 /imagenet")
    assert ("--stop-after", "100step") in migration.action.options
    assert migration.settings["length"].value == "90ep"


def test_half_precision_is_the_mode_of_the_presets() -> None:
    fp16 = migrate_command("python main.py --fp16 --static-loss-scale 256 /imagenet")
    assert fp16.settings["precision.mode"].value == "fp16"
    assert fp16.settings["precision.loss_scale"].value == 256
    assert migrate_command("python ssd.py -d bf16").settings["precision.mode"].value == "bf16"


def test_weight_decays_of_norms_and_biases_that_differ_are_both_explained() -> None:
    migration = migrate_command("train.py --model resnet18 --norm-weight-decay 0.5 --bias-weight-decay 0.5")
    decays = {row.typed: row.status for row in migration.rows if "weight-decay" in row.typed}
    assert decays == {"--norm-weight-decay 0.5": "not supported", "--bias-weight-decay 0.5": "not supported"}


@pytest.mark.parametrize(
    ("given", "init"),
    [
        ("--weights ResNet50_Weights.IMAGENET1K_V2", "torchvision:resnet50.v2"),
        ("--weights DEFAULT", "torchvision:resnet50.v2"),
        ("--weights IMAGENET1K_V1", "torchvision:resnet50"),
        ("--pretrained", "torchvision:resnet50"),
    ],
)
def test_torchvisions_versions_of_weights_are_kept_apart(given: str, init: str) -> None:
    command = f"python references/classification/train.py --model resnet50 --data-path /imagenet {given}"
    assert migrate_command(command).settings["model.init"].value == init
    evaluation = migrate_command(f"{command} --test-only")
    assert evaluation.action.arguments == [init]
    assert [(row.status, row.text) for row in evaluation.rows if row.typed == given] == [
        ("renamed", f"reconv eval {init}")
    ]


def test_weights_that_are_not_downloaded_are_not_replaced_by_others() -> None:
    migration = migrate_command("python train.py --model resnet18 --data-path /d --weights IMAGENET1K_V2")
    assert "model.init" not in migration.settings
    assert [row.status for row in migration.rows if "--weights" in row.typed] == ["not supported"]


def test_the_networks_with_second_weights_are_those_of_the_download_table() -> None:
    assert {f"{name}.v2" for name in WITH_V2_WEIGHTS} == {name for name in TORCHVISION if name.endswith(".v2")}


def test_bash_before_a_script_takes_no_flag_from_it() -> None:
    script = "distributed_train.sh 8 --data-dir /imagenet --model resnet50 -b 64"
    plain, started = migrate_command(script), migrate_command(f"bash -x {script}")
    assert plain.settings["batch.size"].value == 512
    assert started.settings == plain.settings
    assert started.action == plain.action


def rates(command: str, name: str, num_train: int) -> list[float]:
    """The learning rate of every step of a migrated command."""
    migration = migrate_command(command, name)
    finish(migration)
    assert migration.match is not None
    recipe = load(
        migration.match.preset, [(key, value, "test") for key, value in migration.match.changes.items()]
    ).recipe
    plan = make_plan(recipe, Facts(num_train=num_train, num_val=8, num_classes=8))
    return [learning_rate(plan.schedule, step) for step in range(plan.total_steps)]


@pytest.mark.parametrize("schedule", ["stepped", "cosine", "exponential", "polynomial_decay_lr"])
@pytest.mark.parametrize("epochs", [2, 5, 7])
def test_a_graphcore_run_has_their_rates_also_where_it_ends_within_the_warmup(schedule: str, epochs: int) -> None:
    """Fractions are of the length that the user gave; the warm-up has W = steps * 5 / epochs, also in a shorter run."""
    command = f"train.py --model-size 18 --dataset imagenet --epochs {epochs} --data-dir x --lr-schedule {schedule}"
    total = 60 * epochs
    peak, warmup = 2**-8 * 4, 60 * 5

    def theirs(i: int) -> float:
        factor = i / warmup if i < warmup else 1.0
        if schedule == "stepped":
            return peak * 0.1 ** sum(i > fraction * total for fraction in (0.3, 0.6, 0.8, 0.9)) * factor
        if schedule == "cosine":
            return peak * 0.5 * (1 + math.cos(math.pi * i / total)) * factor
        if schedule == "exponential":
            return peak * 0.97 ** (146 * i // total) * factor
        if i <= warmup:
            return peak * i / warmup
        return peak * (1e-5 + (1 - 1e-5) * (1 - (i - warmup) / (total - warmup)) ** 2)

    assert rates(command, "graphcore", 240) == pytest.approx([theirs(i) for i in range(total)], rel=1e-9)


def test_a_short_run_of_nvidia_keeps_the_slope_of_its_warmup() -> None:
    command = "python main.py --arch resnet50 --epochs 2 --warmup 8 --lr 0.8 -b 8 --lr-schedule cosine /imagenet"
    assert rates(command, "nvidia", 24) == pytest.approx([0.1] * 3 + [0.2] * 3)


def test_a_rate_of_a_warmup_that_is_cut_has_the_digits_of_the_decimal_fraction() -> None:
    migration = migrate_command("python3 ssd.py -e 1 -b 2 --data_dir /data", None)
    finish(migration)
    assert migration.match is not None
    assert migration.match.changes["schedule.lr"] == "0.0006 per 32"


@pytest.mark.parametrize("epochs", [3, 14])
@pytest.mark.parametrize("method", ["linear", "constant"])
@pytest.mark.parametrize("kind", ["steplr", "cosineannealinglr", "exponentiallr"])
def test_the_schedules_of_torchvision_are_those_of_torch(kind: str, method: str, epochs: int) -> None:
    """They change once per epoch, and the schedule begins after the warm-up, also in a run that ends within it."""
    shape = "--lr 0.4 --lr-step-size 3 --lr-gamma 0.5 --lr-min 0.01"
    warms = f"--lr-warmup-epochs 4 --lr-warmup-method {method} --lr-warmup-decay 0.05"
    command = f"python train.py --data-path /d --model resnet18 -b 8 --epochs {epochs} --lr-scheduler {kind}"
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    main: list[LRScheduler] = [
        scheduler.StepLR(optimizer, 3, 0.5)
        if kind == "steplr"
        else scheduler.CosineAnnealingLR(optimizer, epochs - 4, 0.01)
        if kind == "cosineannealinglr"
        else scheduler.ExponentialLR(optimizer, 0.5)
    ]
    warmup: LRScheduler = (
        scheduler.LinearLR(optimizer, 0.05, total_iters=4)
        if method == "linear"
        else scheduler.ConstantLR(optimizer, 0.05, total_iters=4)
    )
    theirs, whole = [], scheduler.SequentialLR(optimizer, [warmup, *main], [4])
    for _ in range(epochs):
        theirs += [optimizer.param_groups[0]["lr"]] * 3
        optimizer.step()
        whole.step()
    assert rates(f"{command} {shape} {warms}", "torchvision", 24) == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("kind", ["cosine", "step", "multistep"])
def test_the_schedules_of_timm_change_once_per_epoch_behind_its_warmup(kind: str, prefix: bool) -> None:
    shape = "--decay-epochs 3 --decay-milestones 4 8 --decay-rate 0.5 --min-lr 0.01 --lr 0.4"
    warms = f"--warmup-epochs 2 --warmup-lr 0.1 {'--warmup-prefix' if prefix else ''}"
    command = f"python train.py /d --model resnet18 -b 8 --opt sgd --epochs 10 --sched {kind}"

    def theirs(epoch: int) -> float:
        if epoch < 2:
            return 0.1 + epoch * (0.4 - 0.1) / 2
        at = epoch - 2 * prefix
        if kind == "cosine":
            return 0.01 + 0.5 * (0.4 - 0.01) * (1 + math.cos(math.pi * at / 10))
        return 0.4 * 0.5 ** (at // 3 if kind == "step" else sum(point <= at + 1 for point in (4, 8)))

    expected = [theirs(step // 3) for step in range(3 * (10 + 2 * prefix))]
    assert rates(f"{command} {shape} {warms}", "timm", 24) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", [None, "graphcore", "graphcore-validation"])
def test_validation_of_a_graphcore_run_is_an_evaluation(name: str | None) -> None:
    migration = migrate_command("python validation.py --restore-path logs/run", name)
    assert (migration.action.verb, migration.action.arguments) == ("eval", ["logs/run"])


@pytest.mark.parametrize("name", [None, "graphcore", "graphcore-restore"])
def test_a_graphcore_run_is_restored_with_and_without_program(name: str | None) -> None:
    migration = migrate_command("python restore.py --restore-path logs/run", name)
    assert (migration.action.verb, migration.action.arguments) == ("resume", ["logs/run"])
    training = migrate_command("python train.py --restore-path logs/run", "graphcore")
    assert training.action.verb == "resume"


def test_a_program_is_found_among_those_of_the_vendor_that_is_named() -> None:
    assert migrate_command("python ssd.py --epochs 3", "habana").program is BY_NAME["habana-ssd"]
    assert migrate_command("python main.py --model googlenet", "habana").program is BY_NAME["habana-googlenet"]


def test_spellings_of_the_vendors_documentation_are_taken() -> None:
    migration = migrate_command(
        "python3 train.py --model efficientnet --optimiser RMSProp --select-ipus 0 1 --data-dir x", "graphcore"
    )
    assert migration.settings["optimizer.name"].value == "rmsprop-tf"
    assert rows_of(migration, "--select-ipus") == ["names an IPU; --device cuda:1 names a device"]
    variables = "FORCE_HABANA_IMAGENET_LOADER_FALLBACK=1 LD_PRELOAD=/usr/lib/libjemalloc.so.2"
    migration = migrate_command(f"{variables} python imagenet_main.py -te 90 -ebe 90 --data_dir /d")
    texts = [row.text for row in migration.rows if row.source == "environment"]
    assert len(texts) == 2 and all("not known" not in text for text in texts)


def test_a_part_of_imagenet_is_a_percentage() -> None:
    migration = migrate_command("python imagenet_main.py --mini_imagenet --data_dir /d")
    assert migration.settings["data.subset_percent"].value == 10
    assert any("imagenet_train_subset" in note for note in migration.notes)


def test_the_detector_of_habana_trains_without_evaluation() -> None:
    assert migrate_command("python ssd.py --data_dir /d").settings["evaluate.every"].value == "off"


def test_coco_is_prepared_by_one_command() -> None:
    action = migrate_command("bash download_and_preprocess_coco.sh /data/coco").action
    assert (action.verb, action.arguments) == ("data get", ["coco2017", "/data/coco"])
    assert action.options == [("--to", "tfrecord")]


@pytest.mark.parametrize(
    "command",
    [
        "python main.py --arch resnet50 --resume c.pth.tar --start-epoch 5 /imagenet",
        "python references/classification/train.py --model resnet50 --resume c.pth.tar --start-epoch 5 --data-path /d",
        "python train.py --hmp --resume c.pth.tar --start-epoch 5 --pretrained --data-path /d",
        "python imagenet/main.py -a resnet50 --resume c.pth.tar --start-epoch 5 /imagenet",
        "python pytorch-image-models/train.py /imagenet --model resnet50 --resume c.pth.tar",
    ],
)
def test_a_checkpoint_of_a_pytorch_program_is_continued(command: str) -> None:
    migration = migrate_command(command)
    assert migration.settings["model.resume_from"].value == "c.pth.tar"
    assert "model.init" not in migration.settings
    assert "not supported" not in {row.status for row in migration.rows}
    finish(migration)
    assert migration.match is not None
    assert migration.match.changes["model.resume_from"] == "c.pth.tar"
    evaluation = migrate_command(f"{command} --evaluate") if "main.py" in command else None
    assert evaluation is None or evaluation.action.arguments == ["c.pth.tar"]


def test_a_first_epoch_without_a_checkpoint_is_not_supported() -> None:
    migration = migrate_command("python main.py --arch resnet50 --start-epoch 5 /imagenet")
    assert [row.status for row in migration.rows if "--start-epoch" in row.typed] == ["not supported"]
