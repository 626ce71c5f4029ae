"""Elastic runs without a cluster manager: the agent of one node, and how nodes agree on who takes part.

A store (`reconv rendezvous`) holds, for each node, a record that the node renews every second. When no node trains any
more, the oldest one that is alive writes the roster of the next round: the nodes, their addresses and their ranks.
Everything is signed JSON; anything else in the store is ignored. A round ends when ranks fail, when a node is lost,
leaves or joins; ranks that can save a checkpoint first. Ranks exist only within a round: the lock of the run directory
keeps those of two rounds apart (tests/external/test_elastic_nodes.py). docs/decisions/elastic.md has the reasons.
"""

from __future__ import annotations

import hashlib
import os
import platform
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.elastic.multiprocessing import PContext
from torch.distributed.elastic.multiprocessing.api import RunProcsResult

from reconv.cluster import rounds
from reconv.cluster.launch import ElasticConfig
from reconv.core.errors import ExitCode, ReconvError, RemoteRankError, ResourceError, UsageError
from reconv.core.text import count
from reconv.core.version import __version__
from reconv.core.wait import ProcessWait
from reconv.distributed.environment import FAILURE_DIR_VARIABLE, ROUND_VARIABLE, SECRET_VARIABLE, LaunchEnv
from reconv.distributed.launcher import failure_of, forward_signals_during, signal_ranks, start_fork_server, start_ranks
from reconv.distributed.liveness import Liveness, Renewal, Seen
from reconv.distributed.nic import address_towards, find_nic, free_port, interface_addresses, nic_variables
from reconv.distributed.rank_store import SignedStore, Signer, connect, find_address, new_secret, wait_for_port
from reconv.storage.temporary_folder import has_owner, temporary_folder

T = TypeVar("T")

BEAT_S = 1.0
DEAD_S = 10.0  # of silence
_POLL_S = 0.1
_MAX_JOINED = 10_000  # nodes of a rendezvous; more were counted by someone else, and each costs a request
_COUNT, _LAST_ROUND = "count", "last-round"
_STOPPED = (ExitCode.PREEMPTED, ExitCode.INTERRUPTED, ExitCode.TERMINATED)


@dataclass(frozen=True, slots=True)
class Node:
    """The record of one node."""

    id: int
    host: str
    address: str
    num_ranks: int
    beat: int = 0
    round: int = 0  # the last one it knows
    num_rounds: int = 0  # in which it took part
    is_ready: bool = False  # it trains nothing, and waits for the next round
    is_leaving: bool = False
    run_id: str = ""  # of the run in the run directory as this node sees it
    token: str = ""  # no other node has it: numbers are given again by a store that was started again


@dataclass(frozen=True, slots=True)
class Roster:
    """The nodes of one round with the number of ranks that each of them starts; the first has rank 0."""

    round: int
    nodes: tuple[Node, ...]
    num_ranks: tuple[int, ...]
    master_port: int = 0  # 0: one node, whose ranks choose a port themselves

    @property
    def world_size(self) -> int:
        return sum(self.num_ranks)

    def first_rank(self, node_id: int) -> int:
        return sum(self.num_ranks[: self.ids.index(node_id)])

    def has(self, node: Node) -> bool:
        return (node.id, node.token) in [(other.id, other.token) for other in self.nodes]

    @property
    def ids(self) -> list[int]:
        return [node.id for node in self.nodes]


@dataclass(frozen=True, slots=True)
class _View:
    """This node's view of the others; replaced as a whole by the thread that reads the store."""

    nodes: Mapping[int, Seen[Node]] = field(default_factory=dict)
    roster: Roster | None = None  # of the newest round
    ended: dict[str, Any] | None = None  # of the newest round
    joined_s: float = field(default_factory=time.monotonic)  # when the last node came


