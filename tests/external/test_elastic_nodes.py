"""Elastic runs on simulated machines that are killed, added, stopped and cut off end with the weights of one process.

Needs Linux, root, iproute2 and util-linux. `PYTHONPATH=tests/support python tests/external/test_elastic_nodes.py 3
[SCENARIO...]` repeats every scenario three times and prints how long training paused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from node_namespaces import Machine, machines, missing_tools
from paced_run import write_recipe

PORT = 29400
STEPS, SAVE_EVERY = 600, 50
LIMIT_S = 240
HEARTBEAT_TIMEOUT_S = 10
SETTINGS = {
    "length": f"{STEPS}step",
    "schedule.warmup": "0ep",
    "batch.size": "32",
    "batch.group": "8",
    "save.every": f"{SAVE_EVERY}step",
    "evaluate.every": "off",
    "log.every": "5step",
    "engine.num_threads": "1",
    "data.num_workers": "0",
    "parallel.reduce": "ordered",
    "parallel.heartbeat_timeout_s": str(HEARTBEAT_TIMEOUT_S),
}


def train(recipe: str, out: Path, *more: str) -> list[str]:
    fields = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    return [sys.executable, "-m", "reconv", "train", recipe, "--quiet", "--out", str(out), *fields, *more]


def weights(out: Path) -> str:
    return hashlib.sha256((out / f"checkpoints/step-{STEPS:09d}/model.safetensors").read_bytes()).hexdigest()


@dataclass(slots=True)
class ElasticRun:
    """A rendezvous on the first machine and agents on others."""

    out: Path
    machines: list[Machine]
    agents: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        return self.out.with_suffix(".txt")

    def start_rendezvous(self) -> None:
        endpoint = f"{self.machines[0].address}:{PORT}"
        self.machines[0].start([sys.executable, "-m", "reconv", "rendezvous", endpoint], self.log)

    def add(self, *numbers: int) -> None:
        """Start the agents of some machines."""
        endpoint = f"{self.machines[0].address}:{PORT}"
        recipe = write_recipe(self.out.parent)
        command = train(str(recipe), self.out, "--elastic", "1:4", "--rendezvous", endpoint)
        for number in numbers:
            self.agents[number] = self.machines[number].start(command, self.log, RECONV_SECRET="a secret of this test")

    def joined(self) -> list[int]:
        """The machines in the order in which they have joined; the first one has rank 0."""
        addresses = re.findall(r"at (\S+) joins as node", self.log.read_text())
        return [[machine.address for machine in self.machines].index(address) for address in addresses]

    def start(self, *numbers: int) -> int:
        """Train with all these machines until steps would be lost; returns the number of the attempt."""
        self.add(*numbers)
        self.wait("they never trained together", lambda: len(numbers) in self.num_ranks())
        attempt = self.num_ranks().index(len(numbers)) + 1
        first = self.events("attempt")[attempt - 1]["from_step"] // SAVE_EVERY * SAVE_EVERY
        self.wait_for_step(first + SAVE_EVERY + 20, attempt, len(numbers))
        return attempt

    def events(self, kind: str) -> list[dict[str, Any]]:
        file = self.out / "events.jsonl"
        if not file.exists():
            return []
        lines = [line for line in file.read_text().split("\n")[:-1] if f'"kind":"{kind}"' in line]
        return [json.loads(line) for line in lines]

    def wait(self, what: str, condition: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline_s, f"{what}\n{self.log.read_text()[-6000:]}"
            time.sleep(0.05)

    def wait_for_step(self, step: int, attempt: int, num_ranks: int) -> float:
        """When an attempt with so many ranks has logged a step."""

        def found() -> list[float]:
            attempts = self.events("attempt")
            if len(attempts) < attempt:
                return []
            start_s = attempts[attempt - 1]["time_s"]
            return [e["time_s"] for e in self.events("train") if e["time_s"] > start_s and e["step"] >= step]

        self.wait(f"attempt {attempt} never reached step {step}", found)
        assert self.num_ranks()[attempt - 1] == num_ranks, (self.num_ranks(), self.log.read_text())
        return found()[0]

    def num_ranks(self) -> list[int]:
        """The number of ranks of each attempt."""
        return [int(line.split(" = ")[1].split(" device")[0]) for line in self._batch_lines()]

    def _batch_lines(self) -> list[str]:
        return [next(line for line in e["lines"] if line.startswith("global batch")) for e in self.events("plan")]

    def ends_with(self, codes: dict[int, int]) -> None:
        for number, code in codes.items():
            assert self.agents[number].wait(LIMIT_S) == code, self.log.read_text()[-6000:]


# Each scenario disturbs a run that has saved a checkpoint; returns the next attempt, and how long training paused.


def kill(run: ElasticRun, is_rank_0: bool) -> tuple[int, float]:
    attempt = run.start(1, 2, 3) + 1
    victim = run.joined()[0 if is_rank_0 else -1]
    start_s = time.time()
    run.machines[victim].kill()
    pause_s = run.wait_for_step(0, attempt, num_ranks=2) - start_s
    run.ends_with({number: 0 for number in (1, 2, 3) if number != victim})
    return attempt, pause_s


def kill_a_node(run: ElasticRun) -> tuple[int, float]:
    return kill(run, is_rank_0=False)


def kill_the_node_of_rank_0(run: ElasticRun) -> tuple[int, float]:
    return kill(run, is_rank_0=True)


@contextmanager
def recorded_writers(machine: Machine, out: Path) -> Iterator[list[tuple[float, str]]]:
    """When, and which file of a run, the processes of a machine had open for writing."""
    found: list[tuple[float, str]] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            found.extend((time.time(), name) for pid in machine.pids() for name in open_for_writing(pid, out))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def open_for_writing(pid: int, folder: Path) -> list[str]:
    names = []
    for file in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):  # closed, or the process has ended
            name = os.readlink(file)
            flags = re.search(r"flags:\s+(\d+)", Path(f"/proc/{pid}/fdinfo/{file.name}").read_text())
            if name.startswith(f"{folder}/") and flags and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY:
                names.append(name)
    return names


def kill_agent(run: ElasticRun, is_rank_0: bool) -> tuple[int, float]:
    """Only the agent is killed: all ranks save and stop, its own end by themselves, and never write again."""
    attempt = run.start(1, 2, 3) + 1
    victim = run.joined()[0 if is_rank_0 else -1]
    with recorded_writers(run.machines[victim], run.out) as written:
        start_s = time.time()
        os.kill(run.agents[victim].pid, signal.SIGKILL)
        pause_s = run.wait_for_step(0, attempt, num_ranks=2) - start_s
        run.ends_with({number: 0 for number in (1, 2, 3) if number != victim})
    assert run.machines[victim].pids() == []
    resumed_s = run.events("attempt")[attempt - 1]["time_s"]
    names = {Path(name).name for _, name in written}
    assert "lock" in names if is_rank_0 else names == {"rank-2.log"}
    assert [name for when_s, name in written if when_s >= resumed_s] == []
    return attempt, pause_s


def kill_an_agent(run: ElasticRun) -> tuple[int, float]:
    return kill_agent(run, is_rank_0=False)


def kill_the_agent_of_rank_0(run: ElasticRun) -> tuple[int, float]:
    return kill_agent(run, is_rank_0=True)


def add_a_node(run: ElasticRun) -> tuple[int, float]:
    attempt = run.start(1, 2) + 1
    run.add(3)
    resumed_s = run.wait_for_step(0, attempt, num_ranks=3)
    ended = run.events("end")[attempt - 2]
    assert ended["exit_code"] == 75
    run.ends_with({1: 0, 2: 0, 3: 0})
    return attempt, resumed_s - ended["time_s"]


def stop_a_node(run: ElasticRun) -> tuple[int, float]:
    attempt = run.start(1, 2, 3) + 1
    start_s = time.time()
    os.kill(run.agents[3].pid, signal.SIGTERM)
    pause_s = run.wait_for_step(0, attempt, num_ranks=2) - start_s
    assert run.events("attempt")[attempt - 1]["from_step"] % SAVE_EVERY, "no checkpoint was saved on the way out"
    run.ends_with({3: 75, 1: 0, 2: 0})
    return attempt, pause_s


def cut_a_link(run: ElasticRun) -> tuple[int, float]:
    """The cable of a node is cut, and mended as soon as the others train; the node joins them again."""
    attempt = run.start(1, 2, 3) + 1
    victim = run.joined()[-1]
    start_s = time.time()
    run.machines[victim].set_link("down")
    pause_s = run.wait_for_step(0, attempt, num_ranks=2) - start_s
    run.machines[victim].set_link("up")
    run.wait_for_step(0, attempt + 1, num_ranks=3)
    run.ends_with({1: 0, 2: 0, 3: 0})
    return attempt, pause_s


SCENARIOS = (
    kill_a_node,
    kill_the_node_of_rank_0,
    kill_an_agent,
    kill_the_agent_of_rank_0,
    add_a_node,
    stop_a_node,
    cut_a_link,
)


def play(scenario: Callable[[ElasticRun], tuple[int, float]], folder: Path) -> tuple[float, int]:
    """How long training paused, and how many steps were repeated."""
    folder.mkdir(exist_ok=True)
    with machines(4) as made:
        run = ElasticRun(folder / scenario.__name__, made)
        run.start_rendezvous()
        attempt, pause_s = scenario(run)
        resumed = run.events("attempt")[attempt - 1]
        from_step, resumed_s = resumed["from_step"], resumed["time_s"]
        before = max(event["step"] for event in run.events("train") if event["time_s"] < resumed_s)
        return pause_s, max(0, before - from_step)


def undisturbed(out: Path) -> str:
    """The weights of an undisturbed run in one process."""
    subprocess.run(train("quickstart", out), check=True, timeout=LIMIT_S, capture_output=True)
    return weights(out)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    return undisturbed(tmp_path_factory.mktemp("reference") / "run")


@pytest.mark.skipif(bool(missing_tools()), reason=missing_tools() or "-")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_the_final_weights_are_those_of_one_process(
    scenario: Callable[[ElasticRun], tuple[int, float]], reference: str, tmp_path: Path
) -> None:
    pause_s, num_repeated = play(scenario, tmp_path)
    assert weights(tmp_path / scenario.__name__) == reference
    assert pause_s < 30 + (HEARTBEAT_TIMEOUT_S if scenario is cut_a_link else 0)
    assert num_repeated <= SAVE_EVERY


def main(repeats: int, names: Sequence[str]) -> None:
    """Print a table of some scenarios, or of all, and every pause on stderr."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected = undisturbed(folder / "undisturbed")
        print("| what happens | n | pause, median | shortest to longest | steps repeated, most | final weights |")
        print("|---|---:|---:|---:|---:|---|")
        for scenario in [scenario for scenario in SCENARIOS if scenario.__name__ in names or not names]:
            found, num_equal = [], 0
            for number in range(repeats):
                found.append(play(scenario, folder / str(number)))
                print(scenario.__name__, found[-1], file=sys.stderr, flush=True)
                num_equal += weights(folder / str(number) / scenario.__name__) == expected
            pauses, repeated = [pause_s for pause_s, _ in found], [num_steps for _, num_steps in found]
            row = [scenario.__name__.replace("_", " "), str(len(found)), f"{statistics.median(pauses):.1f} s"]
            row += [
                f"{min(pauses):.1f} to {max(pauses):.1f} s",
                str(max(repeated)),
                f"{num_equal} of {len(found)} equal",
            ]
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1, sys.argv[2:])
