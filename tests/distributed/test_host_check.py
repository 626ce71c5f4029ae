"""Checks of other machines, with a fake ssh that runs commands on this one."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from reconv.distributed.host_check import check_hosts

FAKE_SSH = """#!/bin/sh
[ "$1" = unreachable ] && { echo "unreachable: no route" >&2; exit 255; }
shift
exec sh -c "$*"
"""


def test_other_machines_are_compared_with_this_one(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(FAKE_SSH)
    ssh.chmod(0o755)
    for split in ("train", "val"):
        for label in ("a", "b"):
            (tmp_path / "data" / split / label).mkdir(parents=True)
            Image.new("L", (8, 8)).save(tmp_path / "data" / split / label / "1.png")
    results = check_hosts(["twin", "unreachable"], str(tmp_path / "data"), 0, [str(ssh)])
    levels = {(result.topic, result.name): result.level for result in results}
    assert [levels[("twin", name)] for name in ("ssh", "reconv", "torch", "python", "data")] == ["ok"] * 5
    assert ("twin", "port") in levels
    failed = [(result.name, result.level, result.text) for result in results if result.topic == "unreachable"]
    assert failed == [("ssh", "missing", "unreachable: no route")]
