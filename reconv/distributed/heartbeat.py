"""Signs of life: every process tells the store once a second what it is doing, and hears the others.

Owns the thread that does it and the judgement that a process is lost. Refuses to know what phases mean and how a run is
wound down. Invariant: nothing here waits for a collective; a process that compiles for minutes still beats, one that
was killed, stopped or cut off does not, and then every other one ends within `lost_after_s` and a few seconds. Whoever
ends badly stays until all have said what they had to say: launchers end everybody with the first that ends.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from reconv.distributed.environment import LaunchEnv
from reconv.errors import ExitCode, RankLostError, ReconvError, RemoteRankError

BEAT_S = 1.0
LOST_AFTER_S = 30.0
_SHORT_S = 4 * BEAT_S  # of silence, where something is known to have happened
GRACE_S = 10.0  # for the others, where one process waits for them to leave
# For the main thread to notice by itself that another process has failed. It may be stuck in a collective with it: who
# has failed keeps its connections while anything refers to them, an error's traceback for one.
_NOTICE_S = 2 * BEAT_S
_PATIENCE = timedelta(seconds=10)  # of one question to the store
_NUM_FRAMES = 6
_FAILED = "failed"
SAVING = "saving"


@dataclass(frozen=True, slots=True)
class Beat:
    """What a process last said of itself."""

    number: int
    phase: str
    host: str
    pid: int
    stack: list[str]
    is_done: bool = False  # it takes no further part
    is_over: bool = False  # it has nothing more to say


@dataclass(slots=True)
class _Heard:
    """The last news of a peer, and when it came."""

    beat: Beat | None
    at_s: float


class Heartbeat:
    """The thread of one process; `phase` is set by whoever knows it."""

    def __init__(self, launch_env: LaunchEnv, end: Callable[[ReconvError], None], served: Store) -> None:
        """`end` winds a process down, in a thread, when others are lost; a store it serves lives until it has left."""
        self.phase = "starting"
        self.lost_after_s = LOST_AFTER_S
        self._launch_env = launch_env
        self._end = end
        self._main = threading.main_thread().ident
        self._store = _connect(launch_env)
        self._served: Store | None = served
        now_s = time.monotonic()
        self._peers = {rank: _Heard(None, now_s) for rank in range(launch_env.world_size) if rank != launch_env.rank}
        self._answered_s = now_s  # when the store last answered
        self._number = 0
        self._posted: RemoteRankError | None = None
        self._is_leaving = threading.Event()
        self._judging = threading.Lock()
        self._has_left = threading.Event()
        self._main_knows = threading.Event()  # that something is wrong: it winds down itself
        self._is_giving_up = threading.Event()  # a thread ends this process, whatever the main thread learns
        self._say()  # who ends before its first second is known by name too
        self._thread = threading.Thread(target=self._run, name="reconv-heartbeat", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch_store, name="reconv-store-watch", daemon=True).start()

    def post(self, error: ReconvError) -> bool:
        """Tell the others what has ended this process; whether one of them tells people the same already."""
        told = {"rank": self._launch_env.rank, "host": platform.node(), **error.to_dict()}
        try:
            first = json.loads(self._store.compare_set(_FAILED, "", json.dumps(told)))
        except RuntimeError:  # the store is gone: its owner is what is lost
            return False
        is_same = first["what"] == error.what or error.code == ExitCode.RANK_LOST
        return first["rank"] != self._launch_env.rank and is_same and self._is_heard_here(first)

    def judge(self) -> ReconvError:
        """Why a collective has failed: what another process has posted, or who has stopped beating."""
        self._main_knows.set()
        while self._is_giving_up.is_set():
            time.sleep(BEAT_S)
        deadline_s = time.monotonic() + 2 * GRACE_S
        while time.monotonic() < deadline_s:
            with self._judging:
                found = self._failure() or self._lost(_SHORT_S)
            if found is not None:
                return found
            time.sleep(BEAT_S / 4)
        return RankLostError("the connection to another process was closed", where=self._here(), then=_NEXT)

    def rest(self) -> None:
        """Take no further part: from now on silence is no loss."""
        self._is_leaving.set()
        self._thread.join(2 * BEAT_S + _PATIENCE.total_seconds())
        self._say(is_done=True)

    def leave(self) -> None:
        """Go, and where this process serves the store, wait a little for those who still need it."""
        self.rest()
        deadline_s = time.monotonic() + GRACE_S
        while self._launch_env.rank == 0 and time.monotonic() < deadline_s and not self._all(_is_done, _SHORT_S):
            time.sleep(0.02)
        self._has_left.set()
        self._served = None

    def leave_together(self, is_failing: bool) -> None:
        """After what this process had to say: go when nobody has anything more to say; who is silent is not waited for.

        Where nothing has failed another process may still be saving, and is silent for longer.
        """
        self._say(is_done=True, is_over=True)
        with suppress(KeyboardInterrupt):  # of a person who does not wait
            while not self._all(_is_over, _SHORT_S if is_failing else self.lost_after_s):
                time.sleep(0.02)
        self._has_left.set()
        self._served = None

    def _watch_store(self) -> None:
        """Notice that the store is out of reach: a question to it over a cut cable is never answered, nor refused."""
        while not self._has_left.wait(BEAT_S):
            found = self._unreachable(self.lost_after_s)
            is_alone = not self._main_knows.is_set() or self._is_leaving.is_set()  # nobody else would end this
            if found is not None and self.phase != SAVING and is_alone:
                self._end(found)
                os._exit(found.code)

    def _give_up(self, error: ReconvError) -> None:
        """End this process while its main thread waits for another one, which nothing can interrupt."""
        grace_s = 0.0 if error.code == ExitCode.RANK_LOST else _NOTICE_S
        if self._is_leaving.wait(grace_s) or self._main_knows.is_set():
            return
        self._is_giving_up.set()
        try:
            if not isinstance(error, RemoteRankError):
                error.is_reported = self.post(error)
            self._end(error)
            self.rest()
            self._wake()
            self.leave_together(is_failing=True)
        finally:
            os._exit(error.code)

    def _wake(self) -> None:
        """Let processes of `--devices` that were stopped go on: only then do they hear that they should end."""
        for heard in self._peers.values():
            if self._launch_env.failure_dir and heard.beat is not None:
                with suppress(ProcessLookupError):
                    os.kill(heard.beat.pid, signal.SIGCONT)

    def _run(self) -> None:
        giving_up: threading.Thread | None = None
        while not self._is_leaving.wait(BEAT_S):
            self._say()
            with self._judging:
                self._hear()
                found = self._failure() or self._lost(self.lost_after_s)
            if found is None or self.phase == SAVING or self._main_knows.is_set():  # a save is finished first
                continue
            if giving_up is None:  # in a thread of its own: who is winding down still beats
                giving_up = threading.Thread(target=self._give_up, args=(found,), name="reconv-give-up", daemon=True)
                giving_up.start()

    def _say(self, is_done: bool = False, is_over: bool = False) -> None:
        self._number += 1
        beat = Beat(self._number, self.phase, platform.node(), os.getpid(), self._stack(), is_done, is_over)
        try:
            self._store.set(str(self._launch_env.rank), json.dumps(asdict(beat)))
        except RuntimeError:  # who is out of reach is found by those who wait for an answer
            return

    def _hear(self) -> bool:
        """Take in what peers have said since; whether the store answers."""
        try:
            there = [rank for rank in self._peers if self._store.check([str(rank)])]
            said = self._store.multi_get([str(rank) for rank in there]) if there else []
            self._answered_s = time.monotonic()
        except RuntimeError:
            return False
        for rank, text in zip(there, said, strict=True):
            beat, heard = Beat(**json.loads(text)), self._peers[rank]
            if heard.beat is None or beat.number != heard.beat.number:
                self._peers[rank] = _Heard(beat, time.monotonic())
        return True

    def _failure(self) -> ReconvError | None:
        """What another process has posted; remembered, for the store may go with it."""
        if self._posted is not None:
            return self._posted
        try:
            text = self._store.get(_FAILED).decode() if self._store.check([_FAILED]) else ""
        except RuntimeError:
            return None
        if not text:
            return None
        told = json.loads(text)
        if told["rank"] == self._launch_env.rank:
            return None
        where = f"rank {told['rank']} on {told['host']}" + (f", {told['where']}" if told["where"] else "")
        self._posted = RemoteRankError.from_dict({**told, "where": where, "is_reported": self._is_heard_here(told)})
        return self._posted

    def _is_heard_here(self, told: Mapping[str, Any]) -> bool:
        """Whether what another process tells is read here too: the terminal of rank 0 may be on another machine."""
        return self._launch_env.rank != 0 or told["host"] == platform.node()

    def _lost(self, after_s: float) -> ReconvError | None:
        """The peer that has been silent for too long."""
        found = self._unreachable(after_s)
        if found is not None:
            return found
        alive = {rank: heard for rank, heard in self._peers.items() if heard.beat is None or not heard.beat.is_done}
        if not alive:
            return None
        rank, heard = min(alive.items(), key=lambda item: item[1].at_s)  # the one that has been silent for longest
        silent_s = time.monotonic() - heard.at_s
        if silent_s <= after_s:
            return None
        return RankLostError(
            f"rank {rank} is lost: no sign of life for {silent_s:.0f} s",
            where=_whereabouts(heard.beat),
            why=_state(heard.beat) + self._last_of(rank),
            then=_NEXT,
        )

    def _unreachable(self, after_s: float) -> ReconvError | None:
        silent_s = time.monotonic() - self._answered_s
        if silent_s <= after_s:
            return None
        return RankLostError(
            f"rank 0 cannot be reached: its store has not answered for {silent_s:.0f} s",
            where=f"{self._launch_env.master_addr}:{self._launch_env.master_port}, seen from {self._here()}",
            why="its machine is down, or the network between is cut" + self._last_of(0),
            then=_NEXT,
        )

    def _last_of(self, rank: int) -> str:
        heard = self._peers.get(rank)
        if heard is None or heard.beat is None:
            return ""
        stack = "".join(f"\n           {frame}" for frame in heard.beat.stack)
        return f"; its phase: {heard.beat.phase}; its stack, innermost last:{stack}"

    def _all(self, has_come: Callable[[Beat], bool], silent_s: float) -> bool:
        """Whether all others have come so far, or been silent for so long, or cannot be heard any more."""
        if self._unreachable(_SHORT_S) is not None or not self._hear():
            return True
        since_s = time.monotonic() - silent_s
        return all(
            heard.at_s < since_s or (heard.beat is not None and has_come(heard.beat)) for heard in self._peers.values()
        )

    def _here(self) -> str:
        return f"rank {self._launch_env.rank} on {platform.node()}"

    def _stack(self) -> list[str]:
        """Where the main thread is now, outermost first."""
        frame = sys._current_frames().get(self._main or 0)
        frames = traceback.extract_stack(frame)[-_NUM_FRAMES:] if frame is not None else []
        return [f"{Path(f.filename).name}:{f.lineno} in {f.name}" for f in frames]


_NEXT = "run the same command with --resume; torchrun --max-restarts does so by itself"


def _is_done(beat: Beat) -> bool:
    return beat.is_done


def _is_over(beat: Beat) -> bool:
    return beat.is_over


def _whereabouts(beat: Beat | None) -> str:
    return "it has never been heard" if beat is None else f"{beat.host}, process {beat.pid}"


def _state(beat: Beat | None) -> str:
    """What this machine knows of a process on it."""
    if beat is None or beat.host != platform.node():
        return "killed, stopped or cut off"
    try:
        status = Path(f"/proc/{beat.pid}/status").read_text()
    except OSError:
        return "the process is gone"
    state = next((line.partition(":")[2].strip() for line in status.splitlines() if line.startswith("State")), "")
    return f"the process is there, its state is {state}"


def _connect(launch_env: LaunchEnv) -> Store:
    """A connection of our own: that of the collectives may be waiting for something."""
    store = TCPStore(
        launch_env.master_addr, launch_env.master_port, is_master=False, timeout=_PATIENCE, wait_for_workers=False
    )
    return PrefixStore(f"reconv/{launch_env.restart_count}/beat", store)
