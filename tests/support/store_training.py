"""Commands that train from and to a store, each in a folder and with a cache of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from reconv.storage.object_stores.errors import retry_store
from reconv.storage.object_stores.store import ObjectInfo, ObjectStore

LIMIT_S = 300
SETTINGS = {
    "data.source": "packed",
    "length": "44step",
    "schedule.warmup": "2step",
    "save.every": "11step",
    "engine.num_threads": "1",
}
WEIGHTS = "checkpoints/step-000000044/model.safetensors"


def s3_variables(url: str) -> dict[str, str]:
    """How a process finds the server that `tests/external/swift_server` starts."""
    keys = {"AWS_ACCESS_KEY_ID": "test:tester", "AWS_SECRET_ACCESS_KEY": "testing"}
    return {**keys, "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": url}


def train(data: str, out: str, *more: str, **settings: str) -> list[str]:
    """The words of `reconv train` for a short run."""
    options = [f"--set={name}={value}" for name, value in {**SETTINGS, **settings}.items()]
    return ["train", "quickstart", "--data", data, "--out", out, "--device", "cpu", *options, *more]


@contextmanager
def start_reconv(folder: Path, *command: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """A command that runs in a folder; killed at the end of the block."""
    folder.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "reconv", *command],
        cwd=folder,
        env={**os.environ, "RECONV_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run_reconv(folder: Path, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder; its result whatever the exit code."""
    with start_reconv(folder, *command, **environ) as process:
        stdout, stderr = process.communicate(timeout=LIMIT_S)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def upload(folder: Path, store: ObjectStore) -> None:
    """Copy a folder into a store."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            write_object(store, path.relative_to(folder).as_posix(), path)


def write_object(store: ObjectStore, name: str, content: bytes | Path) -> None:
    retry_store(lambda: store.write(name, content), store.root)


def read_object(store: ObjectStore, name: str) -> bytes:
    item = retry_store(lambda: store.info(name), store.root)
    return retry_store(lambda: store.read(item, 0, item.num_bytes), store.root)


def objects(store: ObjectStore) -> list[ObjectInfo]:
    """What is in a store now; nothing if it fails."""
    try:
        return store.list()
    except OSError:
        return []


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
