"""The lease of a run's copy in an object store: one writer at a time.

`lease.json` names its writer, who writes it again every half minute. Another process that finds one of a living writer
refuses; one that does not change for a minute and a half is taken over. Stores do not all have a conditional PUT, so
of two processes that start within the same seconds the one whose lease is there in the end is the writer, and a writer
that was cut off from the network learns of its successor when it is back. Checkpoints are safe in any case: each is
complete and verified by its own manifest.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from pathlib import Path

from reconv.core.errors import RunLockedError
from reconv.core.wait import ProcessWait
from reconv.storage.object_stores.errors import MissingObjectError, StoreError, retry_store
from reconv.storage.object_stores.store import ObjectStore, join_url

NAME = "lease.json"
RENEW_S = 30.0
EXPIRE_S = 90.0
_MAX_BYTES = 1 << 16  # a larger object is no lease
_SETTLE_S = 1.0  # for another writer that started at the same moment


class LostLeaseError(Exception):
    """Another process writes this copy now."""


class RunLease:
    """The lease of this process on the copy of a run."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._id = secrets.token_hex(8)
        self._successor = ""
        self._is_released = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lease, after waiting until that of another process is released or expired."""
        began_s, seen = time.monotonic(), self._read()
        wait = ProcessWait()
        while seen is not None and not self._is_dead(seen):
            if time.monotonic() - began_s > EXPIRE_S:
                break
            wait.tick(f"the lease of {_describe(seen)} to expire", join_url(self._store.root, NAME), "", sleep_s=1.0)
            now = self._read()
            if now is not None and now != seen:
                raise self._locked(now)
            seen = now
        self._write()
        time.sleep(_SETTLE_S)
        self.check()
        self._thread = threading.Thread(target=self._renew, name="reconv-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise `LostLeaseError` if another process has taken the lease."""
        found = self._read()
        if found is not None and found.get("id") != self._id:
            self._successor = _describe(found)
        if self._successor:
            raise LostLeaseError(self._successor)

    def release(self) -> None:
        """Delete the lease if it is still this process's own."""
        self._is_released.set()
        if self._thread is not None:
            self._thread.join()
        found = self._read()
        if found is not None and found.get("id") == self._id:
            retry_store(lambda: self._store.delete(NAME), self._store.root)

    def _renew(self) -> None:
        """Write the lease again and again, also while a long upload is running."""
        while not self._is_released.wait(RENEW_S):
            try:
                self.check()
                self._write()
            except LostLeaseError:
                return
            except StoreError:
                continue  # if it lasts, another process takes over, and the next check finds it

    def _read(self) -> dict[str, object] | None:
        def read() -> bytes | None:
            try:
                item = self._store.info(NAME)
                if item.num_bytes > _MAX_BYTES:
                    return None
                return self._store.read(item, 0, item.num_bytes)
            except MissingObjectError:
                return None

        content = retry_store(read, self._store.root)
        try:
            found = None if content is None else json.loads(content)
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None

    def _write(self) -> None:
        lease = {
            "id": self._id,
            "host": socket.gethostname(),
            "pids": _pid_namespace(),
            "pid": os.getpid(),
            "time": time.time(),
        }
        retry_store(lambda: self._store.write(NAME, json.dumps(lease).encode()), self._store.root)

    def _is_dead(self, lease: dict[str, object]) -> bool:
        """True if the writer was a process of this machine that has ended."""
        pid = lease.get("pid")
        if not isinstance(pid, int) or not (here := _pid_namespace()) or lease.get("pids") != here:
            return False
        return not Path(f"/proc/{pid}").exists()

    def _locked(self, lease: dict[str, object]) -> RunLockedError:
        return RunLockedError(
            "another process writes this run",
            where=join_url(self._store.root, NAME),
            why=f"{_describe(lease)} has just renewed its lease",
            hint="wait for it or stop it, or use another address with --out",
        )


def _pid_namespace() -> str:
    """Namespace of this process's ids: since the start of this machine, and in this container.

    The host's name does not say that: a pod of Kubernetes has the name of the one that it replaces.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + "/" + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _describe(lease: dict[str, object]) -> str:
    return f"process {lease.get('pid')} on {lease.get('host')}"
