"""torchrun's rendezvous with signed states: what a stranger writes is neither decoded nor believed."""

from __future__ import annotations

import base64
import os
import pickle
import threading
import tomllib
from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from reconv.cluster.torchrun_rendezvous import SignedStateHolder, SignedValues, create_handler
from reconv.distributed.rank_store import Signer

KEY = "reconv/torchrun/run"


class Touch:
    """A pickle of it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    monkeypatch.setenv("RECONV_SECRET", "secret")
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def open_handler(server: TCPStore, nodes: tuple[int, int] = (1, 1)) -> DynamicRendezvousHandler:
    config = {"is_host": "0", "last_call_timeout": "1", "join_timeout": "20", "keep_alive_interval": "1"}
    return create_handler(
        RendezvousParameters("reconv", f"127.0.0.1:{server.port}", "run", *nodes, "127.0.0.1", **config)
    )


def holder(handler: DynamicRendezvousHandler) -> SignedStateHolder:
    found = handler._state_holder
    assert isinstance(found, SignedStateHolder)
    found._cache_duration = 0
    return found


def join(*handlers: DynamicRendezvousHandler) -> list[tuple[int, int]]:
    found: dict[int, tuple[int, int]] = {}

    def work(number: int) -> None:
        info = handlers[number].next_rendezvous()
        found[number] = info.rank, info.world_size

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(handlers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for handler in handlers:
        handler._stop_heartbeats()
    return [found[number] for number in range(len(handlers))]


def test_torchrun_finds_the_backend_by_its_entry_point() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    entry = EntryPoint("reconv", project["entry-points"]["torchrun.handlers"]["reconv"], "torchrun.handlers")
    assert entry.load()() is create_handler


def test_nodes_agree_on_their_ranks(server: TCPStore) -> None:
    assert sorted(join(open_handler(server, (2, 2)), open_handler(server, (2, 2)))) == [(0, 2), (1, 2)]


def test_without_a_secret_there_is_no_rendezvous(server: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RECONV_SECRET")
    with pytest.raises(RendezvousError, match="needs RECONV_SECRET"):
        open_handler(server)


def test_plain_torch_executes_a_pickle_of_the_network_and_this_does_not(server: TCPStore, tmp_path: Path) -> None:
    plain, signed = tmp_path / "plain", tmp_path / "signed"
    evil = {path: base64.b64encode(pickle.dumps(Touch(path))).decode() for path in (plain, signed)}
    backend = C10dRendezvousBackend(server, "run")
    timeout = RendezvousTimeout(last_call=timedelta(seconds=1))
    torchs = DynamicRendezvousHandler.from_backend("run", server, backend, 1, 1, "127.0.0.1", timeout)
    server.set("torch.rendezvous.run", evil[plain])
    with pytest.raises(AttributeError):
        torchs.is_closed()  # the state is what os.system has returned
    assert plain.exists()

    handler = open_handler(server)
    assert join(handler) == [(0, 1)]
    for text in (evil[signed], "0" * 64 + " " + evil[signed], Signer("a guess").sign(KEY, {"version": 99}), "", "{}"):
        server.set(KEY, text)
        assert not holder(handler).sync()
        assert handler._get_world() == (0, 1)
        assert holder(handler)._signer.verify(KEY, server.get(KEY).decode()) is not None  # put back
    assert holder(handler).num_refused == 5
    assert not signed.exists()


def test_a_node_with_another_secret_is_told_once(
    server: TCPStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = open_handler(server)
    join(handler)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RECONV_SECRET", "a typing error")
    other = holder(open_handler(server))
    for _ in range(2):
        other.sync()
        holder(handler).mark_dirty()
        holder(handler).sync()
    assert other.num_refused == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "rendezvous run was not signed with the RECONV_SECRET of this node" in line


def test_an_older_state_is_refused(server: TCPStore) -> None:
    handler = open_handler(server)
    join(handler)
    old = server.get(KEY).decode()
    handler.set_closed()
    new = server.get(KEY).decode()
    server.set(KEY, old)
    assert holder(handler).sync() is None
    assert handler.is_closed()
    assert server.get(KEY).decode() == new


def test_a_deleted_state_is_put_back(server: TCPStore) -> None:
    handler = open_handler(server)
    join(handler)
    server.delete_key(KEY)
    holder(handler).sync()
    assert handler._get_world() == (0, 1)
    assert server.check([KEY])


def test_the_address_of_rank_0_is_signed(server: TCPStore) -> None:
    store = SignedValues(server, Signer("secret"))
    store.set("MASTER_ADDR", "10.0.0.1")
    assert store.get("MASTER_ADDR") == b"10.0.0.1"
    server.set("MASTER_ADDR", "192.0.2.1")
    with pytest.raises(RuntimeError, match="someone without RECONV_SECRET"):
        store.get("MASTER_ADDR")


def test_heartbeats_count_when_they_change_and_not_by_clocks(server: TCPStore) -> None:
    first, second = open_handler(server, (2, 2)), open_handler(server, (2, 2))
    join(first, second)
    other = second._this_node
    ours, theirs = holder(first), holder(second)
    theirs.sync()
    theirs.state.last_heartbeats[other] -= timedelta(days=1)  # its clock is behind
    theirs.mark_dirty()
    theirs._write()
    ours.sync()
    assert other in ours.state.participants
