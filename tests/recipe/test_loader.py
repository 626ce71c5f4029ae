from __future__ import annotations

import os
from pathlib import Path
from typing import get_args

import pytest

from reconv.core.errors import ExitCode, RecipeError
from reconv.recipe.load.identity import differences, may_change
from reconv.recipe.loader import Override, dump, load
from reconv.recipe.parts.schedule import ScheduleConfig
from reconv.recipe.schema import Recipe
from reconv.recipe.units import Duration


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str, name: str = "my.yaml") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    return write


def problems(path: str, *overrides: Override) -> list[str]:
    """The lines of the error that loading gives, without its first and last."""
    with pytest.raises(RecipeError) as caught:
        load(path, overrides)
    assert caught.value.code is ExitCode.USAGE
    return [line.strip().removeprefix(path + ":") for line in caught.value.what.splitlines()[1:]]


def test_all_problems_are_reported_in_the_order_of_the_file(write) -> None:
    path = write(
        "length: 10ep\n"
        "batch:\n"
        "  sise: 3\n"
        "  group: '256'\n"
        "seed: true\n"
        "augment: {hflip: 2}\n"
        "schedule: {name: cosin}\n"
        "optimizer: {nesterov: true, momentum: 0}\n"
    )
    schedules = ", ".join(get_args(ScheduleConfig.model_fields["name"].annotation))
    assert problems(path) == [
        "3: batch.sise: unknown key; did you mean batch.size?",
        "4: batch.group: must be a whole number, or one of all, micro, not '256'; write a number without quotes",
        "5: seed: must be a whole number, not true",
        "6: augment.hflip: must be a number of at most 1, not 2",
        f"7: schedule.name: must be one of {schedules}, not 'cosin'; did you mean cosine?",
        "8: optimizer.nesterov: needs optimizer.momentum above 0",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("batch_size: 3", "did you mean batch.size?"),
        ("lr: 3", "did you mean schedule.lr?"),
        ("epochs: 3", "did you mean length?"),
        ("weight_decay: 3", "did you mean optimizer.weight_decay?"),
        ("optimiser: {name: sgd}", "did you mean optimizer?"),
        ("early_stopping: {foo: 3}", "unknown key; early_stopping has target, patience"),
        ("data: {preproces: {size: 3}}", "did you mean data.preprocess?"),
        ("batch.size: 3", "nest the sections: batch: { size: ..."),
    ],
)
def test_an_unknown_key_suggests_the_closest_field(write, text: str, expected: str) -> None:
    assert problems(write(text))[0].endswith(expected)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("batch: {size: '256'}", "batch.size"),
        ("batch: {size: true}", "batch.size"),
        ("batch: {size: 256.0}", "batch.size"),
        ("batch: {size: 0}", "batch.size"),
        ("seed: -1", "seed"),
        ("model: {freeze_backbone: 2}", "model.freeze_backbone"),
        ("model: {freeze_backbone: yes}", "model.freeze_backbone"),
        ("model: {name: 50}", "model.name"),
        ("schedule: {lr: '0.1'}", "schedule.lr"),
        ("schedule: {lr: true}", "schedule.lr"),
        ("schedule: {lr: .inf}", "schedule.lr"),
        ("schedule: {lr: .nan}", "schedule.lr"),
        ("length: 90", "length"),
        ("length: 90 epochs", "length"),
        ("length: 2.5step", "length"),
        ("save: {every: 101%}", "save.every"),
        ("batch: 64", "batch"),
        ("batch: [64]", "batch"),
        ("augment: {scale: [0.1]}", "augment.scale"),
        ("augment: {ratio: [1, 2, 3]}", "augment.ratio"),
        ("data: {preprocess: {mean: 0.5}}", "data.preprocess.mean"),
        ("data: {preprocess: {mean: ['0.5', 1, 1]}}", "data.preprocess.mean"),
        ("model: {options: {width: {a: 1}}}", "model.options.width"),
        ("model: {options: {a.b: 1}}", "model.options.a.b"),
        ("expect: {metric: top1}", "expect.value"),
        ("name: a/b", "name"),
    ],
)
def test_a_wrong_type_or_range_is_one_problem_with_the_field(write, text: str, field: str) -> None:
    found = problems(write(text))
    assert len(found) == 1
    assert found[0].startswith(f"1: {field}: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schedule: {lr: 2^-11 per image, base_batch_size: 256}", "a rate without `per`"),
        ("schedule: {lr: two per image}", "2^-11 per image"),
        ("published: [{value: 0.7}]", "published"),
        ("measured: [{date: today, hardware: x, n: 1, value: 0.5}]", "measured"),
        (
            "optimizer: {name: adam}",
            "not 'adam'; did you mean adamw",
        ),
        ("early_stopping: {target: 75.9}", "early_stopping.target: must be"),
        ("augment: {progressive_resizing: [[0ep, big]]}", "augment.progressive_resizing: must be"),
        ("data: {preprocess: {resize: auto}}", "data.preprocess.resize: must be"),
        ("augment: {auto_augment: autoaugmnt}", "did you mean autoaugment?"),
    ],
)
def test_an_invalid_value_is_an_error_with_what_the_field_accepts(write, text: str, message: str) -> None:
    assert message in " ".join(problems(write(text)))


