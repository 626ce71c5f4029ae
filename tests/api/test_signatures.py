"""Written signatures of the Python API say what the tables of options say."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import reconv
from reconv.cli.commands.train import train as train_command
from reconv.core.errors import UsageError
from reconv.migrate.translation import SHORT_OPTIONS
from reconv.recipe.schema import schema_fields
from reconv.recipe.shortcuts import SHORTCUTS, shortcut_overrides

_OBJECTS = {"model"}  # shortcuts whose keyword also takes objects


@pytest.mark.parametrize("name", SHORTCUTS)
def test_every_shortcut_is_an_option_and_a_keyword_of_train(name: str) -> None:
    shortcut = SHORTCUTS[name]
    assert shortcut.field in schema_fields()
    options = {option: param for param in train_command.params for option in param.opts}
    assert options[shortcut.option].name == name
    keyword = inspect.signature(reconv.train).parameters[name]
    assert keyword.kind is keyword.KEYWORD_ONLY
    assert keyword.default is (False if shortcut.type is bool else None)
    if name not in _OBJECTS and shortcut.parse is None:
        assert shortcut.type.__name__ in keyword.annotation.split(" | ")


def test_keywords_of_train_set_the_fields_of_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "epochs": 2.5,
        "batch_per_device": 4,
        "lr": "0.1 per 256",
        "workers": 0,
        "seed": 0,
        "init": "weights.pt",
        "resume_from": Path("old.pth"),
        "freeze": True,
        "profile": (5, 8),
        "on_divergence": "stop",
    }
    assert values.keys() | {"batch_size", "model"} == SHORTCUTS.keys()
    found: list[object] = []
    monkeypatch.setattr("reconv.api.training.start", lambda options, *_, **__: found.extend(options.overrides))
    reconv.train("quickstart", devices=2, **values)
    reconv.train("quickstart", batch_size=64, model="resnet18")
    expected = [
        *shortcut_overrides(values, 2, "keyword"),
        ("model.name", "resnet18", "train(model=...)"),
        ("batch.size", 64, "train(batch_size=...)"),
    ]
    assert found == expected
    assert ("length", "2.5ep", "train(epochs=...)") in expected and (
        "profile",
        [5, 8],
        "train(profile=...)",
    ) in expected


def test_both_batch_sizes_are_an_error_in_the_words_of_the_caller() -> None:
    with pytest.raises(UsageError, match=r"^batch_size and batch_per_device cannot be combined"):
        reconv.train("quickstart", batch_size=64, batch_per_device=8)
    with pytest.raises(UsageError, match=r"^--batch-size and --batch-per-device cannot be combined") as caught:
        shortcut_overrides({"batch_size": 64, "batch_per_device": 8}, 4)
    assert caught.value.why == "8 per device x 4 = 32, against 64"


def test_migrate_prints_shortcuts_that_take_the_value_of_their_field() -> None:
    assert SHORT_OPTIONS == {
        "length": "--epochs",
        "batch.size": "--batch-size",
        "schedule.lr": "--lr",
        "data.num_workers": "--workers",
        "seed": "--seed",
        "model.name": "--model",
        "model.init": "--init",
        "model.resume_from": "--resume-from",
        "engine.divergence.policy": "--on-divergence",
    }


def test_devices_are_those_of_a_launch() -> None:
    with pytest.raises(UsageError, match="devices and launch cannot be combined"):
        reconv.train("quickstart", devices=2, launch=reconv.Launch(nic="eth1"))
    with pytest.raises(UsageError, match="no keyword 'elastic'") as caught:
        reconv.train("quickstart", elastic="1:4")
    assert "reconv.Launch" in str(caught.value.hint)
