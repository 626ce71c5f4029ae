"""The store over which the ranks find each other, and the signatures of what they write there.

Rank 0 serves the store on one address only: on the loopback interface if all ranks run on this machine, else on the
address that MASTER_ADDR names. Every wait has a deadline, which is printed while waiting. The store itself knows no
passwords: what ranks write is signed with a secret that they share, and anything else is ignored.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import platform
import secrets
import socket
import threading
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, TCPStore

from reconv.distributed.environment import LaunchEnv
from reconv.errors import RankLostError, ReconvError, UsageError
from reconv.io.atomic import write_atomic
from reconv.io.wait import WAIT_TIMEOUT_S, ProcessWait

SECRET_VARIABLE = "RECONV_SECRET"  # the same for all ranks; without it rank 0 makes one for each run
_PORT_FILE = "store-port"  # with --devices, in the folder that the ranks share
_REQUEST_TIMEOUT = timedelta(seconds=10)
_NUM_NAMED = 8  # missing ranks to name


def open_store(launch_env: LaunchEnv) -> tuple[TCPStore, LaunchEnv]:
    """Connect to the store of rank 0, or serve it. Returns it with the address at which it can be reached."""
    is_server = launch_env.rank == 0 and not launch_env.uses_agent_store
    if launch_env.failure_dir and not is_server:
        launch_env = replace(launch_env, master_port=_read_port(launch_env))
    address = _resolve(launch_env)
    if is_server:
        store, port = _serve(launch_env, address)
        return store, replace(launch_env, master_port=port)
    _wait_for_port(launch_env, address)
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
    raise _unreachable(launch_env, why)


def wait_for_ranks(store: TCPStore, launch_env: LaunchEnv) -> None:
    """Wait until every rank has connected to the store; rank 0 prints which are missing."""
    arrived = PrefixStore(f"reconv/{launch_env.restart_count}/arrived", store)
    wait = ProcessWait(is_printed=launch_env.rank == 0)
    missing = [rank for rank in range(launch_env.world_size) if rank != launch_env.rank]
    try:
        arrived.set(str(launch_env.rank), f"{platform.node()} {os.getpid()}")
        while missing := [rank for rank in missing if not arrived.check([str(rank)])]:
            wait.tick(
                _name_ranks(missing),
                where=f"{launch_env.world_size} processes expected by {launch_env.launcher}",
                then="start all processes of the job, and look at the output of the missing ones",
            )
    except RuntimeError as error:
        raise _unreachable(launch_env, str(error).splitlines()[0]) from error


def _name_ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _NUM_NAMED} more" if len(ranks) > _NUM_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_NUM_NAMED]))}{more}"


def _resolve(launch_env: LaunchEnv) -> tuple[int, tuple[str, int]]:
    """The address family and the numeric address of rank 0."""
    try:
        found = socket.getaddrinfo(launch_env.master_addr, launch_env.master_port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"the address of rank 0, {launch_env.master_addr!r}, cannot be resolved",
            where=f"rank {launch_env.rank} of {launch_env.world_size}, started by {launch_env.launcher}",
            why=str(error),
            then="set MASTER_ADDR to a name or address that every machine of the job knows",
        ) from error
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, (str(address[0]), int(address[1]))


def _serve(launch_env: LaunchEnv, address: tuple[int, tuple[str, int]]) -> tuple[TCPStore, int]:
    """Serve the store on the address of rank 0; with --devices on any free port, which the other ranks read."""
    family, (host, port) = address
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, 0 if launch_env.failure_dir else port))
        listener.listen(max(128, launch_env.world_size))
    except OSError as error:
        listener.close()
        raise UsageError(
            f"rank 0 of {launch_env.world_size} cannot listen for the other processes",
            where=f"{host}:{port}",
            why=f"another program uses the port ({error.strerror})" if error.errno == 98 else str(error.strerror),
            then="set another MASTER_PORT, the same for all processes"
            if error.errno == 98
            else "set MASTER_ADDR to an address of the machine that runs rank 0",
        ) from error
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        launch_env.world_size,
        is_master=True,
        timeout=timedelta(seconds=WAIT_TIMEOUT_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store closes it
    )
    if launch_env.failure_dir:
        write_atomic(Path(launch_env.failure_dir) / _PORT_FILE, str(port))
    return store, port


def _read_port(launch_env: LaunchEnv) -> int:
    """The port that rank 0 of --devices has chosen."""
    file, wait = Path(launch_env.failure_dir) / _PORT_FILE, ProcessWait()
    while not file.exists():
        wait.tick("rank 0", where="--devices", then="run the command again with fewer --devices")
    return int(file.read_text())


def _wait_for_port(launch_env: LaunchEnv, address: tuple[int, tuple[str, int]]) -> None:
    """Wait until something listens at the address of rank 0."""
    wait, (host, port) = ProcessWait(), address[1]
    while True:
        try:
            socket.create_connection((host, port), timeout=_REQUEST_TIMEOUT.total_seconds()).close()
            return
        except OSError as error:
            wait.tick(
                f"rank 0 at {host}:{port}",
                where=f"rank {launch_env.rank} of {launch_env.world_size} on {platform.node()}",
                then=f"start rank 0, or check MASTER_ADDR, MASTER_PORT and the firewall ({error.strerror or error})",
            )


def _unreachable(launch_env: LaunchEnv, why: str) -> ReconvError:
    return RankLostError(
        "rank 0 cannot be reached",
        where=f"{launch_env.master_addr}:{launch_env.master_port}, seen from rank {launch_env.rank}",
        why=why,
        then="check that MASTER_ADDR and MASTER_PORT are the same for all processes and used by no other program",
    )


def new_secret() -> str:
    """A random secret for the ranks of one run."""
    return secrets.token_hex(32)


@dataclass(frozen=True, slots=True)
class Signer:
    """Signs what a rank writes to the store, and checks what it reads there."""

    secret: str

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
