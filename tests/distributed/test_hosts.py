"""Other machines, looked at over a stand-in for ssh that runs commands here."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from reconv.distributed.host_check import examine_hosts

HERE = """#!/bin/sh
[ "$1" = nobody ] && { echo "nobody: no route" >&2; exit 255; }
shift
exec sh -c "$*"
"""


def test_machines_are_compared_with_this_one(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(HERE)
    ssh.chmod(0o755)
    for split in ("train", "val"):
        for label in ("a", "b"):
            (tmp_path / "data" / split / label).mkdir(parents=True)
            Image.new("L", (8, 8)).save(tmp_path / "data" / split / label / "1.png")
    found = examine_hosts(["twin", "nobody"], str(tmp_path / "data"), 0, [str(ssh)])
    levels = {(finding.topic, finding.name): finding.level for finding in found}
    assert [levels[("twin", name)] for name in ("ssh", "reconv", "torch", "python", "data")] == ["ok"] * 5
    assert ("twin", "port") in levels
    lost = [finding for finding in found if finding.topic == "nobody"]
    assert [(finding.name, finding.level, finding.text) for finding in lost] == [("ssh", "missing", "nobody: no route")]
