"""Checks other machines over ssh before a job: versions, clocks, munge, shared folders, data, a port, bandwidth.

Nothing stays there, and an unreachable machine is a result, not an error.
"""

from __future__ import annotations

import json
import secrets
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from reconv.cluster.bandwidth import check_bandwidth
from reconv.cluster.environment_checks import CheckResult, Level
from reconv.core.errors import UsageError
from reconv.core.python_child import python_command
from reconv.storage.files import disk_errors
from reconv.storage.object_stores.store import is_url

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
TIMEOUT_S = 120
_MAX_SKEW_S = 2.0  # includes the time that ssh takes to pass a line on
_MUNGE_EXPIRY_S = 300.0  # of a credential, by default

# Runs in the other machine's Python, at the same path as ours, as launchers do.
_SCRIPT = """
import json, platform, shutil, socket, subprocess, sys, time
print(time.time(), flush=True)
address, port, data, shared, token, credential = sys.argv[1:7]
import torch, reconv
report = {"reconv": reconv.__version__, "python": platform.python_version(), "torch": torch.__version__}
report["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
if data:
    try:
        from reconv.data.readers.dataset_factory import open_dataset
        from reconv.storage.remote_tree import local_data_path
        from reconv.recipe.parts.data import DataConfig
        root = local_data_path(data)
        datasets = {split: open_dataset("auto", root, split, DataConfig()) for split in ("train", "val")}
        report["data"] = {split: dataset.fingerprint() for split, dataset in datasets.items()}
    except Exception as error:
        report["data"] = f"{type(error).__name__}: {error}".splitlines()[0]
if shared:
    try:
        with open(f"{shared}/{token}") as file:
            report["shared"] = "the same" if file.read().startswith(token) else "another folder"
        with open(f"{shared}/{token}", "a") as file:
            file.write(".")
    except OSError as error:
        report["shared"] = str(error)
if credential and shutil.which("unmunge"):
    done = subprocess.run(["unmunge"], input=credential, capture_output=True, text=True)
    report["munge"] = "ok" if done.returncode == 0 else (done.stderr or done.stdout).strip().splitlines()[-1]
elif credential:
    report["munge"] = "munge is not installed"
if address:
    try:
        with socket.create_connection((address, int(port)), timeout=10) as connection:
            report["address"] = connection.getsockname()[0]
        report["port"] = "open"
    except OSError as error:
        report["port"] = str(error)
print(json.dumps(report))
"""


@dataclass(frozen=True, slots=True)
class _Questions:
    """Questions for one machine."""

    address: str = ""  # empty: the port is not tried
    port: int = 0
    data: str = ""
    shared: str = ""
    token: str = ""  # name and content of a file in `shared`
    credential: str = ""  # of munge on this machine

    def words(self) -> list[str]:
        return [self.address, str(self.port), self.data, self.shared, self.token, self.credential]


def check_hosts(
    hosts: Sequence[str], data: str | None, port: int, ssh: Sequence[str] = SSH, shared: str | None = None
) -> list[CheckResult]:
    """Compare each machine with this one; `port` is open here while they try to connect to it."""
    path = "" if data is None else data if is_url(data) else str(Path(data).absolute())
    with _listen(port) as server, _token_file(shared) as (folder, token):
        address, number = socket.getfqdn(), server.getsockname()[1]
        asked = _Questions(address, number, path, folder, token, _munge_credential())
        with ThreadPoolExecutor(1 + len(hosts)) as pool:
            pending = pool.submit(_run_script, [], _Questions(data=path))
            remotes = pool.map(lambda host: _run_script([*ssh, host], asked), hosts)
            local = pending.result()
        results: list[CheckResult] = []
        for host, remote in zip(hosts, remotes, strict=True):
            if isinstance(remote, str):
                advice = f"ssh {host} must work without a password, and {sys.executable} must have reconv there"
                results.append(CheckResult(host, "ssh", None, remote, "missing", advice))
            else:
                results.append(CheckResult(host, "ssh", "ok", "connected"))
                results.extend(_compare(host, local, remote, asked))
                if "address" in remote and isinstance(local, dict) and remote["reconv"] == local["reconv"]:
                    results.append(check_bandwidth(host, ssh, remote["address"]))
        return results


