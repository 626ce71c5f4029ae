"""Runs a fuzz target in a process of its own, with limits of time and memory for each input."""

from __future__ import annotations

import base64
import faulthandler
import json
import os
import resource
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz_mutator import mutate

CORPUS = Path(__file__).resolve().parent / "corpus"
CPU_S = 5.0  # of one input
WALL_S = 60.0  # without a word of the process, on a busy machine
MEMORY_BYTES = 1 << 30  # of one input
_ADDRESS_SPACE_BYTES = 2 << 30  # beyond what the process has: what is reserved must not all be used
_REPORT_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Target:
    """A parser: `prepare` makes the files around it in a folder and returns the function that parses an input."""

    name: str
    prepare: Callable[[Path], Callable[[bytes], object]]
    refusals: tuple[type[BaseException], ...]  # what it may raise


@dataclass(frozen=True, slots=True)
class Failure:
    """An input, and what it led to."""

    data: bytes
    problem: str


@dataclass(slots=True)
class Result:
    """What became of a target."""

    executions: int = 0
    seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)  # one of each kind
    num_failures: int = 0


class _TooSlowError(BaseException):
    """Not an Exception: no parser catches it by accident."""


def corpus(name: str) -> dict[str, bytes]:
    """The kept inputs of a target by name; those whose name begins with `valid` must be accepted."""
    return {path.name: path.read_bytes() for path in sorted((CORPUS / name).iterdir())}


def fuzz(
    target: Target,
    folder: Path,
    kept: Mapping[str, bytes],
    *,
    seconds: float | None = None,
    executions: int | None = None,
    seed: int = 1,
    cpu_s: float = CPU_S,
) -> Result:
    """Give a target its corpus, then mutations, until the time or the number of mutations is reached."""
    began_s = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    receiving, sending = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(receiving)
        _run_child(target, folder, sending, _inputs(target, kept, seconds, executions, seed), cpu_s)
    os.close(sending)
    result = Result()
    is_finished = False
    for report in _reports(receiving):
        result.executions = report.get("executions", result.executions)
        is_finished |= "finished" in report
        if "problem" in report:
            _add(result, Failure(base64.b64decode(report["data"]), report["problem"]))
    os.close(receiving)
    if not is_finished:
        os.kill(pid, signal.SIGKILL)  # a process that has ended keeps its number until it is waited for
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not is_finished:
        running = folder / "running"
        data = running.read_bytes() if running.exists() else b""
        _add(result, Failure(data, f"the process did not return, or crashed (status {status})"))
    result.seconds = time.monotonic() - began_s
    return result


def _reports(pipe: int) -> Iterator[dict[str, Any]]:
    """What the process says, until it ends or says nothing for too long."""
    rest = b""
    while select.select([pipe], [], [], WALL_S)[0] and (chunk := os.read(pipe, 1 << 16)):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from map(json.loads, lines)


def run_one(target: Target, folder: Path, data: bytes) -> object:
    """Parse one input here; what it raises is seen whole."""
    folder.mkdir(parents=True, exist_ok=True)
    return target.prepare(folder)(data)


def _add(result: Result, failure: Failure) -> None:
    result.num_failures += 1
    if failure.problem.splitlines()[0] not in [known.problem.splitlines()[0] for known in result.failures]:
        result.failures.append(failure)


def _inputs(
    target: Target, kept: Mapping[str, bytes], seconds: float | None, executions: int | None, seed: int
) -> Iterator[tuple[bytes, tuple[type[BaseException], ...]]]:
    """Inputs, each with what it may raise."""
    until_s = None if seconds is None else time.monotonic() + seconds
    for name, data in kept.items():
        yield data, () if name.startswith("valid") else target.refusals
    number = 0
    while (executions is None or number < executions) and (until_s is None or time.monotonic() < until_s):
        yield mutate(list(kept.values()), f"{seed}/{target.name}/{number}"), target.refusals
        number += 1


def _run_child(
    target: Target,
    folder: Path,
    pipe: int,
    inputs: Iterator[tuple[bytes, tuple[type[BaseException], ...]]],
    cpu_s: float,
) -> None:
    def send(**report: Any) -> None:
        os.write(pipe, json.dumps(report).encode() + b"\n")

    code = 98
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        warnings.simplefilter("ignore")
        faulthandler.disable()  # pytest's would print the stack of a crash
        _limit_memory()
        execute = target.prepare(folder)
        told_s, executions = time.monotonic(), 0
        for data, refusals in inputs:
            (folder / "running").write_bytes(data)
            if problem := _problem(execute, data, refusals, cpu_s):
                send(problem=problem, data=base64.b64encode(data).decode())
            executions += 1
            if time.monotonic() - told_s > _REPORT_EVERY_S:
                send(executions=executions)
                told_s = time.monotonic()
        send(executions=executions, finished=True)
        code = 0
    except BaseException:
        send(problem=f"the target cannot be prepared\n{traceback.format_exc()}", data="")
    finally:
        os._exit(code)


def _limit_memory() -> None:
    lines = Path("/proc/self/status").read_text().splitlines()
    used = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (used + _ADDRESS_SPACE_BYTES, used + _ADDRESS_SPACE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _problem(
    execute: Callable[[bytes], object], data: bytes, refusals: tuple[type[BaseException], ...], cpu_s: float
) -> str:
    """What is wrong with how an input was parsed; empty if nothing is."""
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.signal(signal.SIGPROF, _stop)
    try:
        problem = _raised(execute, data, refusals, cpu_s)
    except _TooSlowError:
        problem = f"more than {cpu_s:g} s of CPU time\n{traceback.format_exc()}"
    grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kib) << 10
    if not problem and grown_bytes > MEMORY_BYTES:
        problem = f"more than {MEMORY_BYTES >> 20} MiB of memory\n{grown_bytes >> 20} MiB"
    return problem


def _stop(number: int, frame: object) -> None:
    raise _TooSlowError


def _raised(
    execute: Callable[[bytes], object], data: bytes, refusals: tuple[type[BaseException], ...], cpu_s: float
) -> str:
    """The exception of an input that is no refusal, with its place; empty if there is none."""
    try:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        execute(data)
    except _TooSlowError:
        raise
    except refusals as error:
        str(error).encode("utf-8", "backslashreplace")  # as the command line prints it
    except BaseException as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}\n{traceback.format_exc()}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return ""
