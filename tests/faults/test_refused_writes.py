"""A disk that refuses in the middle of a run: the run saves what it can, and ends with code 6 and the path."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import reconv
from reconv.core.errors import DataError, ExitCode, ResourceError, UnreadableDataError
from reconv.data.pipeline.bad_samples import BadSamples
from reconv.logging.events import Event, TrainProgress
from reconv.recipe.loader import load
from reconv.storage.data_errors import unreadable

OVERRIDES = [
    ("length", "6step", "test"),
    ("schedule.warmup", "0ep", "test"),
    ("batch.size", "16", "test"),
    ("save.every", "100step", "test"),
    ("evaluate.every", "off", "test"),
    ("log.every", "1step", "test"),
]


def test_a_run_whose_event_log_cannot_be_written_saves_and_ends_with_code_6(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def fill_the_disk(event: Event) -> None:
        if isinstance(event, TrainProgress) and event.step == 3:
            full = os.open("/dev/full", os.O_RDWR)
            os.dup2(full, descriptor_of(run / "events.jsonl"))
            os.close(full)

    with pytest.raises(ResourceError, match=r"(?s)the disk is full.*events\.jsonl") as error:
        reconv.train("quickstart", out=run, overrides=OVERRIDES, on_event=fill_the_disk)
    assert error.value.code == ExitCode.RESOURCES
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000000004"]
    assert reconv.train("quickstart", out=run, overrides=OVERRIDES, resume=True).exit_code == 0
    assert reconv.train("quickstart", out=tmp_path / "calm", overrides=OVERRIDES).exit_code == 0
    weights = [
        (folder / "checkpoints/step-000000006/model.safetensors").read_bytes() for folder in (run, tmp_path / "calm")
    ]
    assert weights[0] == weights[1]


def descriptor_of(path: Path) -> int:
    """The descriptor under which this process has a file open."""
    for link in Path("/proc/self/fd").iterdir():
        if os.path.realpath(link) == str(path):
            return int(link.name)
    raise AssertionError(f"{path} is not open")


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE])
def test_a_data_file_that_the_system_refuses_to_read_is_never_left_out(code: int) -> None:
    refused = unreadable("images/1.png", OSError(code, os.strerror(code)))
    assert isinstance(refused, UnreadableDataError) and refused.code == ExitCode.RESOURCES
    tolerant = BadSamples(limit=10)
    with pytest.raises(UnreadableDataError, match=r"images/1\.png"):
        tolerant.add("train", 1, 0, refused)
    missing = unreadable("images/2.png", OSError(errno.ENOENT, os.strerror(errno.ENOENT)))
    assert type(missing) is DataError and missing.code == ExitCode.DATA
    tolerant.add("train", 2, 0, missing)
    assert set(tolerant.known("train")) == {2}


def test_a_recipe_that_the_system_refuses_to_look_up_is_not_a_recipe_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object, **options: object) -> os.stat_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    (tmp_path / "mine.yaml").write_text("extends: quickstart\n")
    load(str(tmp_path / "mine.yaml"))
    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(ResourceError, match=r"(?s)refused.*mine\.yaml.*EIO"):
        load(str(tmp_path / "mine.yaml"))
