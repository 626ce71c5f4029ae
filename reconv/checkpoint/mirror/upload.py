"""Copies a run directory into an object store while it trains: checkpoints, events, summary and report.

A checkpoint's manifest is uploaded last, so one that has it in the store is complete. Training never waits for the
store and does not end when it fails: what is missing is tried again at every save and evaluation, and at the end.

A thread of rank 0 writes it, `summary.json` last. A copy that is incomplete at the end is exit code 6; `mirror.json`
in the run directory names its address (tests/checkpoint/mirror).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from reconv.checkpoint import manifest
from reconv.checkpoint.mirror.download import (
    download_run,
    has_run,
    run_store_error,
    write_mirror_url,
)
from reconv.checkpoint.mirror.lease import LostLeaseError, RunLease
from reconv.core.errors import CheckpointError, ResourceError, RunLockedError, UsageError
from reconv.logging.run_dir import RUN_FOLDERS, RunDir, is_run_file
from reconv.storage.object_stores.errors import StoreError, retry_store
from reconv.storage.object_stores.store import ObjectStore, open_object_store

_POLL_S = 5.0  # between two looks for new checkpoints
_FIRST = ("run.json", "recipe.yaml")


class RunMirror:
    """The copy of one run; `start` begins to write it, in a thread of its own."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._store: ObjectStore = open_object_store(url)
        self._lease = RunLease(self._store)
        self._run_dir: RunDir | None = None
        self._uploaded: dict[str, tuple[int, int]] = {}  # size and modification time of what is in the store
        self._manifests_there: dict[str, bytes] = {}  # of the checkpoints in the store
        self._wake = threading.Event()
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self._problem = ""
        self._reported = ""

    @classmethod
    @contextmanager
    def open(cls, url: str, run_dir: RunDir, resume: bool, log: Callable[[str], None]) -> Iterator[RunMirror]:
        """Take the lease; with `resume` also bring the run directory up to date, else the address must be free."""
        run_dir.check_links()
        mirror = cls(url)
        try:
            mirror._lease.acquire()
        except StoreError as error:
            raise run_store_error(url, error) from error
        except LostLeaseError as error:
            raise RunLockedError(
                "another process writes this run", where=url, why=f"{error} has started at the same time"
            ) from error
        try:
            if resume:
                download_run(mirror._store, run_dir, log)
            elif has_run(mirror._store):
                raise UsageError(
                    f"{url} already contains a run",
                    where=url,
                    hint="add --resume to continue it, or choose another --out",
                )
            yield mirror
        finally:
            with suppress(StoreError):
                mirror._lease.release()

    def start(self, run_dir: RunDir) -> None:
        """Begin to copy a run directory."""
        self._run_dir = run_dir
        write_mirror_url(run_dir, self.url)
        self._thread = threading.Thread(target=self._run, name="reconv-mirror", daemon=True)
        self._thread.start()

    def request(self) -> None:
        """Copy what has changed, soon."""
        self._wake.set()

    def new_problem(self) -> str:
        """New reason why the copy is not complete, if there is one."""
        problem = self._problem
        if problem == self._reported:
            return ""
        self._reported = problem
        return problem

    def finish(self) -> None:
        """Copy the rest; raises `ResourceError` with what is missing."""
        if self._thread is None or self._run_dir is None:
            return
        self._is_closing = True
        self._wake.set()
        self._thread.join()
        if self._problem:
            raise ResourceError(
                f"the copy of the run at {self.url} is not complete",
                where=str(self._run_dir.path),
                why=self._problem,
                hint="the run directory on this machine has everything; the same command with --resume copies the rest",
            )

    def __enter__(self) -> RunMirror:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.finish()
        except ResourceError as incomplete:
            if error is None:
                raise
            error.add_note(str(incomplete))

    def _run(self) -> None:
        while True:
            is_last = self._is_closing
            try:
                if self._wake.is_set() or self._has_new_checkpoint() or is_last:
                    self._wake.clear()
                    self._copy()
                    self._problem = ""
            except LostLeaseError as error:
                self._problem = f"{error} has taken over this run in the store; nothing more is written there"
                return
            except StoreError as error:
                self._problem = f"{error.filename}: {error.strerror}"
            except (OSError, CheckpointError) as error:
                self._problem = f"a file of the run cannot be read: {error}"
            if is_last:
                return
            if not self._is_closing:
                self._wake.wait(_POLL_S)

    def _has_new_checkpoint(self) -> bool:
        return any(self._name(path) not in self._manifests_there for path in self._manifests())

    def _manifests(self) -> list[Path]:
        assert self._run_dir is not None
        return sorted(self._run_dir.checkpoints.glob(f"step-*/{manifest.NAME}"))

    def _name(self, path: Path) -> str:
        assert self._run_dir is not None
        return path.relative_to(self._run_dir.path).as_posix()

    def _copy(self) -> None:
        """Upload what has changed; checkpoints before the files that speak of them, and deletions last."""
        assert self._run_dir is not None
        self._lease.check()
        self._run_dir.check_links()
        for name in _FIRST:
            self._upload_changed(self._run_dir.path / name)
        for path in self._manifests():
            with suppress(FileNotFoundError):  # deleted meanwhile: it was not to be kept
                self._upload_checkpoint(path)
        for path in self._files():
            with suppress(FileNotFoundError):
                self._upload_changed(path)
        self._delete_pruned()

    def _files(self) -> Iterator[Path]:
        """The files of the run but for checkpoints; the summary comes last, since it says that the run has ended."""
        assert self._run_dir is not None
        root, summary = self._run_dir.path, self._run_dir.summary
        folders = [root / name for name in RUN_FOLDERS if not (root / name).is_symlink()]
        paths = [*root.iterdir(), *(path for folder in folders for path in folder.rglob("*"))]
        own = [path for path in paths if path.is_file() and not path.is_symlink() and is_run_file(self._name(path))]
        yield from sorted(own, key=lambda path: (path == summary, path))

    def _upload_changed(self, path: Path) -> None:
        status = path.stat()
        version = (status.st_size, status.st_mtime_ns)
        name = self._name(path)
        if self._uploaded.get(name) != version:
            # A file that is being appended to: what is there now.
            content = path.read_bytes() if status.st_size < 2**28 else path
            retry_store(lambda: self._store.write(name, content), self.url)
            self._uploaded[name] = version

    def _upload_checkpoint(self, path: Path) -> None:
        name, text = self._name(path), path.read_bytes()
        if self._manifests_there.get(name) == text or self._is_stored(path, text):
            self._manifests_there[name] = text
            return
        self._manifests_there.pop(name, None)
        retry_store(lambda: self._store.delete(name), self.url)  # of another checkpoint of this step
        folder = path.parent
        for file, entry in manifest.read(folder).files.items():
            own = self._name(folder / file)
            retry_store(lambda own=own, file=file: self._store.write(own, folder / file), self.url)  # type: ignore[misc]
            found = retry_store(lambda own=own: self._store.info(own), self.url)  # type: ignore[misc]
            if found.num_bytes != entry.num_bytes:
                raise StoreError(own, f"it has {found.num_bytes:,} of {entry.num_bytes:,} bytes after the upload")
        self._lease.check()
        retry_store(lambda: self._store.write(name, text), self.url)
        self._manifests_there[name] = text

    def _is_stored(self, path: Path, text: bytes) -> bool:
        """True if an earlier process has uploaded this checkpoint."""
        try:
            item = retry_store(lambda: self._store.info(self._name(path)), self.url)
            return item.num_bytes == len(text) and retry_store(
                lambda: self._store.read(item, 0, item.num_bytes) == text, self.url
            )
        except StoreError:
            return False

    def _delete_pruned(self) -> None:
        """Delete the copies of checkpoints that are no longer kept, manifest first."""
        assert self._run_dir is not None
        kept = {self._name(path) for path in self._manifests()}
        ending = f"/{manifest.NAME}"
        for name in [name for name in self._manifests_there if name not in kept]:
            files = json.loads(self._manifests_there[name])["files"]
            for own in (name, *(f"{name.removesuffix(ending)}/{file}" for file in files)):
                retry_store(lambda own=own: self._store.delete(own), self.url)  # type: ignore[misc]
            del self._manifests_there[name]