def test_an_invalid_value_is_not_also_reported_as_a_contradiction(write) -> None:
    assert problems(write("schedule: {name: step, period: 30}")) == [
        "1: schedule.period: must be a duration with its unit, as in 30ep, 30step or 30%, not 30"
    ]


def test_yaml_words_and_numbers_have_the_type_of_their_field(write) -> None:
    switches = "save: {every: off}\nengine: {compile: on}\n"
    recipe = load(write(f"description: no\nschedule: {{lr: 1e-4}}\nloss: {{label_smoothing: 0}}\n{switches}")).recipe
    assert recipe.description == "no"
    assert recipe.schedule.lr == 1e-4
    assert recipe.save.every == "off"
    assert recipe.engine.compile == "on"
    assert recipe.loss.label_smoothing == 0.0


def test_extends_inherits_values_with_their_origins(write) -> None:
    write("length: 5ep\nbatch:\n  size: 32\n  group: 8\n", "far.yaml")
    write("extends: far.yaml\nbatch: {size: 16}\nname: middle\ndescription: of the middle\n", "mid/../near.yaml")
    resolved = load(write("# my claim\n#   second line\n\nextends: near.yaml\nseed: 3\n"), [("seed", "4", "--seed")])
    recipe, origins = resolved.recipe, resolved.origins
    assert (recipe.length, recipe.batch.size, recipe.batch.group, recipe.seed) == (Duration(5, "ep"), 16, 8, 4)
    assert (recipe.name, recipe.description) == ("my", ""), "a name and a description are not inherited"
    assert origins["batch.size"].endswith("near.yaml:2")
    assert origins["batch.group"].endswith("far.yaml:4")
    assert origins["seed"] == "--seed"
    assert origins["batch.micro"] == "default"
    assert resolved.header == "my claim\n  second line"


def test_a_user_recipe_extends_a_preset_by_name(write) -> None:
    resolved = load(write("extends: resnet50\nlength: 3ep\nschedule: {warmup: 1ep}\n"))
    assert resolved.recipe.optimizer.momentum == 0.875
    assert resolved.origins["optimizer.momentum"].startswith("resnet50.yaml:")


def test_null_removes_an_inherited_section(write) -> None:
    resolved = load(write("extends: quickstart\nexpect: null\n"))
    assert resolved.recipe.expect is None
    assert resolved.origins["expect"].endswith("my.yaml:2")


@pytest.mark.parametrize(
    "change", ["model: {name: resnet34}", "length: 3ep", "batch: {size: 64}", "data: {drop_last: false}"]
)
def test_a_change_of_the_result_drops_the_inherited_expectation(write, change: str) -> None:
    assert load("resnet18").recipe.expect is not None
    path = write(f"extends: resnet18\n{change}\n")
    assert load(path).recipe.expect is None
    assert load(write(f"extends: {path}\nlog: {{every: 7step}}\n", "far.yaml")).recipe.expect is None
    restated = load(write(f"extends: resnet18\n{change}\nexpect: {{metric: top1, value: 0.5}}\n")).recipe.expect
    assert restated is not None
    assert (restated.value, restated.on) == (0.5, "")


