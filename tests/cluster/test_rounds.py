"""Elastic runs as users start them: refused options, and how many ranks can share a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import reconv
from reconv.cluster.rounds import usable_ranks
from reconv.core.errors import UsageError
from reconv.recipe.loader import load


@pytest.mark.parametrize(
    ("launch", "options", "message"),
    [
        ({"rendezvous": "node1:29400"}, {"out": "run"}, "--rendezvous is for elastic runs"),
        ({"elastic": "1:4"}, {}, "--elastic needs --out"),
        ({"elastic": "1:4"}, {"out": "run", "batch_per_device": 8}, "--batch-per-device cannot be combined"),
        ({"elastic": "1:4"}, {"out": "run", "overrides": {"save.every": "off"}}, "save.every is off"),
        ({"elastic": "2:4"}, {"out": "run"}, "waits for 2 nodes"),
        ({"elastic": "1:4", "rendezvous": "node1:29400"}, {"out": "run"}, "needs a secret"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_is_started(
    launch: dict[str, str], options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RECONV_SECRET", raising=False)
    with pytest.raises(UsageError, match=message):
        reconv.train("quickstart", launch=reconv.Launch(**launch), **options)
    assert not Path("run").exists()


def test_a_launcher_and_an_elastic_agent_cannot_be_combined(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="--elastic cannot be combined with torchrun"):
        reconv.train("quickstart", launch=reconv.Launch(elastic="1:4"), out="run")


@pytest.mark.parametrize(
    ("settings", "offered", "expected"),
    [
        ({"batch.size": 32, "batch.group": 8, "parallel.reduce": "ordered"}, [1, 3, 4, 7], [1, 3, 4, 4]),
        ({"batch.size": 32, "batch.group": 8}, [4, 5, 7, 8, 9], [4, 4, 4, 8, 8]),  # two ranks can share a group
        ({"batch.size": 30, "batch.group": "micro"}, [1, 4, 6, 7], [1, 3, 6, 6]),
    ],
)
def test_as_many_ranks_are_used_as_can_share_the_batch(
    settings: dict[str, Any], offered: list[int], expected: list[int]
) -> None:
    recipe = load("quickstart", [(name, value, "--set") for name, value in settings.items()]).recipe
    assert [usable_ranks(recipe, number) for number in offered] == expected