@contextmanager
def _token_file(folder: str | None) -> Iterator[tuple[str, str]]:
    """A folder and the name of a file in it that other machines look for; both are empty without a folder."""
    if folder is None:
        yield "", ""
        return
    path, token = Path(folder).absolute(), f".reconv-doctor-{secrets.token_hex(8)}"
    with disk_errors(path):
        (path / token).write_text(token)
    try:
        yield str(path), token
    finally:
        (path / token).unlink(missing_ok=True)


def _munge_credential() -> str:
    """A credential that machines with the same key can decode; empty if this machine has no munge."""
    try:
        done = subprocess.run(["munge", "--no-input"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server(("", port))
    except OSError as error:
        raise UsageError(
            f"port {port} cannot be opened on this machine", why=str(error), hint="choose another with --port"
        ) from error


def _compare(host: str, local: Any, remote: dict[str, Any], asked: _Questions) -> Iterator[CheckResult]:
    here = local if isinstance(local, dict) else {}
    for name in ("reconv", "torch", "python", "nccl"):
        version = remote[name]
        if version is None and here.get(name) is None:
            continue
        if version == here.get(name):
            yield CheckResult(host, name, version, f"{version}, as here")
        else:
            text = f"{version}, but {here.get(name)} here"
            yield CheckResult(host, name, version, text, "missing", f"install the same {name}")
    yield _compare_clock(host, remote["ahead_s"])
    if "munge" in remote:
        is_ok = remote["munge"] == "ok"
        text = "decodes credentials of this machine" if is_ok else remote["munge"]
        advice = "" if is_ok else "Slurm needs the same /etc/munge/munge.key, and munged running, on all machines"
        yield CheckResult(host, "munge", is_ok, text, "ok" if is_ok else "missing", advice)
    if "shared" in remote:
        is_shared = remote["shared"] == "the same"
        text = f"{asked.shared} is shared and can be written" if is_shared else remote["shared"]
        advice = "" if is_shared else "a job that starts again may run elsewhere: use a shared folder for --out"
        yield CheckResult(host, "shared folder", is_shared, text, "ok" if is_shared else "missing", advice)
    if "data" in remote:
        is_same = remote["data"] == here.get("data") and isinstance(remote["data"], dict)
        text = "the same as here" if is_same else f"not the same as here: {remote['data']}"
        advice = "" if is_same else "compare `reconv data check PATH` on both machines"
        yield CheckResult(host, "data", is_same, text, "ok" if is_same else "missing", advice)
    is_open, address = remote["port"] == "open", f"{asked.address}:{asked.port}"
    text = f"can connect to {address}" if is_open else f"cannot connect to {address}: {remote['port']}"
    advice = "" if is_open else "open the port, or set MASTER_ADDR to an address of this machine that they can reach"
    yield CheckResult(host, "port", is_open, text, "ok" if is_open else "missing", advice)


def _compare_clock(host: str, ahead_s: float) -> CheckResult:
    """Clocks must agree for munge, for file times on shared folders and for `reconv status`."""
    value = round(ahead_s, 1)
    if abs(ahead_s) < _MAX_SKEW_S:
        return CheckResult(host, "clock", value, f"within {_MAX_SKEW_S:.0f} s of this machine's")
    text = f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} this machine's"
    level: Level = "missing" if abs(ahead_s) > _MUNGE_EXPIRY_S else "note"
    return CheckResult(host, "clock", value, text, level, "synchronize the clocks: chrony or ntp")


def _run_script(ssh: Sequence[str], asked: _Questions) -> dict[str, Any] | str:
    """The report of a machine (without ssh: this one), or why there is none."""
    command = python_command(_SCRIPT, *asked.words())
    if ssh:  # ssh joins its arguments into a line for a shell, and the other machine has a sys.path of its own
        command = [shlex.join([sys.executable, "-", *asked.words()])]
    with TemporaryFile("w+") as script, TemporaryFile("w+", errors="replace") as errors:
        script.write(_SCRIPT)
        script.seek(0)
        try:
            process = subprocess.Popen(
                [*ssh, *command], stdin=script, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace"
            )
        except OSError as error:
            return str(error)
        timer = threading.Timer(TIMEOUT_S, process.kill)
        timer.start()
        with process:
            assert process.stdout is not None
            first = process.stdout.readline()  # its clock, at once: importing torch takes seconds
            received_s = time.time()
            output = process.stdout.read()
        timer.cancel()
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    if process.returncode != 0:
        return (lines or [f"exited with code {process.returncode}"])[-1]
    report: dict[str, Any] = json.loads(output.splitlines()[-1])
    return {**report, "ahead_s": float(first) - received_s}
