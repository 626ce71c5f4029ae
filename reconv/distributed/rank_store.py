"""The store over which the ranks find each other, and the signatures of what they write there.

Rank 0 serves the store on one address only: on the loopback interface if all ranks run on this machine, else on the
address that MASTER_ADDR names. Every wait has a deadline, which is printed while waiting. The store itself knows no
passwords: what ranks write is signed with a secret that they share, and anything else is ignored.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import platform
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

from reconv.core.errors import RankLostError, ReconvError, UsageError
from reconv.core.wait import WAIT_TIMEOUT_S, ProcessWait
from reconv.distributed.environment import LaunchEnv
from reconv.storage.files import write_atomic

_PORT_FILE = "store-port"  # of ranks on one machine that have no MASTER_PORT, in the folder that the ranks share
Address = tuple[int, tuple[str, int]]  # family, host and port
_REQUEST_TIMEOUT = timedelta(seconds=10)
RESOLVE_EVERY_S = 5.0


def open_store(launch_env: LaunchEnv) -> tuple[TCPStore, LaunchEnv]:
    """Connect to the store of rank 0, or serve it. Returns it with the address at which it can be reached."""
    is_server = launch_env.rank == 0 and not launch_env.uses_agent_store
    if launch_env.master_port == 0 and not is_server:
        launch_env = replace(launch_env, master_port=_read_port(launch_env))
    if is_server:
        store, port = _serve(launch_env, _resolve(launch_env))
        return store, replace(launch_env, master_port=port)
    wait_for_port(
        lambda: _resolve(launch_env),
        "rank 0",
        where=f"rank {launch_env.rank} of {launch_env.world_size} on {platform.node()}",
        hint="start rank 0, or check MASTER_ADDR, MASTER_PORT and the firewall",
    )
    return connect(launch_env), launch_env


def connect(launch_env: LaunchEnv) -> TCPStore:
    """A further connection to the store. A program that is not a store may accept it and never reply."""
    found: list[TCPStore | BaseException] = []

    def open_connection() -> None:
        try:
            found.append(
                TCPStore(
                    launch_env.master_addr,
                    launch_env.master_port,
                    is_master=False,
                    timeout=_REQUEST_TIMEOUT,
                    wait_for_workers=False,
                )
            )
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=open_connection, daemon=True, name="reconv-store-connect")
    thread.start()
    thread.join(2 * _REQUEST_TIMEOUT.total_seconds())
    if found and isinstance(found[0], TCPStore):
        return found[0]
    why = str(found[0]).splitlines()[0] if found else "what listens there does not reply as rank 0 would"
    raise unreachable(launch_env, why)


def _resolve(launch_env: LaunchEnv) -> Address:
    where = f"rank {launch_env.rank} of {launch_env.world_size}, started by {launch_env.launcher}"
    hint = "set MASTER_ADDR to a name or address that every machine of the job knows"
    return find_address(launch_env.master_addr, launch_env.master_port, "rank 0", where, hint)


def find_address(host: str, port: int, whose: str, where: str, hint: str) -> Address:
    """The numeric address of a host that a user has named."""
    try:
        return resolve(host, port)
    except OSError as error:
        what = f"the address of {whose}, {host!r}, cannot be resolved"
        raise UsageError(what, where=where, why=str(error), hint=hint) from error


def resolve(host: str, port: int) -> Address:
    """The address family and the numeric address of a host; IPv4 if it has both."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(str(error)) from error
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, (str(address[0]), int(address[1]))


def _serve(launch_env: LaunchEnv, address: Address) -> tuple[TCPStore, int]:
    """Serve the store on the address of rank 0; with --devices on any free port, which the other ranks read."""
    host, port = address[1]
    try:
        store = serve_store(address, launch_env.world_size)
    except OSError as error:
        is_used = error.errno == errno.EADDRINUSE
        # With --elastic the port was free a moment ago, and the next round has another one.
        kind = RankLostError if launch_env.failure_dir else UsageError
        raise kind(
            f"rank 0 of {launch_env.world_size} cannot listen for the other processes",
            where=f"{host}:{port}",
            why=f"another program uses the port ({error.strerror})" if is_used else str(error.strerror),
            hint="set another MASTER_PORT, the same for all processes"
            if is_used
            else "set MASTER_ADDR to an address of the machine that runs rank 0",
        ) from error
    if port == 0:
        write_atomic(Path(launch_env.failure_dir) / _PORT_FILE, str(store.port))
    return store, store.port


