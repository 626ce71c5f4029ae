"""Liveness of the members of a group: each writes a record to a store again and again, and reads those of the others.

One mechanism for ranks that connect (`ConnectingRanks`), for ranks that run (`Heartbeat`) and for the nodes of an
elastic run (`cluster.elastic`). A record counts by the changes that others see in it, never by the clock of another
machine. What silence means is decided by the user: for ranks that run in `failure`.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import platform
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

from torch._C._distributed_c10d import PrefixStore

from reconv.core.errors import RankLostError, ReconvError
from reconv.core.machine import process_state
from reconv.core.wait import ProcessWait
from reconv.distributed.authentication import NONCE_BYTES, is_proof, prove, refused, secret_missing
from reconv.distributed.environment import SECRET_VARIABLE, LaunchEnv
from reconv.distributed.process_group import Pace
from reconv.distributed.rank_store import SignedStore, Signer, connect, unreachable
from reconv.recipe.parts.batch import ParallelConfig

T = TypeVar("T")
Record = TypeVar("Record")

_CONNECTING_S, _FIRST_S = 0.5, 0.1  # between messages while ranks connect; the second until all have been seen
_POLL_S = 0.02
_REFUSED_S = 3 * _FIRST_S  # for the other ranks to see why, before rank 0 and its store are gone
_NUM_NAMED = 8  # missing ranks to name
_NUM_FRAMES = 6
SILENT_TIMEOUT_S = ParallelConfig().heartbeat_timeout_s  # the recipe's is not known yet


@dataclass(frozen=True, slots=True)
class Seen(Generic[Record]):
    """The last record of another member, and when it changed."""

    record: Record
    seen_s: float
    num_changes: int = 0  # a record that has never changed may be that of a member which died long ago

    def silent_s(self) -> float:
        return time.monotonic() - self.seen_s


class Liveness(Generic[Record]):
    """The records of a group in a store, and when each of them last changed."""

    def __init__(
        self,
        store: PrefixStore,
        parse: Callable[[str, bytes], Record | None],
        is_new: Callable[[Record, Record], bool] = operator.ne,
        prefix: str = "",
        seen: Mapping[int, Seen[Record]] | None = None,
    ) -> None:
        """`parse` reads what is stored under a key; None: it was written by someone else, and is ignored.

        `is_new(known, found)` is whether a record counts as a sign of life.
        """
        self.seen: Mapping[int, Seen[Record]] = seen or {}  # replaced as a whole, so that other threads can read it
        self.store = store
        self._parse, self._is_new, self._prefix = parse, is_new, prefix
        self._replied_s = time.monotonic()

    def write(self, member: int, text: str) -> None:
        self.store.set(f"{self._prefix}{member}", text)

    def read(self, members: Iterable[int], keep_missing: bool = True) -> Mapping[int, Seen[Record]]:
        """Update `seen`, which is returned; raises RuntimeError without a store.

        Members without a record stay as they were, or go.
        """
        keys = {member: f"{self._prefix}{member}" for member in members}
        present = [member for member, key in keys.items() if self.store.check([key])]
        texts = self.store.multi_get([keys[member] for member in present]) if present else []
        now_s = self._replied_s = time.monotonic()
        found: dict[int, Seen[Record]] = {}
        for member, text in zip(present, texts, strict=True):
            record, known = self._parse(keys[member], text), self.seen.get(member)
            if record is None:
                continue
            if known is None:
                found[member] = Seen(record, now_s)
            else:
                is_new = self._is_new(known.record, record)
                found[member] = Seen(record, now_s, known.num_changes + 1) if is_new else known
        self.seen = {**self.seen, **found} if keep_missing else found
        return self.seen

    def store_silent_s(self) -> float:
        """Seconds since the store last replied; over a broken connection requests get no reply and raise no error."""
        return time.monotonic() - self._replied_s


class Renewal:
    """A thread that calls `exchange(store)` again and again, until it returns None or the store is gone.

    It starts again with a new connection when the store does not reply: a request over a broken connection waits
    without end.
    """

    def __init__(self, exchange: Callable[[PrefixStore], float | None], connect: Callable[[], PrefixStore]) -> None:
        """`exchange` returns how many seconds to wait before it is called again."""
        self._exchange, self._connect = exchange, connect
        self._generation = 0  # of the thread; an abandoned one ends when it wakes up
        self._replied_s = self._renewed_s = time.monotonic()
        self._wake = threading.Event()
        self._ended = threading.Event()

    def start(self, store: PrefixStore | None) -> None:
        """Start the thread, with this connection to the store or with a new one."""
        self._generation += 1
        self._renewed_s = time.monotonic()
        arguments = (self._generation, store)
        threading.Thread(target=self._renew, args=arguments, name="reconv-renewal", daemon=True).start()

    def abandon(self) -> None:
        """End the thread when it wakes up, without another exchange."""
        self._generation += 1

    def finish(self, timeout_s: float) -> None:
        """Call `exchange` at once, and wait until it has returned None."""
        self._wake.set()
        self._ended.wait(timeout_s)

    def silent_s(self, limit_s: float) -> float:
        """Seconds since the store last replied; connects again from time to time once that is more than the limit."""
        now_s = time.monotonic()
        if now_s - max(self._replied_s, self._renewed_s) > limit_s:
            self.start(None)
        return now_s - self._replied_s

    def _renew(self, generation: int, store: PrefixStore | None) -> None:
        with suppress(RuntimeError, OSError, ReconvError):
            store = store or self._connect()
            while generation == self._generation:
                wait_s = self._exchange(store)
                self._replied_s = time.monotonic()
                if wait_s is None:
                    self._ended.set()
                    return
                self._wake.wait(wait_s)


# Ranks that run


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat: what a rank was doing when it sent it."""

    count: int
    phase: str
    host: str
    pid: int
    stack: list[str]  # of its main thread, innermost last
    is_stopped: bool = False  # it takes no further part: its silence is not a loss
    is_exiting: bool = False  # it has nothing more to report
    pace: tuple[float, float] | tuple[()] = ()  # seconds per step; empty until it was measured


