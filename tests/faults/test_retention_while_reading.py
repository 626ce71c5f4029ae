"""Weights of a run that trains are read although retention deletes each checkpoint that a reader has chosen."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from foreign_folders import checkpoints, copy_of, train_run

from reconv.build.init_weights import check_init
from reconv.build.saved_model import find_weights, read_saved_model
from reconv.build.weight_facts import weight_facts
from reconv.recipe.loader import load
from reconv.recipe.schema import Recipe

READERS: dict[str, Callable[[Recipe], object]] = {
    "check_init": lambda recipe: check_init(recipe, 10, lambda text: None),
    "weight_facts": lambda recipe: weight_facts(recipe, is_model_set=False),
    "read_saved_model": lambda recipe: read_saved_model(
        find_weights(str(recipe.model.init)).located, weights="auto", recipe=None
    ),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run(tmp_path_factory.mktemp("trained") / "run")


class Retention:
    """Replaces the first checkpoint of a run by the second one when a file of it is opened for the n-th time."""

    def __init__(self) -> None:
        self.opens_left, self.first, self.second, self.later = 0, Path(), Path(), Path()
        sys.addaudithook(self._on_event)  # stays; it does nothing while nothing is left

    def _on_event(self, name: str, arguments: tuple[Any, ...]) -> None:
        if not self.opens_left or name != "open" or not str(arguments[0]).startswith(f"{self.first}/"):
            return
        self.opens_left -= 1
        if self.opens_left == 0:
            os.rename(self.later, self.second)
            os.rename(self.first, self.first.with_name(f".trash-{self.first.name}-1"))

    def arm(self, run: Path, opens: int) -> None:
        self.first, self.second = checkpoints(run)
        self.later = run / "later"
        os.rename(self.second, self.later)
        self.opens_left = opens


@pytest.fixture(scope="module")
def retention() -> Iterator[Retention]:
    hook = Retention()
    yield hook
    hook.opens_left = 0


@pytest.mark.parametrize("name", READERS)
def test_a_reader_takes_the_next_checkpoint(name: str, trained: Path, tmp_path: Path, retention: Retention) -> None:
    for opens in range(1, 30):
        run = copy_of(trained, tmp_path / str(opens))
        retention.arm(run, opens)
        READERS[name](load("quickstart", [("model.init", str(run), "test")]).recipe)
        if retention.opens_left:
            break
    retention.opens_left = 0
    assert opens > 3, "the checkpoint was opened a few times"
