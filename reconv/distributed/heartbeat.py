"""Heartbeats: each rank writes its own to rank 0's store once a second and reads those of the others.

The store connection is separate from that of the collectives, which may be waiting for something. What silence means
is decided in `failure`.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from torch._C._distributed_c10d import PrefixStore

from reconv.distributed.environment import LaunchEnv
from reconv.distributed.rank_store import Signer, connect

_NUM_FRAMES = 6


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


@dataclass(slots=True)
class PeerStatus:
    """The last heartbeat of another rank, and when it was seen."""

    beat: Beat | None
    seen_s: float

    def silent_s(self) -> float:
        return time.monotonic() - self.seen_s


class Heartbeat:
    """Sends this rank's heartbeats and receives those of the others."""

    def __init__(self, launch_env: LaunchEnv, signer: Signer) -> None:
        self.phase = "starting"
        self._rank = launch_env.rank
        self._signer = signer
        self._store = PrefixStore(f"reconv/{launch_env.restart_count}/beat", connect(launch_env))
        self._main_thread = threading.main_thread().ident
        self._count = 0
        self._replied_s = time.monotonic()
        self.peers = {
            rank: PeerStatus(None, self._replied_s) for rank in range(launch_env.world_size) if rank != launch_env.rank
        }

    def send(self, is_stopped: bool = False, is_exiting: bool = False) -> None:
        self._count += 1
        beat = Beat(self._count, self.phase, platform.node(), os.getpid(), self._stack(), is_stopped, is_exiting)
        try:
            self._store.set(str(self._rank), self._signer.sign(str(self._rank), asdict(beat)))
        except RuntimeError:  # `receive` and `store_silent_s` notice a store that is gone
            return

    def receive(self) -> bool:
        """Update `peers`. Returns whether the store has replied."""
        try:
            present = [rank for rank in self.peers if self._store.check([str(rank)])]
            texts = self._store.multi_get([str(rank) for rank in present]) if present else []
            self._replied_s = time.monotonic()
        except RuntimeError:
            return False
        for rank, signed in zip(present, texts, strict=True):
            message = self._signer.verify(str(rank), signed.decode(errors="replace"))
            known = self.peers[rank].beat
            if message is None:  # written by someone else
                continue
            beat = Beat(**cast(dict[str, Any], message))
            if known is None or beat.count > known.count:  # not an old one again
                self.peers[rank] = PeerStatus(beat, time.monotonic())
        return True

    def store_silent_s(self) -> float:
        """Seconds since the store last replied; over a broken connection requests get no reply and raise no error."""
        return time.monotonic() - self._replied_s

    def put_first(self, key: str, message: dict[str, Any]) -> dict[str, Any]:
        """Store a message unless another rank has done so already. Returns the one that is stored."""
        signed = self._signer.sign(key, message)
        stored = self._signer.verify(key, self._store.compare_set(key, "", signed).decode(errors="replace"))
        if stored is None:  # someone else's: it must not hide ours
            self._store.set(key, signed)
            return message
        return stored

    def get(self, key: str) -> dict[str, Any] | None:
        """The message of another rank, if there is one."""
        signed = self._store.get(key).decode(errors="replace") if self._store.check([key]) else ""
        return self._signer.verify(key, signed) if signed else None

    def _stack(self) -> list[str]:
        """Stack of the main thread, outermost frame first."""
        frame = sys._current_frames().get(self._main_thread or 0)
        frames = traceback.extract_stack(frame)[-_NUM_FRAMES:] if frame is not None else []
        return [f"{Path(f.filename).name}:{f.lineno} in {f.name}" for f in frames]
