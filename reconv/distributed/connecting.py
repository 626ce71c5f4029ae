"""Watches the ranks while they connect, until the process group has heartbeats of its own.

Connecting can wait for another rank without end: gloo for one that is stopped, a request to the store for rank 0. So
whatever waits runs in a thread, while the main thread prints whom it waits for and ends the wait at a deadline, or as
soon as a rank that has been seen is silent.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

from torch._C._distributed_c10d import PrefixStore

from reconv.core.errors import RankLostError
from reconv.core.machine import process_state
from reconv.core.wait import ProcessWait
from reconv.distributed.authentication import NONCE_BYTES, is_proof, prove, refused, secret_missing
from reconv.distributed.environment import SECRET_VARIABLE, LaunchEnv
from reconv.distributed.rank_store import connect, unreachable
from reconv.recipe.parts.batch import ParallelConfig

T = TypeVar("T")

_BEAT_S, _FIRST_BEAT_S = 0.5, 0.1  # the second until all ranks have been seen
_POLL_S = 0.02
_REFUSED_S = 3 * _FIRST_BEAT_S  # for the other ranks to see why, before rank 0 and its store are gone
_NUM_NAMED = 8  # missing ranks to name
SILENT_TIMEOUT_S = ParallelConfig().heartbeat_timeout_s  # the recipe's is not known yet


@dataclass(slots=True)
class _Seen:
    """The last message of another rank, and when it came."""

    text: bytes
    seen_s: float
    host: str
    pid: int
    is_connected: bool
    nonce: str
    transcript: str  # the digest of all challenges as it has seen them; empty until it has seen all
    proof: str  # that it knows the secret; empty if it has none


class ConnectingRanks:
    """Sends a message twice a second and reads those of the others; nothing secret is in them.

    The messages carry challenges and the answers to them, so that no rank connects to one that lacks the secret.
    """

    def __init__(self, launch_env: LaunchEnv) -> None:
        self._launch_env = launch_env
        self._store = PrefixStore(f"reconv/{launch_env.restart_count}/connecting", connect(launch_env))
        self._seen: dict[int, _Seen] = {}
        self._secret = os.environ.get(SECRET_VARIABLE, "")
        self._nonce = secrets.token_hex(NONCE_BYTES)
        self._replied_s = time.monotonic()
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
            self._beating.join(_BEAT_S)

    def wait_for_all(self) -> None:
        """Wait until every rank has been seen and has proved the secret; rank 0 prints which are missing."""
        self._wait(self._are_proved, lambda rank: rank not in self._seen)

    def _transcript(self) -> str:
        """The digest of the challenges of all ranks; empty until all have been seen."""
        if self._others(lambda rank: rank not in self._seen):
            return ""
        ranks = range(self._launch_env.world_size)
        nonces = [self._nonce if rank == self._launch_env.rank else self._seen[rank].nonce for rank in ranks]
        return hashlib.sha256(json.dumps(["store", *nonces]).encode()).hexdigest()

    def _are_proved(self) -> bool:
        """True once all ranks have answered the challenges of all; raises if an answer is wrong."""
        transcript = self._transcript()
        if not transcript:
            return False
        unanswered = self._unanswered(transcript)
        answered = {rank: self._seen[rank].proof for rank in self._others(lambda rank: rank not in unanswered)}
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
        self._wait(lambda: bool(results or errors), lambda rank: not self._seen[rank].is_connected)
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
        store_silent_s = time.monotonic() - self._replied_s
        if self._lost or store_silent_s > SILENT_TIMEOUT_S:
            raise unreachable(self._launch_env, self._lost or f"its store has not replied for {store_silent_s:.0f} s")
        for rank, seen in self._seen.copy().items():
            silent_s = time.monotonic() - seen.seen_s
            if silent_s > SILENT_TIMEOUT_S and not seen.is_connected:
                is_here = seen.host == platform.node()
                raise RankLostError(
                    f"rank {rank} is lost: silent for {silent_s:.0f} s while the ranks connect",
                    where=f"{seen.host}, process {seen.pid}",
                    why=process_state(seen.pid) if is_here else "it was killed or stopped, or its machine is cut off",
                    hint="look at the output of that rank, then run the command again",
                )

    def _beat(self) -> None:
        count = 0
        try:
            while not self._ended.is_set():
                count += 1
                sent = self._send(count)
                self._receive()
                transcript = self._transcript()
                if transcript == sent:  # else all challenges are known now: answer them at once
                    has_all = transcript and not self._unanswered(transcript)
                    self._ended.wait(_BEAT_S if has_all else _FIRST_BEAT_S)
            self._send(count + 1)  # that it is connected: its silence is not a loss
        except RuntimeError as error:
            self._lost = str(error).splitlines()[0]

    def _unanswered(self, transcript: str) -> list[int]:
        return self._others(lambda rank: self._seen[rank].transcript != transcript)

    def _send(self, count: int) -> str:
        """Write the message of this rank; returns the digest of the challenges that it answers."""
        transcript = self._transcript()
        message = {
            "count": count,
            "host": platform.node(),
            "pid": os.getpid(),
            "is_connected": self._is_connected,
            "nonce": self._nonce,
            "transcript": transcript,
            "proof": prove(self._secret, transcript, self._launch_env.rank) if self._secret and transcript else "",
        }
        self._store.set(str(self._launch_env.rank), json.dumps(message))
        return transcript

    def _receive(self) -> None:
        present = self._others(lambda rank: self._store.check([str(rank)]))
        texts = self._store.multi_get([str(rank) for rank in present]) if present else []
        now_s = self._replied_s = time.monotonic()
        for rank, text in zip(present, texts, strict=True):
            if rank in self._seen and self._seen[rank].text == text:
                continue
            with suppress(ValueError, KeyError, TypeError, RecursionError):  # of what someone else has written there
                message = json.loads(text)
                host, pid = str(message["host"]), int(message["pid"])
                proof = (str(message["nonce"]), str(message["transcript"]), str(message["proof"]))
                self._seen[rank] = _Seen(text, now_s, host, pid, bool(message["is_connected"]), *proof)


def _name_ranks(ranks: list[int]) -> str:
    if not ranks:
        return "the connections of this rank"
    more = f" and {len(ranks) - _NUM_NAMED} more" if len(ranks) > _NUM_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_NUM_NAMED]))}{more}"