def serve_store(address: Address, world_size: int) -> TCPStore:
    """A store that listens on one address only; port 0 is any free one."""
    family, (host, port) = address
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(max(128, world_size))
    except OSError:
        listener.close()
        raise
    return TCPStore(
        host,
        listener.getsockname()[1],
        world_size,
        is_master=True,
        timeout=timedelta(seconds=WAIT_TIMEOUT_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store closes it
    )


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


def _read_port(launch_env: LaunchEnv) -> int:
    """The port that rank 0 of --devices has chosen."""
    file, wait = Path(launch_env.failure_dir) / _PORT_FILE, ProcessWait()
    while not file.exists():
        wait.tick("rank 0", where="--devices", hint="run the command again with fewer --devices")
    return int(file.read_text())


def wait_for_port(find_address: Callable[[], Address], who: str, where: str, hint: str) -> None:
    """Wait until something listens at an address; its name may get another one: that of a new pod."""
    wait, address, resolved_s = ProcessWait(), find_address(), time.monotonic()
    while True:
        host, port = address[1]
        try:
            socket.create_connection((host, port), timeout=_REQUEST_TIMEOUT.total_seconds()).close()
            return
        except OSError as error:
            wait.tick(f"{who} at {host}:{port}", where=where, hint=f"{hint} ({error.strerror or error})")
        if time.monotonic() - resolved_s >= RESOLVE_EVERY_S:
            resolved_s = time.monotonic()
            with suppress(UsageError):  # while there is none
                address = find_address()


def unreachable(launch_env: LaunchEnv, why: str) -> ReconvError:
    """The error of a rank that has no connection to the store of rank 0."""
    return RankLostError(
        "rank 0 cannot be reached",
        where=f"{launch_env.master_addr}:{launch_env.master_port}, seen from rank {launch_env.rank}",
        why=why,
        hint="check that MASTER_ADDR and MASTER_PORT are the same for all processes and used by no other program",
    )


def new_secret() -> str:
    """A random secret for the ranks of one run."""
    return secrets.token_hex(32)


@dataclass(frozen=True, slots=True)
class Signer:
    """Signs what a rank writes to the store, and checks what it reads there."""

    secret: str

    def derive(self, purpose: str) -> Signer:
        """A signer for one purpose: what it signs says nothing elsewhere, and cannot be repeated there."""
        return Signer(hmac.new(self.secret.encode(), purpose.encode(), hashlib.sha256).hexdigest())

    def sign(self, key: str, message: dict[str, object]) -> str:
        """The message as text that only holders of the secret can produce for this key."""
        text = json.dumps(message)
        return f"{self._digest(key, text)} {text}"

    def verify(self, key: str, signed: str) -> dict[str, object] | None:
        """The message, or None where it was written by someone without the secret."""
        digest, _, text = signed.partition(" ")
        if not hmac.compare_digest(digest.encode(), self._digest(key, text).encode()):
            return None
        message: dict[str, object] = json.loads(text)
        return message

    def _digest(self, key: str, text: str) -> str:
        return hmac.new(self.secret.encode(), f"{key}\0{text}".encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class SignedStore:
    """Messages in a store, each signed for its key."""

    store: PrefixStore
    signer: Signer

    def get(self, key: str) -> dict[str, Any] | None:
        """The message of a key; None if there is none from a holder of the secret."""
        return (
            self.signer.verify(key, self.store.get(key).decode(errors="replace")) if self.store.check([key]) else None
        )

    def set(self, key: str, message: Mapping[str, Any]) -> None:
        self.store.set(key, self.signer.sign(key, dict(message)))

    def put_first(self, key: str, message: Mapping[str, Any]) -> dict[str, Any]:
        """Store a message unless another member has done so already. Returns the one that is stored."""
        stored = self.store.compare_set(key, "", self.signer.sign(key, dict(message)))
        first = self.signer.verify(key, stored.decode(errors="replace"))
        if first is None:  # someone else's: it must not hide ours
            self.set(key, message)
            return dict(message)
        return first
