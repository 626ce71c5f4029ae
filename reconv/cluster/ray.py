"""Elastic runs on a Ray cluster: one actor per node starts its ranks, in rounds with the nodes that are there.

Ray places the actors and notices lost nodes; what training continues from is the newest checkpoint, so the weights are
those of an undisturbed run (tests/external/test_ray.py). Ray is imported when a run starts, and sends the arguments of
the run as pickles: only those who may submit jobs to a cluster should reach it.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from reconv.cluster import rounds
from reconv.cluster.launch import parse_nodes
from reconv.core.errors import ExitCode, RankLostError, ReconvError, RemoteRankError, UsageError
from reconv.core.stop_signals import handled_stop_signals
from reconv.core.text import count, printable
from reconv.core.version import __version__
from reconv.core.wait import ProcessWait
from reconv.distributed.environment import ROUND_VARIABLE, SECRET_VARIABLE
from reconv.distributed.nic import free_port, nic_variables
from reconv.distributed.rank_store import new_secret

if TYPE_CHECKING:
    from reconv.trainer.options import RunOptions
    from reconv.trainer.run import RunOutcome

_POLL_S = 0.2
_NODES_S = 2.0  # between two looks at the nodes of the cluster
_SETTLE_S = 3.0  # that a new node has been there before the ranks are asked to stop for it
_PLACE_S = 15.0  # for Ray to place the actors: a node may be gone that it still lists
_PASSED_ON = ("DATA_DIR", "OMP_NUM_THREADS", "HF_TOKEN")  # beside RECONV_*


@dataclass(frozen=True, slots=True, kw_only=True)
class Ray:
    """Trains on a Ray cluster: `reconv.train(..., launch=Ray(nodes="1:4", devices_per_node=8))`.

    `nodes` is a number or a range: training goes on with the nodes that are left, and takes new ones in. All nodes
    need Reconv, the data and the run directory at the same paths; the run directory may be in an object store.
    """

    nodes: int | str = 1
    devices_per_node: int = 1
    cpus_per_device: int = 1  # that Ray reserves
    address: str | None = None  # of the cluster; None: $RAY_ADDRESS, or the cluster of this machine
    nic: str | None = None  # the network interface between nodes

    @property
    def limits(self) -> tuple[int, int]:
        """The smallest and the largest number of nodes."""
        limits = parse_nodes(str(self.nodes))
        if limits is None:
            raise UsageError(f"nodes is {self.nodes!r}", hint="use a number or a range, as in '1:4'")
        return limits

    @property
    def num_ranks(self) -> int:
        """The largest number of ranks."""
        return self.limits[1] * self.devices_per_node

    def start(self, train: Any, options: RunOptions, on_event: Any = None) -> RunOutcome:
        """Train until the run ends, as `Launch.start`; the actors import what they call themselves."""
        if on_event is not None:
            raise UsageError(
                "on_event cannot observe several processes", hint="read events.jsonl in the run directory instead"
            )
        return rounds.train_on_ray(self, replace(options, nic=self.nic))

    def run(self, args: Any, usable: Callable[[int], int], needs_gpu: bool | None) -> Mapping[str, Any]:
        """Train as `args` (`RunOptions`) say until the run ends. Returns rank 0's `RunResult` as plain data.

        `usable` is how many of so many ranks can share the global batch. `needs_gpu`: None if GPUs are used where a
        node has some. Raises the error of a rank.
        """
        with _connected(self.address) as ray:
            return _Driver(ray, self, args, usable, needs_gpu).run()


@contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    """The module `ray`, connected to a cluster; disconnected at the end if it was not before."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray: Any = import_module("ray")
    except ImportError as error:
        raise UsageError(
            "training on Ray needs the package ray", why=str(error), hint="pip install 'reconv[ray]'"
        ) from error
    if ray.is_initialized():
        yield ray
        return
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", namespace="reconv")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UsageError(
            "there is no Ray cluster" if address == "auto" else f"no Ray cluster replies at {address}",
            why=printable(str(error).partition("\n")[0]),
            hint="start one with `ray start --head`, or name its address with --address HOST:6379",
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


