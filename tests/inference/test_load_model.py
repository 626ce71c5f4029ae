from __future__ import annotations

from pathlib import Path

import pytest

from reconv.errors import CheckpointError, ExitCode
from reconv.inference.load_model import _read_recipe


def test_a_recipe_of_another_version_is_a_checkpoint_error() -> None:
    with pytest.raises(CheckpointError, match="cannot read the recipe") as exc_info:
        _read_recipe({"optimizer": {"kind": "sgd"}, "records": ["csv"]}, Path("step-000000010"))
    assert exc_info.value.code == ExitCode.CHECKPOINT and "2 fields" in str(exc_info.value)
