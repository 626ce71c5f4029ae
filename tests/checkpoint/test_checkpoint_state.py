"""What state.json of a checkpoint must contain, whatever its checksum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoint_examples import state

from reconv.checkpoint.manifest import check_state
from reconv.core.errors import CheckpointError, ExitCode

FOLDER = Path("run/checkpoints/step-000000020")
EVALUATION = {"step": 20, "weights": "raw", "metrics": {"top1": 0.5}}
BAD_IMAGE = {"split": "train", "index": 3, "step": 7, "path": "a.jpg", "why": "truncated"}


def test_a_state_as_training_writes_it_is_accepted() -> None:
    whole = {**state(20, {10: float("nan"), 20: 0.5}), "bad_images": [BAD_IMAGE], "teacher": None, "a": "later version"}
    check_state(whole, FOLDER)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"step": -1}, "step"),
        ({"step": 20.0}, "step"),
        ({"step": True}, "step"),
        ({"step": 10_001}, "step 10,001 of 10,000"),
        ({"total_steps": 0}, "total_steps"),
        ({"history": {}}, "history"),
        ({"history": [{**EVALUATION, "metrics": {"top1": "high"}}]}, "history.0.metrics.top1"),
        ({"history": [{**EVALUATION, "metrics": {"loss": 0.1}}]}, "step 20 has no top1"),
        ({"history": [{**EVALUATION, "step": 21}]}, "evaluation of step 21, after its own step 20"),
        ({"monitored": "top1"}, "monitored"),
        ({"bad_images": [{**BAD_IMAGE, "split": "test"}]}, "bad_images.0.split"),
        ({"bad_images": [{**BAD_IMAGE, "more": 1}]}, "bad_images.0.more"),
        ({"class_names": []}, "class_names"),
        ({"class_names": [1, 2]}, "class_names.0"),
        ({"display_names": 3}, "display_names"),
        ({"recipe": None}, "recipe"),
        ({"data_fingerprint": []}, "data_fingerprint"),
        ({"threads": 10**9}, "threads"),
        ({"micro_groups": 0}, "micro_groups"),
        ({"decoder": "magic"}, "decoder"),
        ({"callbacks": []}, "callbacks"),
    ],
    ids=str,
)
def test_impossible_content_is_named_with_code_4(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(CheckpointError, match=r"state\.json of step-000000020 is malformed") as refusal:
        check_state({**state(20, {20: 0.5}), **changed}, FOLDER)
    assert refusal.value.code == ExitCode.CHECKPOINT
    assert refusal.value.where == str(FOLDER / "state.json") and why in refusal.value.why


@pytest.mark.parametrize("name", sorted(state(20, {})))
def test_nothing_may_be_missing(name: str) -> None:
    incomplete = {key: value for key, value in state(20, {}).items() if key != name}
    with pytest.raises(CheckpointError, match="malformed") as refusal:
        check_state(incomplete, FOLDER)
    assert refusal.value.why.startswith(f"{name}: Field required")
