"""`torchrun --rdzv-backend reconv`: torch's dynamic rendezvous over a store from which nothing is unpickled.

The backend c10d keeps the state of the rendezvous as a pickle in a TCPStore, so that whoever writes to its port runs
code on every node. This one keeps it as JSON, signed with RECONV_SECRET, and so is what agents tell each other beside
it. What others write is replaced by the newest state that was signed, an older state too. A heartbeat counts when it
changes, not by the clock of another node. Counters cannot be signed: who reaches the port can still stop a run.

torch finds the backend by the entry point in `torchrun.handlers`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from torch._C._distributed_c10d import Store
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import _create_tcp_store
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
    _BackendRendezvousStateHolder,
    _get_timeout,
    _NodeDesc,
    _RendezvousState,
)

from reconv.distributed.environment import SECRET_VARIABLE
from reconv.distributed.rank_store import Signer

_REFUSED = (
    f"warning: the state of rendezvous {{id}} was not signed with the {SECRET_VARIABLE} of this node, which replaces "
    "it: set the same text on every node, and use another --rdzv-id for another run"
)


class SignedStateHolder(_BackendRendezvousStateHolder):
    """The state of a rendezvous, kept as signed JSON in place of the pickle of its base class."""

    def __init__(self, store: Store, signer: Signer, settings: RendezvousSettings) -> None:
        super().__init__(cast(Any, None), settings)
        self.num_refused = 0  # values that no holder of the secret has written, or old ones
        self._store, self._signer = store, signer
        self._key = f"reconv/torchrun/{settings.run_id}"
        self._version = 0  # of the newest state that this node has seen
        self._newest = ""  # that state as it is stored
        self._times: dict[str, tuple[str, datetime]] = {}  # what the store has, and when it came by this node's clock

    def sync(self) -> bool | None:
        """Write the state if it has changed here, else read it; returns whether it was written."""
        if not self._dirty and time.monotonic() - self._last_sync_time < self._cache_duration:
            return None
        has_set = None
        try:
            if self._dirty:
                has_set = self._write()
            else:
                self._accept(self._store.get(self._key) if self._store.check([self._key]) else b"")
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise RendezvousConnectionError("the connection to the rendezvous has failed") from error
        self._dirty, self._last_sync_time = False, time.monotonic()
        self._sanitize()
        return has_set

    def _write(self) -> bool:
        signed = self._signer.sign(self._key, self._as_record(self._state))
        stored = self._store.compare_set(self._key, self._newest, signed)
        self._accept(stored)
        return self._newest == signed

    def _accept(self, stored: bytes) -> None:
        """Take over a stored state; put the newest signed one in the place of anything else, and take over that."""
        text = stored.decode(errors="replace")
        record = self._signer.verify(self._key, text)
        if record is None or cast(int, record["version"]) < self._version:
            if text != self._newest:
                if record is None and text and self.num_refused == 0:
                    print(_REFUSED.format(id=self._settings.run_id), file=sys.stderr, flush=True)
                self.num_refused += 1
                self._store.set(self._key, self._newest)
            text, record = self._newest, self._signer.verify(self._key, self._newest)
        self._newest = text
        self._state = _RendezvousState() if record is None else self._from_record(record)

    def _as_record(self, state: _RendezvousState) -> dict[str, Any]:
        beats = state.last_heartbeats.items()
        return {
            "version": self._version + 1,
            "round": state.round,
            "complete": state.complete,
            "closed": state.closed,
            "deadline": None if state.deadline is None else self._stored_time("deadline", state.deadline),
            "participants": [[_as_list(node), rank] for node, rank in state.participants.items()],
            "wait_list": [_as_list(node) for node in state.wait_list],
            "redundancy_list": [_as_list(node) for node in state.redundancy_list],
            "last_heartbeats": [[_as_list(node), self._stored_time(repr(node), when)] for node, when in beats],
        }

    def _from_record(self, record: dict[str, Any]) -> _RendezvousState:
        self._version, state = record["version"], _RendezvousState()
        state.round, state.complete, state.closed = record["round"], record["complete"], record["closed"]
        if record["deadline"] is not None:
            state.deadline = self._local_time("deadline", record["deadline"], self._settings.timeout.last_call)
        state.participants = {_NodeDesc(*node): rank for node, rank in record["participants"]}
        state.wait_list = {_NodeDesc(*node) for node in record["wait_list"]}
        state.redundancy_list = {_NodeDesc(*node) for node in record["redundancy_list"]}
        beats = [(_NodeDesc(*node), when) for node, when in record["last_heartbeats"]]
        state.last_heartbeats = {node: self._local_time(repr(node), when) for node, when in beats}
        return state

    def _local_time(self, name: str, stored: str, later: timedelta = timedelta(0)) -> datetime:
        """The moment at which a stored time came here first."""
        if name not in self._times or self._times[name][0] != stored:
            self._times[name] = stored, datetime.now(UTC) + later
        return self._times[name][1]

    def _stored_time(self, name: str, local: datetime) -> str:
        """The stored time that came here then; a new one where this node has set it."""
        if name not in self._times or self._times[name][1] != local:
            self._times[name] = local.isoformat(), local
        return self._times[name][0]


def _as_list(node: _NodeDesc) -> list[str | int]:
    return [node.addr, node.pid, node.local_id]


class SignedValues(Store):
    """Values that agents exchange beside the state, such as the address of rank 0; each is signed for its key."""

    def __init__(self, store: Store, signer: Signer) -> None:
        super().__init__()
        self._inner, self._signer = store, signer

    def set(self, key: str, value: str | bytes) -> None:
        text = value if isinstance(value, str) else bytes(value).decode("latin-1")
        self._inner.set(key, self._signer.sign(key, {"value": text}))

    def get(self, key: str) -> bytes:
        message = self._signer.verify(key, self._inner.get(key).decode(errors="replace"))
        if message is None:
            raise RuntimeError(f"{key} was written to the rendezvous by someone without {SECRET_VARIABLE}")
        return str(message["value"]).encode("latin-1")

    def add(self, key: str, amount: int) -> int:
        return int(self._inner.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._inner.check(keys))

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._inner.wait(keys, *timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        timeout: timedelta = self._inner.timeout  # type: ignore[attr-defined]  # missing in torch's stub
        return timeout


def create_handler(params: RendezvousParameters) -> DynamicRendezvousHandler:
    """The rendezvous of an agent, with torch's settings of c10d in --rdzv-conf."""
    secret = os.environ.get(SECRET_VARIABLE)
    if not secret:
        raise RendezvousError(f"--rdzv-backend reconv needs {SECRET_VARIABLE}, the same random text on every node")
    signer, store = Signer(secret), _create_tcp_store(params)
    settings = RendezvousSettings(
        params.run_id,
        params.min_nodes,
        params.max_nodes,
        RendezvousTimeout(*(_get_timeout(params, name) for name in ("join", "last_call", "close", "heartbeat"))),
        timedelta(seconds=params.get_as_int("keep_alive_interval", 5) or 5),
        params.get_as_int("keep_alive_max_attempt", 3) or 3,
    )
    node = DynamicRendezvousHandler._node_desc_generator.generate(params.local_addr)
    holder = SignedStateHolder(store, signer, settings)
    return DynamicRendezvousHandler(node, settings, "reconv", SignedValues(store, signer), holder)


def get_handler() -> Callable[[RendezvousParameters], DynamicRendezvousHandler]:
    """The entry point: what creates a handler."""
    return create_handler
