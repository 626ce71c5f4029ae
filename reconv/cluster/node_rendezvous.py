"""Agreement of the nodes of an elastic run on who takes part: members with heartbeats, and one roster per round.

A store in a process of its own (`reconv rendezvous`) holds, for each node, a record that the node renews every second.
When no node trains any more, the oldest one that is alive writes the roster of the next round: the nodes, their
addresses and their ranks. A record counts by the changes that others see in it, not by clocks. Everything is JSON,
signed with the secret of the run; anything else in the store is ignored.

Ranks exist only within a round. The lock of the run directory keeps the ranks of two rounds apart
(tests/external/test_elastic_nodes.py).
"""

from __future__ import annotations

import hashlib
import platform
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, cast

from torch._C._distributed_c10d import PrefixStore, TCPStore

from reconv.cluster.elastic_config import ElasticConfig
from reconv.core.errors import ReconvError, RemoteRankError, UsageError
from reconv.distributed.environment import LaunchEnv
from reconv.distributed.rank_store import Address, Signer, connect, resolve, serve_store, wait_for_port

BEAT_S = 1.0
DEAD_S = 10.0  # of silence
_COUNT, _LAST_ROUND = "count", "last-round"
_MAX_NODES = 10_000  # that ever joined a rendezvous; more were counted by someone else, and each costs a request


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
        return sum(self.num_ranks[: self.index(node_id)])

    def index(self, node_id: int) -> int:
        return [node.id for node in self.nodes].index(node_id)

    def has(self, node_id: int) -> bool:
        return any(node.id == node_id for node in self.nodes)


def assign_ranks(offered: Sequence[int], usable: Callable[[int], int]) -> tuple[int, ...]:
    """The ranks of each node, of those that it offers: as many in total as can share the global batch."""
    left = usable(sum(offered))
    assigned = []
    for number in offered:
        assigned.append(min(number, left))
        left -= assigned[-1]
    return tuple(assigned)


class Rendezvous(Protocol):
    """Interface to the other nodes, for an agent."""

    node: Node

    def poll_roster(self, usable: Callable[[int], int]) -> Roster | None:
        """The roster of the next round, once it is decided and this node is in it."""

    def waits_for(self) -> str | None:
        """Description of what a round still waits for; None if a round is running or forming."""

    def why_stop(self, roster: Roster, usable: Callable[[int], int]) -> str:
        """Reason for the ranks of this round to save and stop; empty if there is none."""

    def set_ready(self) -> None:
        """The ranks of this node have ended: it waits for the next round."""

    def silent_s(self) -> float:
        """Seconds since the store last replied."""

    def end(self, error: ReconvError | None) -> None:
        """Announce to all nodes that the run has ended, without an error or with one that would come again."""

    def ended(self) -> RemoteRankError | bool:
        """Check if the run has ended, and with which error."""

    def leave(self) -> None: ...


class SingleNode:
    """This machine alone: every round has this node."""

    def __init__(self, config: ElasticConfig) -> None:
        self.node = Node(1, platform.node(), "127.0.0.1", config.num_ranks)

    def poll_roster(self, usable: Callable[[int], int]) -> Roster | None:
        self.node = replace(self.node, round=self.node.round + 1)
        return Roster(self.node.round, (self.node,), assign_ranks([self.node.num_ranks], usable))

    def waits_for(self) -> str | None:
        return None

    def why_stop(self, roster: Roster, usable: Callable[[int], int]) -> str:
        return ""

    def set_ready(self) -> None: ...

    def silent_s(self) -> float:
        return 0.0

    def end(self, error: ReconvError | None) -> None: ...

    def ended(self) -> RemoteRankError | bool:
        return False

    def leave(self) -> None: ...


@dataclass(slots=True)
class _Seen:
    """The last record of a node, and when it changed."""

    node: Node
    seen_s: float
    num_changes: int = 0  # a record that has never changed may be that of a node which died long ago

    @property
    def is_dead(self) -> bool:
        return self.node.is_leaving or time.monotonic() - self.seen_s > DEAD_S


@dataclass(slots=True)
class _View:
    """This node's view of the others; replaced as a whole by the thread that reads the store."""

    nodes: dict[int, _Seen] = field(default_factory=dict)
    roster: Roster | None = None  # of the newest round
    ended: dict[str, Any] | None = None  # of the newest round
    joined_s: float = field(default_factory=time.monotonic)  # when the last node came


