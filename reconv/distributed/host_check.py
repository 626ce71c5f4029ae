"""Other machines, looked at before a job is started on them: ssh, versions, data, and the way back to a port here.

Owns the questions and the comparison. Refuses to start jobs. Invariant: nothing is written there, and a machine that
does not answer is a finding, not an error.
"""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from reconv.environment_checks import CheckResult
from reconv.errors import UsageError

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
LIMIT_S = 120

# Run by the other machine's Python: the same interpreter path is asked for, as launchers do.
_QUESTIONS = """
import json, platform, socket, sys
address, port, data = sys.argv[1:4]
import torch, reconv
told = {"reconv": reconv.__version__, "python": platform.python_version(), "torch": torch.__version__}
if data:
    try:
        from pathlib import Path
        from reconv.data.readers.factory import open_dataset
        from reconv.recipe.data_fields import DataConfig
        sets = {split: open_dataset("auto", Path(data), split, DataConfig()) for split in ("train", "val")}
        told["data"] = {split: source.fingerprint() for split, source in sets.items()}
    except Exception as error:
        told["data"] = f"{type(error).__name__}: {error}".splitlines()[0]
if address:
    try:
        socket.create_connection((address, int(port)), timeout=10).close()
        told["port"] = "open"
    except OSError as error:
        told["port"] = str(error)
print(json.dumps(told))
"""


def examine_hosts(hosts: Sequence[str], data: str | None, port: int, ssh: Sequence[str] = SSH) -> list[CheckResult]:
    """What each machine has, against this one; `port` is opened here while they try to reach it."""
    with _listening(port) as server:
        address, number = socket.getfqdn(), server.getsockname()[1]
        ours = _ask([], "", 0, data)
        findings: list[CheckResult] = []
        for host in hosts:
            theirs = _ask([*ssh, host], address, number, data)
            if isinstance(theirs, str):
                advice = f"ssh {host} must work without a password, and {sys.executable} must have reconv there"
                findings.append(CheckResult(host, "ssh", None, theirs, "missing", advice))
            else:
                findings.append(CheckResult(host, "ssh", "ok", "answers"))
                findings.extend(_compared(host, ours, theirs, f"{address}:{number}"))
        return findings


def _listening(port: int) -> socket.socket:
    try:
        return socket.create_server(("", port))
    except OSError as error:
        raise UsageError(
            f"port {port} cannot be opened here", why=str(error), then="choose another with --port"
        ) from error


def _compared(host: str, ours: Any, theirs: dict[str, Any], address: str) -> Iterator[CheckResult]:
    here = ours if isinstance(ours, dict) else {}
    for name in ("reconv", "torch", "python"):
        if theirs[name] == here.get(name):
            yield CheckResult(host, name, theirs[name], f"{theirs[name]}, as here")
        else:
            yield CheckResult(
                host,
                name,
                theirs[name],
                f"{theirs[name]}, here {here.get(name)}",
                "missing",
                f"install the same {name}",
            )
    if "data" in theirs:
        is_same = theirs["data"] == here.get("data") and isinstance(theirs["data"], dict)
        text = "the same as here" if is_same else f"not the same as here: {theirs['data']}"
        advice = "" if is_same else "compare `reconv data check PATH` on both machines"
        yield CheckResult(host, "data", is_same, text, "ok" if is_same else "missing", advice)
    is_open = theirs["port"] == "open"
    text = f"{address} is reached" if is_open else f"{address} is not reached: {theirs['port']}"
    advice = "" if is_open else "open the port, or give MASTER_ADDR an address that this machine has there"
    yield CheckResult(host, "port", is_open, text, "ok" if is_open else "missing", advice)


def _ask(way: Sequence[str], address: str, port: int, data: str | None) -> dict[str, Any] | str:
    """The answers of a machine, or why there are none."""
    path = "" if data is None else str(Path(data).absolute())
    words = [sys.executable, "-", address, str(port), path]
    if way:  # ssh puts the words together for a shell
        words = [shlex.join(words)]
    try:
        done = subprocess.run([*way, *words], input=_QUESTIONS, capture_output=True, text=True, timeout=LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"])[-1]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told