class Rendezvous:
    """The nodes that share a store. A thread renews this node's record and reads those of the others."""

    def __init__(
        self,
        config: ElasticConfig,
        secret: str,
        job: str = "",
        run_id: Callable[[], str] = str,
        nic_address: str | None = None,
        settle_s: tuple[float, float] = (10.0, 3.0),
    ) -> None:
        """Nodes with the same secret, job and version of Reconv take part in one run.

        They wait `settle_s` for further nodes before the first round, and before later ones.
        """
        self._config = config if config.rendezvous is not None else replace(config, max_nodes=1)
        self.prefix = "reconv/elastic/" + hashlib.sha256(f"{secret}\0{job}\0{__version__}".encode()).hexdigest()
        self._settle_s, self._run_id, self._signer = settle_s, run_id, Signer(secret).derive(self.prefix)
        self._endpoint, self._own_store = config.rendezvous, HashStore()  # the latter: of this machine alone
        self._where = "this machine" if self._endpoint is None else f"{self._endpoint[0]}:{self._endpoint[1]}"
        self._view = _View()
        self._lock = threading.Lock()
        self._renewal = Renewal(self._exchange, self._connect)
        own_address = nic_address or "127.0.0.1"
        if self._endpoint is not None:
            named = "name the address at which `reconv rendezvous` listens"
            find = partial(find_address, *self._endpoint, "the rendezvous", "--rendezvous", named)
            wait_for_port(find, "the rendezvous", "--rendezvous", f"start it with `reconv rendezvous {self._where}`")
            family, address = find()
            own_address = nic_address or address_towards(family, *address)
        store = self._connect()
        number = store.add(_COUNT, 1)
        if number > _MAX_JOINED:
            raise UsageError(
                f"{number - 1:,} nodes have joined this rendezvous, and {_MAX_JOINED:,} may",
                where=self._where,
                why="someone else has written to it",
                hint="start another `reconv rendezvous` on a port that only the nodes of the job reach",
            )
        self.node = Node(number, platform.node(), own_address, config.num_ranks, is_ready=True, token=new_secret())
        messages = self._messages(store)
        self.node = replace(self.node, round=(messages.get(_LAST_ROUND) or {"round": 0})["round"])
        # What is left of an earlier run is not about this one.
        self._ignored_end = self.node.round if messages.get(f"ended/{self.node.round}") is not None else -1
        self._first_round = self.node.round + 1
        self._renewal.start(store)

    # The store

    def _connect(self) -> PrefixStore:
        if self._endpoint is None:
            return PrefixStore(self.prefix, self._own_store)
        # First like this: torch logs a failure with its stack.
        socket.create_connection(self._endpoint, timeout=DEAD_S).close()
        host, port = self._endpoint
        return PrefixStore(self.prefix, connect(LaunchEnv(master_addr=host, master_port=port)))

    def _messages(self, store: PrefixStore | None = None) -> SignedStore:
        return SignedStore(store or self._connect(), self._signer)

    def _parse_node(self, key: str, text: bytes) -> Node | None:
        record = self._signer.verify(key, text.decode(errors="replace"))
        return None if record is None else Node(**cast(dict[str, Any], record))

    def _exchange(self, store: PrefixStore) -> float | None:
        """Write this node's record, and read those of the others. Returns when to do so again."""
        run_id, messages = self._run_id(), self._messages(store)
        found = messages.get(f"node/{self.node.id}")
        is_other = found is not None and found["token"] != self.node.token
        new = store.add(_COUNT, 1) if is_other and self.node.num_rounds == 0 else 0
        with self._lock:
            own = new if new and self.node.num_rounds == 0 else self.node.id  # a node that trains keeps its number
            node = self.node = replace(self.node, id=own, beat=self.node.beat + 1, run_id=run_id)
        messages.set(f"node/{node.id}", asdict(node))
        number = store.add(_COUNT, 0)
        if number < node.id:  # a new store in place of the one that this node has joined
            number = store.add(_COUNT, node.id - number)
        liveness = Liveness(store, self._parse_node, prefix="node/", seen=self._view.nodes)
        others = (other for other in range(1, min(number, _MAX_JOINED) + 1) if other != node.id)
        nodes = liveness.read(others, keep_missing=False)
        round_number = max(
            [
                (messages.get(_LAST_ROUND) or {"round": 0})["round"],
                *(s.record.round for s in nodes.values() if not _is_dead(s)),
            ]
        )
        record = messages.get(f"round/{round_number}")
        roster = self._view.roster if record is None else _roster(record)
        joined_s = time.monotonic() if set(nodes) - set(self._view.nodes) else self._view.joined_s
        self._view = _View(nodes, roster, messages.get(f"ended/{round_number}"), joined_s)
        with self._lock:
            self.node = replace(self.node, round=round_number)
        return None if node.is_leaving else BEAT_S / 4 if self.node.is_ready else BEAT_S

    def silent_s(self) -> float:
        """Seconds since the store last replied; connects again from time to time."""
        return self._renewal.silent_s(DEAD_S)

    # The next round

    def set_ready(self) -> None:
        """The ranks of this node have ended: it waits for the next round."""
        with self._lock:
            self.node = replace(self.node, is_ready=True)

    def poll_roster(self, usable: Callable[[int], int]) -> Roster | None:
        """The roster of the next round, once it is decided and this node is in it."""
        view = self._view
        if view.roster is not None and view.roster.round >= self._first_round and view.roster.has(self.node):
            self._first_round = view.roster.round + 1
            with self._lock:
                self.node = replace(self.node, is_ready=False, num_rounds=self.node.num_rounds + 1)
            return view.roster
        alive = self._alive(view)
        if self.silent_s() > DEAD_S or alive is None or not all(node.is_ready for node in alive):
            return None
        chosen = [node for node in alive if node.run_id == self.node.run_id][: self._config.max_nodes]
        if alive[0].id != self.node.id or any(node.round != self.node.round for node in chosen):
            return None
        num_ranks = rounds.assign_ranks([node.num_ranks for node in chosen], usable)
        settle_s = self._settle_s[0 if all(node.num_rounds == 0 for node in chosen) else 1]
        is_settled = len(chosen) == self._config.max_nodes or time.monotonic() - view.joined_s > settle_s
        if len(chosen) >= self._config.min_nodes and sum(num_ranks) > 0 and is_settled:
            self._decide(chosen, num_ranks)
        return None

    def _alive(self, view: _View) -> list[Node] | None:
        """The nodes that are alive, this one included, oldest first; None while that is not certain."""
        others = [seen for seen in view.nodes.values() if not _is_dead(seen)]
        is_certain = all(seen.num_changes > 0 for seen in others)
        return sorted([self.node, *(s.record for s in others)], key=lambda node: node.id) if is_certain else None

    def _decide(self, nodes: Sequence[Node], num_ranks: tuple[int, ...]) -> None:
        """Write the roster of the next round, unless another node was faster."""
        taking_part = [(node, number) for node, number in zip(nodes, num_ranks, strict=True) if number]
        port, number = free_port(self.node.address) if len(taking_part) > 1 else 0, self.node.round + 1
        roster = Roster(number, tuple(node for node, _ in taking_part), tuple(n for _, n in taking_part), port)
        with suppress(RuntimeError, OSError, ReconvError):
            messages = self._messages()
            messages.put_first(f"round/{number}", asdict(roster))
            messages.set(_LAST_ROUND, {"round": number})

    def waits_for(self) -> str | None:
        """Description of what a round still waits for; None if a round is running or forming."""
        if self.silent_s() > DEAD_S:
            return f"the rendezvous at {self._where}"
        alive = self._alive(self._view)
        if alive is None:
            return None
        if self.node.run_id != alive[0].run_id:
            here, there = self.node.run_id or "none", alive[0].run_id or "none"
            return f"the run of {alive[0].host} to appear in --out (run {there} there, {here} here)"
        num_nodes, least = sum(node.run_id == self.node.run_id for node in alive), self._config.min_nodes
        if not all(node.is_ready for node in alive) or num_nodes >= least:
            return None
        return f"{least - num_nodes} more nodes ({num_nodes} of at least {least})"

    def why_stop(self, roster: Roster, usable: Callable[[int], int]) -> str:
        """Reason for the ranks of this round to save and stop; empty if there is none."""
        view, nodes = self._view, self._view.nodes
        if self.silent_s() > DEAD_S:  # nothing is known; training does not need the store
            return ""
        if view.roster is not None and view.roster.round > roster.round:
            return "the other nodes go on without this one"
        for node in roster.nodes:
            if node.id in nodes and _is_dead(nodes[node.id]):
                return f"{node.host} {'leaves' if nodes[node.id].record.is_leaving else 'is lost'}"
        alive = self._alive(view) or []
        joining = [n for n in alive if n.is_ready and n.id not in roster.ids and n.run_id == self.node.run_id]
        if not joining or len(roster.nodes) >= self._config.max_nodes:
            return ""
        room = self._config.max_nodes - len(roster.nodes)
        offered = sum(node.num_ranks for node in (*roster.nodes, *joining[:room]))
        is_settled = time.monotonic() - view.joined_s > self._settle_s[1]
        return f"{joining[0].host} joins" if is_settled and usable(offered) > roster.world_size else ""

    # The end

    def end(self, error: ReconvError | None) -> None:
        """Announce to all nodes that the run has ended, without an error or with one that would come again."""
        record = {"error": None if error is None else error.to_dict()}
        with suppress(RuntimeError, OSError, ReconvError):
            self._messages().set(f"ended/{self.node.round}", record)

    def ended(self) -> RemoteRankError | bool:
        """Check if the run has ended, and with which error."""
        record = self._view.ended
        if record is None or self.node.round == self._ignored_end:
            return False
        return True if record["error"] is None else RemoteRankError.from_dict({**record["error"], "is_reported": False})

    def leave(self) -> None:
        """Tell the other nodes that this one takes no further part."""
        with self._lock:
            self.node = replace(self.node, is_leaving=True)
        self._renewal.finish(2 * BEAT_S)


