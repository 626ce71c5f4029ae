"""`reconv doctor --hosts` over a real ssh, with a real munge, between simulated machines.

Needs Linux, root and: apt-get install --no-install-recommends openssh-server openssh-client munge iproute2 util-linux.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from node_namespaces import Machine, machines, missing_tools

from reconv import __version__

LIMIT_S = 120
SSHD, NAMES = "/usr/sbin/sshd", ("doctor", "good", "other", "silent")
# A machine has files of its own in place of these, in its own mount namespace.
MOUNT = 'for pair in $MOUNTS; do mount --bind "${pair%%=*}" "${pair##*=}"; done; exec "$@"'


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[dict[str, Machine]]:
    """Four machines; `good` shares everything, `other` has another munge key and other runs, `silent` has no sshd."""
    programs = ("ssh", "ssh-keygen", "munged", "munge")
    if missing_tools() or not Path(SSHD).exists() or not all(map(shutil.which, programs)):
        pytest.skip(missing_tools() or "apt-get install --no-install-recommends openssh-server openssh-client munge")
    for folder in ("/run/sshd", "/run/munge"):
        Path(folder).mkdir(exist_ok=True)
    with machines(4, "rcv-ssh", "10.76.0") as made:
        found = dict(zip(NAMES, made, strict=True))
        write_files(tmp_path, found)
        for name in ("doctor", "good", "other"):
            munged = ["munged", "--foreground", "--force", f"--key-file={tmp_path / munge_key(name)}"]
            files = [f"--{kind}-file={tmp_path / name / kind}" for kind in ("pid", "log", "seed")]
            start(tmp_path, found, name, [*munged, *files])
        for name in ("good", "other"):
            start(tmp_path, found, name, [SSHD, "-D", "-e", "-f", str(tmp_path / "sshd_config")])
        wait_for(lambda: all((tmp_path / name / "munge/munge.socket.2").exists() for name in NAMES[:3]))
        yield found


def munge_key(name: str) -> str:
    return "other.key" if name == "other" else "munge.key"


def write_files(folder: Path, found: dict[str, Machine]) -> None:
    for name in NAMES:
        (folder / name / "munge").mkdir(parents=True)
    for key in ("munge.key", "other.key"):
        (folder / key).write_bytes(secrets.token_bytes(1024))
        (folder / key).chmod(0o400)
    for key in ("host_key", "user_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(command, check=True, timeout=LIMIT_S)
    (folder / "hosts").write_text(
        "127.0.0.1 localhost\n"
        + "".join(f"{machine.address} {name} {machine.name}\n" for name, machine in found.items())
    )
    (folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files\n")
    (folder / "ssh_config").write_text(
        f"IdentityFile {folder}/user_key\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n"
    )
    (folder / "sshd_config").write_text(
        f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/user_key.pub\nStrictModes no\nPermitRootLogin yes\n"
        f"PidFile none\nPasswordAuthentication no\nSetEnv PYTHONPATH={os.environ.get('PYTHONPATH', '')}\n"
    )
    for runs in ("runs", "other/runs"):
        (folder / runs).mkdir()


def start(
    folder: Path, found: dict[str, Machine], name: str, command: Sequence[str], log: str = "log.txt"
) -> subprocess.Popen[bytes]:
    mounts = {"hosts": "/etc/hosts", "nsswitch.conf": "/etc/nsswitch.conf", "ssh_config": "/etc/ssh/ssh_config"}
    mounts[f"{name}/munge"] = "/run/munge"
    if name == "other":
        mounts["other/runs"] = f"{folder}/runs"
    pairs = " ".join(f"{folder}/{source}={target}" for source, target in mounts.items())
    return found[name].start(["sh", "-c", MOUNT, "sh", *command], folder / log, MOUNTS=pairs)


def wait_for(is_true: Any) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_machines_are_compared_over_ssh(cluster: dict[str, Machine], tmp_path: Path) -> None:
    words = ["doctor", "--hosts", "good,other,silent", "--runs", str(tmp_path / "runs"), "--json"]
    command = [sys.executable, "-m", "reconv", *words, str(tmp_path / "report.json")]
    code = start(tmp_path, cluster, "doctor", command, "doctor.txt").wait(LIMIT_S)
    assert code == 2, (tmp_path / "doctor.txt").read_text()
    report = json.loads((tmp_path / "report.json").read_text())
    equal = {"ssh": "ok", "reconv": __version__, "torch": torch.__version__, "python": platform.python_version()}
    assert {name: report["good"][name] for name in equal} == equal
    assert abs(report["good"]["clock"]) < 2
    checks = ("munge", "shared folder", "port")
    assert [report["good"][name] for name in checks] == [True, True, True]
    assert [report["other"][name] for name in checks] == [False, False, True]
    assert report["silent"] == {"ssh": None}
    assert all(report[name]["all-reduce"] for name in ("good", "other")), (tmp_path / "doctor.txt").read_text()
    missing = [(found["topic"], found["name"]) for found in report["advice"] if found["level"] == "missing"]
    assert missing == [("other", "munge"), ("other", "shared folder"), ("silent", "ssh")]
    assert list((tmp_path / "runs").iterdir()) == []


def test_the_bandwidth_of_an_all_reduce_is_that_of_the_link(cluster: dict[str, Machine], tmp_path: Path) -> None:
    def measured() -> tuple[float, str]:
        command = [sys.executable, "-m", "reconv", "doctor", "--hosts", "good"]
        start(tmp_path, cluster, "doctor", command, "doctor.txt").wait(LIMIT_S)
        text = (tmp_path / "doctor.txt").read_text()
        rates = re.findall(r"([\d.]+) Gbit/s with this machine \(eth0 to eth0, gloo\), link of 10 Gbit/s", text)
        assert rates, text
        return float(rates[-1]), text

    free, _ = measured()
    limit = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "200mbit", "burst", "64kb", "latency", "50ms"]
    subprocess.run(["ip", "netns", "exec", cluster["good"].name, *limit], check=True)
    limited, text = measured()
    assert 0.1 < limited < 0.21 < free
    assert "look for other traffic, limits and cables" in text


def test_equal_machines_are_ready(cluster: dict[str, Machine], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "reconv", "doctor", "--hosts", "good", "--runs", str(tmp_path / "runs")]
    code = start(tmp_path, cluster, "doctor", command, "doctor.txt").wait(LIMIT_S)
    text = (tmp_path / "doctor.txt").read_text()
    assert code == 0, text
    assert "decodes credentials of this machine" in text
    assert "can connect to rcv-ssh-0:" in text or "can connect to doctor:" in text
