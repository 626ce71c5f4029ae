"""Take a run back from an object store: its files, and every checkpoint that is complete and verifies."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from reconv.checkpoint import manifest
from reconv.checkpoint.run_identity import read_identity
from reconv.checkpoint.store import is_checkpoint_name
from reconv.core.errors import CheckpointError, UnreadableRunError, UsageError
from reconv.logging.run_dir import RunDir, is_run_file
from reconv.storage import read_limits
from reconv.storage.bounded import read_json_object
from reconv.storage.files import disk_errors, fsync_dir, write_atomic
from reconv.storage.given_addresses import is_given, remember_address
from reconv.storage.object_stores.errors import StoreError, retry_store
from reconv.storage.object_stores.store import (
    ObjectInfo,
    ObjectStore,
    as_url,
    check_name,
    is_url,
    join_url,
    local_folder,
    open_object_store,
)

NO_MIRROR = "off"
URL_FILE = "mirror.json"  # in a run directory: where its copy is
_PART_BYTES = 8 << 20
_CONNECTIONS = 8


def read_mirror_url(run_dir: RunDir) -> str | None:
    """Address of a run's copy; None if it has none."""
    try:
        url = read_json_object(run_dir.path / URL_FILE, read_limits.RUN_JSON_BYTES)["url"]
    except (OSError, ValueError, KeyError):
        return None
    return as_url(url)


def write_mirror_url(run_dir: RunDir, url: str) -> None:
    """Note in the run directory where its copy is, an address that the user has given."""
    remember_address(url)
    write_atomic(run_dir.path / URL_FILE, json.dumps({"url": url}))


def check_mirror_address(url: str, where: str) -> None:
    """Raise unless this user has given the address that a run directory notes for its copy."""
    if not is_given(url):
        raise UsageError(
            f"this run says that its copy is at {url}, an address that you have not given",
            where=where,
            why="the run would be read from there and written there",
            hint=f"if it is yours: reconv resume RUN --mirror '{url}'; to leave it alone: --mirror off",
        )


def has_run(store: ObjectStore) -> bool:
    """True if there is a run at the store's root."""
    return any(item.name == "recipe.yaml" for item in _list(store))


def download_run(store: ObjectStore, run_dir: RunDir, log: Callable[[str], None]) -> bool:
    """Bring a run directory up to date with its copy; False if there is none, or it has nothing newer.

    What is on this machine is kept where its newest checkpoint is at least as new. Checkpoints that are incomplete or
    damaged in the store are left out with a note.
    """
    items = {item.name: item for item in _list(store)}
    if "recipe.yaml" not in items or "run.json" not in items:
        return False
    steps = sorted(name for name in _complete_checkpoints(items))
    local = sorted(path.parent.name for path in run_dir.checkpoints.glob(f"*/{manifest.NAME}"))
    if run_dir.is_run() and (not steps or (local and local[-1] >= steps[-1])):
        return False
    _check_same_run(store, items["run.json"], run_dir)
    run_dir.check_links()
    log(f"downloading {len(steps)} checkpoints from {store.root}")
    with disk_errors(run_dir.path), _store_errors(store.root):
        run_dir.checkpoints.mkdir(parents=True, exist_ok=True)
        for name in steps:
            if name not in local:
                _download_checkpoint(store, items, name, run_dir, log)
        # recipe.yaml last: with it the folder is a run.
        others = [name for name in items if is_run_file(name)]
        for name in sorted(others, key=lambda name: (name == "recipe.yaml", name)):
            _download(store, items[name], run_dir.path / name)
    return True


def fetch_run(run: str | Path) -> str | Path:
    """A path as it is; for the address of a run in an object store its directory here, brought up to date."""
    if not is_url(run) or as_url(run).startswith("http"):  # weights may have the address of a web server
        return run
    url = as_url(run)
    run_dir = RunDir(local_folder(url, Path("runs")))
    if not download_run(open_object_store(url), run_dir, lambda text: None) and not run_dir.is_run():
        raise CheckpointError(f"no run at {url}", where=url, hint="check the address")
    write_mirror_url(run_dir, url)
    return run_dir.path


