"""The file of a study: what it does next is a function of the file, wherever its process was killed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from reconv.core.errors import CheckpointError, RunLockedError, UsageError
from reconv.tuner.space import parse_space
from reconv.tuner.study import JOURNAL, Settings, StudyFile, TrialRecord, locked_folder

SPACE = parse_space(["schedule.lr=0.01:1:log", "optimizer.momentum=0.5|0.9", "batch.size=16:64:16"])
SETTINGS = Settings("quickstart", "0" * 32, None, tuple(map(str, SPACE)), 0, "tpe", 3, 3, 9)


def score(trial: TrialRecord, rung: int) -> float:
    """A result that depends on the values alone."""
    lr = float(trial.values.get("schedule.lr", 0.1))
    return 1 - (lr - 0.2) ** 2 + 0.01 * rung


def fails(trial: TrialRecord) -> bool:
    return float(trial.values.get("schedule.lr", 0.1)) > 0.8


def advance(folder: Path, trials: int = 20, settings: Settings = SETTINGS) -> list[TrialRecord]:
    """Continue a study to its end, with invented results."""
    folder.mkdir(exist_ok=True)
    study = StudyFile(folder, settings, SPACE)
    for first in range(0, trials, settings.round_size):
        last = min(first + settings.round_size, trials)
        study.propose(last, {"schedule.lr": 0.1})
        for rung in range(settings.rungs):
            for trial in study.trials()[first:last]:
                if trial.state == "running" and (trial.failure or fails(trial)):
                    study.fail(trial.number, trial.failure or "exit code 5: diverged")
                elif trial.state == "running" and rung not in trial.scores:
                    study.report(trial.number, rung, score(trial, rung))
            undecided = [t.number for t in study.trials()[first:last] if t.state == "running" and t.last_rung == rung]
            if rung == settings.rungs - 1:
                for number in undecided:
                    study.complete(number)
            else:
                study.halve(rung, undecided)
    return study.trials()


def test_a_study_killed_at_any_byte_of_its_file_ends_with_the_same_trials(tmp_path: Path) -> None:
    whole = advance(tmp_path / "whole")
    content = (tmp_path / "whole" / JOURNAL).read_bytes()
    ends = [n + 1 for n, byte in enumerate(content) if byte == 10]
    assert len(ends) > 60
    cuts = [*ends[::4], *(end + 7 for end in ends[1:-1:6])]  # between lines, and within
    for number, cut in enumerate(cuts):
        folder = tmp_path / f"cut-{number}"
        folder.mkdir()
        (folder / JOURNAL).write_bytes(content[:cut])
        assert advance(folder) == whole, cut


def test_a_halving_counts_all_trials_that_have_reached_the_rung(tmp_path: Path) -> None:
    trials = advance(tmp_path, 27, replace(SETTINGS, search="random"))
    for rung in (0, 1):
        for first in (0, 9, 18):
            seen = [t for t in trials[1 : first + 9] if rung in t.scores]
            best = sorted(seen, key=lambda t: (-t.scores[rung], t.number))[: max(1, len(seen) // 3)]
            kept = {t.number for t in best} | {0}
            round_of = [t for t in trials[first : first + 9] if rung in t.scores]
            assert [t.number for t in round_of if rung + 1 in t.scores] == [
                t.number for t in round_of if t.number in kept and not t.failure
            ]
    assert trials[0].state == "complete"
    assert {t.state for t in trials} == {"complete", "pruned", "failed"}


def test_trials_depend_on_the_seed_and_random_search_on_nothing_else(tmp_path: Path) -> None:
    first, again = advance(tmp_path / "1"), advance(tmp_path / "2")
    other = advance(tmp_path / "3", settings=replace(SETTINGS, seed=1))
    random = advance(tmp_path / "4", settings=replace(SETTINGS, search="random"))
    longer = advance(tmp_path / "4", 25, settings=replace(SETTINGS, search="random"))
    assert first == again
    assert [t.values for t in first[1:]] != [t.values for t in other[1:]]
    assert [t.values for t in longer[:20]] == [t.values for t in random]
    assert first[0].values == {}


def test_the_search_finds_the_better_region(tmp_path: Path) -> None:
    trials = advance(tmp_path, 36)
    distances = [abs(float(t.values["schedule.lr"]) - 0.2) for t in trials[1:]]
    assert sum(distances[-9:]) < 0.6 * sum(distances[:9])


def test_another_study_is_refused_with_what_differs(tmp_path: Path) -> None:
    advance(tmp_path, 9)
    for change in ({"recipe_digest": "1" * 32}, {"seed": 3}, {"data": "/photos"}, {"rungs": 2}, {"search": "random"}):
        with pytest.raises(UsageError, match="this folder has another study") as caught:
            StudyFile(tmp_path, replace(SETTINGS, **change), SPACE)
        assert next(iter(change)) in caught.value.why
    assert len(StudyFile(tmp_path, replace(SETTINGS, round_size=16), SPACE).trials()) == 9
    assert StudyFile(tmp_path, replace(SETTINGS, round_size=16), SPACE).settings.round_size == 9


@pytest.mark.parametrize(
    "content", [b"no json\n", b'{"op_code": 0}\n', b'{"op_code": 99, "worker_id": "a"}\n', b"\xff\xfe\n", b"[1]\n"]
)
def test_a_damaged_file_is_an_error_that_leaves_it_as_it_is(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / JOURNAL
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="the file of the study is damaged") as caught:
        StudyFile(tmp_path, SETTINGS, SPACE)
    assert caught.value.where == str(path)
    assert path.read_bytes() == content


def test_a_study_of_another_program_is_refused(tmp_path: Path) -> None:
    advance(tmp_path, 9)
    lines = (tmp_path / JOURNAL).read_text().splitlines(keepends=True)
    (tmp_path / JOURNAL).write_text("".join(line for line in lines if '"settings"' not in line))
    with pytest.raises(UsageError, match="is a study of another program"):
        StudyFile(tmp_path, SETTINGS, SPACE)


def test_one_process_at_a_time_has_the_study(tmp_path: Path) -> None:
    with locked_folder(tmp_path), pytest.raises(RunLockedError, match="the study is in use"), locked_folder(tmp_path):
        pass
    with locked_folder(tmp_path):
        pass


def test_importance_is_that_of_the_field_that_decides(tmp_path: Path) -> None:
    advance(tmp_path, 36)
    found = StudyFile(tmp_path, SETTINGS, SPACE).importance()
    assert sum(found.values()) == pytest.approx(1.0)
    assert max(found, key=found.__getitem__) == "schedule.lr"
    assert found["schedule.lr"] > 0.5
    (tmp_path / "few").mkdir()
    assert StudyFile(tmp_path / "few", SETTINGS, SPACE).importance() == {}


@pytest.mark.parametrize(
    ("written", "changed"),
    [
        ('"values": {"schedule.lr": ', '"values": {"model.name": "./evil.py:Net", "schedule.lr": '),
        ('"values": {"schedule.lr": ', '"values": {"schedule.lr": 9'),
        ('"batch.size": 64', '"batch.size": 24'),
    ],
)
def test_values_in_the_file_that_are_not_of_the_space_are_refused(tmp_path: Path, written: str, changed: str) -> None:
    advance(tmp_path)
    file = tmp_path / JOURNAL
    lines = [json.dumps(json.loads(line)) for line in file.read_text().splitlines()]
    at = next(number for number, line in enumerate(lines) if written in line and '"values": {}' not in line)
    lines[at] = lines[at].replace(written, changed)
    file.write_text("\n".join([*lines, ""]))
    with pytest.raises(CheckpointError, match="damaged") as error:
        advance(tmp_path)
    assert "not of the space" in str(error.value)