@pytest.mark.parametrize(
    "change",
    [
        "name: mine\ndescription: of mine",
        "data: {path: /imagenet, num_workers: 3}",
        "save: {every: 10min}",
        "log: {every: 7step}",
        "model: {name: resnet18}",
    ],
)
def test_other_changes_inherit_the_expectation(write, change: str) -> None:
    assert load(write(f"extends: resnet18\n{change}\n")).recipe.expect == load("resnet18").recipe.expect


def test_a_problem_in_a_parent_is_shown_with_the_parents_line(write) -> None:
    write("length: 5ep\nbatch: {sise: 3}\n", "far.yaml")
    assert "far.yaml:2: batch.sise" in problems(write("extends: far.yaml\nseed: x\n"))[1]


def test_a_contradiction_is_shown_at_the_field_that_caused_it(write) -> None:
    write("length: 5ep\n", "far.yaml")
    path = write("extends: far.yaml\nseed: 1\nschedule: {warmup: 6ep}\n")
    assert problems(path) == ["3: schedule.warmup: 6ep is longer than the run (length 5ep)"]
    assert problems(path, ("length", "4ep", "--epochs"))[0].startswith("--epochs: schedule.warmup")


@pytest.mark.parametrize(("first", "second"), [("a.yaml", "a.yaml"), ("b.yaml", "a.yaml")])
def test_circular_extends_are_rejected(write, first: str, second: str) -> None:
    write(f"extends: {second}\n", "b.yaml")
    with pytest.raises(RecipeError, match="extend itself"):
        load(write(f"extends: {first}\n", "a.yaml"))


@pytest.mark.parametrize("value", ["[a, b]", "3", "", "{a: b}"])
def test_extends_must_be_one_name(write, value: str) -> None:
    with pytest.raises(RecipeError, match="extends must be one recipe"):
        load(write(f"extends: {value}\n"))


def test_paths_are_relative_to_their_file(write, tmp_path: Path) -> None:
    write("data: {path: ../photos}\nmodel: {init: weights.safetensors}\n", "conf/base.yaml")
    recipe = load(write("extends: conf/base.yaml\n")).recipe
    assert recipe.data.path == str(tmp_path / "photos")
    assert recipe.model.init == str(tmp_path / "conf" / "weights.safetensors")
    assert load(write("model: {init: 'torchvision:resnet50'}")).recipe.model.init == "torchvision:resnet50"


def test_a_path_given_as_an_override_is_relative_to_the_working_folder(write, monkeypatch, tmp_path: Path) -> None:
    path = write("seed: 1\n")
    monkeypatch.chdir(tmp_path)
    assert load(path, [("data.path", "a: b #1", "--data")]).recipe.data.path == str(tmp_path / "a: b #1")
    assert load(path, [("data.path", "null", "--set")]).recipe.data.path is None
    assert load(path, [("data.path", Path("x"), "--data")]).recipe.data.path == str(tmp_path / "x")


def test_overrides_are_typed_by_the_field_and_checked_like_a_file(write) -> None:
    path = write("seed: 1\n")
    settings: list[Override] = [
        ("batch.size", "64", "--batch-size"),
        ("batch.group", "32", "--set"),
        ("schedule.lr", "1e-3", "--lr"),
        ("augment.scale", "[0.5, 1]", "--set"),
        ("save.every", "off", "--set"),
        ("length", "3ep", "--epochs"),
        ("description", "007", "--set"),
        ("model.options.width", "8", "--set"),
        ("data", {"drop_last": False}, "library"),
        ("seed", 9, "library"),
    ]
    resolved = load(path, settings)
    recipe = resolved.recipe
    assert (recipe.batch.size, recipe.batch.group, recipe.schedule.lr, recipe.augment.scale) == (64, 32, 1e-3, (0.5, 1))
    assert (recipe.save.every, recipe.length, recipe.description) == ("off", Duration(3, "ep"), "007")
    assert (recipe.model.options, recipe.data.drop_last, recipe.seed) == ({"width": 8}, False, 9)
    assert resolved.origins["model.options.width"] == "--set"
    assert resolved.origins["data.drop_last"] == "library"
    found = problems(path, ("batch.sise", "3", "--set batch.sise"), ("batch.size", "x", "--batch-size"))
    assert "--set batch.sise: batch.sise: unknown key; did you mean batch.size?" in found
    assert any(line.startswith("--batch-size: batch.size: must be a whole number") for line in found)
    assert len(found) == 2
    for bad in ("a..b", "", "extends"):
        assert "is not a field" in problems(path, (bad, "3", "--set"))[0]