def _check_same_run(store: ObjectStore, item: ObjectInfo, run_dir: RunDir) -> None:
    if not run_dir.is_run():
        return
    if _read_run_id(store, item) != read_identity(run_dir).run_id:
        raise CheckpointError(
            f"{run_dir.path} and {store.root} are different runs",
            where=str(run_dir.path),
            why="their run ids differ",
            hint="move one of them away, or use another --out",
        )


def _read_run_id(store: ObjectStore, item: ObjectInfo) -> object:
    """The id in the run.json of a copy."""
    try:
        if item.num_bytes > read_limits.RUN_JSON_BYTES:
            raise ValueError(f"it has {item.num_bytes:,} bytes")
        with _store_errors(store.root):
            found = json.loads(retry_store(lambda: store.read(item, 0, item.num_bytes), store.root))
        return found["run_id"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            "run.json of the copy cannot be read",
            where=join_url(store.root, item.name),
            why=str(error),
            hint="use another --out",
        ) from error


def _list(store: ObjectStore) -> list[ObjectInfo]:
    with _store_errors(store.root):
        items = retry_store(store.list, store.root)
    for item in items:
        check_name(store.root, item.name)
    return items


def _complete_checkpoints(items: Mapping[str, ObjectInfo]) -> list[str]:
    """The folders of checkpoints that have a manifest."""
    folders = [PurePosixPath(name).parent for name in items if PurePosixPath(name).name == manifest.NAME]
    return [path.name for path in folders if str(path.parent) == "checkpoints" and is_checkpoint_name(path.name)]


def _download_checkpoint(
    store: ObjectStore, items: Mapping[str, ObjectInfo], name: str, run_dir: RunDir, log: Callable[[str], None]
) -> None:
    """Download a checkpoint beside its place, verify it and move it there."""
    temporary = run_dir.checkpoints / f".{name}.downloading"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        prefix = f"checkpoints/{name}/"
        _download(store, items[prefix + manifest.NAME], temporary / manifest.NAME)
        for file, entry in manifest.read(temporary).files.items():
            item = items.get(prefix + file)
            if item is None or item.num_bytes != entry.num_bytes:
                raise manifest.damaged(temporary / file, "is missing or incomplete in the store")
            _download(store, item, temporary / file)
        manifest.verify(temporary)
        os.replace(temporary, run_dir.checkpoints / name)
        fsync_dir(run_dir.checkpoints)
    except UnreadableRunError:
        raise
    except CheckpointError as error:
        log(f"{join_url(store.root, prefix[:-1])} is damaged ({error.what}): leaving it out")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _download(store: ObjectStore, item: ObjectInfo, path: Path) -> None:
    """Download one object, by parts of one version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    starts = range(0, item.num_bytes, _PART_BYTES)

    def read(start: int) -> bytes:
        length = min(_PART_BYTES, item.num_bytes - start)
        return retry_store(lambda: store.read(item, start, length), store.root)

    temporary = path.with_name(f".{path.name}.{hashlib.sha256(item.etag.encode()).hexdigest()[:12]}.tmp")
    with open(temporary, "wb") as file, ThreadPoolExecutor(_CONNECTIONS) as pool:
        for group in range(0, len(starts), _CONNECTIONS):
            for part in pool.map(read, starts[group : group + _CONNECTIONS]):
                file.write(part)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


@contextmanager
def _store_errors(url: str) -> Iterator[None]:
    """Turn a `StoreError` of the block into an error of the run."""
    try:
        yield
    except StoreError as error:
        raise run_store_error(url, error) from error


def run_store_error(url: str, error: StoreError) -> UnreadableRunError:
    """The error for a copy of a run that cannot be read or written."""
    return UnreadableRunError(
        f"cannot reach the copy of the run at {url}",
        where=str(error.filename),
        why=error.strerror or str(error),
        hint=error.hint,
    )
