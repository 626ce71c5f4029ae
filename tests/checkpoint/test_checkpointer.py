"""`Checkpointer`: a loop that is not ours continues from its checkpoints with the same bits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reconv.checkpoint.checkpointer import Checkpointer
from reconv.checkpoint.store import CheckpointStore
from reconv.core.errors import CheckpointError, UsageError
from reconv.optim import EMA, FusedLAMB


class Value:
    """An object with any state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Loop:
    """A training loop with everything that has a state."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
        self.optimizer = FusedLAMB(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 3])
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=2)
        self.ema = EMA(self.model, 0.9)

    def train(self, start: int, stop: int) -> list[float]:
        losses = []
        for step in range(start, stop):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            loss = self.model(x).square().mean()
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.ema.update()
            losses.append(float(loss.detach()))
        return losses

    def objects(self) -> dict[str, Any]:
        return dict(vars(self))


def test_a_restored_loop_continues_with_the_same_bits(tmp_path: Path) -> None:
    whole = Loop()
    expected = whole.train(0, 6)
    first = Loop()
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(**first.objects()) == 0
        assert first.train(0, 3) == expected[:3]
        checkpointer.save(3, **first.objects())
        first.train(3, 4)  # while it is written
    again = Loop()
    torch.manual_seed(99)
    assert Checkpointer(tmp_path).restore(**again.objects()) == 3
    assert again.train(3, 6) == expected[3:]
    for one, other in zip(again.ema.model.state_dict().values(), whole.ema.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_any_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state = {
        "tuple": (1, (2.5, None), []),
        3: [True, "text", -math.inf],
        "tensor": torch.arange(3, dtype=torch.bfloat16),
        "empty": {},
    }
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, value=Value(state))
    loaded = Value(None)
    Checkpointer(tmp_path).restore(value=loaded)
    assert torch.equal(loaded.state.pop("tensor"), state.pop("tensor"))
    assert loaded.state == state and type(loaded.state["tuple"][1]) is tuple
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".pt", ".pkl")]


def test_the_newest_are_kept_and_a_damaged_one_is_passed_over(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        for step in range(1, 5):
            checkpointer.save(step, wait=True, value=Value({"step": step}))
        assert checkpointer.steps() == [3, 4]
    state = tmp_path / "step-000000004/state.json"
    state.write_bytes(state.read_bytes().replace(b"step", b"ste.", 1))
    value = Value(None)
    assert Checkpointer(tmp_path).restore(value=value) == 3 and value.state == {"step": 3}
    (tmp_path / "step-000000003/manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint is valid"):
        Checkpointer(tmp_path).restore(value=value)


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, rank=1) as checkpointer:
        checkpointer.save(1, value=Value({}))
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_saved_or_restored_is_named(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(UsageError, match=r"model.a.1 cannot be saved[\s\S]*it is a set"):
        checkpointer.save(1, model=Value({"a": [0, {1}]}))
    checkpointer.save(1, wait=True, model=Value({}), optimizer=Value({}))
    with pytest.raises(CheckpointError, match=r"saved: model, optimizer; to restore: model"):
        checkpointer.restore(model=Value({}))
    with pytest.raises(UsageError, match="keep is 0"):
        Checkpointer(tmp_path, keep=0)
    with pytest.raises(ValueError, match="not a valid name"):
        checkpointer.save(2, wait=True, Model=Value({"weight": torch.ones(1)}))


def test_a_failed_save_is_raised_later(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    checkpointer = Checkpointer(tmp_path / "file")
    checkpointer.save(1, value=Value({}))
    with pytest.raises(Exception, match="file"):
        checkpointer.close()


def test_a_checkpoint_of_a_run_is_none_of_a_loop(tmp_path: Path) -> None:
    CheckpointStore(tmp_path).save(1, {"model": {"weight": torch.ones(1)}}, {"epoch": 1})
    with pytest.raises(CheckpointError, match="not a checkpoint of a Checkpointer"):
        Checkpointer(tmp_path).restore(model=Value({}))