@dataclass(slots=True)
class _Outcome:
    """Outcome of the ranks of a round."""

    codes: list[int | None]  # by node; None: the node is lost
    results: list[Mapping[str, Any]] = field(default_factory=list)
    was_stopped: bool = False  # by the driver

    @property
    def progress(self) -> str:
        """The newest checkpoint that a node of the round has seen."""
        return max((str(result["checkpoint"]) for result in self.results), default="")

    @property
    def error(self) -> ReconvError:
        """The error that explains the others: not that of a rank which has only lost its peers."""
        errors = [result["error"] for result in self.results if result["error"] is not None]
        errors.sort(key=lambda error: error["code"] in (ExitCode.RANK_LOST, ExitCode.PREEMPTED))
        if not errors or (None in self.codes and errors[0]["code"] == ExitCode.RANK_LOST):
            return RankLostError("a node is lost", where=f"node {self.codes.index(None)}" if None in self.codes else "")
        return RemoteRankError.from_dict(errors[0])


class _Driver:
    """The rounds of a run."""

    def __init__(self, ray: Any, config: Ray, args: Any, usable: Callable[[int], int], needs_gpu: bool | None) -> None:
        self._ray, self._config, self._args, self._usable = ray, config, args, usable
        self._min, self._max = config.limits
        self._secret = os.environ.get(SECRET_VARIABLE) or new_secret()
        per_node = config.devices_per_node
        self._bundle: dict[str, float] = {"CPU": per_node * config.cpus_per_device}
        if needs_gpu is None:
            needs_gpu = any(node["Alive"] and node["Resources"].get("GPU") for node in ray.nodes())
        if needs_gpu:
            self._bundle["GPU"] = per_node
        self._files = {path.name: path.read_text(encoding="utf-8") for path in _recipe_files(args.recipe)}
        self._signals: list[int] = []
        self._restarts = rounds.RestartPolicy()

    def run(self) -> Mapping[str, Any]:
        is_main = threading.current_thread() is threading.main_thread()
        numbers = handled_stop_signals() if is_main else ()
        previous = {n: signal.signal(n, lambda number, _: self._signals.append(number)) for n in numbers}
        try:
            number = 0
            while True:
                number += 1
                outcome = self._round(number)
                if outcome is None:
                    continue
                if outcome.codes.count(0) == len(outcome.codes):
                    return outcome.results[0]["result"]  # type: ignore[no-any-return]
                self._after(outcome)
        finally:
            for n, handler in previous.items():
                signal.signal(n, signal.SIG_DFL if handler is None else handler)

    # One round

    def _num_nodes(self) -> int:
        """Number of nodes that can take part now: as many as can share the batch, with all their devices."""
        nodes = [node for node in self._ray.nodes() if node["Alive"] and self._has_room(node["Resources"])]
        per_node = self._config.devices_per_node
        fitting = (n for n in range(min(len(nodes), self._max), 0, -1) if self._usable(n * per_node) == n * per_node)
        return next(fitting, 0)

    def _has_room(self, resources: Mapping[str, float]) -> bool:
        return all(resources.get(name, 0) >= amount for name, amount in self._bundle.items())

    def _wait_for_nodes(self) -> int:
        wait = ProcessWait()
        while True:
            if self._signals:
                raise rounds.stopped_without_saving(self._signals)
            number = self._num_nodes()
            if number >= self._min:
                return number
            has = " and ".join(f"{amount:g} {name}" for name, amount in self._bundle.items())
            wait.tick(
                f"{self._min} nodes with {has} ({number} now)",
                where="Ray",
                hint="start more nodes with `ray start --address=...`, or allow fewer with --nodes",
                sleep_s=1.0,
            )

    def _round(self, number: int) -> _Outcome | None:
        """The outcome of a round; None if its actors could not be placed."""
        groups: Any = import_module("ray.util.placement_group")
        strategies: Any = import_module("ray.util.scheduling_strategies")
        size = self._wait_for_nodes()
        group = groups.placement_group([self._bundle] * size, strategy="STRICT_SPREAD")
        try:
            self._ray.get(group.ready(), timeout=_PLACE_S)
            actor = self._ray.remote(max_restarts=0, max_concurrency=4, num_cpus=self._bundle["CPU"])(NodeActor)
            nodes = [
                actor.options(
                    num_gpus=self._bundle.get("GPU", 0),
                    scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(group, index),
                ).remote()
                for index in range(size)
            ]
            facts = self._ray.get([node.describe.remote() for node in nodes], timeout=4 * _PLACE_S)
        except (self._ray.exceptions.GetTimeoutError, self._ray.exceptions.RayActorError) as error:
            self._print(f"the nodes could not be reserved ({type(error).__name__}): trying again")
            groups.remove_placement_group(group)
            return None
        try:
            _check_versions(facts)
            ranks = count(size * self._config.devices_per_node, "rank")
            self._print(f"round {number}: {count(size, 'node')}, {ranks}; rank 0 on {facts[0]['host']}")
            return self._watch(nodes, facts, self._variables(number, facts))
        finally:
            groups.remove_placement_group(group)

    def _variables(self, number: int, facts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        passed_on = {k: v for k, v in os.environ.items() if k.startswith("RECONV_") or k in _PASSED_ON}
        return {
            **passed_on,
            "PET_NNODES": str(len(facts)),
            "PET_NPROC_PER_NODE": str(self._config.devices_per_node),
            "PET_MASTER_ADDR": facts[0]["address"],
            "PET_MASTER_PORT": str(facts[0]["port"]),
            SECRET_VARIABLE: self._secret,
            ROUND_VARIABLE: str(number),
        }

    def _watch(
        self, nodes: Sequence[Any], facts: Sequence[Mapping[str, Any]], variables: Mapping[str, str]
    ) -> _Outcome:
        arguments = (pickle_by_value(self._args), self._files, str(Path.cwd()))
        pending = {
            node.train.remote(*arguments, {**variables, "PET_NODE_RANK": str(index)}): index
            for index, node in enumerate(nodes)
        }
        lines = {node.read_lines.remote(): index for index, node in enumerate(nodes)}
        outcome = _Outcome([None] * len(nodes))
        results: dict[int, Mapping[str, Any]] = {}
        stopped_s = first_end_s = looked_s = joined_s = None
        while pending:
            for ref in self._ray.wait(list(lines), num_returns=len(lines), timeout=_POLL_S)[0] if lines else ():
                index = lines.pop(ref)
                with suppress(self._ray.exceptions.RayError):
                    self._show(self._ray.get(ref), facts[index]["host"], index)
                    lines[nodes[index].read_lines.remote()] = index
            for ref in self._ray.wait(list(pending), num_returns=len(pending), timeout=0 if lines else _POLL_S)[0]:
                index = pending.pop(ref)
                with suppress(self._ray.exceptions.RayError):  # the node is lost
                    results[index] = self._ray.get(ref)
                    outcome.codes[index] = results[index]["code"]
                if outcome.codes[index] != 0:
                    first_end_s = first_end_s or time.monotonic()
            now_s = time.monotonic()
            if stopped_s is None and looked_s is not None and now_s - looked_s < _NODES_S and not self._signals:
                continue
            looked_s = now_s
            reason = self._why_stop(len(nodes))
            joined_s = None if not reason else joined_s or now_s
            is_due = self._signals or (joined_s is not None and now_s - joined_s >= _SETTLE_S)
            if stopped_s is None and is_due:
                self._print(f"{reason or 'asked to stop'}: saving")
                stopped_s, outcome.was_stopped = now_s, True
                self._signal(nodes, pending.values(), signal.SIGTERM)
            if now_s - min(stopped_s or now_s, first_end_s or now_s) > rounds.STOP_LIMIT_S:
                self._signal(nodes, pending.values(), signal.SIGKILL)
        for ref, index in lines.items():  # what was printed last
            with suppress(self._ray.exceptions.RayError):
                self._show(self._ray.get(ref, timeout=5.0), facts[index]["host"], index)
        outcome.results = [results[index] for index in sorted(results)]
        return outcome

    def _why_stop(self, num_nodes: int) -> str:
        """Reason for the ranks to save and stop, if there is one: more nodes can take part."""
        return "a node joins" if num_nodes < self._max and self._num_nodes() > num_nodes else ""

    def _signal(self, nodes: Sequence[Any], indices: Any, number: int) -> None:
        with suppress(self._ray.exceptions.RayError):
            self._ray.get([nodes[index].signal.remote(int(number)) for index in indices], timeout=5.0)

    def _show(self, lines: Sequence[str], host: str, index: int) -> None:
        for line in lines:
            print(line if index == 0 else f"{host}: {line}", flush=True)

    # After a round

    def _after(self, outcome: _Outcome) -> None:
        """Decide after a round that has not finished the run; raises its error if a restart would not mend it."""
        error = outcome.error
        if self._signals:
            is_saved = ExitCode.PREEMPTED in outcome.codes
            raise error if is_saved else rounds.stopped_without_saving(self._signals)
        if error.code in rounds.FINAL:
            raise error
        if outcome.was_stopped or error.code == ExitCode.PREEMPTED:
            return
        self._print(self._restarts.after(error, len(outcome.codes), outcome.progress))

    def _print(self, text: str) -> None:
        print(f"ray: {text}", file=sys.stderr, flush=True)


def _recipe_files(recipe: str) -> Sequence[Path]:
    from reconv.recipe.load.extends import own_files

    return own_files(recipe)


def _check_versions(facts: Sequence[Mapping[str, Any]]) -> None:
    for fact in facts:
        if fact["version"] != __version__:
            raise UsageError(
                f"{fact['host']} has Reconv {fact['version']}, and this machine {__version__}",
                hint="install the same version on all nodes",
            )


def pickle_by_value(args: Any) -> bytes:
    """The arguments of a run with the objects in them; classes of a script or a notebook are refused.

    Every rank imports the classes of its objects, and `__main__` is another module there.
    """
    for name, value in args.objects.items():
        kind = value if isinstance(value, type) or (callable(value) and hasattr(value, "__module__")) else type(value)
        if getattr(kind, "__module__", "") == "__main__":
            raise UsageError(
                f"{name} is defined in the script itself",
                why="the nodes import it, and the script runs on this machine alone",
                hint="move it to a module that is installed on, or shared with, all nodes",
            )
    return pickle.dumps(args)


class NodeActor:
    """One node of a round, in a process of Ray there. Its ranks are asked to save and stop when it ends."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._has_lines = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None

    def describe(self) -> dict[str, Any]:
        """The address of this node, a port that is free there, and the installed version."""
        address = str(import_module("ray.util").get_node_ip_address())
        port = free_port(address)
        return {"address": address, "port": port, "host": socket.gethostname(), "version": __version__}

    def train(self, args: bytes, files: Mapping[str, str], cwd: str, variables: Mapping[str, str]) -> dict[str, Any]:
        """Train with the ranks of this node until they end; returns how, as plain data."""
        with TemporaryDirectory(prefix="reconv-ray-") as name:
            folder = Path(name)
            for file, text in files.items():
                (folder / file).write_text(text, encoding="utf-8")
            # Ranks of a node that is alive although its actor is not, as after a lost driver, save before they end.
            libc = ctypes.CDLL(None) if sys.platform == "linux" else None
            self._process = subprocess.Popen(
                [sys.executable, "-m", "reconv.cluster.ray", name],
                env={**os.environ, **nic_variables(self.describe()["address"]), **variables},
                cwd=cwd if Path(cwd).is_dir() else None,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                preexec_fn=None if libc is None else lambda: libc.prctl(1, signal.SIGTERM),
            )
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            with suppress(BrokenPipeError), self._process.stdin as stdin:
                stdin.write(args)
            for line in self._process.stdout:
                with self._has_lines:
                    self._lines.append(line.decode(errors="replace").rstrip("\n"))
                    self._has_lines.notify()
            code = self._process.wait()
            with suppress(OSError):
                return {**json.loads((folder / "result.json").read_text(encoding="utf-8")), "code": code}
            what = f"the process of a node ended with {code}"
            return {"code": code, "error": RankLostError(what).to_dict(), "result": None, "checkpoint": ""}

    def read_lines(self) -> list[str]:
        """Lines printed since the last call; waits a second for them."""
        with self._has_lines:
            self._has_lines.wait_for(lambda: self._lines, timeout=1.0)
            lines, self._lines = self._lines, []
        return lines

    def signal(self, number: int) -> None:
        """Send a signal to the process of this node."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def main(folder: Path) -> int:
    """Train on this node as its actor says; the result is left in the folder."""
    from reconv.trainer.prepare import run_on_devices
    from reconv.trainer.run import run_training

    args = pickle.loads(sys.stdin.buffer.read())  # from the actor
    if not Path(args.recipe).is_file() and (folder / Path(args.recipe).name).is_file():
        args = replace(args, recipe=str(folder / Path(args.recipe).name))
    result: Any = None
    error: ReconvError | None = None
    try:
        result = run_on_devices(None, run_training, args, None)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    except ReconvError as raised:
        error = raised
    record = {
        "error": None if error is None else error.to_dict(),
        "result": None if result is None else {"summary": dict(result.summary), "exit_code": int(result.exit_code)},
        "checkpoint": rounds.newest_checkpoint(args.out / "checkpoints"),
    }
    (folder / "result.json").write_text(json.dumps(record), encoding="utf-8")
    return int(error.code if error is not None else result.exit_code)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
