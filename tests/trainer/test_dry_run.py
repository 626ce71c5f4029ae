"""Dry runs and --compile-only: real steps that leave no files."""

from __future__ import annotations

import json
import tempfile
from multiprocessing import util
from pathlib import Path

import pytest
from ranks import in_ranks

import reconv
from reconv.cli import main
from reconv.logging.events import CheckpointSaved, Event, LogMessage, RunPlanned, TrainProgress
from reconv.trainer.dry_run import DryRunResult, dry_run

GIVEN = [("data.subset_percent", "20", "--set")]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    util.get_temp_dir()  # cached: a test's own directory is deleted later, and too long for a socket path
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_dry_run_leaves_no_files(temporary: Path) -> None:
    short = [*GIVEN, ("length", "2step", "--set"), ("schedule.warmup", "1step", "--set")]
    reconv.train("quickstart", overrides=short)
    before = _contents(Path())
    seen: list[Event] = []
    result = dry_run("quickstart", steps=7, overrides=GIVEN, on_event=seen.append)
    assert [e.step for e in seen if isinstance(e, TrainProgress)] == [1, 2, 3, 4, 5, 6, 7]
    assert sum(isinstance(e, CheckpointSaved) for e in seen) == 1
    assert result.steps == 7
    assert _contents(Path()) == before
    assert list(temporary.glob("reconv-*")) == []  # torch keeps compiled code there too


def test_dry_run_equals_the_first_steps_of_the_run() -> None:
    def losses(events: list[Event]) -> list[float]:
        return [e.loss for e in events if isinstance(e, TrainProgress)]

    dry: list[Event] = []
    dry_run("quickstart", steps=4, overrides=GIVEN, on_event=dry.append)
    real: list[Event] = []
    assert len(losses(dry)) == 4
    # With the warm-up of the whole run, a shorter one begins with the same steps.
    short = [("length", "2ep", "--set"), ("schedule.warmup", "1ep", "--set")]
    given = [*GIVEN, ("log.every", "1step", "--set"), *short]
    reconv.train("quickstart", overrides=given, on_event=real.append)
    assert losses(dry) == losses(real)[:4]


def test_dry_run_estimates_time_and_disk_space() -> None:
    seen: list[Event] = []
    result = dry_run("quickstart", steps=8, overrides=GIVEN, on_event=seen.append)
    [plan] = [e for e in seen if isinstance(e, RunPlanned)]
    assert result.total_steps == 25 * plan.steps_per_epoch
    assert result.images_per_s is not None
    assert result.estimated_s is not None
    assert result.evaluation_s is not None
    assert result.save_s is not None
    [saved] = [e for e in seen if isinstance(e, CheckpointSaved)]
    assert result.save_s == saved.wall_s and saved.write_s is not None
    copy_s = saved.wall_s - saved.write_s  # background writes do not slow down the steps
    expected_s = result.total_steps * 64 / result.images_per_s + 25 * (result.evaluation_s + copy_s)
    assert result.estimated_s == pytest.approx(expected_s)
    assert result.checkpoint_bytes == saved.num_bytes
    assert result.estimated_disk_bytes == 3 * saved.num_bytes  # the last two and the best
    assert result.peak_memory_bytes > 0


@pytest.mark.parametrize(
    ("given", "num_kept"),
    [
        ({"checkpoint_average.last": "10ep"}, 2 + 1 + 10),
        ({"checkpoint_average.last": "100%", "save.keep_last": "1"}, 1 + 1 + 25),
        ({"checkpoint_average.last": "10ep", "save.every": "2ep", "save.keep_best": "false"}, 2 + 5),
        ({"checkpoint_average.last": "3ep", "save.keep_at": "[4ep, 8ep]"}, 2 + 1 + 2 + 3),
    ],
)
def test_dry_run_counts_checkpoints_kept_for_averaging(given: dict[str, str], num_kept: int) -> None:
    settings = [*GIVEN, *((field, value, "--set") for field, value in given.items())]
    result = dry_run("quickstart", steps=1, overrides=settings)
    assert result.checkpoint_bytes is not None
    assert result.estimated_disk_bytes == num_kept * result.checkpoint_bytes


def test_too_few_steps_give_a_note_and_no_throughput() -> None:
    result = dry_run("quickstart", steps=2, overrides=GIVEN)
    assert result.images_per_s is None
    assert result.estimated_s is None
    assert any("too few steps" in note for note in result.notes)


def test_dry_run_disables_loggers() -> None:
    seen: list[Event] = []
    dry_run("quickstart", steps=2, overrides=[*GIVEN, ("loggers", "wandb,csv", "--set")], on_event=seen.append)
    assert not any(isinstance(e, LogMessage) and e.level == "warning" for e in seen)
    assert list(Path().iterdir()) == []


def dry_run_on_rank(temporary: str, settings: dict[str, str]) -> tuple[DryRunResult, list[str]]:
    """The result of a dry run on this rank, and the texts it logged."""
    tempfile.tempdir = temporary
    seen: list[Event] = []
    given = [*GIVEN, *((field, value, "--set") for field, value in settings.items())]
    result = dry_run("quickstart", steps=5, overrides=given, on_event=seen.append)
    said = [line for e in seen if isinstance(e, RunPlanned) for line in e.lines]
    said += [e.text for e in seen if isinstance(e, LogMessage)]
    return result, said


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch.group": "16"}, "2 devices x 32 x 1 micro-batch"),
        (
            {
                "batch.group": "16",
                "batch.micro": "16",
                "parallel.pipeline_stages": "2",
                "parallel.pipeline_splits": "[layer2.0]",
            },
            "each a pipeline of 2 devices",
        ),
    ],
)
def test_dry_run_on_several_ranks_logs_on_rank_0_only(temporary: Path, settings: dict[str, str], words: str) -> None:
    first, second = in_ranks(2, dry_run_on_rank, str(temporary), {**settings, "engine.num_threads": "1"})
    assert first[0] == second[0] and first[0].steps == 5 and first[0].images_per_s is not None
    assert any(words in line for line in first[1])
    assert any("2 processes on 1 machine" in line for line in first[1])
    assert second[1] == []
    assert list(temporary.glob("reconv-*")) == []
    assert list(Path().iterdir()) == [Path(temporary.name)]


def _run(words: list[str], code: int = 0) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == code


def test_compile_only_neither_evaluates_nor_saves(temporary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Event] = []
    dry_run("quickstart", overrides=GIVEN, on_event=seen.append)
    assert {e.kind for e in seen} <= {
        *("attempt", "data_fingerprint", "plan", "train", "image", "end", "message", "data_wait")
    }
    _run(["train", "quickstart", "--set", "data.subset_percent=20", "--compile-only", "--out", "here"])
    assert "nothing was kept" in capsys.readouterr().out
    assert sorted(path.name for path in Path().iterdir()) == ["temporary"]
    assert list(temporary.glob("reconv-*")) == []  # torch keeps compiled code there too


def test_a_dry_run_as_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    _run(["train", "quickstart", "--set", "data.subset_percent=20", "--dry-run", "5", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["steps"] == 5
    assert result["images_per_s"] > 0


@pytest.mark.parametrize("words", [["--resume"], ["--profile", "1,2"], ["--compile-only"]])
def test_options_incompatible_with_dry_run_are_an_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _run(["train", "quickstart", "--dry-run", "3", *words], code=2)
    assert "cannot be combined" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["5-8", "1,2,3", "a,b", ""])
def test_malformed_profile_range_is_an_error(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    _run(["train", "quickstart", "--profile", text], code=2)
    assert "--profile" in capsys.readouterr().err
