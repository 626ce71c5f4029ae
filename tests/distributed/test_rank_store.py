"""Finding the other ranks: who may write to the store, where it listens, and how long anyone waits."""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from ranks import environment, free_port, in_ranks
from torch._C._distributed_c10d import PrefixStore, TCPStore

from reconv.core import wait
from reconv.core.errors import ExitCode, RankLostError, UsageError
from reconv.distributed import rank_store as rendezvous
from reconv.distributed.environment import LaunchEnv, read_launch_env
from reconv.distributed.liveness import ConnectingRanks, Heartbeat
from reconv.distributed.process_group import open_process_group
from reconv.distributed.rank_store import Signer, open_store


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines of half a second, with a line every tenth."""
    monkeypatch.setattr(wait, "WAIT_TIMEOUT_S", 0.5)
    defaults = wait.ProcessWait.__init__.__defaults__
    monkeypatch.setattr(wait.ProcessWait.__init__, "__defaults__", (0.1, *defaults[1:]))


def launch_env(rank: int, port: int, world_size: int = 2) -> LaunchEnv:
    return LaunchEnv(rank, world_size, rank, world_size, "torchrun", master_port=port)


def listening_addresses() -> set[str]:
    """The addresses at which this process listens for TCP connections, from /proc."""
    inodes = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                raw = bytes.fromhex(fields[1].partition(":")[0])
                words = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
                found.add(socket.inet_ntop(family, words))
    return found


def join_and_look() -> tuple[int, set[str]]:
    """One rank: its world size, and where it listens."""
    process_group = open_process_group()
    try:
        process_group.all_gather(process_group.rank)
        return process_group.world_size, listening_addresses()
    finally:
        process_group.close()


def test_ranks_of_one_machine_listen_on_the_loopback_interface_only() -> None:
    results = in_ranks(2, join_and_look)
    assert [size for size, _ in results] == [2, 2]
    assert all(addresses and addresses <= {"127.0.0.1", "::1"} for _, addresses in results)


def test_what_a_stranger_writes_to_the_store_is_ignored() -> None:
    port = free_port()
    store, _ = open_store(launch_env(0, port))
    signer = Signer("the secret of this run")
    ours, theirs = (Heartbeat(launch_env(rank, port), signer) for rank in (0, 1))
    stranger = Heartbeat(launch_env(1, port), Signer("a guess"))
    stranger.send(is_stopped=True)
    assert ours.receive() and ours.peers[1].record is None
    theirs.send()
    assert ours.receive() and ours.peers[1].record is not None and not ours.peers[1].record.is_stopped
    for text in ("", "no signature", '{"rank": 1, "code": 0}', "\udcff", "0" * 64 + " {}"):
        PrefixStore("reconv/0/beat", store).set("1", text.encode("utf-8", "surrogateescape"))
        assert ours.receive()
        assert ours.peers[1].record is not None and ours.peers[1].record.count == 1
    stranger.messages.put_first("failed", {"rank": 1, "host": "x", "code": 0, "what": "finished"})
    assert ours.messages.get("failed") is None
    assert ours.messages.put_first("failed", {"rank": 0, "what": "real"}) == {"rank": 0, "what": "real"}
    assert theirs.messages.get("failed") == {"rank": 0, "what": "real"}


def test_an_old_heartbeat_that_is_written_again_does_not_count() -> None:
    port = free_port()
    store, _ = open_store(launch_env(0, port))
    ours, theirs = (Heartbeat(launch_env(rank, port), Signer("secret")) for rank in (0, 1))
    theirs.send()
    old = PrefixStore("reconv/0/beat", store).get("1")
    theirs.send()
    ours.receive()
    seen_s = ours.peers[1].seen_s
    PrefixStore("reconv/0/beat", store).set("1", old)
    assert ours.receive() and ours.peers[1].seen_s == seen_s


def test_a_signature_is_for_one_key_and_one_secret() -> None:
    signed = Signer("a").sign("1", {"x": 1})
    assert Signer("a").verify("1", signed) == {"x": 1}
    assert Signer("a").verify("2", signed) is None
    assert Signer("b").verify("1", signed) is None
    assert Signer("a").derive("another run").verify("1", signed) is None


@pytest.mark.usefixtures("short_waits")
def test_rank_0_alone_names_the_missing_rank_and_ends_with_code_7(capfd: pytest.CaptureFixture[str]) -> None:
    env = launch_env(0, free_port(), world_size=3)
    _store, env = open_store(env)
    match = "ranks 1, 2 did not respond within"
    with pytest.raises(RankLostError, match=match) as error, ConnectingRanks(env) as connecting:
        connecting.wait_for_all()
    assert error.value.code == ExitCode.RANK_LOST
    assert "waiting for ranks 1, 2, 0 s of 0" in capfd.readouterr().err


@pytest.mark.usefixtures("short_waits")
def test_a_rank_without_rank_0_says_where_it_waits(capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    with pytest.raises(RankLostError, match=f"rank 0 at 127.0.0.1:{port} did not respond"):
        open_store(launch_env(1, port))
    assert f"waiting for rank 0 at 127.0.0.1:{port}" in capfd.readouterr().err


def test_a_late_rank_0_is_waited_for() -> None:
    port = free_port()
    found: list[TCPStore] = []
    thread = threading.Thread(target=lambda: found.append(open_store(launch_env(1, port))[0]))
    thread.start()
    time.sleep(0.3)
    store, _ = open_store(launch_env(0, port))
    thread.join(20)
    store.set("key", "value")
    assert found[0].get("key") == b"value"


def test_a_program_that_accepts_and_never_replies_is_not_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_REQUEST_TIMEOUT", rendezvous.timedelta(seconds=0.3))
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(RankLostError, match="rank 0 cannot be reached"),
    ):
        open_store(launch_env(1, other.getsockname()[1]))


def test_an_address_that_does_not_resolve_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**environment(1, 2, 29500), "MASTER_ADDR": "no-such-host.invalid"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"'no-such-host\.invalid', cannot be resolved"):
        open_store(read_launch_env())


def test_an_address_of_another_machine_cannot_be_served() -> None:
    with pytest.raises(UsageError, match="cannot listen") as error:
        open_store(replace(launch_env(0, free_port()), master_addr="192.0.2.1"))  # an address for documentation
    assert "MASTER_ADDR" in error.value.hint


def test_a_rank_finds_rank_0_at_the_new_address_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a pod that was replaced: nothing listens at the address that the name had first."""
    resolve, names = socket.getaddrinfo, []

    def getaddrinfo(host: str, *args: object, **options: object) -> object:
        if host == "localhost":
            names.append(host)
        return resolve("127.0.0.2" if len(names) == 1 else host, *args, **options)  # type: ignore[arg-type]

    server_env = launch_env(0, free_port())
    store, _ = open_store(server_env)
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(rendezvous, "RESOLVE_EVERY_S", 0.0)
    other, _ = open_store(replace(launch_env(1, server_env.master_port), master_addr="localhost"))
    other.set("found", "yes")
    assert store.get("found") == b"yes"
    assert len(names) > 1
