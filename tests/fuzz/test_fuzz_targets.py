"""Every fuzz target gets its corpus and a few mutations (`make fuzz`: many), and the runner finds what is wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzz_mutator import mutate
from fuzz_runner import CORPUS, Result, Target, corpus, fuzz
from fuzz_targets import TARGETS

from reconv.core.errors import DataError, ReconvError

NUM_MUTATIONS = 12


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("DATA_DIR", raising=False)


@pytest.mark.parametrize("name", TARGETS)
def test_a_parser_returns_or_refuses(name: str, tmp_path: Path) -> None:
    kept = corpus(name)
    result = fuzz(TARGETS[name], tmp_path / name, kept, executions=NUM_MUTATIONS)
    assert [failure.problem for failure in result.failures] == []
    assert result.executions == len(kept) + NUM_MUTATIONS


def test_a_valid_input_must_be_accepted(tmp_path: Path) -> None:
    """An input that is refused at its first byte would test nothing."""
    target = Target("own", lambda _: lambda data: _raise(DataError("bad")), (ReconvError,))
    result = fuzz(target, tmp_path, {"bad": b"a", "valid-one": b"b"}, executions=0)
    assert [failure.data for failure in result.failures] == [b"b"]


def test_every_target_has_a_valid_input() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} == set(TARGETS)
    assert [name for name in TARGETS if not any(file.startswith("valid") for file in corpus(name))] == []


def test_the_same_key_gives_the_same_input() -> None:
    kept = list(corpus("events").values())
    inputs = [mutate(kept, f"1/events/{number}") for number in range(200)]
    assert inputs == [mutate(kept, f"1/events/{number}") for number in range(200)]
    assert len(set(inputs)) > 150


def _fuzz(parse: Callable[[bytes], object], folder: Path, cpu_s: float = 5) -> Result:
    return fuzz(
        Target("own", lambda _: parse, (ReconvError,)), folder, {"a": b"a", "b": b"b"}, executions=0, cpu_s=cpu_s
    )


def _raise(error: Exception) -> None:
    raise error


def _spin(data: bytes) -> None:
    until_s = time.process_time() + 20
    while time.process_time() < until_s:
        pass


@pytest.mark.parametrize(
    ("parse", "problem"),
    [
        (lambda data: _raise(KeyError("x")), "KeyError at test_fuzz_targets.py"),
        (_spin, "more than 0.1 s of CPU time"),
        (lambda data: bytearray(5 << 30), "MemoryError at test_fuzz_targets.py"),
        (lambda data: data == b"a" and b"\1" * (1100 << 20), "more than 1024 MiB of memory"),
        (lambda data: os.abort(), "the process did not return, or crashed (status -6)"),
    ],
    ids=["exception", "time", "address space", "memory", "crash"],
)
def test_the_runner_finds(parse: Callable[[bytes], object], problem: str, tmp_path: Path) -> None:
    result = _fuzz(parse, tmp_path, 0.1 if parse is _spin else 5)
    assert len(result.failures) == 1  # one of each kind
    assert result.failures[0].problem.startswith(problem)
    assert result.failures[0].data == b"a"


def test_a_refusal_is_no_failure(tmp_path: Path) -> None:
    result = _fuzz(lambda data: _raise(DataError("bad")), tmp_path)
    assert (result.failures, result.executions) == ([], 2)
