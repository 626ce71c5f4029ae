"""Checks of other machines, with a fake ssh that runs commands on this one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from PIL import Image

from reconv.cluster.host_check import check_hosts

FAKE_SSH = """#!/bin/bash
[ "$1" = unreachable ] && { echo "unreachable: no route" >&2; exit 255; }
host=$1
shift
case $host in
  late) exec sh -c "$*" | sed -u '1s/^[0-9.]*$/1000000000/' ;;  # the clock of 2001
  *) exec sh -c "$*" ;;
esac
"""
MUNGE = """#!/bin/sh
case $0 in
  */munge) echo credential-of-here ;;
  *) read line; [ "$line" = credential-of-here ] || exit 14 ;;
esac
"""


def write_program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.slow
def test_other_machines_are_compared_with_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh = write_program(tmp_path / "ssh", FAKE_SSH)
    for split in ("train", "val"):
        for label in ("a", "b"):
            (tmp_path / "data" / split / label).mkdir(parents=True)
            Image.new("L", (8, 8)).save(tmp_path / "data" / split / label / "1.png")
    for folder in ("bin", "runs"):
        (tmp_path / folder).mkdir()
    for name in ("munge", "unmunge"):
        write_program(tmp_path / "bin" / name, MUNGE)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    hosts = ["twin", "late", "unreachable"]
    results = check_hosts(hosts, str(tmp_path / "data"), 0, [str(ssh)], shared=str(tmp_path / "runs"))
    levels = {(result.topic, result.name): result.level for result in results}
    names = ("ssh", "reconv", "torch", "python", "data", "munge", "shared folder", "all-reduce", "clock")
    assert [levels[("twin", name)] for name in names] == ["ok"] * 9
    assert [levels[("late", name)] for name in names] == ["ok"] * 8 + ["missing"]
    assert ("twin", "port") in levels
    failed = [(result.name, result.level, result.text) for result in results if result.topic == "unreachable"]
    assert failed == [("ssh", "missing", "unreachable: no route")]
    assert list((tmp_path / "runs").iterdir()) == []  # nothing stays