def _is_dead(seen: Seen[Node]) -> bool:
    return seen.record.is_leaving or seen.silent_s() > DEAD_S


def _roster(record: Mapping[str, Any]) -> Roster:
    nodes = tuple(Node(**node) for node in record["nodes"])
    return Roster(record["round"], nodes, tuple(record["num_ranks"]), record["master_port"])


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
    addresses = interface_addresses()
    nic_address = None if nic is None or config.rendezvous is None else addresses[find_nic(nic, addresses)]
    received: list[int] = []
    results: list[T] = []
    raised: list[BaseException] = []

    def start() -> None:
        try:
            start_fork_server()
            shared = secret or new_secret()
            with temporary_folder("elastic") as folder:
                rendezvous = Rendezvous(config, shared, work.job, work.run_id, nic_address)
                try:
                    results.append(_Agent(config, work, rendezvous, folder, shared, received).run())
                finally:
                    rendezvous.leave()
        except BaseException as error:
            raised.append(error)

    forward_signals_during(start, received)
    if raised:
        raise raised[0]
    return results[0]


@dataclass(slots=True)
class _Agent(Generic[T]):
    """The rounds of one node."""

    config: ElasticConfig
    work: ElasticWork[T]
    rendezvous: Rendezvous
    folder: Path
    secret: str
    signals: list[int]  # that this process has received
    _restarts: rounds.RestartPolicy = field(default_factory=rounds.RestartPolicy)
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
            error = failure_of(outcome, self.folder / str(roster.round), self._ranks(roster)[1])
            self._raise_if_final(error)
            if not was_stopped and error.code != ExitCode.PREEMPTED:
                self._print(self._restarts.after(error, roster.ids, self.work.progress()))
            self.rendezvous.set_ready()

    def _next_roster(self) -> Roster | None:
        """The roster of the next round; None if the run has ended. Raises the error with which it has ended."""
        wait = ProcessWait()
        while True:
            if self.signals:
                raise rounds.stopped_without_saving(self.signals)
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

    def _run_round(self, roster: Roster) -> tuple[RunProcsResult, bool]:
        """Run the ranks of this node. Returns how they ended, and whether they were asked to stop."""
        self._check_run_dir()
        folder = self.folder / str(roster.round)
        folder.mkdir()
        own, first = self._ranks(roster)
        here = f"rank {first}" if own == 1 else f"ranks {first} to {first + own - 1}"
        nodes, ranks = count(len(roster.nodes), "node"), count(roster.world_size, "rank")
        self._print(f"round {roster.round}: {nodes}, {ranks}; this node: {here}")
        args = (str(self.folder), self.work.function, self.work.args)
        processes = start_ranks(self._variables(roster, folder), folder, _run_supervised, args, "forkserver")
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
        while (outcome := processes.wait(timeout=0)) is None:
            time.sleep(_POLL_S)
            if stopped_s is None:
                reason = "" if self.signals else self.rendezvous.why_stop(roster, self.work.usable)
                if reason:
                    self._print(f"{reason}: saving where possible, then the next round")
                    stopped_s = time.monotonic()
            if stopped_s is not None:
                signal_ranks(signal.SIGTERM, signaled)
                if time.monotonic() - stopped_s > rounds.STOP_LIMIT_S:
                    processes.close(signal.SIGKILL)
        return outcome, stopped_s is not None

    def _ranks(self, roster: Roster) -> tuple[int, int]:
        """The number of ranks of this node, and the first of them."""
        node_id = self.rendezvous.node.id
        return roster.num_ranks[roster.ids.index(node_id)], roster.first_rank(node_id)

    def _variables(self, roster: Roster, folder: Path) -> list[dict[str, str]]:
        """The environment of each rank of this node."""
        own, first = self._ranks(roster)
        shared = {
            "WORLD_SIZE": str(roster.world_size),
            "LOCAL_WORLD_SIZE": str(own),
            "MASTER_ADDR": "127.0.0.1",
            ROUND_VARIABLE: str(roster.round),
            FAILURE_DIR_VARIABLE: str(folder),
            SECRET_VARIABLE: self.secret,
        }
        if len(roster.nodes) > 1:
            shared |= {"MASTER_ADDR": roster.nodes[0].address, "MASTER_PORT": str(roster.master_port)}
            shared |= nic_variables(self.rendezvous.node.address)
        return [{**shared, "RANK": str(first + local), "LOCAL_RANK": str(local)} for local in range(own)]

    def _raise_if_final(self, error: ReconvError) -> None:
        """Raise an error that a restart would not mend, or that of a node that was asked to stop."""
        if self.signals:
            raise error if error.code in _STOPPED else rounds.stopped_without_saving(self.signals)
        if error.code in rounds.FINAL:
            self.rendezvous.end(error)
            raise error

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