def test_a_missing_recipe_is_an_error_with_a_suggestion(write, monkeypatch, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="did you mean quickstart") as caught:
        load("quickstrat")
    assert caught.value.what == "recipe 'quickstrat' not found"
    write("seed: 1\n", "own.yaml")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"did you mean the file own\.yaml"):
        load("own")
    with pytest.raises(RecipeError, match="check the path"):
        load("no/such.yaml")
    (tmp_path / "folder.yaml").mkdir()
    os.mkfifo(tmp_path / "pipe.yaml")
    for name, why in (("folder.yaml", "it is a folder"), ("pipe.yaml", "it is not a regular file")):
        with pytest.raises(RecipeError, match="not found") as caught:
            load(name)
        assert caught.value.why == why
    with pytest.raises(RecipeError, match="not YAML") as caught:
        load(write("seed: [1,\n"))
    assert "correct this line" in caught.value.hint
    with pytest.raises(RecipeError, match="not found"):
        load("\0")
    with pytest.raises(RecipeError, match="is empty"):
        load(write("# only a comment\n"))
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9\n")
    with pytest.raises(RecipeError, match="not UTF-8"):
        load("latin.yaml")


def test_a_dumped_recipe_loads_equal(write) -> None:
    odd = Recipe(name="1e-4", description="no: #\n'x'", model={"options": {"a": "off", "b": [1.5], "c": None}})
    for recipe in (odd, load("quickstart").recipe, load("resnet50").recipe):
        assert load(write(dump(recipe))).recipe == recipe


def test_differences_name_the_leaves_that_differ() -> None:
    old = load("quickstart").recipe
    new = load("quickstart", [("batch.size", 32, ""), ("model.options.width", 8, ""), ("expect", None, "")]).recipe
    found = differences(old, new)
    assert found["batch.size"] == (64, 32)
    assert found["model.options.width"] == (None, 8)
    assert found["expect.value"] == (0.99, None)
    assert "seed" not in found
    assert differences(old, old) == {}


def test_only_fields_that_do_not_affect_the_result_may_change_on_resume() -> None:
    allowed = (
        "data.num_workers",
        "data.prefetch",
        "engine.num_threads",
        "log.every",
        "save.every",
        "save.keep_last",
        "name",
    )
    refused = (
        "length",
        "batch.size",
        "schedule.lr",
        "seed",
        "engine.compile",
        "data.drop_last",
        "logs",
        "evaluate.every",
    )
    assert all(may_change(field) for field in (*allowed, "expect", "expect.value", "description", "data.path"))
    assert not any(may_change(field) for field in refused)


@pytest.mark.parametrize(
    ("text", "rate", "per"),
    [
        ("2^-11 per image", 2**-11, 1),
        ("2^-9.5 per image", 2**-9.5, 1),
        ("0.256 per 256", 0.256, 256),
        ("3e-3 per 32 images", 0.003, 32),
        ("2^-3", 0.125, None),  # used as written
    ],
)
def test_a_rate_with_its_batch_size_replaces_both_inherited_fields(write, text, rate, per) -> None:
    resolved = load(write(f"extends: resnet50\nschedule:\n  lr: {text}\n"))
    assert (resolved.recipe.schedule.lr, resolved.recipe.schedule.base_batch_size) == (rate, per)
    assert resolved.origins["schedule.lr"].endswith(":3")
    assert resolved.origins["schedule.base_batch_size"].endswith(":3")
    typed = load("resnet50", [("schedule.lr", text, "--set")])
    assert (typed.recipe.schedule.lr, typed.recipe.schedule.base_batch_size) == (rate, per)
    assert typed.origins["schedule.base_batch_size"] == "--set"


