"""Checks other machines over ssh before a job: versions, data, and whether they can reach a port of this machine.

Nothing is written there, and an unreachable machine is a result, not an error.
"""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from reconv.environment_checks import CheckResult
from reconv.errors import UsageError

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
TIMEOUT_S = 120

# Runs in the other machine's Python, at the same path as ours, as launchers do.
_SCRIPT = """
import json, platform, socket, sys
address, port, data = sys.argv[1:4]
import torch, reconv
report = {"reconv": reconv.__version__, "python": platform.python_version(), "torch": torch.__version__}
if data:
    try:
        from pathlib import Path
        from reconv.data.readers.dataset_factory import open_dataset
        from reconv.recipe.data_fields import DataConfig
        datasets = {split: open_dataset("auto", Path(data), split, DataConfig()) for split in ("train", "val")}
        report["data"] = {split: dataset.fingerprint() for split, dataset in datasets.items()}
    except Exception as error:
        report["data"] = f"{type(error).__name__}: {error}".splitlines()[0]
if address:
    try:
        socket.create_connection((address, int(port)), timeout=10).close()
        report["port"] = "open"
    except OSError as error:
        report["port"] = str(error)
print(json.dumps(report))
"""


def check_hosts(hosts: Sequence[str], data: str | None, port: int, ssh: Sequence[str] = SSH) -> list[CheckResult]:
    """Compare each machine with this one; `port` is open here while they try to connect to it."""
    with _listen(port) as server:
        address, number = socket.getfqdn(), server.getsockname()[1]
        with ThreadPoolExecutor(1 + len(hosts)) as pool:
            pending = pool.submit(_run_script, [], "", 0, data)
            remotes = pool.map(lambda host: _run_script([*ssh, host], address, number, data), hosts)
            local = pending.result()
        results: list[CheckResult] = []
        for host, remote in zip(hosts, remotes, strict=True):
            if isinstance(remote, str):
                advice = f"ssh {host} must work without a password, and {sys.executable} must have reconv there"
                results.append(CheckResult(host, "ssh", None, remote, "missing", advice))
            else:
                results.append(CheckResult(host, "ssh", "ok", "connected"))
                results.extend(_compare(host, local, remote, f"{address}:{number}"))
        return results


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server(("", port))
    except OSError as error:
        raise UsageError(
            f"port {port} cannot be opened on this machine", why=str(error), then="choose another with --port"
        ) from error


def _compare(host: str, local: Any, remote: dict[str, Any], address: str) -> Iterator[CheckResult]:
    here = local if isinstance(local, dict) else {}
    for name in ("reconv", "torch", "python"):
        version = remote[name]
        if version == here.get(name):
            yield CheckResult(host, name, version, f"{version}, as here")
        else:
            text = f"{version}, but {here.get(name)} here"
            yield CheckResult(host, name, version, text, "missing", f"install the same {name}")
    if "data" in remote:
        is_same = remote["data"] == here.get("data") and isinstance(remote["data"], dict)
        text = "the same as here" if is_same else f"not the same as here: {remote['data']}"
        advice = "" if is_same else "compare `reconv data check PATH` on both machines"
        yield CheckResult(host, "data", is_same, text, "ok" if is_same else "missing", advice)
    is_open = remote["port"] == "open"
    text = f"can connect to {address}" if is_open else f"cannot connect to {address}: {remote['port']}"
    advice = "" if is_open else "open the port, or set MASTER_ADDR to an address of this machine that they can reach"
    yield CheckResult(host, "port", is_open, text, "ok" if is_open else "missing", advice)


def _run_script(ssh: Sequence[str], address: str, port: int, data: str | None) -> dict[str, Any] | str:
    """The report of a machine (without ssh: this one), or why there is none."""
    path = "" if data is None else str(Path(data).absolute())
    command = [sys.executable, "-", address, str(port), path]
    if ssh:  # ssh joins its arguments into a line for a shell
        command = [shlex.join(command)]
    try:
        done = subprocess.run([*ssh, *command], input=_SCRIPT, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or [f"exited with code {done.returncode}"])[-1]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report
