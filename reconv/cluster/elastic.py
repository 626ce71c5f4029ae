"""The agent of one node of an elastic run: starts its ranks in rounds, each with the nodes that are there.

A round ends when the ranks of a node fail, when a node is lost, leaves or joins. Ranks that still can save a checkpoint
first; the next round resumes from the last one. The agent itself trains nothing and reads no checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch.distributed.elastic.multiprocessing import PContext
from torch.distributed.elastic.multiprocessing.api import RunProcsResult

from reconv.cluster.elastic_config import ElasticConfig
from reconv.cluster.node_rendezvous import Rendezvous, Roster, SingleNode, StoreRendezvous
from reconv.core.errors import ExitCode, ReconvError, RemoteRankError, ResourceError, TerminatedError, UsageError
from reconv.core.text import count, printable
from reconv.core.wait import ProcessWait
from reconv.distributed.environment import FAILURE_DIR_VARIABLE, ROUND_VARIABLE, SECRET_VARIABLE
from reconv.distributed.launcher import failure_of, forward_signals_during, signal_ranks, start_fork_server, start_ranks
from reconv.distributed.nic import VARIABLES as NIC_VARIABLES
from reconv.distributed.nic import find_nic, interface_addresses
from reconv.distributed.rank_store import new_secret
from reconv.storage.temporary_folder import has_owner, temporary_folder

T = TypeVar("T")

_POLL_S = 0.1
_STOP_LIMIT_S = 300.0  # for ranks that were asked to save and stop
_LOCKED_LIMIT_S = 120.0  # for ranks of an earlier round, on a node that is cut off, to release the run directory
MAX_RESTARTS = 3  # in a row, with the same nodes and without a new checkpoint
# A restart would end with the same error.
_FINAL = (ExitCode.USAGE, ExitCode.DATA, ExitCode.CHECKPOINT, ExitCode.DIVERGED)
_STOPPED = (ExitCode.PREEMPTED, ExitCode.INTERRUPTED, ExitCode.TERMINATED)


@dataclass(frozen=True, slots=True)
class ElasticWork(Generic[T]):
    """Work of the ranks, and what the agent must know about it."""

    function: Callable[..., T]  # of a module; called in every rank
    args: tuple[Any, ...]
    usable: Callable[[int], int]  # how many of so many ranks can share the global batch
    job: str  # the run directory; the same on all nodes
    run_id: Callable[[], str]  # of the run in the run directory; empty if there is none yet
    progress: Callable[[], str]  # changes with every checkpoint
    finished: Callable[[], T]  # the result, on a node that had no rank when the run ended


def run_elastic(config: ElasticConfig, work: ElasticWork[T], nic: str | None = None) -> T:
    """Take part in an elastic run until it ends. Returns the result of a rank of this node, or raises an error."""
    secret = os.environ.get(SECRET_VARIABLE)
    if config.rendezvous is not None and not secret:
        raise UsageError(
            f"--rendezvous needs a secret that all nodes share, in {SECRET_VARIABLE}",
            why="only nodes that know it may take part in the run",
            hint=f"export {SECRET_VARIABLE}=... as `reconv rendezvous` printed it, on every node",
        )
    received: list[int] = []
    results: list[T] = []
    raised: list[BaseException] = []

    def start() -> None:
        try:
            start_fork_server()
            with temporary_folder("elastic") as folder:
                rendezvous = _open_rendezvous(config, secret or "", work, nic)
                try:
                    agent = _Agent(config, work, rendezvous, folder, secret or new_secret(), received)
                    results.append(agent.run())
                finally:
                    rendezvous.leave()
        except BaseException as error:
            raised.append(error)

    forward_signals_during(start, received)
    if raised:
        raise raised[0]
    return results[0]


def _open_rendezvous(config: ElasticConfig, secret: str, work: ElasticWork[T], nic: str | None) -> Rendezvous:
    if config.rendezvous is None:
        return SingleNode(config)
    addresses = interface_addresses()
    address = None if nic is None else addresses[find_nic(nic, addresses)]
    return StoreRendezvous(config, secret, work.job, work.run_id, address)


@dataclass(slots=True)
class _Agent(Generic[T]):
    """The rounds of one node."""

    config: ElasticConfig
    work: ElasticWork[T]
    rendezvous: Rendezvous
    folder: Path
    secret: str
    signals: list[int]  # that this process has received
    _num_restarts: int = 0
    _last: tuple[tuple[int, ...], str] | None = None  # the nodes and the progress at the last failure
    _locked_s: float | None = None  # since when another process has the run directory
    _run_id: str = ""  # of the run in the run directory, once there is one

    def run(self) -> T:
        node = self.rendezvous.node
        if self.config.rendezvous is not None:
            self._print(f"{node.host} at {node.address} joins as node {node.id}")
        while True:
            roster = self._next_roster()
            if roster is None:
                return self.work.finished()
            outcome, was_stopped = self._run_round(roster)
            if not outcome.failures:
                self.rendezvous.end(None)
                result: T = outcome.return_values[0]
                return result
            error = failure_of(outcome, self._folder(roster), roster.first_rank(self.rendezvous.node.id))
            self._raise_if_final(error)
            if not was_stopped and error.code != ExitCode.PREEMPTED:
                self._count_failure(roster, error)
            self.rendezvous.set_ready()

    # Between two rounds

    def _next_roster(self) -> Roster | None:
        """The roster of the next round; None if the run has ended. Raises the error with which it has ended."""
        wait = ProcessWait()
        while True:
            if self.signals:
                raise self._stopped()
            ended = self.rendezvous.ended()
            if isinstance(ended, RemoteRankError):
                raise ended
            if ended:
                return None
            roster = self.rendezvous.poll_roster(self.work.usable)
            if roster is not None:
                return roster
            missing = self.rendezvous.waits_for()
            if missing is None:  # the others train, or are about to stop
                wait = ProcessWait()
                time.sleep(_POLL_S)
                continue
            wait.tick(missing, where="--elastic", hint="start more nodes, or look at the rendezvous and the network")

    def _stopped(self) -> BaseException:
        """The end of a node that was asked to stop, and whose ranks had nothing to save."""
        if self.signals[0] == signal.SIGINT:
            return KeyboardInterrupt()
        return TerminatedError("stopped without saving", why="no rank of this node was training")

    # One round

    def _folder(self, roster: Roster) -> Path:
        return self.folder / str(roster.round)

    def _run_round(self, roster: Roster) -> tuple[RunProcsResult, bool]:
        """Run the ranks of this node. Returns how they ended, and whether they were asked to stop."""
        self._check_run_dir()
        self._folder(roster).mkdir()
        self._print(self._describe(roster))
        args = (str(self.folder), self.work.function, self.work.args)
        processes = start_ranks(self._variables(roster), self._folder(roster), _run_supervised, args, "forkserver")
        try:
            return self._watch(roster, processes)
        finally:
            processes.close()

    def _check_run_dir(self) -> None:
        """Refuse to go on without the run that an earlier round has trained: the ranks would start a new one."""
        found = self.work.run_id()
        if self._run_id and found != self._run_id:
            raise ResourceError(
                "the run directory no longer has the run",
                where=self.work.job,
                why="its file system is not mounted, or the run was deleted",
                hint="mount it and start this node again",
            )
        self._run_id = found

    def _watch(self, roster: Roster, processes: PContext) -> tuple[RunProcsResult, bool]:
        stopped_s: float | None = None
        signaled: set[int] = set()
        while True:
            outcome = processes.wait(timeout=0)
            if outcome is not None:
                return outcome, stopped_s is not None
            time.sleep(_POLL_S)
            if stopped_s is None:
                reason = "" if self.signals else self.rendezvous.why_stop(roster, self.work.usable)
                if reason:
                    self._print(f"{reason}: saving where possible, then the next round")
                    stopped_s = time.monotonic()
            if stopped_s is not None:
                signal_ranks(signal.SIGTERM, signaled)
                if time.monotonic() - stopped_s > _STOP_LIMIT_S:
                    processes.close(signal.SIGKILL)

    def _describe(self, roster: Roster) -> str:
        own = roster.num_ranks[roster.index(self.rendezvous.node.id)]
        first = roster.first_rank(self.rendezvous.node.id)
        here = f"rank {first}" if own == 1 else f"ranks {first} to {first + own - 1}"
        nodes, ranks = count(len(roster.nodes), "node"), count(roster.world_size, "rank")
        return f"round {roster.round}: {nodes}, {ranks}; this node: {here}"

    def _variables(self, roster: Roster) -> list[dict[str, str]]:
        """The environment of each rank of this node."""
        node_id = self.rendezvous.node.id
        own, first = roster.num_ranks[roster.index(node_id)], roster.first_rank(node_id)
        shared = {
            "WORLD_SIZE": str(roster.world_size),
            "LOCAL_WORLD_SIZE": str(own),
            "MASTER_ADDR": "127.0.0.1",
            ROUND_VARIABLE: str(roster.round),
            FAILURE_DIR_VARIABLE: str(self._folder(roster)),
            SECRET_VARIABLE: self.secret,
        }
        if len(roster.nodes) > 1:
            shared |= {"MASTER_ADDR": roster.nodes[0].address, "MASTER_PORT": str(roster.master_port)}
            shared |= _nic_variables(self.rendezvous.node.address)
        return [{**shared, "RANK": str(first + local), "LOCAL_RANK": str(local)} for local in range(own)]

    # After a round

    def _raise_if_final(self, error: ReconvError) -> None:
        """Raise an error that a restart would not mend, or that of a node that was asked to stop."""
        if self.signals:
            raise error if error.code in _STOPPED else self._stopped()
        if error.code in _FINAL:
            self.rendezvous.end(error)
            raise error

    def _count_failure(self, roster: Roster, error: ReconvError) -> None:
        """Raise the error of ranks that fail again and again."""
        now_s = time.monotonic()
        if error.code == ExitCode.RUN_LOCKED:
            self._locked_s = self._locked_s or now_s
            if now_s - self._locked_s > _LOCKED_LIMIT_S:
                raise error
            self._print(f"{printable(error.what)}; trying again")
            time.sleep(2.0)
            return
        self._locked_s = None
        current = (tuple(node.id for node in roster.nodes), self.work.progress())
        self._num_restarts = self._num_restarts + 1 if current == self._last else 1
        self._last = current
        if self._num_restarts > MAX_RESTARTS:
            raise error
        self._print(
            f"{printable(error.what)}; starting again ({self._num_restarts} of {MAX_RESTARTS} without a new checkpoint)"
        )

    def _print(self, text: str) -> None:
        print(f"elastic: {text}", file=sys.stderr, flush=True)


def _run_supervised(folder: str, function: Callable[..., T], args: tuple[Any, ...]) -> T:
    """One rank, which is asked to stop when its agent was killed. The fork server lives as long as its ranks do."""

    def stop_without_agent() -> None:
        while has_owner(Path(folder)):
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_without_agent, name="reconv-agent-watch", daemon=True).start()
    return function(*args)


def _nic_variables(address: str) -> dict[str, str]:
    """The interface of an address, for gloo and NCCL, where the user has chosen none."""
    name = next((name for name, found in interface_addresses().items() if found == address), None)
    return {} if name is None else {variable: os.environ.get(variable, name) for variable in NIC_VARIABLES}
