"""Every command of the vendors' documentation migrates, and what becomes of it can be planned and trained."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

import reconv
from reconv.cli.commands.train import train
from reconv.cli.options import parse_settings
from reconv.migrate.command_line import split_commands
from reconv.migrate.migration import Migration, TargetMachine, finish, migrate_command
from reconv.migrate.new_command import command_words
from reconv.recipe.load.identity import differences
from reconv.recipe.load.resolved import fit_to_data
from reconv.recipe.loader import Override, load
from reconv.recipe.plan import Facts, Plan, make_plan
from reconv.recipe.shortcuts import shortcut_overrides

FOLDER = Path(__file__).parent
LINES = [line.partition(": ") for line in (FOLDER / "vendor_commands.txt").read_text().splitlines() if line[0] != "#"]
COMMANDS = [(kind, command) for kind, _, command in LINES]
FURTHER = [
    (line.partition(" | ")[0], line.partition(" | ")[2])
    for line in (FOLDER / "further_commands.txt").read_text().splitlines()
    if line[0] != "#"
]
COCO, CIFAR, IMAGENET = 117_266, 50_000, 1_281_167


@cache
def migrated(command: str) -> Migration:
    migration = migrate_command(command)
    finish(migration)
    return migration


def overrides_of(migration: Migration) -> list[Override]:
    assert migration.match is not None
    return [(name, value, "migrate") for name, value in migration.match.changes.items()]


def planned(migration: Migration) -> Plan:
    assert migration.match is not None
    resolved = load(migration.match.preset, overrides_of(migration))
    recipe = resolved.recipe
    num_train = COCO if recipe.task == "detection" else CIFAR if "cifar" in recipe.data.source else IMAGENET
    resolved = fit_to_data(resolved, num_train, 1000)
    return make_plan(resolved.recipe, Facts(num_train, 5000, 1000, cores=2))


def typed_flags(command: str) -> list[str]:
    """The words of a command that are flags: nothing else in these commands begins with a dash and a letter."""
    words = [word for simple in split_commands(command) for word in simple.words]
    return [word for word in words if re.match(r"--?[A-Za-z]", word)]


def test_the_file_has_the_commands_of_all_programs() -> None:
    assert len(COMMANDS) == 66
    assert {kind for kind, _ in COMMANDS} == {"R", "P", "D"}


def test_every_command_migrates_to_a_recipe_that_can_be_planned() -> None:
    num_planned = 0
    for kind, command in COMMANDS:
        migration = migrated(command)
        words = command_words(migration, TargetMachine("cuda", 8))
        assert migration.rows, command
        if migration.action.verb in ("train", "bench infer") and not migration.is_fragment:
            assert migration.match is not None, command
            assert words[:2] == ["reconv", migration.action.verb.split()[0]]
            assert planned(migration).schedule.total_steps > 0
            num_planned += 1
        elif kind == "R":
            assert words[0] == "reconv", command
    assert num_planned == 40


def test_every_flag_of_every_command_has_one_row() -> None:
    num_flags = 0
    for _, command in COMMANDS:
        rows = [row.typed for row in migrate_command(command).rows]
        if command.startswith(("tar", "find", "for", "mv")):
            continue
        for word in typed_flags(command):
            num_flags += 1
            name = word.partition("=")[0]
            count = len([1 for other in typed_flags(command) if other.partition("=")[0] == name])
            found = [row for row in rows if re.search(rf"(^| ){re.escape(name)}($|[ =])", row)]
            assert len(found) == count, (word, found)
    assert num_flags > 500


def test_the_printed_command_gives_the_same_recipe() -> None:
    num_compared = 0
    for _, command in [*COMMANDS, *FURTHER]:
        migration = migrated(command)
        words = command_words(migration, TargetMachine("cuda", 8))
        if migration.is_fragment or words[:2] != ["reconv", "train"] or migration.match is None:
            continue
        context = train.make_context("train", words[2:], resilient_parsing=True)
        options = context.params
        typed = shortcut_overrides(options) + parse_settings(options["settings"])
        recipe = load(options["recipe"], typed).recipe
        assert differences(recipe, migration.match.recipe).keys() <= {"description", "profile"}, command
        num_compared += 1
    assert num_compared > 60


@pytest.mark.parametrize(("preset", "command"), [entry for entry in FURTHER if entry[0] != "-"])
def test_the_closest_preset_is_the_one_made_from_that_command(preset: str, command: str) -> None:
    match = migrated(command).match
    assert match is not None
    assert match.preset == preset


def test_further_commands_can_be_planned() -> None:
    for _, command in FURTHER:
        migration = migrated(command)
        assert migration.match is not None
        assert planned(migration).global_batch > 0
    assert len(FURTHER) > 30


def test_the_documented_commands_need_no_change_but_seed_workers_and_logs() -> None:
    allowed = {"seed", "data.num_workers", "log.every", "evaluate.every", "save.every", "loggers", "model.init"}
    exact = [migrated(command) for kind, command in COMMANDS if kind == "R" and "mpirun" in command]
    assert len(exact) == 15
    for migration in exact:
        assert migration.match is not None
        assert set(migration.match.changes) <= allowed, migration.match.changes


def _train(command: str, tmp_path: Path) -> None:
    """Two steps of what a command became, on a few small generated images."""
    migration = migrated(command)
    assert migration.match is not None
    is_detector = migration.match.recipe.task == "detection"
    tiny: list[Override] = [
        ("data.source", "scattered-digits" if is_detector else "synthetic", "test"),
        ("data.num_samples", 8, "test"),
        *([] if is_detector else [("data.num_classes", 3, "test")]),
        ("batch.size", 2, "test"),
        ("batch.group", 2, "test"),
        ("length", "2step", "test"),
        ("schedule.warmup", "0step", "test"),
        ("evaluate.every", "off", "test"),
        ("save.every", "off", "test"),
        ("loggers", [], "test"),
        ("model.init", None, "test"),
        ("data.num_workers", 0, "test"),
        ("checkpoint_average.last", "off", "test"),
    ]
    if not is_detector and migration.match.recipe.data.preprocess.size > 64:
        tiny += [("data.preprocess.size", 64, "test"), ("data.preprocess.resize", 64, "test")]
    changes = [entry for entry in overrides_of(migration) if entry[0] not in {name for name, _, _ in tiny}]
    result = reconv.train(
        migration.match.preset, overrides=[*changes, *tiny], out=tmp_path / "run", device="cpu", console="quiet"
    )
    assert result.summary["steps"] == 2


FAST = ["python train.py --config mk2_resnet8_test --wandb"]
RUNNABLE = list(
    dict.fromkeys(
        command
        for kind, command in COMMANDS
        if kind == "R"
        and not re.search(r"--help|-h$|--evaluate|--mode eval|restore\.py", command)
        and command not in FAST
    )
)


@pytest.mark.parametrize("command", FAST)
def test_a_migrated_command_trains(command: str, tmp_path: Path) -> None:
    _train(command, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("command", RUNNABLE)
def test_every_runnable_command_trains(command: str, tmp_path: Path) -> None:
    _train(command, tmp_path)
