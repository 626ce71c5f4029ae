"""Training from and to a real S3 server, OpenStack Swift, through a proxy that fails.

Needs s3fs (`pip install 'reconv[s3]'`) and Swift: apt-get install --no-install-recommends swift-proxy swift-account
swift-container swift-object memcached. The test of a full disk needs root, for a small file system.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_proxy import ProxyRules, store_proxy
from store_training import (
    LIMIT_S,
    WEIGHTS,
    objects,
    read_object,
    run_reconv,
    s3_variables,
    start_reconv,
    train,
    upload,
    wait_for,
    write_object,
)

from reconv.checkpoint import manifest
from reconv.storage.object_stores.store import open_object_store

FAULTS = {"503": 0.1, "cut": 0.1, "truncated": 0.1, "slow": 0.05}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, swift: str) -> Path:
    """Packed digits, on this machine and at s3://data/packed."""
    folder = tmp_path_factory.mktemp("data") / "packed"
    run_reconv(folder.parent, "data", "convert", "digits", str(folder), "--to", "packed", "--per-shard", "300")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_variables(swift).items():
            patch.setenv(name, value)
        store = open_object_store("s3://data/packed")
        upload(folder, store)
    return folder


@pytest.fixture(scope="module")
def expected(packed: Path) -> bytes:
    """The weights after training on local data, in a local folder."""
    out = packed.parent / "local"
    run_reconv(packed.parent, *train(str(packed), str(out)))
    return (out / WEIGHTS).read_bytes()


@pytest.fixture
def rules(swift: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProxyRules]:
    """The rules of a proxy in front of the server, which everything in a test uses."""
    rules = ProxyRules(swift)
    with store_proxy(rules) as url:
        for name, value in s3_variables(url).items():
            monkeypatch.setenv(name, value)
        yield rules


def test_weights_under_faults_equal_those_of_local_data(
    tmp_path: Path, packed: Path, expected: bytes, rules: ProxyRules
) -> None:
    rules.faults = FAULTS
    done = run_reconv(tmp_path / "m", *train("s3://data/packed", "s3://runs/faults"))
    assert done.returncode == 0, done.stderr
    assert all(rules.counts[name] for name in FAULTS)
    assert (tmp_path / "m" / "runs/s3/runs/faults" / WEIGHTS).read_bytes() == expected
    rules.faults = {}
    store = open_object_store("s3://runs/faults")
    assert read_object(store, WEIGHTS) == expected
    assert not any(found.name == "lease.json" for found in store.list())


def test_a_killed_run_continues_on_another_machine_bitwise(
    tmp_path: Path, packed: Path, expected: bytes, rules: ProxyRules
) -> None:
    rules.faults = {"503": 0.05, "cut": 0.05}
    with start_reconv(tmp_path / "first", *train("s3://data/packed", "s3://runs/killed")):
        store = open_object_store("s3://runs/killed")
        wait_for(lambda: any(item.name.endswith(manifest.NAME) for item in objects(store)))
    done = run_reconv(tmp_path / "second", *train("s3://data/packed", "s3://runs/killed", "--resume"))
    assert done.returncode == 0, done.stderr
    assert "resuming from step" in done.stdout
    assert (tmp_path / "second" / "runs/s3/runs/killed" / WEIGHTS).read_bytes() == expected


def test_a_store_that_goes_away_does_not_stop_training_and_the_next_start_copies_the_rest(
    tmp_path: Path, packed: Path, expected: bytes, rules: ProxyRules
) -> None:
    with start_reconv(tmp_path / "m", *train(str(packed), "s3://runs/away")) as process:
        store = open_object_store("s3://runs/away")
        wait_for(lambda: any(item.name == "recipe.yaml" for item in objects(store)))
        rules.is_down = True
        _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 6, stderr
    assert "the copy of the run at s3://runs/away is not complete" in stderr
    assert (tmp_path / "m" / "runs/s3/runs/away" / WEIGHTS).read_bytes() == expected
    rules.is_down = False
    done = run_reconv(tmp_path / "m", *train(str(packed), "s3://runs/away", "--resume"))
    assert done.returncode == 0, done.stderr
    assert read_object(store, WEIGHTS) == expected
    assert json.loads(read_object(store, "summary.json"))["exit_code"] == 0