def test_results_are_not_inherited(write) -> None:
    parent = write("published: [{source: someone, value: 0.5}]\nmeasured: []\n", "parent.yaml")
    assert load(parent).recipe.published[0].source == "someone"
    assert load(write(f"extends: {parent}\n", "child.yaml")).recipe.published == ()


@pytest.mark.parametrize(
    "field,value,is_kept",
    [
        ("seed", "3", True),
        ("save.every", "off", True),
        ("data.num_workers", "2", True),
        ("length", "25ep", True),  # what the recipe says anyway
        ("length", "2ep", False),
        ("model.name", "resnet20_cifar", False),
        ("schedule.lr", "0.5", False),
    ],
)
def test_an_override_that_changes_the_result_drops_the_expectation(field: str, value: str, is_kept: bool) -> None:
    recipe = load("quickstart", [(field, value, "--set")]).recipe
    assert (recipe.expect is not None) == is_kept


def test_an_expectation_may_be_set_with_other_overrides() -> None:
    recipe = load("quickstart", [("expect.value", "0.5", "--set"), ("length", "2ep", "--set")]).recipe
    assert recipe.expect is not None and recipe.expect.value == 0.5


@pytest.mark.parametrize(
    ("setting", "accepted"),
    [
        ("length=5", "as in 5ep or 5step, not 5"),
        ("schedule.warmup=5", "as in 5ep, 5step or 5%, not 5"),
        ("schedule.warmup=0.5", "as in 0.5ep or 0.5%, not 0.5"),
        ("save.every=5", "as in 5ep, 5step, 5% or 5min, or off, not 5"),
        ("length=long", "as in 90ep or 5000step, not 'long'"),
    ],
)
def test_a_number_without_a_unit_is_refused_with_units_that_the_field_takes(setting: str, accepted: str) -> None:
    field, _, value = setting.partition("=")
    with pytest.raises(RecipeError) as caught:
        load("resnet50", [(field, value, "--set")])
    assert accepted in str(caught.value)
    for unit in ("ep", "step", "%", "min"):
        if value.isdigit() and f"{value}{unit}" in accepted:
            load("resnet50", [(field, f"{value}{unit}", "--set")])


def test_the_hint_names_the_preset_that_the_recipe_is_made_from(write) -> None:
    hints = {
        "resnet50": "resnet50",
        write("extends: ssd-resnet34\nfoo: 1\n"): "ssd-resnet34",
        write("task: detection\nfoo: 1\n", "boxes.yaml"): "quickstart-detection",
        write("foo: 1\n", "own.yaml"): "quickstart",
    }
    for recipe, name in hints.items():
        with pytest.raises(RecipeError) as caught:
            load(recipe, [("bar", "1", "--set")])
        assert caught.value.hint == f"`reconv recipes show {name}` lists all fields"


def test_files_of_own_code_are_relative_to_the_recipe_and_modules_found_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "base.yaml").write_text("extends: quickstart\ncallbacks: [./cb.py:Notify, my_pkg.cb:Other]\n")
    (folder / "my.yaml").write_text("extends: base.yaml\nmodel: {name: ../nets.py:make}\n")
    resolved = load(str(folder / "my.yaml"), [("loss.name", "./l.py:focal", "--set")])
    recipe = resolved.recipe
    assert recipe.model.name == f"{tmp_path}/nets.py:make"
    assert [entry.name for entry in recipe.callbacks] == [f"{folder}/cb.py:Notify", "my_pkg.cb:Other"]
    assert recipe.loss.name == f"{Path.cwd()}/l.py:focal"
    assert recipe.code_path == (str(folder), str(Path.cwd()))
    (tmp_path / "again.yaml").write_text(dump(recipe))
    assert load(str(tmp_path / "again.yaml")).recipe == recipe


def test_code_path_is_set_only_where_modules_are_named(tmp_path: Path) -> None:
    assert load("quickstart").recipe.code_path == ()
    assert load("quickstart", [("model.name", "timm:resnet10t", "--set")]).recipe.code_path == ()
    (tmp_path / "my.yaml").write_text("extends: quickstart\ncode_path: [src]\nmodel: {name: my_pkg:make}\n")
    assert load(str(tmp_path / "my.yaml")).recipe.code_path == (str(tmp_path / "src"),)
