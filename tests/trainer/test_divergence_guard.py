"""Training that diverges with finite numbers is found at a step that does not depend on resumes, and can be rewound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import safetensors.torch
import torch

import reconv
from reconv.cli import main
from reconv.core.errors import DivergedError, RecipeError
from reconv.logging.event_log import latest_by_step, read_events
from reconv.logging.events import CheckpointSaved, LogMessage, TrainProgress
from reconv.logging.run_dir import RunDir
from reconv.trainer.callbacks.divergence_guard import exceeds_start, has_collapsed

# Learns for two epochs of 23 steps, and then has a rate at which nothing converges.
DIVERGES = {
    "length": "5ep",
    "batch.size": "64",
    "schedule": "{name: piecewise, lr: 0.1, milestones: [2ep], milestone_lrs: [20]}",
    "save.every": "7step",
    "save.background": "false",
    "log.every": "1step",
}


def train(out: Path, policy: str, *, stop_after: str | None = None, resume: bool = False, **more: str) -> Path:
    settings = {**DIVERGES, "engine.divergence.policy": policy, **more}
    given = [(name, value, "--set") for name, value in settings.items()]
    return reconv.train("quickstart", out=out, overrides=given, stop_after=stop_after, resume=resume).folder


def warnings(run: Path) -> list[str]:
    events = read_events(RunDir(run).events)
    return [event.text for event in events if isinstance(event, LogMessage) and event.level == "warning"]


@pytest.mark.parametrize(
    ("losses", "start", "expected"),
    [
        ([1.0] * 20, 2.3, False),
        ([2.4] * 20, 2.3, False),  # within the margin
        ([3.0, 3.2] * 10, 2.3, True),
        ([0.5] * 19 + [60.0], 2.3, False),  # one bad batch
        ([None] * 12 + [1.0] * 8, 2.3, True),  # most steps not finite
        ([-3.0] * 20, -1.0, False),
        ([-0.5] * 20, -1.0, True),
    ],
)
def test_a_loss_above_its_start_is_more_than_noise(losses: list[float | None], start: float, expected: bool) -> None:
    assert exceeds_start(losses, start) is expected


@pytest.mark.parametrize(
    ("best", "now", "chance", "num_samples", "expected"),
    [
        (0.867, 0.221, 1 / 6, 120, True),
        (0.867, 0.80, 1 / 6, 120, False),
        (0.70, 0.55, 0.1, 10_000, False),  # significant, and usual at high rates
        (0.60, 0.30, 0.1, 10, False),  # ten images say little
        (0.12, 0.08, 0.1, 1000, False),  # it had learned nothing
        (0.5, math.nan, 0.1, 100, True),
        (math.nan, 0.5, 0.1, 100, False),
        (25.0, 3.0, 0.0, 100, False),  # not a fraction
    ],
)
def test_a_collapse_is_more_than_chance(
    best: float, now: float, chance: float, num_samples: int, expected: bool
) -> None:
    assert has_collapsed(best, now, chance, num_samples) is expected


def test_divergence_is_warned_of_once_with_a_command_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(tmp_path / "run", "warn")
    told = [text for text in warnings(run) if "likely cause" in text]
    assert len(told) == 1 and "from 89.72 % at its best" in told[0]
    command = told[0].rpartition(": reconv ")[2].split()
    assert command[:3] == ["resume", str(run), "--fork"] and "--best" in command
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([*command, "--set", "schedule.name=constant", "--epochs", "3", "--quiet"])
    assert ended.value.code in (0, None)
    assert (tmp_path / "runs" / "quickstart" / "1" / "summary.json").is_file()


def test_a_rate_that_never_learns_is_warned_of_with_a_smaller_one(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "warn", schedule="{name: constant, lr: 8}", length="2ep")
    (told,) = [text for text in warnings(run) if "likely cause" in text]
    assert "above the 2.3" in told and "(8 at step 20)" in told
    assert told.endswith("start again with a smaller rate: --lr 0.8")


def test_policies_stop_and_ignore(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match="fell to") as stopped:
        train(tmp_path / "stop", "stop")
    assert "--fork --best --lr 0.01" in stopped.value.hint
    assert [text for text in warnings(train(tmp_path / "ignore", "ignore")) if "likely cause" in text] == []


def test_a_rewind_without_checkpoints_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="needs the best checkpoint"):
        train(tmp_path / "run", "rewind", **{"save.every": "off"})
    assert not (tmp_path / "run").exists()


def bits(run: Path) -> dict[str, torch.Tensor]:
    newest = max((run / "checkpoints").iterdir())
    files = newest.glob("*.safetensors")
    return {f"{f.stem}/{name}": tensor for f in files for name, tensor in safetensors.torch.load_file(f).items()}


def rates(run: Path) -> Sequence[tuple[int, float]]:
    return [(e.step, e.lr) for e in latest_by_step(read_events(RunDir(run).events)) if isinstance(e, TrainProgress)]


def test_a_rewound_run_equals_one_that_was_stopped_and_resumed(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", "rewind")
    saves = [e for e in read_events(RunDir(whole).events) if isinstance(e, CheckpointSaved)]
    rewound = next(save.step for save in saves if save.reason == "rewind")
    assert 46 < rewound < 115
    assert dict(rates(whole))[rewound] == 20 and dict(rates(whole))[rewound + 1] == 2
    for stop in (rewound - 3, rewound, rewound + 1):
        parts = train(tmp_path / f"stopped-{stop}", "rewind", stop_after=f"{stop}step")
        train(parts, "rewind", resume=True)
        assert rates(parts) == rates(whole)
        expected, found = bits(whole), bits(parts)
        assert expected.keys() == found.keys() and len(expected) > 30
        assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