def test_a_full_cache_disk_changes_no_weight(tmp_path: Path, packed: Path, expected: bytes, rules: ProxyRules) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    size = "size=200k,nr_inodes=60"
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", disk], check=False).returncode:
        pytest.skip("a small file system needs root")
    try:
        command = train("s3://data/packed", str(tmp_path / "out"))
        done = run_reconv(tmp_path / "m", *command, RECONV_CACHE=str(disk), RECONV_CACHE_LIMIT="1GB")
        assert done.returncode == 0, done.stderr
        assert "No space left on device" in done.stderr
        assert (tmp_path / "out" / WEIGHTS).read_bytes() == expected
    finally:
        subprocess.run(["umount", disk], check=True)


def test_an_object_that_is_replaced_during_training_ends_it(tmp_path: Path, packed: Path, rules: ProxyRules) -> None:
    store = open_object_store("s3://data/replaced")
    upload(packed, store)
    command = train("s3://data/replaced", str(tmp_path / "out"), length="100000step", **{"save.every": "off"})
    shard = packed / "train-00001-of-00005.packed"
    with start_reconv(tmp_path, *command, RECONV_CACHE_LIMIT="1B") as process:
        wait_for((tmp_path / "out" / "events.jsonl").is_file)
        write_object(store, shard.name, shard.read_bytes()[::-1])
        _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 3, stderr
    assert "s3://data/replaced/train-00001-of-00005.packed" in stderr


@pytest.mark.parametrize(("kind", "more"), [("tar", []), ("tfrecord", ["--shards", "3,2"]), ("folder", [])])
def test_other_formats_train_to_the_weights_of_local_data(
    tmp_path: Path, rules: ProxyRules, kind: str, more: list[str]
) -> None:
    local = tmp_path / kind
    commands = [["convert", "digits", str(local), "--to", kind, *more], ["index", str(local)]]
    for command in commands[: 2 if kind == "folder" else 1]:
        done = run_reconv(tmp_path, "data", *command)
        assert done.returncode == 0, done.stderr
    upload(local, open_object_store(f"s3://data/{kind}"))
    rules.counts.clear()
    for data, out in ((str(local), "local"), (f"s3://data/{kind}", "remote")):
        done = run_reconv(tmp_path, *train(data, out, **{"data.source": kind}))
        assert done.returncode == 0, done.stderr
    assert rules.counts["passed"] > 0
    assert (tmp_path / "remote" / WEIGHTS).read_bytes() == (tmp_path / "local" / WEIGHTS).read_bytes()


def test_names_may_be_strange_and_markers_of_folders_are_no_objects(rules: ProxyRules) -> None:
    boto3 = pytest.importorskip("boto3")
    names = ["d/%41.jpg", "d/a b.jpg", "d/b\\c.jpg", "d/h#q?versionId=1.jpg", "d/n\nl.jpg", "d/ü.jpg"]
    client = boto3.client("s3")
    for name in ("", "d/", *names):
        client.put_object(Bucket="data", Key=f"odd/{name}", Body=name.encode() if name in names else b"")
    for url, prefix in (("s3://data/odd", ""), ("s3://data", "odd/")):
        store = open_object_store(url)
        found = [item for item in store.list() if item.name.startswith(f"{prefix}d/")]
        assert [item.name for item in found] == [prefix + name for name in names]
        for item, name in zip(found, names, strict=True):
            assert store.read(item, 1, item.num_bytes - 1) == name.encode()[1:]


@pytest.mark.parametrize(
    ("data", "environ", "code", "text"),
    [
        ("s3://data/packed", {"AWS_SECRET_ACCESS_KEY": "wrong"}, 6, "Forbidden"),
        ("s3://absent/packed", {}, 3, "no such object or bucket"),
        ("s3://data/absent", {}, 3, "no objects at s3://data/absent"),
    ],
)
def test_errors_say_what_is_wrong(
    tmp_path: Path, packed: Path, rules: ProxyRules, data: str, environ: dict[str, str], code: int, text: str
) -> None:
    done = run_reconv(tmp_path, *train(data, str(tmp_path / "out")), **environ)
    assert done.returncode == code, done.stderr
    assert text in done.stderr
    assert "hint:" in done.stderr
    assert not (tmp_path / "out").exists()