class StoreRendezvous:
    """The nodes that share a store. A thread renews this node's record and reads those of the others.

    The thread starts again with a new connection when the store does not reply: a request over a broken connection
    waits without end.
    """

    def __init__(
        self,
        config: ElasticConfig,
        secret: str,
        job: str = "",
        run_id: Callable[[], str] = str,
        nic_address: str | None = None,
        settle_s: tuple[float, float] = (10.0, 3.0),
    ) -> None:
        """Nodes with the same secret and job take part in one run.

        `settle_s`: how long to wait for further nodes before the first round, and before later ones.
        """
        assert config.rendezvous is not None
        self._config = config
        self._settle_s = settle_s
        self._run_id = run_id
        self._signer = Signer(secret)
        self.prefix = "reconv/elastic/" + hashlib.sha256(f"{secret}\0{job}".encode()).hexdigest()
        self._launch_env = LaunchEnv(master_addr=config.rendezvous[0], master_port=config.rendezvous[1])
        self._replied_s = time.monotonic()
        self._view = _View()
        self._generation = 0  # of the thread; an abandoned one ends when it wakes up
        self._lock = threading.Lock()
        self._left = threading.Event()
        host, port = config.rendezvous
        wait_for_port(
            lambda: _resolve_rendezvous(host, port),
            "the rendezvous",
            "--rendezvous",
            f"start it with `reconv rendezvous {host}:{port}`",
        )
        store = self._connect()
        own_address = nic_address or address_towards(_resolve_rendezvous(host, port))
        number = store.add(_COUNT, 1)
        if number > _MAX_NODES:
            raise UsageError(
                f"{number - 1:,} nodes have joined this rendezvous, and {_MAX_NODES:,} may",
                where=f"{host}:{port}",
                why="someone else has written to it",
                hint="start another `reconv rendezvous` on a port that only the nodes of the job reach",
            )
        self.node = Node(number, platform.node(), own_address, config.num_ranks, is_ready=True)
        self.node = replace(self.node, round=self._last_round(store))
        # What is left of an earlier run is not about this one.
        self._ignored_end = self.node.round if self._get(store, f"ended/{self.node.round}") is not None else -1
        self._first_round = self.node.round + 1
        self._start_thread(store)

    # The store

    def _connect(self) -> PrefixStore:
        return PrefixStore(self.prefix, connect(self._launch_env))

    def _start_thread(self, store: PrefixStore | None) -> None:
        self._generation += 1
        self._renewed_s = time.monotonic()
        arguments = (self._generation, store)
        threading.Thread(target=self._renew, args=arguments, name="reconv-rendezvous", daemon=True).start()

    def _renew(self, generation: int, store: PrefixStore | None) -> None:
        """Renew this node's record, and read everything, until the node leaves or the store is gone."""
        with suppress(RuntimeError, OSError, ReconvError):
            if store is None:
                # First like this: torch logs a failure with its stack.
                endpoint = (self._launch_env.master_addr, self._launch_env.master_port)
                socket.create_connection(endpoint, timeout=DEAD_S).close()
                store = self._connect()
            while generation == self._generation:
                written = self._exchange(store)
                if written.is_leaving:
                    self._left.set()
                    return
                time.sleep(BEAT_S / 4 if self.node.is_ready else BEAT_S)

    def _exchange(self, store: PrefixStore) -> Node:
        """Write this node's record, which is returned, and read those of the others."""
        run_id = self._run_id()
        with self._lock:
            node = self.node = replace(self.node, beat=self.node.beat + 1, run_id=run_id)
        self._set(store, f"node/{node.id}", asdict(node))
        count = store.add(_COUNT, 0)
        if count < node.id:  # a new store in place of the one that this node has joined
            count = store.add(_COUNT, node.id - count)
        nodes = self._read_nodes(store, range(1, min(count, _MAX_NODES) + 1))
        round_number = max([self._last_round(store), *(seen.node.round for seen in nodes.values() if not seen.is_dead)])
        record = self._get(store, f"round/{round_number}")
        roster = self._view.roster if record is None else _roster(record)
        new = set(nodes) - set(self._view.nodes)
        joined_s = time.monotonic() if new else self._view.joined_s
        self._view = _View(nodes, roster, self._get(store, f"ended/{round_number}"), joined_s)
        with self._lock:
            self.node = replace(self.node, round=round_number)
        self._replied_s = time.monotonic()
        return node

    def _read_nodes(self, store: PrefixStore, ids: Sequence[int]) -> dict[int, _Seen]:
        known, found = self._view.nodes, {}
        for number in ids:
            record = None if number == self.node.id else self._get(store, f"node/{number}")
            if record is None:
                continue
            node, before = Node(**record), known.get(number)
            if before is None:
                found[number] = _Seen(node, time.monotonic())
            elif node.beat != before.node.beat:
                found[number] = _Seen(node, time.monotonic(), before.num_changes + 1)
            else:
                found[number] = before
        return found

    def _last_round(self, store: PrefixStore) -> int:
        record = self._get(store, _LAST_ROUND)
        return 0 if record is None else int(cast(int, record["round"]))

    def _get(self, store: PrefixStore, key: str) -> dict[str, Any] | None:
        if not store.check([key]):
            return None
        return self._signer.verify(key, store.get(key).decode(errors="replace"))

    def _set(self, store: PrefixStore, key: str, record: Mapping[str, Any]) -> None:
        store.set(key, self._signer.sign(key, dict(record)))

    def silent_s(self) -> float:
        """Seconds since the store last replied; connects again from time to time."""
        now_s = time.monotonic()
        if now_s - max(self._replied_s, self._renewed_s) > DEAD_S:
            self._start_thread(None)
        return now_s - self._replied_s

    # The next round

    def set_ready(self) -> None:
        with self._lock:
            self.node = replace(self.node, is_ready=True)

    def poll_roster(self, usable: Callable[[int], int]) -> Roster | None:
        view = self._view
        if view.roster is not None and view.roster.round >= self._first_round and view.roster.has(self.node.id):
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
        num_ranks = assign_ranks([node.num_ranks for node in chosen], usable)
        settle_s = self._settle_s[0 if all(node.num_rounds == 0 for node in chosen) else 1]
        is_settled = len(chosen) == self._config.max_nodes or time.monotonic() - view.joined_s > settle_s
        if len(chosen) >= self._config.min_nodes and sum(num_ranks) > 0 and is_settled:
            self._decide(chosen, num_ranks)
        return None

    def _alive(self, view: _View) -> list[Node] | None:
        """The nodes that are alive, this one included, oldest first; None while that is not certain."""
        others = [seen for seen in view.nodes.values() if not seen.is_dead]
        if any(seen.num_changes == 0 for seen in others):
            return None
        return sorted([self.node, *(seen.node for seen in others)], key=lambda node: node.id)

    def _decide(self, nodes: Sequence[Node], num_ranks: tuple[int, ...]) -> None:
        """Write the roster of the next round, unless another node was faster."""
        taking_part = [(node, number) for node, number in zip(nodes, num_ranks, strict=True) if number]
        port = free_port(self.node.address) if len(taking_part) > 1 else 0
        number = self.node.round + 1
        roster = Roster(number, tuple(node for node, _ in taking_part), tuple(n for _, n in taking_part), port)
        key = f"round/{number}"
        with suppress(RuntimeError, ReconvError):
            store = self._connect()
            stored = store.compare_set(key, "", self._signer.sign(key, asdict(roster)))
            if self._signer.verify(key, stored.decode(errors="replace")) is None:  # someone else's
                self._set(store, key, asdict(roster))
            self._set(store, _LAST_ROUND, {"round": number})

    def waits_for(self) -> str | None:
        if self.silent_s() > DEAD_S:
            return f"the rendezvous at {self._launch_env.master_addr}:{self._launch_env.master_port}"
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
        view, nodes = self._view, self._view.nodes
        if self.silent_s() > DEAD_S:  # nothing is known; training does not need the store
            return ""
        if view.roster is not None and view.roster.round > roster.round:
            return "the other nodes go on without this one"
        for node in roster.nodes:
            if node.id in nodes and nodes[node.id].is_dead:
                return f"{node.host} {'leaves' if nodes[node.id].node.is_leaving else 'is lost'}"
        alive = self._alive(view) or []
        joining = [n for n in alive if n.is_ready and not roster.has(n.id) and n.run_id == self.node.run_id]
        if not joining or len(roster.nodes) >= self._config.max_nodes:
            return ""
        room = self._config.max_nodes - len(roster.nodes)
        offered = sum(node.num_ranks for node in (*roster.nodes, *joining[:room]))
        is_settled = time.monotonic() - view.joined_s > self._settle_s[1]
        return f"{joining[0].host} joins" if is_settled and usable(offered) > roster.world_size else ""

    # The end

    def end(self, error: ReconvError | None) -> None:
        record = {"error": None if error is None else error.to_dict()}
        with suppress(RuntimeError, ReconvError):
            self._set(self._connect(), f"ended/{self.node.round}", record)

    def ended(self) -> RemoteRankError | bool:
        record = self._view.ended
        if record is None or self.node.round == self._ignored_end:
            return False
        return True if record["error"] is None else RemoteRankError.from_dict({**record["error"], "is_reported": False})

    def leave(self) -> None:
        with self._lock:
            self.node = replace(self.node, is_leaving=True)
        self._left.wait(2 * BEAT_S)


def _roster(record: Mapping[str, Any]) -> Roster:
    nodes = tuple(Node(**node) for node in record["nodes"])
    return Roster(record["round"], nodes, tuple(record["num_ranks"]), record["master_port"])


def address_towards(address: Address) -> str:
    """The address of this machine in the network of another one; nothing is sent."""
    family, (host, port) = address
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def free_port(address: str) -> int:
    """A port of this machine that is free now."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def serve_rendezvous(host: str, port: int) -> TCPStore:
    """The store of elastic runs, on one address of this machine."""
    try:
        return serve_store(resolve(host, port), world_size=1)
    except OSError as error:
        raise UsageError(
            "the rendezvous cannot listen",
            where=f"{host}:{port}",
            why=str(error.strerror),
            hint="name an address of this machine and a port that no other program uses",
        ) from error


def _resolve_rendezvous(host: str, port: int) -> Address:
    try:
        return resolve(host, port)
    except OSError as error:
        raise UsageError(
            f"the address of the rendezvous, {host!r}, cannot be resolved",
            where="--rendezvous",
            why=str(error),
            hint="name the address at which `reconv rendezvous` listens",
        ) from error