class Heartbeat:
    """Sends this rank's heartbeats and receives those of the others.

    The store connection is separate from that of the collectives, which may be waiting for something.
    """

    def __init__(self, launch_env: LaunchEnv, signer: Signer) -> None:
        self.phase = "starting"
        self.pace: Pace | None = None  # of this rank's steps
        self._rank = launch_env.rank
        self._signer = signer
        self._main_thread = threading.main_thread().ident
        self._count = 0
        store = PrefixStore(f"reconv/{launch_env.restart_count}/beat", connect(launch_env))
        self.messages = SignedStore(store, signer)  # beside the heartbeats
        self._liveness = Liveness[Beat | None](store, self._parse, _is_later)
        now_s, ranks = time.monotonic(), range(launch_env.world_size)
        self._liveness.seen = {rank: Seen(None, now_s) for rank in ranks if rank != launch_env.rank}

    @property
    def peers(self) -> Mapping[int, Seen[Beat | None]]:
        """The other ranks; a record is None until the first heartbeat."""
        return self._liveness.seen

    def send(self, is_stopped: bool = False, is_exiting: bool = False) -> None:
        self._count += 1
        pace = () if self.pace is None else (self.pace.wait_s, self.pace.forward_s)
        beat = Beat(self._count, self.phase, platform.node(), os.getpid(), self._stack(), is_stopped, is_exiting, pace)
        try:
            self._liveness.write(self._rank, self._signer.sign(str(self._rank), asdict(beat)))
        except RuntimeError:  # `receive` and `store_silent_s` notice a store that is gone
            return

    def receive(self) -> bool:
        """Update `peers`. Returns whether the store has replied."""
        try:
            self._liveness.read(self.peers)
        except RuntimeError:
            return False
        return True

    def store_silent_s(self) -> float:
        """Seconds since the store last replied."""
        return self._liveness.store_silent_s()

    def _parse(self, key: str, text: bytes) -> Beat | None:
        message = self._signer.verify(key, text.decode(errors="replace"))
        return None if message is None else Beat(**cast(dict[str, Any], message))

    def _stack(self) -> list[str]:
        """Stack of the main thread, outermost frame first."""
        frame = sys._current_frames().get(self._main_thread or 0)
        frames = traceback.extract_stack(frame)[-_NUM_FRAMES:] if frame is not None else []
        return [f"{Path(f.filename).name}:{f.lineno} in {f.name}" for f in frames]


def _is_later(known: Beat | None, found: Beat | None) -> bool:
    """True unless an old heartbeat was written again."""
    return known is None or (found is not None and found.count > known.count)


# Ranks that connect


@dataclass(frozen=True, slots=True)
class _Hello:
    """The message of a rank that connects; nothing secret is in it."""

    count: int
    host: str
    pid: int
    is_connected: bool
    nonce: str
    transcript: str  # the digest of all challenges as it has seen them; empty until it has seen all
    proof: str  # that it knows the secret; empty if it has none


class ConnectingRanks:
    """Watches the ranks while they connect, until the process group has heartbeats.

    Connecting can wait for another rank without end: gloo for one that is stopped, a request to the store for rank 0.
    So whatever waits runs in a thread, while the main thread prints whom it waits for and ends the wait at a deadline,
    or as soon as a rank that has been seen is silent. A thread sends messages twice a second. They carry challenges
    and the answers to them, so that no rank connects to one that lacks the secret.
    """

    def __init__(self, launch_env: LaunchEnv) -> None:
        self._launch_env = launch_env
        store = PrefixStore(f"reconv/{launch_env.restart_count}/connecting", connect(launch_env))
        self._liveness = Liveness[_Hello](store, _parse_hello)
        self._secret = os.environ.get(SECRET_VARIABLE, "")
        self._nonce = secrets.token_hex(NONCE_BYTES)
        self._lost = ""  # why there is no store any more
        self._is_connected = False
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="reconv-connecting", daemon=True)

    def __enter__(self) -> Self:
        self._beating.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._ended.set()
        if kind is None:
            self._beating.join(_CONNECTING_S)

    def wait_for_all(self) -> None:
        """Wait until every rank has been seen and has proved the secret; rank 0 prints which are missing."""
        self._wait(self._are_proved, lambda rank: rank not in self._liveness.seen)

    def _transcript(self) -> str:
        """The digest of the challenges of all ranks; empty until all have been seen."""
        if self._others(lambda rank: rank not in self._liveness.seen):
            return ""
        ranks = range(self._launch_env.world_size)
        nonces = [self._nonce if rank == self._launch_env.rank else self._hello(rank).nonce for rank in ranks]
        return hashlib.sha256(json.dumps(["store", *nonces]).encode()).hexdigest()

    def _are_proved(self) -> bool:
        """True once all ranks have answered the challenges of all; raises if an answer is wrong."""
        transcript = self._transcript()
        if not transcript:
            return False
        unanswered = self._unanswered(transcript)
        answered = {rank: self._hello(rank).proof for rank in self._others(lambda rank: rank not in unanswered)}
        error = None
        if self._secret:
            wrong = [r for r, proof in answered.items() if not is_proof(self._secret, transcript, r, proof)]
            error = refused(self._launch_env, wrong) if wrong else None
        elif knowing := [rank for rank, proof in answered.items() if proof]:
            error = secret_missing(self._launch_env, knowing)
        if error is not None:
            time.sleep(_REFUSED_S)
            raise error
        return not unanswered

    def run(self, connect_all: Callable[[], T]) -> T:
        """Call a function that connects to all ranks and may wait for each of them."""
        results: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                results.append(connect_all())
            except BaseException as error:
                errors.append(error)
            self._is_connected = True

        threading.Thread(target=work, name="reconv-connect", daemon=True).start()
        self._wait(lambda: bool(results or errors), lambda rank: not self._hello(rank).is_connected)
        if errors:
            raise errors[0]
        return results[0]

    def _wait(self, is_done: Callable[[], bool], is_missing: Callable[[int], bool]) -> None:
        """Poll until it is done; raises RankLostError at the deadline or when a rank is silent."""
        wait = ProcessWait(is_printed=self._launch_env.rank == 0)
        while not is_done():
            self._raise_if_silent()
            wait.tick(
                _name_ranks(self._others(is_missing)),
                where=f"{self._launch_env.world_size} processes expected by {self._launch_env.launcher}",
                hint="start all processes of the job, and look at the output of the missing ones",
                sleep_s=_POLL_S,
            )

    def _others(self, is_wanted: Callable[[int], bool]) -> list[int]:
        ranks = range(self._launch_env.world_size)
        return [rank for rank in ranks if rank != self._launch_env.rank and is_wanted(rank)]

    def _raise_if_silent(self) -> None:
        store_silent_s = self._liveness.store_silent_s()
        if self._lost or store_silent_s > SILENT_TIMEOUT_S:
            raise unreachable(self._launch_env, self._lost or f"its store has not replied for {store_silent_s:.0f} s")
        for rank, seen in self._liveness.seen.items():
            hello, silent_s = seen.record, seen.silent_s()
            if silent_s > SILENT_TIMEOUT_S and not hello.is_connected:
                is_here = hello.host == platform.node()
                raise RankLostError(
                    f"rank {rank} is lost: silent for {silent_s:.0f} s while the ranks connect",
                    where=f"{hello.host}, process {hello.pid}",
                    why=process_state(hello.pid) if is_here else "it was killed or stopped, or its machine is cut off",
                    hint="look at the output of that rank, then run the command again",
                )

    def _beat(self) -> None:
        count = 0
        try:
            while not self._ended.is_set():
                count += 1
                sent = self._send(count)
                self._liveness.read(self._others(lambda rank: True))
                transcript = self._transcript()
                if transcript == sent:  # else all challenges are known now: answer them at once
                    has_all = transcript and not self._unanswered(transcript)
                    self._ended.wait(_CONNECTING_S if has_all else _FIRST_S)
            self._send(count + 1)  # that it is connected: its silence is not a loss
        except RuntimeError as error:
            self._lost = str(error).splitlines()[0]

    def _unanswered(self, transcript: str) -> list[int]:
        return self._others(lambda rank: self._hello(rank).transcript != transcript)

    def _send(self, count: int) -> str:
        """Write the message of this rank; returns the digest of the challenges that it answers."""
        transcript = self._transcript()
        proof = prove(self._secret, transcript, self._launch_env.rank) if self._secret and transcript else ""
        here = (platform.node(), os.getpid(), self._is_connected, self._nonce)
        self._liveness.write(self._launch_env.rank, json.dumps(asdict(_Hello(count, *here, transcript, proof))))
        return transcript

    def _hello(self, rank: int) -> _Hello:
        return self._liveness.seen[rank].record


def _parse_hello(key: str, text: bytes) -> _Hello | None:
    try:
        message = json.loads(text)
        here = (str(message["host"]), int(message["pid"]), bool(message["is_connected"]))
        proof = (str(message["nonce"]), str(message["transcript"]), str(message["proof"]))
        return _Hello(int(message["count"]), *here, *proof)
    except (ValueError, KeyError, TypeError, RecursionError):  # of what someone else has written there
        return None


def _name_ranks(ranks: list[int]) -> str:
    if not ranks:
        return "the connections of this rank"
    more = f" and {len(ranks) - _NUM_NAMED} more" if len(ranks) > _NUM_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_NUM_NAMED]))}{more}"
